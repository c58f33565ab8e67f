"""The engine of transformers' `generate`: for every causal language model, and the one that others are tested with.

Shape legend: B sequences, T tokens, V vocabulary.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Unpack

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

from tunesmith.base.core.errors import TrainingError
from tunesmith.base.core.seeds import derive
from tunesmith.base.core.turns import Turns
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Group, SamplingParams
from tunesmith.engine.rollout import sequence
from tunesmith.engine.rollout.dialogue import in_rounds
from tunesmith.engine.rollout.engine import Callbacks, Dialogue, Functions, make_request
from tunesmith.engine.rollout.usage import Usage

_FILL = 0
Filter = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From ids and logits `[B, V]` to logits with -inf for tokens that cannot be drawn: transformers' warpers."""

_NOT_FINITE = (
    "the model's logits are not finite; its weights are damaged, or overflow in float16: set model.dtype to float32, "
    "or go back to an older checkpoint"
)
_NOTHING_LEFT = (
    "logit_bias, repetition_penalty and min_new_tokens together forbid every token, or make a logit infinite; "
    "weaken them"
)


class TransformersEngine:
    """Draws completions with `model.generate`, `batch_size` sequences at a time.

    `weight_version` is called once per `generate` and stamped on every group. The model is in evaluation mode during
    the call. Completions depend on the seed and on the rest of the batch. Calls from several threads wait for each
    other, those of other such engines too: torch has one global generator, and `generate` draws from it.
    """

    name = "transformers"

    _turns = Turns("engine")

    is_exact = False
    """Attention over a cache and over a whole sequence round differently."""

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

    def unload(self) -> None:
        """Nothing to free: `generate` keeps nothing."""

    def generate(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, **functions: Unpack[Functions]
    ) -> list[Group]:
        """See `engine.Engine.generate`. With `sampling.seed` set, the same call returns the same tokens."""
        with self._turns.next():
            return self._generate(prompts, n, sampling, functions)

    def converse(self, prompts: Sequence[Prompt], sampling: SamplingParams, dialogue: Dialogue) -> int:
        """See `engine.Engine.converse`; in rounds."""
        return in_rounds(lambda asked, own, _: self.generate(asked, 1, own), prompts, sampling, dialogue)

    def _generate(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, functions: Functions
    ) -> list[Group]:
        version, num_rows = self._weight_version(), self._batch_size
        request = make_request(self._model, self._tokenizer, prompts, n, sampling, num_rows, version)
        rows = [
            sequence.Sequence(index, sample, ids, request.limits, request.decode)
            for index, ids in enumerate(request.prompt_ids)
            for sample in range(n)
        ]
        usage = Usage(request.num_slots, prefill_tokens=request.prompt_tokens)
        on_group = functions.pop("on_group", None)
        callbacks = Callbacks(request, **functions)
        try:
            self._draw(rows, sampling, request.seed, callbacks, usage)
        except KeyboardInterrupt as interrupt:
            raise request.interrupted(row for row in rows if row.finish_reason) from interrupt
        usage.record(request.prompt_tokens)
        groups = request.groups(rows)
        if on_group:
            # Not before the end: tokens are drawn from torch's global generator, which a reward may use meanwhile.
            for index, group in enumerate(groups):
                on_group(index, group)
        return groups

    @torch.no_grad()
    def _draw(
        self,
        rows: Sequence[sequence.Sequence],
        sampling: SamplingParams,
        seed: int,
        callbacks: Callbacks,
        usage: Usage,
    ) -> None:
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
                    times = self._draw_batch(rows[start : start + self._batch_size], sampling, callbacks)
                others_wait = start + self._batch_size < len(rows)
                for (begin_s, _), (end_s, num_drawn) in pairwise(times):
                    usage.add(end_s - begin_s, num_drawn, others_wait=others_wait)
        finally:
            self._model.train(was_training)

    def _draw_batch(
        self, rows: Sequence[sequence.Sequence], sampling: SamplingParams, callbacks: Callbacks
    ) -> list[tuple[float, int]]:
        """Draw until all `rows`, of one batch, have ended; returns `Draw.times`."""
        device = self._model.device
        width = max(len(row.prompt_ids) for row in rows)
        # Left padding, as `generate` needs it, with any id: it is masked by length.
        ids_BT = torch.tensor([[_FILL] * (width - len(row.prompt_ids)) + list(row.prompt_ids) for row in rows])
        lengths_B = torch.tensor([len(row.prompt_ids) for row in rows])
        mask_BT = torch.arange(width)[None, :] >= width - lengths_B[:, None]
        draw = Draw(rows, sampling, _filters(sampling), callbacks)
        with _own_settings_hidden(self._model):
            self._model.generate(  # type: ignore[operator]
                ids_BT.to(device),
                attention_mask=mask_BT.long().to(device),
                generation_config=_generation_config(sampling, rows[0].limits),
                logits_processor=LogitsProcessorList([_Processor(draw)]),
                stopping_criteria=StoppingCriteriaList([_Criterion(draw)]),
            )
        return draw.times


@dataclass(frozen=True, slots=True)
class _Normalised:
    """Logits and their log-sum-exp, which costs as much as a filter and is needed twice."""

    logits_BV: torch.Tensor
    lse_B: torch.Tensor

    def logps(self, token_B: torch.Tensor) -> list[float]:
        """Log-prob of each row's token, in nats."""
        return (self.logits_BV.gather(1, token_B[:, None]).squeeze(1) - self.lse_B).tolist()


class Draw:
    """One batch of completions: `process` is called with the logits of a step, `take` with the tokens drawn from them.

    Tokens and their log-probs are appended to the sequence of their row. `times` has, of each step, the time at which
    its tokens were taken, in seconds, and how many completions got one.
    """

    def __init__(
        self,
        rows: Sequence[sequence.Sequence],
        sampling: SamplingParams,
        filters: Sequence[Filter],
        callbacks: Callbacks,
    ) -> None:
        self._rows = rows
        self._callbacks = callbacks
        self._filters = filters
        self._limits = rows[0].limits
        self._penalty = sampling.repetition_penalty
        self._bias = dict(sampling.logit_bias)
        self._temperature = sampling.temperature or 1.0
        self._seen_BV: torch.Tensor | None = None
        self._num_drawn = 0
        self.times: list[tuple[float, int]] = []
        self._raw = self._drawn_from = _Normalised(torch.empty(0), torch.empty(0))

    def process(self, ids_BT: torch.Tensor, logits_BV: torch.Tensor) -> torch.Tensor:
        """Logits to draw from: bias, repetition penalty, temperature and filters, in this order.

        Raises:
            TrainingError: if there is nothing to draw from, saying why.
        """
        changed_BV = self._without_stop_ids(self._penalised(self._biased(logits_BV)))
        self._raw = self._drawn_from = self._normalised(logits_BV / self._temperature, _NOT_FINITE)
        if changed_BV is logits_BV and not self._filters:
            return self._raw.logits_BV
        drawn_from_BV = self._raw.logits_BV if changed_BV is logits_BV else changed_BV / self._temperature
        for filter_ in self._filters:
            drawn_from_BV = filter_(ids_BT, drawn_from_BV)
        self._drawn_from = self._normalised(drawn_from_BV, _NOTHING_LEFT)
        return drawn_from_BV

    def take(self, token_B: torch.Tensor) -> torch.Tensor:
        """Mask of the rows that have ended, bool [B], after `token_B` were drawn."""
        logps = self._drawn_from.logps(token_B)
        raw_logps = logps if self._raw is self._drawn_from else self._raw.logps(token_B)
        if self._seen_BV is not None:
            self._seen_BV.scatter_(1, token_B[:, None], True)
        self._num_drawn += 1
        self.times.append((time.perf_counter(), sum(row.finish_reason is None for row in self._rows)))
        for row, token, logp, raw_logp in zip(self._rows, token_B.tolist(), logps, raw_logps, strict=True):
            if row.finish_reason is None:
                has_ended = row.append(token, logp, raw_logp)
                # Row by row, so that after an interrupt exactly the rows that were reported count as finished.
                self._callbacks.note([row], [row] if has_ended else [])
        return torch.tensor([row.finish_reason is not None for row in self._rows], device=token_B.device)

    def _biased(self, logits_BV: torch.Tensor) -> torch.Tensor:
        if not self._bias:
            return logits_BV
        token_N = torch.tensor(list(self._bias), device=logits_BV.device)
        value_N = torch.tensor(list(self._bias.values())).to(logits_BV)
        return logits_BV.index_add(1, token_N, value_N.expand(len(logits_BV), -1))

    def _penalised(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """Keskar et al., CTRL (2019): positive logits are divided by the penalty, negative ones multiplied.

        transformers' own would also penalise the padding token.
        """
        if self._penalty == 1:
            return logits_BV
        if self._seen_BV is None:
            self._seen_BV = torch.zeros_like(logits_BV, dtype=torch.bool)
            for row, seen_V in zip(self._rows, self._seen_BV, strict=True):
                seen_V[list(row.prompt_ids)] = True
        penalised_BV = torch.where(logits_BV < 0, logits_BV * self._penalty, logits_BV / self._penalty)
        return torch.where(self._seen_BV, penalised_BV, logits_BV)

    def _without_stop_ids(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """`logits_BV`, from which no stop id is drawn before `min_new_tokens`."""
        stop_ids = list(self._limits.stop_ids)
        if not stop_ids or self._num_drawn >= self._limits.min_new_tokens:
            return logits_BV
        return logits_BV.index_fill(1, torch.tensor(stop_ids, device=logits_BV.device), float("-inf"))

    def _normalised(self, logits_BV: torch.Tensor, message: str) -> _Normalised:
        lse_B = logits_BV.logsumexp(dim=-1)
        is_finite_B = lse_B.isfinite()
        if not bool(is_finite_B.all()):
            row = self._rows[int((~is_finite_B).nonzero()[0])]
            raise TrainingError(
                f"token {self._num_drawn} of completion {row.sample} of prompt {row.request} (counted from 0) cannot "
                f"be drawn: {message}"
            )
        return _Normalised(logits_BV, lse_B)


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
    top_k = [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    top_p = [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    min_p = [MinPLogitsWarper(sampling.min_p)] if sampling.min_p > 0 else []
    return [*top_k, *top_p, *min_p]  # type: ignore[list-item]


def _generation_config(sampling: SamplingParams, limits: sequence.Limits) -> GenerationConfig:
    """Settings of `generate`, without filters, which are in `Draw`."""
    return GenerationConfig(
        do_sample=sampling.temperature > 0,
        max_new_tokens=sampling.max_new_tokens,
        top_k=0 if sampling.temperature > 0 else None,  # greedy decoding has none, and warns of one
        eos_token_id=sorted(limits.stop_ids) or None,
        pad_token_id=_FILL,
    )


@contextmanager
def _own_settings_hidden(model: PreTrainedModel) -> Iterator[None]:
    """A block without the model's own settings: `generate` takes from them what it is not given, such as a `min_p`
    that would change the distribution whose log-probs are recorded.
    """
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


@contextmanager
def _contiguous_head_input(model: PreTrainedModel) -> Iterator[None]:
    """While the block runs, the output layer gets contiguous hidden states.

    After the prompts, `generate` hands it a strided slice, for which torch's matmul copies the layer's weight once for
    each row.
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
