"""Samples, the outcomes of scoring them, and the failure policy of a reward."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, Protocol, get_args, runtime_checkable

from tunesmith.base.config.sections import OnError
from tunesmith.base.core.errors import RewardError
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Completion, Group

_SHOWN_CHARACTERS = 60

LARGEST = 1e18
"""Size of a reward, and of a sum of them, at most. Of larger ones the squares, whose sums a standard deviation and the
loss of the values are of, are no numbers of float32.
"""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The `trainer_state` of reward functions, with field names of transformers' TrainerState.

    `epoch` counts passes over the prompts.
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion to score; `index` is its place in its group."""

    prompt: Prompt
    prompt_token_ids: tuple[int, ...]
    completion: Completion
    index: int

    @property
    def is_broken(self) -> bool:
        """True for a trajectory that its environment broke."""
        trajectory = self.completion.trajectory
        return trajectory is not None and trajectory.error is not None

    def __str__(self) -> str:
        shown = textwrap.shorten(self.completion.text, _SHOWN_CHARACTERS, placeholder="...")
        return f"prompt {self.prompt.id}, completion {self.index} ({shown!r})"


@runtime_checkable
class Reward(Protocol):
    """Anything that scores samples. `None` means that the reward does not apply to a sample."""

    @property
    def name(self) -> str:
        """Name in metrics and messages."""
        ...

    def score(self, samples: Sequence[Sample]) -> list[float | None]:
        """One finite number or None for each sample, in order. Raises RewardError naming the reward and the sample."""
        ...


def samples_of(groups: Sequence[Group]) -> list[Sample]:
    """The completions of all groups, group after group."""
    return [
        Sample(group.prompt, group.prompt_token_ids, completion, index)
        for group in groups
        for index, completion in enumerate(group.completions)
    ]


@dataclass(frozen=True, slots=True)
class Policy:
    """Handling of completions that a reward fails on, and the time limit of one call in seconds.

    `fail` ends the run, `drop` leaves the completion out of training, `zero` counts 0 for that reward. Raises
    RewardError for another value and for a time that is not positive.
    """

    on_error: OnError = "fail"
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.on_error not in get_args(OnError):
            raise RewardError(f"on_error is {self.on_error!r}; allowed are {', '.join(get_args(OnError))}")
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise RewardError(f"timeout_s is {self.timeout_s!r}; give a positive number of seconds, or None to wait")


class SampleError(RewardError):
    """Reason why a reward has no number for a sample. Failures of the same `kind` share one line in the log."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[type["SampleError"], tuple[str, str]]:
        return SampleError, (str(self), self.kind)  # an exception is copied by its message alone


Outcome = float | None | SampleError
"""A finite number, None where the reward does not apply, or why there is no number."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A reward had no number for a sample, why, and what was done about it. Failures of one `kind` are logged once.

    `retry`: a call with several samples failed and calls with each of them alone did not, so that those count.
    """

    reward: str
    sample: str
    reason: str
    action: Literal["drop", "zero", "retry"]
    kind: str


class Logged:
    """Columns and metrics that a reward function logs about `num_samples` samples."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.columns: dict[str, list[object]] = {}
        self.values: dict[str, list[float]] = {}

    def extra(self, column: str, values: Sequence[object]) -> None:
        """Keep one value for each sample under `column`."""
        values = list(values)
        if len(values) != self.num_samples:
            raise RewardError(
                f"log_extra({column!r}, ...) was given {len(values)} values for {self.num_samples} completions; "
                "give one for each"
            )
        self.columns[column] = values

    def metric(self, name: str, value: float) -> None:
        """Keep a number under `name`; several of one name are averaged."""
        self.values.setdefault(name, []).append(float(value))

    def add(self, other: "Logged", places: Sequence[int]) -> None:
        """Add what was logged about the samples at `places`; the others have None in new columns."""
        for column, values in other.columns.items():
            own = self.columns.setdefault(column, [None] * self.num_samples)
            for place, value in zip(places, values, strict=True):
                own[place] = value
        for name, numbers in other.values.items():
            self.values.setdefault(name, []).extend(numbers)

    def means(self) -> dict[str, float]:
        """The mean of each metric."""
        return {name: fmean(values) for name, values in self.values.items()}


@dataclass(slots=True)
class Scored:
    """Outcomes of one reward for some samples, and what its function logged.

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
