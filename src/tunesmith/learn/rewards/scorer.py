"""Several rewards as one: each scores every completion, and training follows the weighted sum.

Shape legend: P prompts, G completions per prompt, R rewards, N samples.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from tunesmith.base.config.sections import OnError, RewardSource
from tunesmith.base.core.errors import RewardError
from tunesmith.base.core.log import get_logger
from tunesmith.base.core.trace import span
from tunesmith.base.core.turns import Turns
from tunesmith.engine.batch.rollout import Group
from tunesmith.engine.distributed.ranks import gathered, share_of
from tunesmith.engine.models.heads import RewardModel
from tunesmith.engine.models.tokenizer import PreTrainedTokenizerBase
from tunesmith.learn.judges.judge import Judge
from tunesmith.learn.rewards.ahead import Ahead, Calls, Portion, answers_async, checked, one_answer, portions
from tunesmith.learn.rewards.calling import CalledReward
from tunesmith.learn.rewards.functions import identity_of
from tunesmith.learn.rewards.judged import JudgeReward
from tunesmith.learn.rewards.model import ModelReward
from tunesmith.learn.rewards.outcome import (
    LARGEST,
    Failure,
    Logged,
    Policy,
    Sample,
    SampleError,
    Scored,
    TrainerState,
    samples_of,
)
from tunesmith.learn.rewards.sources import Loading, RewardLike, code_files, resolve, reward_list
from tunesmith.learn.rewards.threads import EventLoop, Worker, result_of


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of P groups of G completions.

    `total_PG` is the weighted sum, float32. `parts[name]` holds one reward unweighted, NaN where it does not apply.
    `valid_PG` is False where a completion is left out of training because a reward failed on it; `total_PG` is 0 there.
    `failures` lists every reward that had no number for a completion, and what was done. `logged` are means of what
    functions passed to `log_metric`, `columns` what they passed to `log_extra`. `greedy_P` are rewards of greedy
    completions of the prompts, NaN where one failed, if an algorithm had them drawn.
    """

    total_PG: torch.Tensor
    parts: Mapping[str, torch.Tensor]
    valid_PG: torch.Tensor
    failures: Sequence[Failure] = ()
    logged: Mapping[str, float] = field(default_factory=dict[str, float])
    columns: Mapping[str, Sequence[object]] = field(default_factory=dict[str, Sequence[object]])
    greedy_P: torch.Tensor | None = None

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
    greedy = [part.greedy_P for part in parts if part.greedy_P is not None]
    return Scores(
        total_PG=torch.cat([part.total_PG for part in parts]),
        parts={name: torch.cat([part.parts[name] for part in parts]) for name in parts[0].parts},
        valid_PG=torch.cat([part.valid_PG for part in parts]),
        failures=[failure for part in parts for failure in part.failures],
        logged=logged,
        columns=columns,
        greedy_P=torch.cat(greedy) if greedy else None,
    )


class Scorer:
    """The weighted sum of rewards.

    `sources` are sections of a recipe, or their `source` as text, or Python objects: functions, reward models, anything
    with a `name` and `score(samples)`. `weights` replaces the sections' weights. `on_error` and `timeout_s` hold for
    what is no section, which has its own. `policy_tokenizer` lets reward models with the same tokenizer score sampled
    ids as they are; `device` is where named reward models are loaded. Two rewards of one name get a
    number: `length`, `length_2`. With `while_drawing` all rewards are called in a second thread, so that
    `ahead` can score groups while an engine draws others. `code_files` are the files of the functions that are named,
    `functions` the identities of those that are given as objects.
    Threads that call `score` take turns: rewards are not called at once by two of them.
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
        sources = reward_list(sources)
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
        self.functions = {
            name: identity_of(source)
            for name, source, reward in zip(self.names, sources, self._rewards, strict=True)
            if isinstance(reward, CalledReward) and not isinstance(source, str | RewardSource)
        }
        self._turns = Turns("scorer")
        self._loop = EventLoop()
        self._worker = Worker("scorer") if while_drawing else None
        self._settler = Settler(self.names, [reward.policy for reward in self._rewards], self.weights)

    def weight_of(self, name: str) -> float:
        """The weight of the reward `name`; 0 if there is none of this name."""
        return dict(zip(self.names, self.weights, strict=True)).get(name, 0.0)

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raise RewardError for a function that needs a column which prompts with `columns` do not have."""
        for reward in self._rewards:
            if isinstance(reward, CalledReward):
                reward.check_columns(columns)

    @property
    def judges(self) -> dict[str, Judge]:
        """The judges among the rewards, by name."""
        rewards = zip(self.names, self._rewards, strict=True)
        return {name: reward.judge for name, reward in rewards if isinstance(reward, JudgeReward)}

    @property
    def is_relative(self) -> bool:
        """True if a reward compares the completions of a prompt with each other, so that one alone has none."""
        return any(isinstance(reward, JudgeReward) and reward.is_relative for reward in self._rewards)

    @property
    def models(self) -> dict[str, RewardModel]:
        """The models of `model_rewards`, by name."""
        return {name: reward.model for name, reward in self.model_rewards.items()}

    @property
    def model_rewards(self) -> dict[str, ModelReward]:
        """The rewards that are models, by name."""
        rewards = zip(self.names, self._rewards, strict=True)
        return {name: reward for name, reward in rewards if isinstance(reward, ModelReward)}

    def ahead(self, num_groups: int, group_size: int, state: TrainerState) -> Ahead | None:
        """An `Ahead` that scores groups as they end, to be passed to `score`. None without `while_drawing`."""
        if self._worker is None:
            return None
        rewards = dict(zip(self.names, self._rewards, strict=True))
        return Ahead(rewards, self._worker, self._loop, num_groups, group_size, {"trainer_state": state})

    def score(
        self, groups: Sequence[Group], *, state: TrainerState | None = None, ahead: Ahead | None = None
    ) -> Scores:
        """The scores of all completions. `state` is passed on to functions as `trainer_state`. `ahead`, if it
        was given all of `groups`, holds their outcomes, and no reward is called again.

        A reward without a number for a sample (it raised, hung, returned no number), and a sample to which no reward
        applies, follow `on_error`. Raises RewardError that names the reward and the sample under `fail`, and if every
        completion is dropped.
        """
        with self._turns.next():
            return self._score(groups, state, ahead)

    def _score(self, groups: Sequence[Group], state: TrainerState | None, ahead: Ahead | None) -> Scores:
        samples = samples_of(groups)
        sizes = sorted({len(group.completions) for group in groups})
        if len(sizes) != 1 or not samples:
            raise RewardError(f"groups of {sizes or 'no'} completions; one call scores groups of one size, at least 1")
        whole = Portion(range(len(groups)), sizes[0])
        with _own_torch_settings():
            scored = self._scored(samples, whole, state or TrainerState()) if ahead is None else ahead.answers()
        return self._settler.settle(samples, scored, (len(groups), sizes[0]))

    def _scored(self, samples: Sequence[Sample], whole: Portion, state: TrainerState) -> list[Scored]:
        """Outcomes of each reward, in the order of the rewards. Async functions run concurrently.

        With several ranks each computes its share: whole portions of a reward model, one call of a function.
        """
        done: dict[str, Scored] = {}
        waiting: list[tuple[str, CalledReward]] = []
        extras = {"trainer_state": state}
        mine = share_of(whole.groups, all_ranks=True)
        own = [Portion(range(mine[0], mine[-1] + 1), whole.group_size)] if mine else []
        for name, reward in zip(self.names, self._rewards, strict=True):
            if isinstance(reward, CalledReward) and reward.is_async:
                waiting.append((name, reward))
                continue
            with span(name):
                is_model = isinstance(reward, ModelReward)
                every = portions(len(whole.groups), whole.group_size)
                parts = share_of(every, all_ranks=True) if is_model else own
                ask = functools.partial(_outcomes, reward, samples, parts, extras)
                answers = ask() if self._worker is None else self._worker.run(ask, math.inf)
                found = gathered(list(answers.items()), "rewards", all_ranks=True)
                done[name] = checked(reward, one_answer(dict(found)))
        if waiting:
            with span("async"), span("+".join(name for name, _ in waiting)):
                calls = [
                    Calls(name, reward, own, self._begun(reward, samples, own, extras)) for name, reward in waiting
                ]
                answered = answers_async(calls, self._loop, lambda part: [samples[i] for i in part.samples])
                for name, scored in answered.items():
                    found = gathered([(part, scored) for part in own], "rewards", all_ranks=True)
                    done[name] = one_answer(dict(found))
        return [done[name] for name in self.names]

    def _begun(
        self, reward: CalledReward, samples: Sequence[Sample], parts: Sequence[Portion], extras: Mapping[str, object]
    ) -> dict[Portion, Future[Scored]]:
        """The calls of an async function, which have begun."""
        begun = {part: reward.outcomes_async([samples[i] for i in part.samples], extras) for part in parts}
        return {part: self._loop.submit(call) for part, call in begun.items()}


def _outcomes(
    reward: ModelReward | CalledReward,
    samples: Sequence[Sample],
    parts: Sequence[Portion],
    extras: Mapping[str, object],
) -> dict[Portion, Scored]:
    """The outcomes of one call for each of `parts`."""
    of_part = {part: [samples[i] for i in part.samples] for part in parts}
    if isinstance(reward, ModelReward):
        begun = {part: future for part in parts if (future := reward.begin(of_part[part], extras))}
        if begun:
            return {part: result_of(future) for part, future in begun.items()}
    return {part: reward.outcomes(of_part[part], extras) for part in parts}


@contextmanager
def _own_torch_settings() -> Iterator[None]:
    """Take back what rewards set for the whole process: gradients, the default dtype and the number of threads.

    A judge that is loaded with `torch.set_grad_enabled(False)` would else end the training, and another number of
    threads would change its last bits.
    """
    has_gradients, dtype, num_threads = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_grad_enabled(has_gradients)
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)


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


@dataclass(slots=True)
class _Failures:
    """The failures of one scoring, and the places of the samples that they drop."""

    samples: Sequence[Sample]
    listed: list[Failure] = field(default_factory=list[Failure])
    dropped: set[int] = field(default_factory=set[int])

    def add(self, reward: str, place: int, error: SampleError, on_error: OnError) -> None:
        """Note that `reward` failed on a sample; raises the error under `fail`."""
        if on_error == "fail":
            raise error
        if on_error == "drop":
            self.dropped.add(place)
        self.listed.append(Failure(reward, str(self.samples[place]), str(error), on_error, error.kind))


class Settler:
    """Applies the failure policies of rewards, and logs each kind of failure of each reward once."""

    def __init__(self, names: Sequence[str], policies: Sequence[Policy], weights: Sequence[float]) -> None:
        self._names = tuple(names)
        self._policies = tuple(policies)
        self._weights = torch.tensor(weights, dtype=torch.float64)[:, None]
        self._said: set[tuple[str, str]] = set()
        self._strictest: OnError = next(p for p in _STRICTEST_FIRST if any(policy.on_error == p for policy in policies))

    def settle(self, samples: Sequence[Sample], scored: Sequence[Scored], shape: tuple[int, int]) -> Scores:
        """The scores of all samples, as groups of `shape`.

        A sample that no reward applies to, or whose sum is beyond 1e18, is a failure too, under the strictest of the
        policies; a trajectory that its environment broke is left out, whatever they are. Raises RewardError for a
        failure under `fail`, and if every sample is dropped.
        """
        failures, logged = _Failures(samples), Logged(len(samples))
        rows: list[list[float]] = []
        for name, policy, part in zip(self._names, self._policies, scored, strict=True):
            rows.append(_row(name, policy.on_error, part, failures))
            logged.add(part.logged, range(len(samples)))
        values_RN = torch.tensor(rows, dtype=torch.float64)
        for place in values_RN.isnan().all(dim=0).nonzero().flatten().tolist():
            named = ", ".join(f"`{name}`" for name in self._names)
            message = f"no reward applies to {samples[place]}: {named} returned None"
            error = SampleError(f"{message}; let one of them return a number for every sample", "no reward applies")
            policy = self._strictest
            if samples[place].is_broken:
                policy, error = "drop", SampleError(f"{message}, because its environment broke it", "environment")
            if place not in failures.dropped:
                failures.add(", ".join(self._names), place, error, policy)
        total_N = (values_RN.nan_to_num(nan=0.0) * self._weights).sum(dim=0).float()
        for place in (~(total_N.abs() <= LARGEST)).nonzero().flatten().tolist():
            message = (
                f"the weighted sum of rewards of {samples[place]} is {total_N[place]:.3g}; 1e18 in size is the "
                "most, so lower the weights"
            )
            failures.add(", ".join(self._names), place, SampleError(message, "sum"), self._strictest)
            total_N[place] = 0.0
        self._log(failures.listed, len(samples))
        if len(failures.dropped) == len(samples):
            raise RewardError(
                f"every one of {len(samples)} completions is left out (on_error: drop), so there is nothing to learn "
                f"from. {failures.listed[0].reason}"
            )
        valid_N = torch.tensor([place not in failures.dropped for place in range(len(samples))])
        return Scores(
            total_PG=total_N.where(valid_N, 0.0).reshape(shape),
            parts=dict(zip(self._names, values_RN.float().reshape(-1, *shape), strict=True)),
            valid_PG=valid_N.reshape(shape),
            failures=tuple(failures.listed),
            logged=logged.means(),
            columns=logged.columns,
        )

    def _log(self, failures: Sequence[Failure], num_samples: int) -> None:
        by_kind: dict[tuple[str, str], list[Failure]] = {}
        for failure in failures:
            by_kind.setdefault((failure.reward, failure.kind), []).append(failure)
        for key, (first, *others) in by_kind.items():
            if key in self._said:
                continue
            self._said.add(key)
            if first.action == "retry":
                done = "Called with one completion at a time it did not fail, so those numbers count"
            else:
                done = f"{1 + len(others)} of {num_samples} completions are {_DONE[first.action]}, {first.sample}"
                done += " first" if others else ""
            get_logger(__name__).warning(
                "%s. %s. More failures of this kind are counted in rewards/num_failed.", first.reason, done
            )


def _row(name: str, on_error: OnError, scored: Scored, failures: _Failures) -> list[float]:
    """The numbers of reward `name` for all samples: NaN where it does not apply or has none."""
    if scored.retried is not None:
        together = f"{len(scored.outcomes)} completions together"
        failures.listed.append(Failure(name, together, str(scored.retried), "retry", "retried"))
    row: list[float] = []
    for place, outcome in enumerate(scored.outcomes):
        if isinstance(outcome, SampleError):
            failures.add(name, place, outcome, on_error)
            outcome = 0.0 if on_error == "zero" else None
        row.append(math.nan if outcome is None else outcome)
    return row
