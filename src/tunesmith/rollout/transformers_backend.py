"""The plain engine: `transformers.generate`. It is the reference that faster engines are compared with.

Shape legend: B sequences, T tokens, V vocabulary.
"""

import secrets
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
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tunesmith.batch.rollout import Completion, Group, SamplingParams
from tunesmith.core.errors import TrainingError
from tunesmith.core.seeds import derive
from tunesmith.models.tokenizer import decode, encode_prompt, stop_token_ids
from tunesmith.rollout.engine import OnProgress, check_prompt_lengths, check_request
from tunesmith.schema.records import FinishReason, Prompt


class _ChosenLogProbs(LogitsProcessor):
    """Remembers the log-prob of each token that `generate` draws.

    It stands last in the list of processors and so sees the logits that the token is drawn from; which token that was,
    it learns from the ids of the next call. `output_scores=True` would give the same at T times the memory.
    """

    def __init__(self) -> None:
        self._pending: tuple[torch.Tensor, torch.Tensor] | None = None
        self._columns: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self._settle(input_ids[:, -1])
        lse_B = scores.logsumexp(dim=-1)
        if not bool(lse_B.isfinite().all()):
            row = int((~lse_B.isfinite()).nonzero()[0])
            raise TrainingError(
                f"the model's logits are not finite (token {len(self._columns)} of sequence {row} of a batch), so "
                "nothing can be drawn from them; its weights are damaged, or overflow in float16: set model.dtype to "
                "float32, or go back to an older checkpoint"
            )
        self._pending = scores, lse_B
        return scores

    def _settle(self, token_B: torch.Tensor) -> None:
        if self._pending is not None:
            logits_BV, lse_B = self._pending
            self._columns.append(logits_BV.gather(1, token_B[:, None]).squeeze(1) - lse_B)
            self._pending = None

    def logps(self, generated_BT: torch.Tensor) -> torch.Tensor:
        """Log-prob of each generated token, `[B, T]`, float32; to be called once, when `generate` has returned."""
        if len(self._columns) < generated_BT.shape[1]:
            self._settle(generated_BT[:, -1])
        return torch.stack(self._columns[: generated_BT.shape[1]], dim=1)


class TransformersEngine:
    """Draws completions with `model.generate`, `batch_size` sequences at a time.

    `weight_version` is asked once per call and stamped on every group. The model is put in evaluation mode for the
    call.
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

    def generate(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, *, on_progress: OnProgress | None = None
    ) -> list[Group]:
        """One group of `n` completions for each prompt; with `sampling.seed` set, the same call returns the same
        tokens.

        Raises:
            InputError: for a request that cannot be served, before any token is drawn.
        """
        check_request(prompts, n, sampling)
        prompt_ids = [encode_prompt(self._tokenizer, prompt) for prompt in prompts]
        config = self._model.config
        context_length = getattr(config, "max_position_embeddings", None) or 1_000_000
        check_prompt_lengths(
            prompts, [len(ids) for ids in prompt_ids], config.vocab_size, context_length, sampling.max_new_tokens
        )
        seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
        rows = [index for index in range(len(prompts)) for _ in range(n)]
        completions: list[Completion] = []
        was_training = self._model.training
        self._model.eval()
        try:
            for start in range(0, len(rows), self._batch_size):
                batch = [prompt_ids[index] for index in rows[start : start + self._batch_size]]
                completions += self._generate_batch(batch, sampling, derive(seed, "batch", start))
                if on_progress:
                    on_progress(len(completions), len(rows))
        finally:
            self._model.train(was_training)
        version = self._weight_version()
        return [
            Group(prompt, prompt_ids[i], tuple(completions[i * n : (i + 1) * n]), version)
            for i, prompt in enumerate(prompts)
        ]

    @torch.no_grad()
    def _generate_batch(
        self, prompt_ids: Sequence[Sequence[int]], sampling: SamplingParams, seed: int
    ) -> list[Completion]:
        device = self._model.device
        width = max(len(ids) for ids in prompt_ids)
        fill = 0  # any id will do: padding is masked by length
        # Left padding, as `generate` needs it.
        ids_BT = torch.tensor([[fill] * (width - len(ids)) + list(ids) for ids in prompt_ids], device=device)
        mask_BT = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids], device=device)
        stop_ids = self._stop_token_ids(sampling)
        recorder = _ChosenLogProbs()
        with (
            _contiguous_head_input(self._model),
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        ):
            torch.manual_seed(seed)
            sequences_BT = self._model.generate(  # type: ignore[operator]
                ids_BT,
                attention_mask=mask_BT,
                generation_config=self._generation_config(sampling, stop_ids, fill),
                logits_processor=_warpers(sampling, recorder),
            )
        generated_BT = sequences_BT[:, width:]
        logp_BT = recorder.logps(generated_BT)
        return [
            self._completion(ids, logps, stop_ids)
            for ids, logps in zip(generated_BT.tolist(), logp_BT.tolist(), strict=True)
        ]

    def _completion(self, ids: list[int], logps: list[float], stop_ids: Sequence[int]) -> Completion:
        length = next((t + 1 for t, token in enumerate(ids) if token in stop_ids), len(ids))
        stopped = length > 0 and ids[length - 1] in stop_ids
        finish: FinishReason = "stop" if stopped else "length"
        text = decode(self._tokenizer, ids[: length - 1] if stopped else ids[:length])
        return Completion(tuple(ids[:length]), tuple(logps[:length]), text, finish)

    def _stop_token_ids(self, sampling: SamplingParams) -> list[int]:
        return sorted({*stop_token_ids(self._model, self._tokenizer), *sampling.stop_token_ids})

    def _generation_config(self, sampling: SamplingParams, stop_ids: list[int], fill: int) -> GenerationConfig:
        # Every option that a model's own generation config could set is set here, so that nothing is taken from there.
        return GenerationConfig(
            do_sample=sampling.temperature > 0,
            max_new_tokens=sampling.max_new_tokens,
            min_new_tokens=sampling.min_new_tokens or None,
            repetition_penalty=sampling.repetition_penalty,
            temperature=1.0,
            top_k=0 if sampling.temperature > 0 else None,  # greedy decoding has none, and warns of one
            top_p=1.0,
            num_beams=1,
            eos_token_id=stop_ids or None,
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


def _warpers(sampling: SamplingParams, recorder: _ChosenLogProbs) -> LogitsProcessorList:
    """Temperature and filters in `generate`'s own order, and the recorder behind them."""
    warpers: list[LogitsProcessor] = []
    if sampling.temperature not in (0.0, 1.0):
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.temperature > 0 and sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.temperature > 0 and sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.temperature > 0 and sampling.min_p > 0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return LogitsProcessorList([*warpers, recorder])
