"""What happens between two forward passes of `transformers.generate`: logits are filtered, the token that was drawn
from them is scored, and the completion ends or goes on.

Shape legend: B sequences, V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from tunesmith.batch.rollout import SamplingParams
from tunesmith.core.errors import TrainingError
from tunesmith.rollout import sequence
from tunesmith.rollout.text_stream import Watch

Filter = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From ids and logits [B, V] to logits with -inf where a token is not to be drawn: transformers' warpers."""

_NOT_FINITE = (
    "the model's logits are not finite; its weights are damaged, or overflow in float16: set model.dtype to float32, "
    "or go back to an older checkpoint"
)
_NOTHING_LEFT = (
    "logit_bias, repetition_penalty and min_new_tokens together forbid every token, or make a logit infinite; "
    "weaken them"
)


@dataclass(frozen=True, slots=True)
class _Normalised:
    """Logits and their log-sum-exp, which costs as much as a filter and is needed twice."""

    logits_BV: torch.Tensor
    lse_B: torch.Tensor

    def logps(self, token_B: torch.Tensor) -> list[float]:
        """Log-prob of each row's token, in nats."""
        return (self.logits_BV.gather(1, token_B[:, None]).squeeze(1) - self.lse_B).tolist()


class Draw:
    """One batch of completions: `process` is called with the logits of a step, `take` with what was drawn from them.

    A row's tokens, with their two log-probs, go into its sequence, which knows where it ends.
    """

    def __init__(
        self, rows: Sequence[sequence.Sequence], sampling: SamplingParams, filters: Sequence[Filter], watch: Watch
    ) -> None:
        self._rows = rows
        self._watch = watch
        self._filters = filters
        self._limits = rows[0].limits
        self._penalty = sampling.repetition_penalty
        self._bias = dict(sampling.logit_bias)
        self._temperature = sampling.temperature or 1.0
        self._seen_BV: torch.Tensor | None = None
        self._num_drawn = 0
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
        """Which rows have ended, bool [B], now that `token_B` were drawn."""
        logps = self._drawn_from.logps(token_B)
        raw_logps = logps if self._raw is self._drawn_from else self._raw.logps(token_B)
        if self._seen_BV is not None:
            self._seen_BV.scatter_(1, token_B[:, None], True)
        self._num_drawn += 1
        for row, token, logp, raw_logp in zip(self._rows, token_B.tolist(), logps, raw_logps, strict=True):
            if row.finish_reason is None:
                row.append(token, logp, raw_logp)
                self._watch.note(row)
        return torch.tensor([row.finish_reason is not None for row in self._rows], device=token_B.device)

    def _biased(self, logits_BV: torch.Tensor) -> torch.Tensor:
        if not self._bias:
            return logits_BV
        value_N = torch.tensor(list(self._bias.values())).to(logits_BV)
        return logits_BV.index_add(1, _index(self._bias, logits_BV), value_N.expand(len(logits_BV), -1))

    def _penalised(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """Keskar et al., CTRL (2019): positive logits are divided by the penalty, negative ones multiplied.

        transformers' own would also punish the token that stands for padding.
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
        stop_ids = [token for token in self._limits.stop_ids if token < logits_BV.shape[1]]
        if not stop_ids or self._num_drawn >= self._limits.min_new_tokens:
            return logits_BV
        return logits_BV.index_fill(1, _index(stop_ids, logits_BV), float("-inf"))

    def _normalised(self, logits_BV: torch.Tensor, complaint: str) -> "_Normalised":
        lse_B = logits_BV.logsumexp(dim=-1)
        fine_B = lse_B.isfinite()
        if not bool(fine_B.all()):
            row = self._rows[int((~fine_B).nonzero()[0])]
            raise TrainingError(
                f"token {self._num_drawn} of completion {row.sample} of prompt {row.request} (counted from 0) cannot "
                f"be drawn: {complaint}"
            )
        return _Normalised(logits_BV, lse_B)


def _index(token_ids: Iterable[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(token_ids), device=like.device)
