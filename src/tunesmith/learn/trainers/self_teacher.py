"""A teacher that is the student itself, with what the student does not read in its context.

Self-distillation from demonstrations (SDFT, Shenfeld et al. 2026, arXiv 2601.19897) and from feedback in words (SDPO,
Hübotter et al. 2026, arXiv 2601.20802). The teacher's weights are the student's as they are, as they were, or their
exponential moving average.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from tunesmith.base.config.algorithms.distill import DistillRecipe
from tunesmith.collect.data.contexts import Context
from tunesmith.engine.batch.rollout import Group
from tunesmith.engine.models.language_model import LanguageModel, model_of_recipe, reference_of
from tunesmith.engine.models.loaded import PreTrainedTokenizerBase
from tunesmith.engine.models.lora import trained_parameters, twin
from tunesmith.engine.models.tokenizer import encode_prompt


class Average(nn.Module):
    """The exponential moving average of the trained parameters of `student`, in float32, and a model that has them.

    Its own parameters are the averages, which are part of a checkpoint; `copy` is no part of it.
    """

    def __init__(self, student: LanguageModel, copy: LanguageModel, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self._student = trained_parameters(student.module)
        self._copy = {name: one for name, one in copy.module.named_parameters() if name in self._student}
        for name, parameter in self._copy.items():  # of float32, the copy's own numbers
            self.register_parameter(name.replace(".", "/"), nn.Parameter(parameter.detach().float()))

    @torch.no_grad()
    def follow(self) -> None:
        """Add the share `rate` of the student's weights, after an update of it."""
        for average, parameter in zip(self.parameters(), self._student.values(), strict=True):
            average.lerp_(parameter.float(), self.rate)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Write the averages into the model, rounded to its dtype."""
        for average, parameter in zip(self.parameters(), self._copy.values(), strict=True):
            parameter.copy_(average)


def self_teacher(cfg: DistillRecipe, student: LanguageModel) -> tuple[LanguageModel, Average | None]:
    """(The model of the teacher `self`; its average, if it has one). `student` has not been trained yet, nor divided
    among ranks.
    """
    section = cfg.distill
    if section.self_weights == "current":
        return student, None
    if section.self_weights == "initial":
        return reference_of(student, cfg.model), None
    copied = twin(student.module).requires_grad_(False).eval()
    copy = model_of_recipe(copied, cfg.model, student.kernels)
    return copy, Average(student, copy, section.ema_rate)


def as_taught(groups: Sequence[Group], context: Context, tokenizer: PreTrainedTokenizerBase) -> list[Group]:
    """The groups with the prompts that teachers read: what they think of the same tokens, with more in their context.

    The template is filled anew, so its ids are those of `encode_prompt`.
    """
    return [replace(group, prompt_token_ids=encode_prompt(tokenizer, context.added(group.prompt))) for group in groups]
