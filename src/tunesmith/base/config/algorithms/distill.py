"""On-policy distillation: settings, recipe, and what the rest of the program knows of it."""

# Fields are frozen, so that a subclass may narrow their type.
# pyright: reportIncompatibleVariableOverride=false

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from tunesmith.base.config.policy_sections import UpdateSection
from tunesmith.base.config.recipe import SamplingRecipe
from tunesmith.base.config.rules import NO_HEAD, Rule, Values, always, is_not
from tunesmith.base.config.sections import SELF, Positive, Section
from tunesmith.base.config.spec import Passes, Spec
from tunesmith.base.config.templates import checked_template

PRIVILEGED = "privileged_context"
"""Column, and name in a template, of what teachers read and the student does not, as in TRL."""


class TeacherSource(Section):
    """A model whose distribution is learnt, and its weight beside other teachers."""

    SHORTHAND = "model"

    model: str
    """Hub id, local folder, GGUF file or run folder, with the student's tokenizer; or `self`: the student, which reads
    what distill.context says (a folder of that name is `./self`)."""
    weight: Positive = 1.0
    """Weight of its divergence relative to those of the other teachers."""


class ContextSection(Section):
    """Text that the teachers read with the prompt and the student does not: a hint, a reason, a better answer."""

    SHORTHAND = "column"

    column: Annotated[str, Field(min_length=1)] | None = None
    """Column of the prompts with the text, which every row must have; null: `privileged_context` if a teacher is
    `self`, else teachers read the prompt alone."""
    template: str = "{privileged_context}\n\n{prompt}"
    """The teachers' prompt, and of a conversation its last turn of the user: `{prompt}` is the student's,
    `{privileged_context}` the text of the column, `{name}` that of the row's column of that name."""

    @field_validator("template")
    @classmethod
    def _check_template(cls, given: str) -> str:
        return checked_template(given, "prompt")


class DistillSection(UpdateSection):
    """On-policy distillation: learn the teachers' distributions of the student's own tokens (Agarwal et al. 2024)."""

    teachers: Annotated[tuple[TeacherSource, ...], Field(min_length=1)] = (TeacherSource(model="smollm2"),)
    """Teachers; with several, the loss is the weighted mean of their divergences."""
    context: ContextSection = ContextSection()
    self_weights: Literal["current", "initial", "ema"] = "current"
    """Weights of the teacher `self`: the student's as they are, as they were before the first step, or their
    exponential moving average."""
    ema_rate: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Share of the student's weights that each update adds to the average."""
    divergence: Literal["reverse_kl", "forward_kl", "jensen_shannon", "sampled_reverse_kl"] = "reverse_kl"
    """KL(student, teacher), which seeks the teacher's main modes; KL(teacher, student), which covers all of them;
    their generalized Jensen-Shannon divergence; or the first, estimated by the sampled token alone."""
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Weight of the teacher in the mixture of `jensen_shannon`."""
    temperature: Positive = 1.0
    """Temperature of the distributions that are compared; that of the samples is rollout.temperature."""
    loss_normalization: Literal["token", "sequence"] = "token"
    """Mean over all tokens of the update, or over completions of the mean of their tokens."""

    @property
    def has_self(self) -> bool:
        """True if the student is a teacher too."""
        return any(one.model == SELF for one in self.teachers)

    @property
    def context_column(self) -> str | None:
        """The column with what teachers read beside the prompt; None if they read nothing else."""
        return self.context.column or (PRIVILEGED if self.has_self else None)

    @model_validator(mode="after")
    def _check_self(self) -> "DistillSection":
        if sum(one.model == SELF for one in self.teachers) > 1:
            raise ValueError("teachers has `self` several times; name it once, with a weight")
        return self


class DistillRecipe(SamplingRecipe):
    """Train a student on its own completions to follow the distributions of teachers."""

    ALLOWS_PIPELINE = False

    algorithm: Literal["distill"] = "distill"
    distill: DistillSection = DistillSection()

    @model_validator(mode="after")
    def _check_average(self) -> "DistillRecipe":
        if self.distill.has_self and self.distill.self_weights == "ema" and self.scale.shards_parameters:
            raise ValueError(
                "distill.self_weights is ema, but with scale.shard: parameters no rank has all weights to average; "
                "set self_weights to current or initial, or scale.shard back"
            )
        return self


def _has_self(v: Values) -> bool:
    return SELF in (v[key] for key in v if key.startswith("distill.teachers.") and key.endswith(".model"))


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
            "distill.context.template",
            lambda v: v["distill.context.column"] is None and not _has_self(v),
            "distill.context.column is null, so the teachers read the prompt alone; set it, or leave this out",
        ),
        Rule(
            "distill.self_weights distill.ema_rate",
            lambda v: not _has_self(v),
            "no teacher is `self`; name it in distill.teachers, or leave this out",
        ),
        Rule(
            "distill.ema_rate",
            is_not("distill.self_weights", "ema"),
            "it belongs to distill.self_weights ema; set that, or leave this out",
        ),
        Rule(
            "rollout.importance.* rollout.recompute_logps rollout.score_while_drawing "
            "alarms.max_cut_share alarms.max_logp_difference",
            always,
            "distillation has no reward and no ratio; leave this out",
        ),
        Rule("alarms.max_kl", always, "distillation measures no KL to a reference; leave this out"),
        NO_HEAD,
    ),
)
