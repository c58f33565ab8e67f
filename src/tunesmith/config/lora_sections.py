"""Sections of a recipe for low-rank adapters. Every default of theirs stands here and nowhere else."""

from typing import Annotated

from pydantic import Field

from tunesmith.config.section import Positive, Section


class LoraSection(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) in place of all weights, made by PEFT."""

    SHORTHAND = "rank"

    rank: int = Field(
        default=0, ge=0, description="Rank of the adapters, which alone are trained; 0 trains the weights themselves."
    )
    alpha: Positive | None = Field(
        default=None, description="Adapters are scaled by alpha / rank; null takes twice the rank."
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0,
        description="Dropout of what enters an adapter, where gradients are taken. Not for PPO and GRPO, whose ratios "
        "compare two passes.",
    )
    target_modules: tuple[str, ...] = Field(
        default=("all-linear",),
        min_length=1,
        description="Names, or ends of names, of the linear layers that get an adapter: `[q_proj, v_proj]`. "
        "`all-linear` is every one but the output layer.",
    )
    use_dora: bool = Field(
        default=False,
        description="Learn the length of each row of a weight beside its direction (DoRA, Liu et al. 2024, arXiv "
        "2402.09353).",
    )
    use_rslora: bool = Field(
        default=False, description="Scale by alpha / sqrt(rank) (Kalajdzievski 2023, arXiv 2312.03732)."
    )
    seed: int = Field(default=0, ge=0, description="Seed of the first adapter weights.")
