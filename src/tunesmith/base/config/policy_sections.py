"""Sections that several algorithms share: the KL to the reference, and the policy loss of PPO and GRPO."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tunesmith.base.config.sections import (
    DemonstrationsSection,
    Finite,
    Fraction,
    NonNegative,
    Positive,
    PositiveInt,
    Section,
)

Estimator = Literal["k1", "k2", "k3"]
"""Estimator of the KL to the reference policy, after Schulman 2020, "Approximating KL divergence"."""

Surrogate = Literal["clip", "cispo", "sapo", "log_prob", "dppo_tv", "dppo_kl", "gmpo", "kl_cov"]
Level = Literal["token", "sequence", "product"]
"""Importance ratio per token; per completion, as the geometric mean of its tokens' (GSPO, Zheng et al. 2025, arXiv
2507.18071, equation 7); or per completion, as their product."""

Normalization = Literal["token", "sequence", "sequence_sum", "constant", "micro_batch"]


class KLSection(Section):
    """KL divergence to the reference policy."""

    SHORTHAND = "coef"

    coef: NonNegative = 0.05
    """Coefficient; 0 loads no reference model."""
    estimator: Estimator = "k1"
    """Estimator of the KL (Schulman 2020)."""
    place: Literal["reward", "loss"] = "reward"
    """Subtract it from the reward per token, or add it to the loss."""
    target: Positive | None = None
    """KL in nats per completion that an adaptive coefficient keeps; null fixes the coefficient."""
    horizon: Positive = 10_000.0
    """Time scale of the adaptive coefficient, in completions (Ziegler et al. 2019)."""
    bias_correction: bool = False
    """Weight the KL in the loss by the ratio of new to sampling policy, so that off-policy updates with k1 and k3 have
    the gradient of KL(policy, reference)."""

    @model_validator(mode="after")
    def _check_bias_correction(self) -> "KLSection":
        if self.bias_correction and self.place != "loss":
            raise ValueError("bias_correction weighs the KL in the loss, but place is reward; set place: loss")
        return self


class PtxDemonstrationsSection(DemonstrationsSection):
    """Demonstrations that are learnt beside the rewards."""

    heldout_fraction: Fraction = 0.0
    """Share of demonstrations that is not learnt, by a hash of the prompt or of the opening of the conversation."""


class PtxSection(Section):
    """A term of supervised learning on demonstrations beside the policy loss (PPO-ptx, Ouyang et al. 2022)."""

    SHORTHAND = "coef"

    coef: NonNegative = 0.0
    """Weight of the mean of -log p over their learnt tokens; 0 is off."""
    demonstrations_per_update: PositiveInt = 8
    """Demonstrations in each optimizer step."""
    micro_batch_tokens: PositiveInt = 2048
    """Tokens of demonstrations in one forward and backward pass."""

    @property
    def num_learnt(self) -> int:
        """Demonstrations that an update learns."""
        return self.demonstrations_per_update if self.coef > 0 else 0


class UpdateSection(Section):
    """Updates of a rollout: their number, and their parts."""

    num_epochs: PositiveInt = 1
    """Passes over each rollout."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps in each pass."""
    micro_batch_size: PositiveInt = 16
    """Sequences in one forward and backward pass; gradients are accumulated."""


class PolicyLossSection(UpdateSection):
    """Policy loss and updates, shared by PPO and GRPO."""

    surrogate: Surrogate = "clip"
    """PPO's clipped ratio; CISPO: the log-prob weighted by a detached ratio of at most 1 + clip_high; SAPO: a sigmoid
    of the ratio, which closes softly; the log-prob alone (REINFORCE, GPG); DPPO: the ratio, cut where the probability
    of the token has moved too far (dppo_tv) or its binary KL is too large (dppo_kl); GMPO: the geometric mean of the
    completion's ratios, each clipped in logarithms; or KL-Cov: the ratio, with a penalty on few tokens."""
    importance_sampling_level: Level = "token"
    """Ratio of new to old policy: of each token; of a completion, as the geometric mean of its tokens (GSPO, arXiv
    2507.18071, equation 7) or their product (RLOO)."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped below 1 - clip_low; for DPPO the bound of the divergence where the advantage is negative,
    for GMPO that of -log ratio."""
    clip_high: Positive = 0.2
    """The ratio is clipped above 1 + clip_high; DAPO has 0.28. For DPPO the bound of the divergence where the advantage
    is positive, for GMPO that of log ratio."""
    temperature_positive: Positive = 1.0
    """Steepness of SAPO's sigmoid for tokens of positive advantage."""
    temperature_negative: Positive = 1.05
    """Steepness of SAPO's sigmoid for the other tokens."""
    kl_cov_share: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 2e-4
    """Share of the tokens of a micro-batch, those with the highest covariance of log-prob and advantage, that KL-Cov
    keeps near the old policy; one at least."""
    kl_cov_coef: Positive = 1.0
    """Weight of |log ratio| for those tokens."""
    dual_clip: Positive | None = None
    """Upper bound of the ratio for negative advantages (dual-clip PPO, TRL's delta), for example 3; null is off."""
    loss_normalization: Normalization = "token"
    """Mean over all tokens of the update; over completions, of the mean or the sum of their tokens; sum divided by
    completions x max_new_tokens; or mean over micro-batches of means over tokens."""
    off_policy_mask: Positive | None = None
    """Leave out what has a negative advantage in completions whose log-prob has fallen by more nats per token than this
    since they were drawn (DeepSeek-V3.2); null is off."""
    top_entropy_share: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    """Share of the tokens of a micro-batch, those of highest entropy, that the surrogate learns (Wang et al. 2025 have
    0.2)."""
    clip_cov_share: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0
    """Share of the tokens of a micro-batch that are left out, drawn from those whose covariance of log-prob and
    advantage is between clip_cov_low and clip_cov_high (Clip-Cov, Cui et al. 2025 with 2e-4); 0 is off."""
    clip_cov_low: Finite = 1.0
    """Lower bound of the covariance of tokens that are left out."""
    clip_cov_high: Finite = 5.0
    """Upper bound."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus, a mean over tokens."""
    target_kl: Positive | None = None
    """Stop the updates of a rollout once the KL per token to its own policy exceeds this; null is off."""

    @property
    def is_divergence_bound(self) -> bool:
        """True if the surrogate is DPPO's, whose ratio and bounds are to the engine's log-probs, not to a pass of the
        old policy.
        """
        return self.surrogate in ("dppo_tv", "dppo_kl")

    @property
    def leaves_out_tokens(self) -> bool:
        """True if the surrogate does not learn some of the tokens."""
        return self.top_entropy_share < 1 or self.clip_cov_share > 0 or self.off_policy_mask is not None

    @model_validator(mode="after")
    def _check_level(self) -> "PolicyLossSection":
        if self.surrogate in ("dppo_tv", "dppo_kl", "gmpo", "kl_cov") and self.importance_sampling_level != "token":
            raise ValueError(
                f"importance_sampling_level is {self.importance_sampling_level}, but surrogate {self.surrogate} is "
                "defined by the ratios of tokens; set token"
            )
        for name, value, off in (
            ("top_entropy_share", self.top_entropy_share, 1),
            ("clip_cov_share", self.clip_cov_share, 0),
        ):
            if self.surrogate == "gmpo" and value != off:
                raise ValueError(
                    f"{name} is {value:g}, but gmpo is a mean over all tokens of a completion; set it to {off}"
                )
        return self

    @model_validator(mode="after")
    def _check_clip_cov(self) -> "PolicyLossSection":
        if self.clip_cov_low >= self.clip_cov_high:
            raise ValueError(
                f"clip_cov_low is {self.clip_cov_low:g}, not below clip_cov_high, {self.clip_cov_high:g}; lower it"
            )
        return self

    @model_validator(mode="after")
    def _check_dual_clip(self) -> "PolicyLossSection":
        if self.dual_clip is not None and self.surrogate != "clip":
            raise ValueError(f"dual_clip belongs to surrogate clip; set dual_clip: null for {self.surrogate}")
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"dual_clip is {self.dual_clip}, not above 1 + clip_high, {1 + self.clip_high:g}; raise it"
            )
        return self
