"""The computation of a step: sequences, lengths, passes, and how it is cut into pieces."""

from dataclasses import dataclass

from tunesmith.base.config.recipe import Recipe, SamplingRecipe
from tunesmith.base.config.schema import SPECS
from tunesmith.base.core.errors import InputError

INT8_BYTES = 1 + 4 / 64
"""Bytes of a weight in 8 bits, with its part of a scale in float32."""
INT8_RATE = 1.7
"""Rate of products in 8 bits as a multiple of that in 16: 256 rows of 576 x 1,536, Zen 4 with VNNI and BF16."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Work of one step. Lengths are in tokens; `mean_new_tokens` is the mean of what is drawn, at most `new_tokens`.

    `draws` says that the step samples completions, `trains` what it trains (`config.spec.Spec`). `num_other_models` are
    further models that score all rows, such as teachers. `critic` is `separate` for a second model that is trained too.
    `slots` is the number of completions that an engine draws at a time, `lease` the number that it takes from the queue
    at a time; 0 is an equal share for each engine. `learnt_share` are the rows that an epoch learns, `scored_share`
    those that a pass without gradients computes, each as a share of all rows. `trained_share` is the share of the
    weights that is trained, `itemsize` the bytes of a weight, `base_itemsize` those of one under adapters where they
    are others, `moment_bytes` those of the moments of one. With `draws_in_int8` the engine multiplies in 8 bits.
    """

    draws: bool
    prompts: int
    completions: int
    prompt_tokens: float
    new_tokens: int
    mean_new_tokens: float
    trains: str = "policy"
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
    learnt_share: float = 1.0
    scored_share: float = 1.0
    trained_share: float = 1.0
    itemsize: int = 2
    base_itemsize: float | None = None
    draws_in_int8: bool = False
    moment_bytes: float = 8.0

    @property
    def num_rows(self) -> int:
        """Sequences of a step."""
        return self.prompts * self.completions

    @property
    def row_tokens(self) -> float:
        """Mean tokens of a row, prompt and completion."""
        return self.prompt_tokens + self.mean_new_tokens

    @property
    def tokens(self) -> float:
        """Tokens of all rows."""
        return self.num_rows * self.row_tokens

    @property
    def engine_itemsize(self) -> float:
        """Bytes of a weight that the engine packs."""
        return INT8_BYTES if self.draws_in_int8 else self.itemsize

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
    their limit by default. Raises InputError for the live loop, which has no step of a fixed size.
    """
    spec = SPECS.get(recipe.algorithm)
    if spec is None:
        raise InputError(f"a step of {recipe.algorithm} cannot be planned; give one of {', '.join(SPECS)}")
    passes = spec.passes(recipe)
    num_learnt = passes.num_learnt + passes.num_replied + passes.num_demonstrations * passes.num_minibatches
    shared = {
        "draws": spec.draws,
        "trains": spec.trains,
        "prompt_tokens": prompt_tokens,
        "num_epochs": passes.num_epochs,
        "num_minibatches": passes.num_minibatches,
        "micro_batch_size": passes.micro_batch_size,
        "has_reference": passes.reference,
        "num_other_models": passes.num_teachers,
        "recomputes_old_policy": passes.old_policy,
        "critic": passes.critic,
        "learnt_share": num_learnt / passes.num_rows,
        "scored_share": 1.0 if passes.scores_all else passes.num_learnt / passes.num_rows,
        "checkpointed": recipe.model.gradient_checkpointing,
        "trained_share": 0.01 if recipe.model.lora.rank else 1.0,
        "itemsize": 4 if recipe.model.dtype == "float32" else 2,
        "base_itemsize": INT8_BYTES if recipe.model.base == "int8" else None,
        "moment_bytes": 8.0 if recipe.optimizer.state == "float32" else 2.03,
    }
    if not isinstance(recipe, SamplingRecipe):
        return Workload(**shared, prompts=passes.num_rows, completions=1, new_tokens=0, mean_new_tokens=0.0)
    rollout = recipe.rollout
    return Workload(
        **shared,
        prompts=rollout.prompts_per_step,
        completions=passes.num_rows // rollout.prompts_per_step,
        new_tokens=recipe.max_completion_tokens,
        mean_new_tokens=mean_new_tokens or max(1.0, recipe.max_completion_tokens / 2),
        slots=rollout.num_slots if rollout.backend != "transformers" else rollout.batch_size,
        draws_in_int8=rollout.weights == "int8" and rollout.backend == "native",
    )
