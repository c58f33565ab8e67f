"""On-policy distillation: settings, recipe, and what the rest of the program knows of it."""

# Fields are frozen, so that a subclass may narrow their type.
# pyright: reportIncompatibleVariableOverride=false

from typing import Annotated, Literal

from pydantic import Field

from tunesmith.base.config.policy_sections import UpdateSection
from tunesmith.base.config.recipe import SamplingRecipe
from tunesmith.base.config.rules import NO_HEAD, Rule, always, is_not
from tunesmith.base.config.sections import Positive, Section
from tunesmith.base.config.spec import Passes, Spec


class TeacherSource(Section):
    """A model whose distribution is learnt, and its weight beside other teachers."""

    SHORTHAND = "model"

    model: str
    """Hub id, local folder, GGUF file or run folder, with the student's tokenizer."""
    weight: Positive = 1.0
    """Weight of its divergence relative to those of the other teachers."""


class DistillSection(UpdateSection):
    """On-policy distillation: learn the teachers' distributions of the student's own tokens (Agarwal et al. 2024)."""

    teachers: Annotated[tuple[TeacherSource, ...], Field(min_length=1)] = (TeacherSource(model="smollm2"),)
    """Teachers; with several, the loss is the weighted mean of their divergences."""
    divergence: Literal["reverse_kl", "forward_kl", "jensen_shannon"] = "reverse_kl"
    """KL(student, teacher), which seeks the teacher's main modes; KL(teacher, student), which covers all of them; or
    their generalized Jensen-Shannon divergence."""
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Weight of the teacher in the mixture of `jensen_shannon`."""
    temperature: Positive = 1.0
    """Temperature of the distributions that are compared; that of the samples is rollout.temperature."""


class DistillRecipe(SamplingRecipe):
    """Train a student on its own completions to follow the distributions of teachers."""

    ALLOWS_PIPELINE = False

    algorithm: Literal["distill"] = "distill"
    distill: DistillSection = DistillSection()


def _passes(cfg: DistillRecipe) -> Passes:
    return Passes.of_drawing(cfg, num_teachers=len(cfg.distill.teachers))


SPEC = Spec(
    recipe=DistillRecipe,
    title="on-policy distillation",
    code="tunesmith.learn.trainers.distill:DistillTask",
    headline=("loss", "teacher_agreement", "entropy"),
    best="teacher_agreement",
    passes=_passes,
    rules=(
        Rule(
            "distill.beta",
            is_not("distill.divergence", "jensen_shannon"),
            "it is the mixture of distill.divergence jensen_shannon; set that, or leave this out",
        ),
        Rule(
            "distill.teachers.0.weight",
            lambda v: "distill.teachers.1.weight" not in v,
            "weights are relative to those of other teachers, and there is one; leave this out",
        ),
        Rule(
            "rollout.importance.* rollout.recompute_logps rollout.score_while_drawing",
            always,
            "distillation has no reward and no ratio; leave this out",
        ),
        Rule("alarms.max_kl", always, "distillation measures no KL to a reference; leave this out"),
        NO_HEAD,
    ),
)
