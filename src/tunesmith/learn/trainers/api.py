"""The interface of an algorithm: a `Learner` with its step, what a step returns, and data given from Python; and of a
listener to the events of a run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from tunesmith.base.config.recipe import Recipe
from tunesmith.collect.data.demonstrations import DemonstrationLike
from tunesmith.collect.data.pairs import JudgementLike
from tunesmith.collect.data.prompts import PromptLike
from tunesmith.engine.batch.upload import Uploader
from tunesmith.engine.models.export import ModelCard, save_final
from tunesmith.engine.models.language_model import LanguageModel
from tunesmith.engine.models.loaded import PreTrainedTokenizerBase
from tunesmith.engine.models.optimizer import MasterAdamW, StepReport
from tunesmith.learn.algorithms.kl import Controller
from tunesmith.learn.environments.contract import EnvironmentFactory
from tunesmith.learn.rewards.sources import RewardLike
from tunesmith.learn.trainers import setup

Metrics = dict[str, float]
Row = Mapping[str, object]


def no_rows(step: int = 0) -> Sequence[Row]:
    """No rows: the default of `StepResult`."""
    return ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Metrics of one step, and the optimizer's report; None if no update was made.

    `batch()` returns the training rows, which are written to `refused/` if the update was refused; `samples(step)`
    returns rows of `samples.jsonl`.
    """

    metrics: Metrics
    report: StepReport | None
    batch: Callable[[], Sequence[Row]] = no_rows
    samples: Callable[[int], Sequence[Row]] = no_rows


class Counter(Protocol):
    """Further state of a checkpoint."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state as JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Go on from this state."""
        ...


class Learner(Protocol):
    """The models that an algorithm trains, its optimizer, and its step."""

    optimizer: MasterAdamW

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """Trained modules, by the name of their file in a checkpoint."""
        ...

    @property
    def counters(self) -> Mapping[str, Counter]:
        """Further state of a checkpoint, by name."""
        ...

    def step(self, batch: Any, index: int, /) -> StepResult:
        """Take step `index` (from 0) on `batch`. All random draws are pure functions of the run's seed and `index`."""
        ...

    def export(self, folder: Path, card: ModelCard) -> Path:
        """Write the trained model to `folder` in the Hugging Face layout."""
        ...


class PolicyParts:
    """The common part of learners of a policy: it is trained, exported, and sent its batches. No part of a step.

    A subclass is a dataclass with the fields `policy` and `tokenizer`.
    """

    policy: LanguageModel
    tokenizer: PreTrainedTokenizerBase

    @cached_property
    def uploader(self) -> Uploader | None:
        """Sends batches to the device of the policy; None on a CPU."""
        return setup.uploader_to(self.policy.module.device)

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """The policy."""
        return {"policy": self.policy.module}

    @property
    def counters(self) -> Mapping[str, Counter]:
        """Nothing."""
        return {}

    def export(self, folder: Path, card: ModelCard) -> Path:
        """Write the policy to `folder` in the Hugging Face layout."""
        return save_final(self.policy.module, self.tokenizer, folder, card)


class PolicyWithKL(PolicyParts):
    """As `PolicyParts`, with the field `kl`."""

    kl: Controller

    @property
    def counters(self) -> Mapping[str, Counter]:
        """The controller of the KL coefficient."""
        return {"kl": self.kl}


@dataclass(frozen=True, slots=True)
class Wishes:
    """Requests of a listener after a step: a checkpoint now, and the end of the run."""

    save: bool = False
    stop: bool = False


class Listener:
    """Is told of the events of a run, between its steps. This one does nothing; a subclass overrides what it needs."""

    def begin(self, cfg: Recipe, learner: Learner, folder: Path, first_step: int, num_steps: int) -> None:
        """The run in `folder` goes from `first_step` (0 for a new one) to `num_steps`."""

    def step_ended(self, step: int, metrics: Mapping[str, float]) -> Wishes:
        """`step` (counted from 1) is recorded with `metrics`."""
        return Wishes()

    def saved(self, step: int) -> None:
        """The checkpoint after `step` is on disk."""

    def ended(self) -> None:
        """Everything of the run is written."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Data and rewards given as Python objects; None for what the recipe names.

    Held-out rows, where given, replace the share of the training rows that the recipe would hold out.
    """

    prompts: Sequence[PromptLike] | None = None
    rewards: Sequence[RewardLike] | None = None
    pairs: Sequence[JudgementLike] | None = None
    demonstrations: Sequence[DemonstrationLike] | None = None
    tools: Sequence[Callable[..., Any]] | None = None
    environment_factory: EnvironmentFactory | None = None
    heldout_pairs: Sequence[JudgementLike] | None = None
    heldout_demonstrations: Sequence[DemonstrationLike] | None = None

    @property
    def given(self) -> list[str]:
        """Names of the training inputs that are set: a resumed run must be given them again."""
        names = [field.name for field in fields(self) if not field.name.startswith("heldout")]
        return [name for name in names if getattr(self, name) is not None]
