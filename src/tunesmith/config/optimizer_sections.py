"""The section of the optimizer: rates, schedule, clipping, and what is kept for each weight."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from tunesmith.config.sections import Fraction, NonNegative, Positive, PositiveInt, Section

Schedule = Literal["constant", "linear", "cosine", "warmup_stable_decay"]


class OptimizerSection(Section):
    """AdamW on float32 masters, gradient clipping and the learning-rate schedule."""

    SHORTHAND = "learning_rate"

    learning_rate: Positive = Field(default=1e-5, description="Peak learning rate.")
    head_learning_rate: Positive | None = Field(
        default=None, description="Learning rate of value and reward heads; null takes learning_rate."
    )
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.95), description="AdamW's decay of the two moments.")
    eps: Positive = Field(default=1e-8, description="AdamW's epsilon.")
    weight_decay: NonNegative = Field(
        default=0.0, description="Decoupled weight decay; not applied to vectors (norms, biases)."
    )
    max_grad_norm: Positive = Field(default=1.0, description="Gradients are scaled down to this global norm.")
    warmup_steps: int = Field(
        default=0, ge=0, description="Steps over which the learning rate rises linearly to its peak."
    )
    schedule: Schedule = Field(
        default="constant",
        description="Fall of the learning rate after the warm-up; `warmup_stable_decay` keeps the peak until "
        "decay_share of the steps are left, then falls linearly.",
    )
    min_ratio: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="Share of the peak at which the fall ends; not for `constant`."
    )
    decay_share: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.2, description="Share of all steps over which `warmup_stable_decay` falls, at the end."
    )
    max_refused_steps: PositiveInt = Field(
        default=5, description="Non-finite steps in a row after which training stops."
    )
    state: Literal["float32", "int8"] = Field(
        default="float32",
        description="What the two moments are kept in: `int8` takes 2 bytes a weight instead of 8, and more time.",
    )
    loss_scale: Positive = Field(
        default=65536.0,
        description="For float16 weights alone: the factor on the loss at the start, a power of two. It halves where a "
        "gradient overflows; that update is left out.",
    )
    loss_scale_window: PositiveInt = Field(
        default=200, description="Updates without overflow after which the factor on the loss doubles."
    )

    @field_validator("loss_scale")
    @classmethod
    def _is_a_power_of_two(cls, scale: float) -> float:
        if scale < 1 or not scale.is_integer() or int(scale) & (int(scale) - 1):
            raise ValueError(f"loss_scale is {scale:g}; give a power of two from 1 on, so that no bit is lost")
        return scale
