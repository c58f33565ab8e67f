"""Supervised fine-tuning: settings, recipe, and what the rest of the program knows of it."""

# Fields are frozen, so that a subclass may narrow their type.
# pyright: reportIncompatibleVariableOverride=false

from typing import Literal

from tunesmith.base.config.recipe import Recipe
from tunesmith.base.config.rules import NO_HEAD, NO_REFERENCE
from tunesmith.base.config.sections import DemonstrationsSection, PositiveInt, Section
from tunesmith.base.config.spec import Passes, Spec


class SFTSection(Section):
    """Supervised fine-tuning: mean negative log-likelihood of the trained tokens of a step."""

    num_epochs: PositiveInt = 1
    """Passes over the demonstrations."""
    demonstrations_per_step: PositiveInt = 16
    """Demonstrations in one optimizer step."""
    micro_batch_tokens: PositiveInt = 2048
    """Tokens in one forward and backward pass; gradients are accumulated. A longer demonstration is one by itself."""
    bucket_steps: PositiveInt = 1
    """Sort the demonstrations of this many steps by length, for less padding; 1 keeps the shuffled order."""


class SFTRecipe(Recipe):
    """Fine-tune a language model on demonstrations."""

    algorithm: Literal["sft"] = "sft"
    demonstrations: DemonstrationsSection = DemonstrationsSection()
    sft: SFTSection = SFTSection()


def _passes(cfg: SFTRecipe) -> Passes:
    return Passes.of_rows(cfg.sft.demonstrations_per_step)


SPEC = Spec(
    recipe=SFTRecipe,
    title="supervised fine-tuning",
    code="tunesmith.learn.trainers.sft:SFTTask",
    headline=("loss", "mean_token_accuracy"),
    best="mean_token_accuracy",
    passes=_passes,
    rules=(NO_HEAD, NO_REFERENCE),
)
