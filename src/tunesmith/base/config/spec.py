"""The facts of an algorithm for the rest of the program: a `Spec`, and the `Passes` of one of its steps.

Nothing here imports torch: command line, plans, estimates, diagnosis and pages read it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tunesmith.base.config.policy_sections import KLSection
from tunesmith.base.config.recipe import PolicyRecipe, PtxRecipe, Recipe, SamplingRecipe
from tunesmith.base.config.rules import Rule
from tunesmith.base.config.sections import RolloutSection

Critic = Literal["none", "shared", "separate"]


class Draws(Protocol):
    """A recipe whose steps draw completions; `section` is that of its algorithm."""

    @property
    def rollout(self) -> RolloutSection:
        """The settings of drawing completions."""
        ...

    @property
    def section(self) -> Any:
        """The settings of learning them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The passes of a step, over rows of tokens: what estimates and plans compute its cost from.

    A step has `num_rows` rows. Of those, `num_learnt` are learnt in `num_epochs` epochs of `num_minibatches` optimizer
    steps each, with `micro_batch_size` rows in a forward and backward pass. `old_policy` and `reference` are forward
    passes of those models before the update, over the rows that are learnt or, with `scores_all`, over all;
    `num_teachers` models compute each row that is learnt, in each epoch. Each update learns `num_demonstrations` rows
    that were not drawn; `num_replied` rows are learnt once more in each epoch, for what an environment replied. A
    `separate` critic scores all rows, and is trained as the policy is.
    """

    num_rows: int
    num_learnt: int
    num_epochs: int = 1
    num_minibatches: int = 1
    micro_batch_size: int = 1
    old_policy: bool = False
    reference: bool = False
    scores_all: bool = False
    num_teachers: int = 0
    num_demonstrations: int = 0
    num_replied: int = 0
    critic: Critic = "none"

    @property
    def num_updates(self) -> int:
        """Optimizer steps."""
        return self.num_epochs * self.num_minibatches

    @classmethod
    def of_drawing(
        cls,
        cfg: Draws,
        *,
        section: Any = None,
        old_policy: bool = False,
        critic: Critic = "none",
        num_learnt: int | None = None,
        num_beside: int = 0,
        num_teachers: int = 0,
    ) -> "Passes":
        """The passes of an algorithm that draws its rows.

        `section` says how often a rollout is learnt, and may have a `kl`; by default it is that of the recipe's
        algorithm. `num_learnt` is by default all completions of the prompts; `num_beside` further rows are drawn and
        scored, and not learnt. `old_policy` says that the update needs log-probs of the policy that drew: an exact
        engine has recorded them.
        """
        section, rollout = section or cfg.section, cfg.rollout
        is_exact = rollout.backend == "native" and rollout.own_weights == "model" and not rollout.recompute_logps
        num_rows = rollout.prompts_per_step * rollout.completions_per_prompt
        kl = getattr(section, "kl", None)
        return cls(
            num_rows=num_rows + num_beside,
            num_learnt=num_rows if num_learnt is None else num_learnt,
            num_epochs=section.num_epochs,
            num_minibatches=section.num_minibatches,
            micro_batch_size=section.micro_batch_size,
            old_policy=old_policy and not is_exact,
            reference=isinstance(kl, KLSection) and kl.coef > 0,
            scores_all=isinstance(kl, KLSection) and kl.place == "reward",
            num_teachers=num_teachers,
            num_demonstrations=cfg.ptx.num_learnt if isinstance(cfg, PtxRecipe) else 0,
            num_replied=num_rows * (isinstance(cfg, PolicyRecipe) and cfg.environment.reply_loss_coef > 0),
            critic=critic,
        )

    @classmethod
    def of_rows(cls, num_rows: int, micro_batch_size: int = 1, *, reference: bool = False) -> "Passes":
        """The passes of an algorithm that learns given rows, all of a step in one update."""
        return cls(num_rows=num_rows, num_learnt=num_rows, micro_batch_size=micro_batch_size, reference=reference)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """An algorithm: its recipe, where its code is, and how its runs are shown, ranked and counted.

    `title` may name settings of the algorithm's section, as `{loss}`. `code` is `module:class`, imported when a run
    begins: a learner (`trainers.rollouts.PolicyLearner`) for a `PolicyRecipe`, else a task (`trainers.run.Task`).
    `headline` are the metrics beside the progress bar. `best` is the metric that ranks checkpoints, the higher the
    better, on held-out rows with `eval/` before it. `passes` are those of a step of a recipe. `rules` name keys that
    have no effect beside others.
    """

    recipe: type[Recipe]
    title: str
    code: str
    headline: tuple[str, ...]
    best: str
    passes: Callable[[Any], Passes]
    rules: tuple[Rule, ...] = ()
    trains: Literal["policy", "reward model"] = "policy"

    def title_of(self, cfg: Recipe) -> str:
        """The title of a run of `cfg`."""
        return self.title.format(**cfg.section.model_dump())

    @property
    def name(self) -> str:
        """The name on the command line and in recipes."""
        return str(self.recipe.model_fields["algorithm"].default)

    @property
    def draws(self) -> bool:
        """True if its steps draw completions."""
        return issubclass(self.recipe, SamplingRecipe)
