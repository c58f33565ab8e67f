"""The plain engine: `transformers.generate`. It is the reference that faster engines are compared with, and runs every
model that transformers loads.

Shape legend: B sequences, T tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tunesmith.batch.rollout import Group, SamplingParams
from tunesmith.core.seeds import derive
from tunesmith.rollout import sequence
from tunesmith.rollout.asked import HandOut, ask
from tunesmith.rollout.engine import GenerationInterrupted, OnGroup, OnProgress, OnText
from tunesmith.rollout.text_stream import Watch
from tunesmith.rollout.transformers_draw import Draw, Filter
from tunesmith.schema.records import Prompt


class TransformersEngine:
    """Draws completions with `model.generate`, `batch_size` sequences at a time.

    `weight_version` is asked once per call and stamped on every group. The model is put in evaluation mode for the
    call. What is drawn depends on the seed, and on what else is in the batch.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        weight_version: Callable[[], int] = lambda: 0,
        batch_size: int = 64,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._weight_version = weight_version
        self._batch_size = batch_size

    @property
    def is_exact(self) -> bool:
        """False: attention over a cache and over a whole sequence round differently."""
        return False

    def unload(self) -> None:
        """Nothing to free: cache and all else are gone when `generate` returns."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: SamplingParams,
        *,
        on_progress: OnProgress | None = None,
        on_text: OnText | None = None,
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        """One group of `n` completions for each prompt; with `sampling.seed` set, the same call returns the same
        tokens.

        Raises:
            InputError: for a request that cannot be served, before any token is drawn.
            TrainingError: if the model's logits are not finite, or bias and penalty leave no token.
            GenerationInterrupted: on Ctrl-C, with what was finished by then.
        """
        asked = ask(self._model, self._tokenizer, prompts, n, sampling)
        version = self._weight_version()
        rows = [
            sequence.Sequence(index, sample, ids, asked.limits, asked.decode)
            for index, ids in enumerate(asked.prompt_ids)
            for sample in range(n)
        ]
        try:
            self._draw(rows, sampling, asked.seed, Watch(len(rows), on_progress, on_text))
        except KeyboardInterrupt as interrupt:
            groups = asked.groups([row for row in rows if row.finish_reason], version)
            raise GenerationInterrupted([group for group in groups if group.completions]) from interrupt
        # Not before the end: tokens are drawn from torch's global generator, which a reward may use meanwhile.
        HandOut(asked, version, on_group).note(rows)
        return asked.groups(rows, version)

    @torch.no_grad()
    def _draw(self, rows: Sequence[sequence.Sequence], sampling: SamplingParams, seed: int, watch: Watch) -> None:
        """Draw until every one of `rows` has ended."""
        device = self._model.device
        was_training = self._model.training
        self._model.eval()
        try:
            for start in range(0, len(rows), self._batch_size):
                with (
                    _contiguous_head_input(self._model),
                    torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
                ):
                    torch.manual_seed(derive(seed, "batch", start))
                    self._draw_batch(rows[start : start + self._batch_size], sampling, watch)
        finally:
            self._model.train(was_training)

    def _draw_batch(self, rows: Sequence[sequence.Sequence], sampling: SamplingParams, watch: Watch) -> None:
        device = self._model.device
        width = max(len(row.prompt_ids) for row in rows)
        fill = 0  # any id will do: padding is masked by length
        # Left padding, as `generate` needs it.
        ids_BT = torch.tensor([[fill] * (width - len(row.prompt_ids)) + list(row.prompt_ids) for row in rows])
        lengths_B = torch.tensor([len(row.prompt_ids) for row in rows])
        mask_BT = torch.arange(width)[None, :] >= width - lengths_B[:, None]
        draw = Draw(rows, sampling, _filters(sampling), watch)
        self._model.generate(  # type: ignore[operator]
            ids_BT.to(device),
            attention_mask=mask_BT.long().to(device),
            generation_config=_generation_config(sampling, rows[0].limits, fill),
            logits_processor=LogitsProcessorList([_Processor(draw)]),
            stopping_criteria=StoppingCriteriaList([_Criterion(draw)]),
        )


class _Processor(LogitsProcessor):
    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return self._draw.process(input_ids, scores)  # type: ignore[return-value]


class _Criterion(StoppingCriteria):
    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: object) -> torch.BoolTensor:
        return self._draw.take(input_ids[:, -1])  # type: ignore[return-value]


def _filters(sampling: SamplingParams) -> list[Filter]:
    if sampling.temperature == 0:
        return []
    filters: list[Filter] = []
    if sampling.top_k:
        filters.append(TopKLogitsWarper(sampling.top_k))  # type: ignore[arg-type]
    if sampling.top_p < 1:
        filters.append(TopPLogitsWarper(sampling.top_p))  # type: ignore[arg-type]
    if sampling.min_p > 0:
        filters.append(MinPLogitsWarper(sampling.min_p))  # type: ignore[arg-type]
    return filters


def _generation_config(sampling: SamplingParams, limits: sequence.Limits, fill: int) -> GenerationConfig:
    """The loop's own settings; everything that a model's generation config could set is set, so that nothing is taken
    from there. Filters are in `Draw`, for which `generate` has no say.
    """
    return GenerationConfig(
        do_sample=sampling.temperature > 0,
        max_new_tokens=sampling.max_new_tokens,
        repetition_penalty=1.0,
        temperature=1.0,
        top_k=0 if sampling.temperature > 0 else None,  # greedy decoding has none, and warns of one
        top_p=1.0,
        num_beams=1,
        eos_token_id=sorted(limits.stop_ids) or None,
        pad_token_id=fill,
        use_cache=True,
    )


@contextmanager
def _contiguous_head_input(model: PreTrainedModel) -> Iterator[None]:
    """While the block runs, the output layer gets contiguous hidden states.

    After the prompts, `generate` hands it the last position of each, a strided slice. For that torch's matmul copies
    the layer's weight once for each row: 128 prompts took 32 s instead of 5 in bfloat16 on one core.
    """
    layer = model.get_output_embeddings()
    if layer is None:
        yield
        return
    handle = layer.register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(), *inputs[1:]))
    try:
        yield
    finally:
        handle.remove()
