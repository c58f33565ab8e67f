"""Direct preference optimisation: settings, recipe, and what the rest of the program knows of it."""

# Fields are frozen, so that a subclass may narrow their type.
# pyright: reportIncompatibleVariableOverride=false

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tunesmith.base.config.recipe import Recipe
from tunesmith.base.config.rules import NO_HEAD, Rule, is_not
from tunesmith.base.config.sections import NonNegative, PairsSection, Positive, PositiveInt, Section
from tunesmith.base.config.spec import Passes, Spec

DirectLoss = Literal[
    "sigmoid",
    "sigmoid_norm",
    "ipo",
    "hinge",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
    "simpo",
    "orpo",
    "kto",
]
"""Under TRL's names, where TRL has them."""

REFERENCE_FREE: frozenset[DirectLoss] = frozenset({"simpo", "orpo"})
"""Losses without a reference model."""

SMOOTHED: frozenset[DirectLoss] = frozenset({"sigmoid", "robust", "exo_pair", "simpo"})
"""Losses that take `label_smoothing`."""


class DirectLossSection(Section):
    """The loss of direct preference optimisation (Rafailov et al. 2023) and its relatives."""

    SHORTHAND = "loss"

    loss: DirectLoss = "sigmoid"
    """DPO, alone or by the mean of a token; IPO, SLiC's hinge, robust DPO, EXO, NCA, BCO, SPPO, APO, DiscoPOP, SimPO,
    ORPO, or KTO, which takes unpaired labels too."""
    beta: Positive = 0.1
    """Scale of the rewards, beta (log policy - log reference); IPO's tau, ORPO's lambda. For SimPO about 2."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5, allow_inf_nan=False)] = 0.0
    """Assumed share of wrong votes: conservative DPO with `sigmoid` and `simpo`, unbiased with `robust`;
    the target of `exo_pair`."""
    discopop_tau: Positive = 0.05
    """Temperature at which `discopop` mixes its two losses."""
    simpo_gamma: NonNegative = 0.5
    """Target margin between the rewards, for `simpo`."""

    @model_validator(mode="after")
    def _check_smoothing(self) -> "DirectLossSection":
        if self.label_smoothing and self.loss not in SMOOTHED:
            raise ValueError(
                f"label_smoothing is {self.label_smoothing:g}, but the loss {self.loss} has none; set it to 0, or take "
                f"one of {', '.join(sorted(SMOOTHED))}"
            )
        if self.loss in ("robust", "exo_pair") and not self.label_smoothing:
            usual = "0.001" if self.loss == "exo_pair" else "0.1"
            raise ValueError(f"{self.loss} needs label_smoothing, the share of wrong votes, for example {usual}")
        return self

    @property
    def needs_reference(self) -> bool:
        """True if the loss compares with the reference model."""
        return self.loss not in REFERENCE_FREE


class DPOSection(DirectLossSection):
    """Direct preference optimisation on given pairs."""

    ties: Literal["drop", "half", "rao_kupper"] = "drop"
    """Ties: leave them out, count half a vote for each side, or model their probability (Rao and Kupper 1967, with
    `sigmoid`)."""
    tie_theta: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 3.0
    """Threshold of `rao_kupper`: equal completions tie with probability (theta - 1) / (theta + 1)."""
    desirable_weight: Positive = 1.0
    """Weight of the wanted completions, for `kto`."""
    undesirable_weight: Positive = 1.0
    """Weight of the unwanted completions, for `kto`."""
    reference: Literal["precomputed", "live"] = "precomputed"
    """Log-probs of the reference: computed before the first step, or at each step by a copy kept in memory."""
    num_epochs: PositiveInt = 1
    """Passes over the pairs."""
    pairs_per_step: PositiveInt = 32
    """Pairs, or labelled completions for `kto`, in one optimizer step."""
    micro_batch_size: PositiveInt = 8
    """Pairs in one forward and backward pass; gradients are accumulated."""

    @model_validator(mode="after")
    def _check_options_of_loss(self) -> "DPOSection":
        if self.ties == "rao_kupper" and self.loss != "sigmoid":
            raise ValueError(f"ties: rao_kupper is a model of votes for the loss sigmoid, not for {self.loss}")
        if self.ties == "half" and self.loss == "kto":
            raise ValueError("ties: half needs pairs, but kto takes each completion by itself; set ties to drop")
        return self


class DPORecipe(Recipe):
    """Train a policy on preference pairs directly, without a reward model: DPO, IPO, SimPO, ORPO, KTO and others."""

    algorithm: Literal["dpo"] = "dpo"
    pairs: PairsSection = PairsSection()
    dpo: DPOSection = DPOSection()

    @model_validator(mode="after")
    def _check_rankings(self) -> "DPORecipe":
        if self.pairs.rankings != "pairs":
            raise ValueError(
                f"pairs.rankings is {self.pairs.rankings}, which reward models alone know; set it to pairs"
            )
        return self


def direct_loss_rules(section: str) -> tuple[Rule, ...]:
    """Rules of a section with a direct loss."""
    return (
        Rule(
            f"{section}.discopop_tau",
            is_not(f"{section}.loss", "discopop"),
            "it is a temperature of {section}.loss discopop; set that, or leave this out",
        ),
        Rule(
            f"{section}.simpo_gamma",
            is_not(f"{section}.loss", "simpo"),
            "it is the margin of {section}.loss simpo; set that, or leave this out",
        ),
    )


DPO_RULES: tuple[Rule, ...] = (
    *direct_loss_rules("dpo"),
    Rule(
        "dpo.tie_theta",
        is_not("dpo.ties", "rao_kupper"),
        "it is the threshold of dpo.ties rao_kupper; set that, or leave this out",
    ),
    Rule(
        "dpo.desirable_weight dpo.undesirable_weight",
        is_not("dpo.loss", "kto"),
        "it weighs labels of dpo.loss kto; set that, or leave this out",
    ),
    Rule(
        "dpo.reference",
        lambda v: v["dpo.loss"] in REFERENCE_FREE,
        "dpo.loss is one without a reference model; leave this out",
    ),
    Rule(
        "model.reference",
        lambda v: v["dpo.reference"] != "live" or v["dpo.loss"] in REFERENCE_FREE,
        "the model itself computes the reference before it is trained; set dpo.reference to live, or leave this out",
    ),
)


def _passes(cfg: DPORecipe) -> Passes:
    section = cfg.dpo
    return Passes.of_rows(
        2 * section.pairs_per_step,  # a pair is two rows
        2 * section.micro_batch_size,
        reference=section.needs_reference and section.reference == "live",
    )


SPEC = Spec(
    recipe=DPORecipe,
    title="direct preference optimisation ({loss})",
    code="tunesmith.learn.trainers.dpo:DPOTask",
    headline=("loss", "rewards/accuracies", "rewards/margins"),
    best="rewards/accuracies",
    passes=_passes,
    rules=(
        NO_HEAD,
        *DPO_RULES,
    ),
)
