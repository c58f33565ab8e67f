"""Several rewards as one: each scores every completion, the weighted sum is what training follows.

Shape legend: P prompts, G completions per prompt.
"""

import asyncio
import difflib
import math
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TypeVar

import torch

from tunesmith.batch.rollout import Group
from tunesmith.config.schema import RewardSource
from tunesmith.core.errors import ModelError, RewardError
from tunesmith.core.trace import span
from tunesmith.models.heads import RewardModel
from tunesmith.models.load import load_reward_model
from tunesmith.models.tokenizer import PreTrainedTokenizerBase
from tunesmith.rewards.builtin import BUILTINS, RewardFunction
from tunesmith.rewards.functions import FunctionReward, builtin_function, check_callable, load_function
from tunesmith.rewards.model import ModelReward
from tunesmith.rewards.sample import Reward, Sample, samples_of

T = TypeVar("T")

RewardLike = RewardSource | str | RewardModel | Reward | RewardFunction
"""A section of a recipe, its source as text, a reward model, an object with `name` and `score`, or a function."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What reward functions receive as `trainer_state`, under the names of transformers' TrainerState."""

    global_step: int = 0
    max_steps: int = 0


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of P groups of G completions.

    `total_PG` is the weighted sum, float32. `parts[name]` holds one reward unweighted, NaN where it does not apply.
    `logged` are means of what functions passed to `log_metric`, `columns` what they passed to `log_extra`.
    """

    total_PG: torch.Tensor
    parts: Mapping[str, torch.Tensor]
    logged: Mapping[str, float] = field(default_factory=dict[str, float])
    columns: Mapping[str, Sequence[object]] = field(default_factory=dict[str, Sequence[object]])

    def metrics(self) -> dict[str, float]:
        """`reward`, `reward_std`, and `rewards/<name>/mean` and `/std` over the completions that have the reward (TRL's
        names).
        """
        metrics = {"reward": float(self.total_PG.mean()), "reward_std": _std(self.total_PG.flatten())}
        for name, part_PG in self.parts.items():
            known = part_PG[~part_PG.isnan()]
            if len(known):
                metrics |= {f"rewards/{name}/mean": float(known.mean()), f"rewards/{name}/std": _std(known)}
        return {**metrics, **self.logged}


class Scorer:
    """The weighted sum of rewards.

    `sources` are sections of a recipe, or their `source` as text, or Python objects: functions, reward models, anything
    with a `name` and `score(samples)`. `weights` replaces the sections' weights. `policy_tokenizer` lets reward models
    with the same tokenizer score sampled ids as they are; `device` and `dtype` are where named reward models are
    loaded. Two rewards of one name are told apart by a number: `length`, `length_2`. Raises RewardError for a source
    that leads nowhere.
    """

    def __init__(
        self,
        sources: Sequence[RewardLike],
        *,
        weights: Sequence[float] | None = None,
        policy_tokenizer: PreTrainedTokenizerBase | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        micro_batch_size: int = 32,
    ) -> None:
        if not sources:
            raise RewardError(f"no reward is given; give at least one, for example a built-in: {', '.join(BUILTINS)}")
        if weights is not None and len(weights) != len(sources):
            raise RewardError(f"{len(weights)} weights for {len(sources)} rewards; give one for each")
        if not all(math.isfinite(weight) for weight in weights or ()):
            raise RewardError(f"the weights of the rewards are {list(weights or ())}; each must be finite")

        def with_model(model: RewardModel) -> ModelReward:
            return ModelReward(model, policy_tokenizer=policy_tokenizer, micro_batch_size=micro_batch_size)

        def load(section: RewardSource) -> ModelReward:
            model = load_reward_model(
                section.source, label=section.label, transform=section.transform, device=device, dtype=dtype
            )
            return with_model(model)

        self._rewards = [_resolve(source, with_model, load) for source in sources]
        own_weights = [source.weight if isinstance(source, RewardSource) else 1.0 for source in sources]
        self.weights = tuple(own_weights if weights is None else weights)
        self.names = _distinct([reward.name for reward in self._rewards])
        self._loop = _EventLoop()

    @property
    def num_models(self) -> int:
        """Rewards that are models, for memory estimates."""
        return sum(isinstance(reward, ModelReward) for reward in self._rewards)

    def score(self, groups: Sequence[Group], *, state: TrainerState | None = None) -> Scores:
        """The scores of all completions. `state` is passed on to functions as `trainer_state`.

        Raises RewardError that names the reward and the sample: for a function that raises or returns something that is
        no score, and for a sample to which no reward applies.
        """
        samples = samples_of(groups)
        sizes = sorted({len(group.completions) for group in groups})
        if len(sizes) != 1 or not samples:
            raise RewardError(f"groups of {sizes or 'no'} completions; one call scores groups of one size, at least 1")
        log = _Log()
        extras = {"trainer_state": state or TrainerState(), "log_extra": log.extra, "log_metric": log.metric}
        values = torch.tensor(self._all_values(samples, extras), dtype=torch.float32)
        applies = ~values.isnan()
        for sample, any_applies in zip(samples, applies.any(dim=0).tolist(), strict=True):
            if not any_applies:
                raise RewardError(
                    f"no reward applies to {sample}: {', '.join(f'`{name}`' for name in self.names)} returned None; "
                    "let one of them return a number for every sample"
                )
        weights = torch.tensor(self.weights, dtype=torch.float32)[:, None]
        total = (torch.where(applies, values, 0.0) * weights).sum(dim=0)
        shape = (len(groups), sizes[0])
        parts = {name: part.reshape(shape) for name, part in zip(self.names, values, strict=True)}
        return Scores(total.reshape(shape), parts, logged=log.means(), columns=log.columns)

    def _all_values(self, samples: Sequence[Sample], extras: Mapping[str, object]) -> list[list[float]]:
        """One row per reward; None becomes NaN. Async functions run at the same time."""
        rows: dict[int, list[float | None]] = {}
        waiting: dict[int, Coroutine[object, object, list[float | None]]] = {}
        for index, (reward, name) in enumerate(zip(self._rewards, self.names, strict=True)):
            if not isinstance(reward, FunctionReward):
                with span(name):
                    rows[index] = reward.score(samples)
            elif reward.is_async:
                waiting[index] = reward.score_async(samples, extras)
            else:
                with span(name):
                    rows[index] = reward.score(samples, extras)
        if waiting:
            with span("async"):
                rows |= dict(zip(waiting, self._loop.run(_gather(list(waiting.values()))), strict=True))
        return [[float("nan") if value is None else value for value in rows[index]] for index in range(len(rows))]


class _Log:
    """Collects what reward functions log."""

    def __init__(self) -> None:
        self.columns: dict[str, Sequence[object]] = {}
        self._values: dict[str, list[float]] = {}

    def extra(self, column: str, values: Sequence[object]) -> None:
        self.columns[column] = list(values)

    def metric(self, name: str, value: float) -> None:
        self._values.setdefault(name, []).append(float(value))

    def means(self) -> dict[str, float]:
        return {name: fmean(values) for name, values in self._values.items()}


class _EventLoop:
    """One asyncio loop in a thread of its own, started on first use.

    Clients of async services bind to the loop that first used them, so that one loop must serve all calls; and the
    caller may itself run inside a loop, as in a notebook.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[object, object, T]) -> T:
        """The result of `coroutine`."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="tunesmith-rewards", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


async def _gather(coroutines: Sequence[Coroutine[object, object, T]]) -> list[T]:
    return list(await asyncio.gather(*coroutines))


def _resolve(
    source: RewardLike, with_model: Callable[[RewardModel], ModelReward], load: Callable[[RewardSource], ModelReward]
) -> Reward | FunctionReward:
    if isinstance(source, str):
        source = RewardSource(source=source)
    if isinstance(source, RewardSource):
        return _from_section(source, load)
    if isinstance(source, RewardModel):
        return with_model(source)
    if isinstance(source, Reward | FunctionReward):
        return source
    return FunctionReward(check_callable(source, repr(source)))


def _from_section(section: RewardSource, load: Callable[[RewardSource], ModelReward]) -> Reward | FunctionReward:
    source = section.source
    is_builtin = source in BUILTINS
    is_model = not is_builtin and (Path(source).is_dir() or (":" not in source and not source.endswith(".py")))
    if section.arguments and not is_builtin:
        raise RewardError(f"reward {source!r} takes no `arguments`: only built-ins do ({', '.join(BUILTINS)})")
    if not is_model and (section.label is not None or section.transform != "raw"):
        raise RewardError(
            f"reward {source!r} is a function; `label` and `transform` belong to reward models, remove them"
        )
    if is_builtin:
        return FunctionReward(builtin_function(source, section.arguments), name=source)
    if not is_model:
        return FunctionReward(load_function(source))
    close = difflib.get_close_matches(source, list(BUILTINS), n=1, cutoff=0.75)
    if close and not Path(source).exists():
        raise RewardError(f"reward {source!r} is no built-in and no model; did you mean {close[0]!r}?")
    try:
        return load(section)
    except ModelError as error:
        raise RewardError(
            f"reward {source!r}: {error}. A reward is `./file.py:name`, `package.module:name`, a reward model, or a "
            f"built-in: {', '.join(BUILTINS)}"
        ) from error


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """The names, the second of the same name followed by `_2`, the third by `_3`."""
    distinct: list[str] = []
    for name in names:
        candidates = (name, *(f"{name}_{number}" for number in range(2, len(names) + 1)))
        distinct.append(next(candidate for candidate in candidates if candidate not in distinct))
    return tuple(distinct)


def _std(values: torch.Tensor) -> float:
    return float(values.std()) if len(values) > 1 else 0.0
