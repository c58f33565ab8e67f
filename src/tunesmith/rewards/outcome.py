"""What a reward makes of a sample, and what is done where it has no number for it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, get_args

from tunesmith.config.sections import OnError
from tunesmith.core.errors import RewardError


@dataclass(frozen=True, slots=True)
class Policy:
    """What is done with a completion that a reward fails on, and how many seconds one call may take.

    `fail` ends the run, `drop` leaves the completion out of training, `zero` counts 0 for that reward. Raises
    RewardError for another word and for a time that is not positive.
    """

    on_error: OnError = "fail"
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.on_error not in get_args(OnError):
            raise RewardError(f"on_error is {self.on_error!r}; allowed are {', '.join(get_args(OnError))}")
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise RewardError(f"timeout_s is {self.timeout_s!r}; give a positive number of seconds, or None to wait")


class SampleError(RewardError):
    """Why a reward has no number for a sample. `kind` is the same for failures that are worth one line in the log."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


Outcome = float | None | SampleError
"""A finite number, None where the reward does not apply, or why there is no number."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A reward had no number for a sample, why, and what was done about it.

    `retry`: a call with several samples failed and calls with each of them alone did not, so that those count.
    """

    reward: str
    sample: str
    reason: str
    action: Literal["drop", "zero", "retry"]


class Logged:
    """What a reward function logs about `num_samples` samples."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self.columns: dict[str, list[object]] = {}
        self.values: dict[str, list[float]] = {}

    def extra(self, column: str, values: Sequence[object]) -> None:
        """Keep one value for each sample under `column`."""
        values = list(values)
        if len(values) != self._num_samples:
            raise RewardError(
                f"log_extra({column!r}, ...) was given {len(values)} values for {self._num_samples} completions; "
                "give one for each"
            )
        self.columns[column] = values

    def metric(self, name: str, value: float) -> None:
        """Keep a number under `name`; several of one name are averaged."""
        self.values.setdefault(name, []).append(float(value))

    def add(self, other: "Logged", places: Sequence[int]) -> None:
        """Take in what was logged about the samples at `places`; the others have None in new columns."""
        for column, values in other.columns.items():
            own = self.columns.setdefault(column, [None] * self._num_samples)
            for place, value in zip(places, values, strict=True):
                own[place] = value
        for name, numbers in other.values.items():
            self.values.setdefault(name, []).extend(numbers)

    def means(self) -> dict[str, float]:
        """The mean of each metric."""
        return {name: fmean(values) for name, values in self.values.items()}


@dataclass(slots=True)
class Scored:
    """What one reward made of some samples: an outcome for each, and what its function logged.

    `retried` is set where a call with all samples failed and the outcomes are those of calls with each alone.
    """

    outcomes: list[Outcome]
    logged: Logged
    retried: SampleError | None = None

    def numbers(self) -> list[float | None]:
        """The outcomes if all are numbers or None; raises the first SampleError otherwise."""
        for outcome in self.outcomes:
            if isinstance(outcome, SampleError):
                raise outcome
        return [outcome for outcome in self.outcomes if not isinstance(outcome, SampleError)]
