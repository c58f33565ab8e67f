"""What becomes of samples that a reward failed on: the policies of all rewards applied to all outcomes.

Shape legend: R rewards, N samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tunesmith.config.sections import OnError
from tunesmith.core.errors import RewardError
from tunesmith.core.log import get_logger
from tunesmith.rewards.outcome import Failure, Policy, SampleError, Scored
from tunesmith.rewards.sample import Sample

_STRICTEST_FIRST: tuple[OnError, ...] = ("fail", "drop", "zero")
_DONE = {"drop": "left out of training", "zero": "counted as 0"}


@dataclass(frozen=True, slots=True)
class Settled:
    """Numbers for all samples. `values_RN` is NaN where a reward does not apply or has no number, `total_N` is the
    weighted sum and 0 where `valid_N` is False, float32 both.
    """

    values_RN: torch.Tensor
    total_N: torch.Tensor
    valid_N: torch.Tensor
    failures: tuple[Failure, ...]


@dataclass(slots=True)
class _Book:
    """The failures of one scoring, and the samples that they drop."""

    samples: Sequence[Sample]
    dropped: set[int] = field(default_factory=set[int])
    failures: list[Failure] = field(default_factory=list[Failure])
    by_kind: dict[tuple[str, str], list[Failure]] = field(default_factory=dict[tuple[str, str], list[Failure]])

    def add(self, reward: str, place: int, error: SampleError, on_error: OnError) -> None:
        """Note that `reward` failed on a sample; raises the error under `fail`."""
        if on_error == "fail":
            raise error
        if on_error == "drop":
            self.dropped.add(place)
        self._note(error, Failure(reward, str(self.samples[place]), str(error), on_error))

    def add_retried(self, reward: str, error: SampleError) -> None:
        """Note that a call of `reward` with all samples failed, and that those with each alone did not."""
        self._note(error, Failure(reward, f"{len(self.samples)} completions together", str(error), "retry"))

    def _note(self, error: SampleError, failure: Failure) -> None:
        self.failures.append(failure)
        kind = "retried" if failure.action == "retry" else error.kind
        self.by_kind.setdefault((failure.reward, kind), []).append(failure)


class Settler:
    """Applies policies, and logs each kind of failure of each reward once."""

    def __init__(self, names: Sequence[str], policies: Sequence[Policy], weights: Sequence[float]) -> None:
        self._names = tuple(names)
        self._policies = tuple(policies)
        self._weights = torch.tensor(weights, dtype=torch.float64)[:, None]
        self._said: set[tuple[str, str]] = set()
        self._strictest: OnError = next(p for p in _STRICTEST_FIRST if any(policy.on_error == p for policy in policies))

    def settle(self, samples: Sequence[Sample], scored: Sequence[Scored]) -> Settled:
        """The numbers of all samples, and the failures.

        A sample that no reward applies to, or whose sum is no float32, is a failure too, under the strictest of the
        policies. Raises RewardError for a failure under `fail`, and if every sample is dropped.
        """
        book = _Book(samples)
        rows = [self._row(index, part, book) for index, part in enumerate(scored)]
        values_RN = torch.tensor(rows, dtype=torch.float64)
        self._note_without_reward(values_RN, book)
        total_N = (values_RN.nan_to_num(nan=0.0) * self._weights).sum(dim=0).float()
        for place in (~total_N.isfinite()).nonzero().flatten().tolist():
            message = f"the weighted sum of rewards of {samples[place]} is beyond float32; lower the weights"
            book.add(", ".join(self._names), place, SampleError(message, "sum"), self._strictest)
            total_N[place] = 0.0
        self._log(book)
        if len(book.dropped) == len(samples):
            raise RewardError(
                f"every one of {len(samples)} completions is left out (on_error: drop), so there is nothing to learn "
                f"from. {book.failures[0].reason}"
            )
        valid_N = torch.tensor([place not in book.dropped for place in range(len(samples))])
        return Settled(values_RN.float(), total_N.where(valid_N, 0.0), valid_N, tuple(book.failures))

    def _row(self, index: int, scored: Scored, book: _Book) -> list[float]:
        name, on_error = self._names[index], self._policies[index].on_error
        if scored.retried is not None:
            book.add_retried(name, scored.retried)
        row: list[float] = []
        for place, outcome in enumerate(scored.outcomes):
            if isinstance(outcome, SampleError):
                book.add(name, place, outcome, on_error)
                row.append(0.0 if on_error == "zero" else float("nan"))
            else:
                row.append(float("nan") if outcome is None else outcome)
        return row

    def _note_without_reward(self, values_RN: torch.Tensor, book: _Book) -> None:
        for place in values_RN.isnan().all(dim=0).nonzero().flatten().tolist():
            if place in book.dropped:
                continue
            message = (
                f"no reward applies to {book.samples[place]}: {', '.join(f'`{name}`' for name in self._names)} "
                "returned None; let one of them return a number for every sample"
            )
            book.add(", ".join(self._names), place, SampleError(message, "no reward applies"), self._strictest)

    def _log(self, book: _Book) -> None:
        for (reward, kind), failures in book.by_kind.items():
            if (reward, kind) in self._said:
                continue
            self._said.add((reward, kind))
            first = failures[0]
            if first.action == "retry":
                done = "Called with one completion at a time it did not fail, so those numbers count"
            else:
                done = f"{len(failures)} of {len(book.samples)} completions are {_DONE[first.action]}, {first.sample}"
                done += " first" if len(failures) > 1 else ""
            get_logger(__name__).warning(
                "%s. %s. More failures of this kind are counted in rewards/num_failed.", first.reason, done
            )
