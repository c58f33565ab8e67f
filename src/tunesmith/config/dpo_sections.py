"""The section of recipes that learn from preferences directly, without a reward model."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tunesmith.config.sections import NonNegative, Positive, PositiveInt, Section

DirectLoss = Literal["sigmoid", "ipo", "hinge", "robust", "simpo", "orpo", "kto"]

REFERENCE_FREE: frozenset[DirectLoss] = frozenset({"simpo", "orpo"})
"""Losses that compare with no reference model."""

SMOOTHED: frozenset[DirectLoss] = frozenset({"sigmoid", "robust", "simpo"})
"""Losses that take `label_smoothing`."""


class DPOSection(Section):
    """Direct preference optimisation (Rafailov et al. 2023) and its relatives."""

    SHORTHAND = "loss"

    loss: DirectLoss = Field(
        default="sigmoid",
        description="DPO, IPO, SLiC's hinge, robust DPO, SimPO, ORPO, or KTO, which takes unpaired labels too.",
    )
    beta: Positive = Field(
        default=0.1,
        description="Scale of the rewards, beta (log policy - log reference); IPO's tau, ORPO's lambda. SimPO wants "
        "about 2.",
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5, allow_inf_nan=False)] = Field(
        default=0.0,
        description="Share of votes taken to be wrong: conservative DPO with `sigmoid` (also `simpo`), unbiased with "
        "`robust`.",
    )
    simpo_gamma: NonNegative = Field(
        default=0.5, description="Reward by which the chosen completion must win, for `simpo`."
    )
    ties: Literal["drop", "half", "rao_kupper"] = Field(
        default="drop",
        description="Pairs marked as ties: leave them out, count half a vote for each side, or give ties a "
        "probability of their own (Rao and Kupper 1967, with `sigmoid`).",
    )
    tie_theta: Annotated[float, Field(gt=1, allow_inf_nan=False)] = Field(
        default=3.0,
        description="Threshold of `rao_kupper`: equal completions tie with probability (theta - 1) / (theta + 1).",
    )
    desirable_weight: Positive = Field(default=1.0, description="Weight of the wanted completions, for `kto`.")
    undesirable_weight: Positive = Field(default=1.0, description="Weight of the unwanted completions, for `kto`.")
    reference: Literal["precomputed", "live"] = Field(
        default="precomputed",
        description="Log-probs of the starting model: of all completions before the first step, or at each step by a "
        "copy that is kept in memory.",
    )
    num_epochs: PositiveInt = Field(default=1, description="Passes over the pairs.")
    pairs_per_step: PositiveInt = Field(
        default=32, description="Pairs, or labelled completions for `kto`, in one optimizer step."
    )
    micro_batch_size: PositiveInt = Field(
        default=8, description="Pairs in one forward and backward pass; gradients are accumulated."
    )

    @model_validator(mode="after")
    def _options_fit_the_loss(self) -> "DPOSection":
        if self.label_smoothing and self.loss not in SMOOTHED:
            raise ValueError(
                f"label_smoothing is {self.label_smoothing:g}, but the loss {self.loss} has none; set it to 0, or take "
                f"one of {', '.join(sorted(SMOOTHED))}"
            )
        if self.loss == "robust" and not self.label_smoothing:
            raise ValueError("robust needs label_smoothing, the share of votes that are wrong, for example 0.1")
        if self.ties == "rao_kupper" and self.loss != "sigmoid":
            raise ValueError(f"ties: rao_kupper is a model of votes for the loss sigmoid, not for {self.loss}")
        if self.ties == "half" and self.loss == "kto":
            raise ValueError("ties: half needs pairs, but kto takes each completion by itself; set ties to drop")
        return self

    @property
    def needs_reference(self) -> bool:
        """True if the loss compares with the starting model."""
        return self.loss not in REFERENCE_FREE
