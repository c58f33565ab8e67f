"""The computation of a step: sequences, lengths, passes, and how it is cut into pieces."""

from dataclasses import dataclass
from typing import Any

from tunesmith.config.algorithm_sections import DPOSection, KLSection, PPOSection
from tunesmith.config.schema import PolicyRecipe, Recipe, SamplingRecipe


@dataclass(frozen=True, slots=True)
class Workload:
    """Work of one step. Lengths are in tokens; `mean_new_tokens` is the mean of what is drawn, at most `new_tokens`.

    `num_other_models` are further models that score all rows, such as teachers. `critic` is `separate` for a second
    model that is trained too. `slots` is the number of completions that an engine draws at a time, `lease` the number
    that it takes from the queue at a time; 0 is an equal share for each engine. `trained_share` is the share of the
    weights that is trained, `itemsize` the bytes of a weight, `moment_bytes` those of the moments of one.
    """

    algorithm: str
    prompts: int
    completions: int
    prompt_tokens: float
    new_tokens: int
    mean_new_tokens: float
    num_epochs: int = 1
    num_minibatches: int = 1
    micro_batch_size: int = 1
    has_reference: bool = False
    num_other_models: int = 0
    recomputes_old_policy: bool = False
    critic: str = "none"
    slots: int = 128
    lease: int = 0
    checkpointed: bool = False
    trained_share: float = 1.0
    itemsize: int = 2
    moment_bytes: float = 8.0

    @property
    def num_rows(self) -> int:
        """Sequences of a step."""
        return self.prompts * self.completions

    @property
    def draws(self) -> bool:
        """True if the step samples completions."""
        return self.algorithm in ("ppo", "grpo", "best_of_n", "distill")

    @property
    def row_tokens(self) -> float:
        """Mean tokens of a row, prompt and completion."""
        return self.prompt_tokens + self.mean_new_tokens

    @property
    def tokens(self) -> float:
        """Tokens of all rows."""
        return self.num_rows * self.row_tokens

    @property
    def num_passes(self) -> int:
        """Forward passes without gradients, of models besides the critic."""
        return self.has_reference + self.num_other_models + self.recomputes_old_policy

    @property
    def num_updates(self) -> int:
        """Optimizer steps."""
        return self.num_epochs * self.num_minibatches


def workload_of(recipe: Recipe, prompt_tokens: float, mean_new_tokens: float | None = None) -> Workload:
    """The step of `recipe`. Prompts have `prompt_tokens` on average, completions `mean_new_tokens`, half of
    their limit by default.
    """
    name = "reward_model" if recipe.algorithm == "reward" else recipe.algorithm
    section: Any = getattr(recipe, name)
    kl = getattr(section, "kl", None)
    shared = {
        "algorithm": recipe.algorithm,
        "prompt_tokens": prompt_tokens,
        "checkpointed": recipe.model.gradient_checkpointing,
        "trained_share": 0.01 if recipe.model.lora.rank else 1.0,
        "itemsize": 4 if recipe.model.dtype == "float32" else 2,
        "moment_bytes": 8.0 if recipe.optimizer.state == "float32" else 2.03,
        "num_epochs": section.num_epochs if isinstance(recipe, SamplingRecipe) else 1,
        "num_minibatches": getattr(section, "num_minibatches", 1),
    }
    if not isinstance(recipe, SamplingRecipe):
        per_row = 1 if recipe.algorithm == "sft" else 2  # a pair is two rows
        rows = per_row * getattr(section, "demonstrations_per_step" if per_row == 1 else "pairs_per_step")
        micro = per_row * getattr(section, "micro_batch_size", 1)
        is_compared = isinstance(section, DPOSection) and section.needs_reference and section.reference == "live"
        return Workload(
            **shared, prompts=rows, completions=1, new_tokens=0, mean_new_tokens=0.0, micro_batch_size=micro,
            has_reference=is_compared,
        )  # fmt: skip
    rollout = recipe.rollout
    return Workload(
        **shared,
        prompts=rollout.prompts_per_step,
        completions=rollout.completions_per_prompt,
        new_tokens=rollout.max_new_tokens,
        mean_new_tokens=mean_new_tokens or max(1.0, rollout.max_new_tokens / 2),
        micro_batch_size=section.micro_batch_size,
        has_reference=isinstance(kl, KLSection) and kl.coef > 0,
        num_other_models=len(getattr(section, "teachers", ())) if not isinstance(recipe, PolicyRecipe) else 0,
        recomputes_old_policy=rollout.recompute_logps or rollout.backend != "native",
        critic=section.critic if isinstance(section, PPOSection) else "none",
        slots=rollout.num_slots if rollout.backend != "transformers" else rollout.batch_size,
    )
