"""Several rewards as one: each scores every completion, and training follows the weighted sum.

Shape legend: P prompts, G completions per prompt, R rewards, N samples.
"""

import asyncio
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tunesmith.batch.rollout import Group
from tunesmith.config.sections import OnError, RewardSource
from tunesmith.core.errors import RewardError
from tunesmith.core.log import get_logger
from tunesmith.core.trace import span
from tunesmith.models.heads import RewardModel
from tunesmith.models.tokenizer import PreTrainedTokenizerBase
from tunesmith.rewards.ahead import Ahead, Threads, checked
from tunesmith.rewards.builtin import BUILTINS
from tunesmith.rewards.calling import CalledReward
from tunesmith.rewards.model import ModelReward
from tunesmith.rewards.outcome import (
    Failure,
    Logged,
    Policy,
    Sample,
    SampleError,
    Scored,
    one_answer,
    portions,
    samples_of,
)
from tunesmith.rewards.sources import Loading, RewardLike, code_files, resolve
from tunesmith.rewards.threads import EventLoop, HangError, Worker


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The `trainer_state` of reward functions, with field names of transformers' TrainerState."""

    global_step: int = 0
    max_steps: int = 0


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of P groups of G completions.

    `total_PG` is the weighted sum, float32. `parts[name]` holds one reward unweighted, NaN where it does not apply.
    `valid_PG` is False where a completion is left out of training because a reward failed on it; `total_PG` is 0 there.
    `failures` lists every reward that had no number for a completion, and what was done. `logged` are means of what
    functions passed to `log_metric`, `columns` what they passed to `log_extra`.
    """

    total_PG: torch.Tensor
    parts: Mapping[str, torch.Tensor]
    valid_PG: torch.Tensor
    failures: Sequence[Failure] = ()
    logged: Mapping[str, float] = field(default_factory=dict[str, float])
    columns: Mapping[str, Sequence[object]] = field(default_factory=dict[str, Sequence[object]])

    def metrics(self) -> dict[str, float]:
        """`reward`, `reward_std`, and `rewards/<name>/mean` and `/std` over the valid completions that have the reward
        (TRL's names); `rewards/num_failed` and `rewards/num_dropped`; and what functions logged.
        """
        total = self.total_PG[self.valid_PG]
        metrics = {"reward": float(total.mean()), "reward_std": _std(total)}
        for name, part_PG in self.parts.items():
            known = part_PG[self.valid_PG & ~part_PG.isnan()]
            if len(known):
                metrics |= {f"rewards/{name}/mean": float(known.mean()), f"rewards/{name}/std": _std(known)}
        metrics |= {
            "rewards/num_failed": float(len(self.failures)),
            "rewards/num_dropped": float((~self.valid_PG).sum()),
        }
        return {**metrics, **self.logged}


def joined(parts: Sequence[Scores]) -> Scores:
    """The scores of several calls of one scorer, on groups of one size, as those of all groups together."""
    if len(parts) == 1:
        return parts[0]
    sizes = [part.total_PG.numel() for part in parts]
    logged: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part.logged):
        known = [(size, part.logged[name]) for size, part in zip(sizes, parts, strict=True) if name in part.logged]
        logged[name] = sum(size * value for size, value in known) / sum(size for size, _ in known)
    columns = {
        name: [
            value for size, part in zip(sizes, parts, strict=True) for value in part.columns.get(name, [None] * size)
        ]
        for name in dict.fromkeys(name for part in parts for name in part.columns)
    }
    return Scores(
        total_PG=torch.cat([part.total_PG for part in parts]),
        parts={name: torch.cat([part.parts[name] for part in parts]) for name in parts[0].parts},
        valid_PG=torch.cat([part.valid_PG for part in parts]),
        failures=[failure for part in parts for failure in part.failures],
        logged=logged,
        columns=columns,
    )


class Scorer:
    """The weighted sum of rewards.

    `sources` are sections of a recipe, or their `source` as text, or Python objects: functions, reward models, anything
    with a `name` and `score(samples)`. `weights` replaces the sections' weights. `on_error` and `timeout_s` hold for
    what is no section, which has its own. `policy_tokenizer` lets reward models with the same tokenizer score sampled
    ids as they are; `device` is where named reward models are loaded. Two rewards of one name get a
    number: `length`, `length_2`. With `while_drawing` all rewards are called in a second thread, so that
    `ahead` can score groups while an engine draws others. `code_files` are the files of the functions that are named.
    Raises RewardError for a source that leads nowhere.
    """

    def __init__(
        self,
        sources: Sequence[RewardLike],
        *,
        weights: Sequence[float] | None = None,
        policy_tokenizer: PreTrainedTokenizerBase | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        on_error: OnError = "fail",
        timeout_s: float | None = None,
        while_drawing: bool = False,
    ) -> None:
        if not sources:
            raise RewardError(f"no reward is given; give at least one, for example a built-in: {', '.join(BUILTINS)}")
        if weights is not None and len(weights) != len(sources):
            raise RewardError(f"{len(weights)} weights for {len(sources)} rewards; give one for each")
        if not all(math.isfinite(weight) for weight in weights or ()):
            raise RewardError(f"the weights of the rewards are {list(weights or ())}; each must be finite")
        loading = Loading(policy_tokenizer, device, dtype, Policy(on_error, timeout_s))
        self._rewards = [resolve(source, loading) for source in sources]
        own_weights = [source.weight if isinstance(source, RewardSource) else 1.0 for source in sources]
        self.weights = tuple(own_weights if weights is None else weights)
        self.names = _distinct([reward.name for reward in self._rewards])
        self.code_files = code_files(sources)
        self._loop = EventLoop()
        self._worker = Worker("scorer") if while_drawing else None
        self._settler = Settler(self.names, [reward.policy for reward in self._rewards], self.weights)

    @property
    def models(self) -> dict[str, RewardModel]:
        """The rewards that are models, by name."""
        rewards = zip(self.names, self._rewards, strict=True)
        return {name: reward.model for name, reward in rewards if isinstance(reward, ModelReward)}

    @property
    def num_models(self) -> int:
        """Rewards that are models, for memory estimates."""
        return len(self.models)

    def ahead(self, num_groups: int, group_size: int, state: TrainerState) -> Ahead | None:
        """An `Ahead` that scores groups as they end, to be passed to `score`. None without `while_drawing`."""
        if self._worker is None:
            return None
        rewards = dict(zip(self.names, self._rewards, strict=True))
        return Ahead(rewards, Threads(self._worker, self._loop), num_groups, group_size, {"trainer_state": state})

    def score(
        self, groups: Sequence[Group], *, state: TrainerState | None = None, ahead: Ahead | None = None
    ) -> Scores:
        """The scores of all completions. `state` is passed on to functions as `trainer_state`. `ahead`, if it
        was given all of `groups`, holds their outcomes, and no reward is called again.

        A reward without a number for a sample (it raised, hung, returned no number), and a sample to which no reward
        applies, follow `on_error`. Raises RewardError that names the reward and the sample under `fail`, and if every
        completion is dropped.
        """
        samples = samples_of(groups)
        sizes = sorted({len(group.completions) for group in groups})
        if len(sizes) != 1 or not samples:
            raise RewardError(f"groups of {sizes or 'no'} completions; one call scores groups of one size, at least 1")
        extras = {"trainer_state": state or TrainerState()}
        scored = self._scored(samples, sizes[0], extras) if ahead is None else ahead.answers()
        settled = self._settler.settle(samples, scored)
        logged = Logged(len(samples))
        for part in scored:
            logged.add(part.logged, range(len(samples)))
        shape = (len(groups), sizes[0])
        return Scores(
            total_PG=settled.total_N.reshape(shape),
            parts={name: part.reshape(shape) for name, part in zip(self.names, settled.values_RN, strict=True)},
            valid_PG=settled.valid_N.reshape(shape),
            failures=settled.failures,
            logged=logged.means(),
            columns=logged.columns,
        )

    def _scored(self, samples: Sequence[Sample], group_size: int, extras: Mapping[str, object]) -> list[Scored]:
        """Outcomes of each reward, in the order of the rewards. Async functions run concurrently."""
        scored: dict[int, Scored] = {}
        for index, (reward, name) in enumerate(zip(self._rewards, self.names, strict=True)):
            if not reward.is_async:
                with span(name):
                    ask = functools.partial(_outcomes, reward, samples, group_size, extras)
                    scored[index] = checked(reward, ask() if self._worker is None else self._worker.run(ask, math.inf))
        waiting = {i: r for i, r in enumerate(self._rewards) if isinstance(r, CalledReward) and r.is_async}
        if waiting:
            with span("async"):
                scored |= self._scored_async(waiting, samples, extras)
        return [scored[index] for index in range(len(self._rewards))]

    def _scored_async(
        self, rewards: Mapping[int, CalledReward], samples: Sequence[Sample], extras: Mapping[str, object]
    ) -> dict[int, Scored]:
        done: dict[int, Scored] = {}

        async def score(index: int, reward: CalledReward) -> None:
            done[index] = await reward.outcomes_async(samples, extras)

        async def score_all() -> list[BaseException | None]:
            return await asyncio.gather(*(score(i, r) for i, r in rewards.items()), return_exceptions=True)

        limits = [r.policy.timeout_s for r in rewards.values() if r.policy.timeout_s is not None]
        try:
            for error in self._loop.run(score_all(), min(limits, default=None)):
                if error is not None:
                    raise error
            scored = done
        except HangError as error:  # the whole loop: what has ended counts, the others follow their policies
            scored = {index: reward.hung(samples, error) for index, reward in rewards.items()} | dict(done)
        return {index: checked(reward, scored[index]) for index, reward in rewards.items()}


def _outcomes(
    reward: ModelReward | CalledReward, samples: Sequence[Sample], group_size: int, extras: Mapping[str, object]
) -> Scored:
    """A function is called with all samples at once, a model with a portion at a time."""
    if isinstance(reward, CalledReward):
        return reward.outcomes(samples, extras)
    parts = portions(len(samples) // group_size, group_size)
    return one_answer({part: reward.outcomes(samples[part.samples.start : part.samples.stop]) for part in parts})


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """The names, the second of the same name followed by `_2`, the third by `_3`."""
    distinct: list[str] = []
    for name in names:
        candidates = (name, *(f"{name}_{number}" for number in range(2, len(names) + 1)))
        distinct.append(next(candidate for candidate in candidates if candidate not in distinct))
    return tuple(distinct)


def _std(values: torch.Tensor) -> float:
    return float(values.std()) if len(values) > 1 else 0.0


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
