"""Sections of the algorithms: SFT, reward model, DPO, and the policy losses of PPO and GRPO."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tunesmith.config.sections import Fraction, NonNegative, Positive, PositiveInt, Section


class SFTSection(Section):
    """Supervised fine-tuning: the mean negative log-likelihood of the learnt tokens of each step."""

    num_epochs: PositiveInt = Field(default=1, description="Passes over the demonstrations.")
    demonstrations_per_step: PositiveInt = Field(default=16, description="Demonstrations in one optimizer step.")
    micro_batch_tokens: PositiveInt = Field(
        default=2048,
        description="Tokens in one forward and backward pass; gradients are accumulated. A longer demonstration stands "
        "alone.",
    )
    bucket_steps: PositiveInt = Field(
        default=1,
        description="Demonstrations of so many steps are dealt out by length, so that those of a step are about "
        "equally long: less padding where a model needs any. 1 leaves the order as it was drawn.",
    )


class RewardTrainerSection(Section):
    """The Bradley-Terry reward model."""

    num_layers: PositiveInt | None = Field(
        default=None, description="Keep the lowest n layers of the model alone, a smaller reward model; null keeps all."
    )
    num_epochs: PositiveInt = Field(default=1, description="Passes over the pairs.")
    pairs_per_step: PositiveInt = Field(default=16, description="Pairs in one optimizer step.")
    micro_batch_size: PositiveInt = Field(
        default=16, description="Pairs in one forward and backward pass; gradients are accumulated."
    )
    margin: Literal["none", "column"] = Field(
        default="none", description="`column`: the chosen reward must win by the row's `margin` (Llama 2)."
    )
    center_coef: NonNegative = Field(
        default=0.0, description="Weight of (chosen + rejected)^2, which holds rewards near zero."
    )


class RewardEvaluationSection(Section):
    """How a reward model is judged once it is trained."""

    judge: bool = Field(
        default=False,
        description="Judge it on the held-out pairs as `tunesmith eval reward` does, with a TF-IDF model fitted on the "
        "training pairs beside it; the figures stand in the result, and all of them in reward_quality.json.",
    )


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


class KLSection(Section):
    """KL divergence to the reference policy: estimator, place and coefficient."""

    SHORTHAND = "coef"

    coef: NonNegative = Field(default=0.05, description="Coefficient; 0 loads no reference model.")
    estimator: Literal["k1", "k2", "k3"] = Field(
        default="k1", description="Estimator of the KL, after Schulman (2020)."
    )
    place: Literal["reward", "loss"] = Field(
        default="reward", description="Subtract it from the reward per token, or add it to the loss."
    )
    target: Positive | None = Field(
        default=None, description="Nats per sequence that an adaptive coefficient aims at; null keeps it fixed."
    )
    horizon: Positive = Field(
        default=10_000.0, description="Completions over which the adaptive coefficient reacts (Ziegler et al. 2019)."
    )
    bias_correction: bool = Field(
        default=False,
        description="In the loss, weigh the KL of each token by the ratio of the new policy to the one that drew it: "
        "k1 and k3 then have the gradient of KL(policy, reference), in later updates too.",
    )

    @model_validator(mode="after")
    def _correction_is_of_the_loss(self) -> "KLSection":
        if self.bias_correction and self.place != "loss":
            raise ValueError("bias_correction weighs the KL in the loss, but place is reward; set place: loss")
        return self


class PolicyLossSection(Section):
    """The loss of the policy, which PPO and GRPO share: ratio, what is maximised, and what the sum is divided by."""

    surrogate: Literal["clip", "cispo"] = Field(
        default="clip",
        description="PPO's clipped ratio, or CISPO's log-prob weighted by a ratio that is cut at 1 + clip_high and "
        "carries no gradient, so that no token is left out.",
    )
    importance_sampling_level: Literal["token", "sequence", "product"] = Field(
        default="token",
        description="A ratio of new to old policy for each token; one for a completion, the geometric mean of its "
        "tokens' (GSPO); or their product (RLOO).",
    )
    clip_low: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.2, description="The ratio is clipped below 1 - clip_low; cispo has no lower bound."
    )
    clip_high: Positive = Field(
        default=0.2, description="The ratio is clipped above 1 + clip_high; 0.28 lets rare tokens grow (DAPO)."
    )
    dual_clip: Positive | None = Field(
        default=None,
        description="Where the advantage is negative the ratio counts no more than this (dual-clip PPO; TRL's delta); "
        "above 1 + clip_high, 3 is usual; null is off.",
    )
    loss_normalization: Literal["token", "sequence", "sequence_sum", "constant", "micro_batch"] = Field(
        default="token",
        description="The loss is a mean over all tokens of the update; over completions, of the mean or the sum of "
        "their tokens; the sum over completions x max_new_tokens; or a mean over micro-batches of means over tokens.",
    )
    entropy_coef: NonNegative = Field(default=0.0, description="Weight of the entropy bonus, a mean over tokens.")

    @model_validator(mode="after")
    def _dual_clip_lies_above_the_clip(self) -> "PolicyLossSection":
        if self.dual_clip is not None and self.surrogate == "cispo":
            raise ValueError("dual_clip belongs to surrogate clip; set dual_clip: null for cispo")
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"dual_clip is {self.dual_clip}, not above 1 + clip_high, {1 + self.clip_high:g}; raise it"
            )
        return self


class PPOSection(PolicyLossSection):
    """Proximal policy optimisation (Schulman et al. 2017)."""

    num_epochs: PositiveInt = Field(default=2, description="Passes over each rollout.")
    num_minibatches: PositiveInt = Field(default=1, description="Optimizer steps in each pass.")
    micro_batch_size: PositiveInt = Field(
        default=16, description="Sequences in one forward and backward pass; gradients are accumulated."
    )
    value_clip: Positive | None = Field(
        default=0.2, description="Values may move this far from the rollout's; null is off."
    )
    value_coef: NonNegative = Field(default=0.1, description="Weight of the value loss.")
    gamma: Fraction = Field(default=1.0, description="Discount of later rewards.")
    lam: Fraction = Field(default=0.95, description="Lambda of generalised advantage estimation.")
    whiten_advantages: bool = Field(
        default=True, description="Shift and scale advantages to mean 0 and variance 1 over the rollout."
    )
    whiten_rewards: bool = Field(
        default=False, description="Scale rewards to variance 1 over the rollout, keeping their mean."
    )
    target_kl: Positive | None = Field(
        default=None, description="Stop a rollout's updates once the KL to its own policy exceeds this, per token."
    )
    critic: Literal["shared", "separate", "none"] = Field(
        default="shared",
        description="Value head on the policy's trunk, a model of its own, or none: advantages are then the rewards "
        "to come (REINFORCE++).",
    )
    kl: KLSection = KLSection()

    @model_validator(mode="after")
    def _no_critic_has_no_lambda(self) -> "PPOSection":
        if self.critic == "none" and self.lam != 1:
            raise ValueError(f"lam is {self.lam}, which weighs values, but critic is none; set lam: 1.0")
        return self


class GRPOKLSection(KLSection):
    """KL divergence to the reference policy, as GRPO has it: k3, in the loss."""

    coef: NonNegative = Field(default=0.04, description="Coefficient; 0 loads no reference model.")
    estimator: Literal["k1", "k2", "k3"] = Field(
        default="k3", description="Estimator of the KL, after Schulman (2020)."
    )
    place: Literal["reward", "loss"] = Field(
        default="loss", description="Subtract it from the reward of a completion, or add it to the loss."
    )


class GRPOSection(PolicyLossSection):
    """Group-relative policy optimisation (Shao et al. 2024) and RLOO: the baseline is the group, there is no critic."""

    baseline: Literal["mean", "leave_one_out"] = Field(
        default="mean", description="Mean reward of the group (GRPO), or of its other completions (RLOO)."
    )
    scale: Literal["group", "batch", "advantages", "none"] = Field(
        default="group",
        description="Divide advantages by the spread of the group's rewards, of all rewards, of all advantages "
        "(REINFORCE++-baseline), or not at all.",
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = Field(
        default="sum_then_normalize",
        description="Add several rewards and compare the sums; or compare each reward within its group, add those, "
        "and scale to variance 1 over the step (GDPO), whatever baseline and scale are.",
    )
    dynamic_sampling: int = Field(
        default=0,
        ge=0,
        description="Times that a step may draw further prompts in place of groups whose rewards are all equal "
        "(DAPO); 0 is off.",
    )
    mask_truncated_completions: bool = Field(
        default=False, description="Completions that the length limit ended are compared, but not learnt from."
    )
    num_epochs: PositiveInt = Field(default=1, description="Passes over each rollout.")
    num_minibatches: PositiveInt = Field(default=1, description="Optimizer steps in each pass.")
    micro_batch_size: PositiveInt = Field(
        default=16, description="Sequences in one forward and backward pass; gradients are accumulated."
    )
    kl: GRPOKLSection = GRPOKLSection()

    @model_validator(mode="after")
    def _kl_in_the_reward_needs_a_sum(self) -> "GRPOSection":
        if self.multi_objective_aggregation == "normalize_then_sum" and self.kl.place == "reward" and self.kl.coef > 0:
            raise ValueError(
                "multi_objective_aggregation is normalize_then_sum, which has no sum to take the KL from; set "
                "kl.place: loss"
            )
        return self
