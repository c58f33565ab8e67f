"""Sections of the algorithms: SFT, reward model, DPO, PPO, GRPO, best-of-n and distillation."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tunesmith.config.sections import Fraction, NonNegative, NonNegativeInt, Positive, PositiveInt, Section

Estimator = Literal["k1", "k2", "k3"]
"""Estimator of the KL to the reference policy, after Schulman 2020, "Approximating KL divergence"."""

Surrogate = Literal["clip", "cispo"]
Level = Literal["token", "sequence", "product"]
"""Importance ratio per token; per completion, as the geometric mean of its tokens' (GSPO, Zheng et al. 2025, arXiv
2507.18071, equation 7); or per completion, as their product."""

Normalization = Literal["token", "sequence", "sequence_sum", "constant", "micro_batch"]
Baseline = Literal["mean", "leave_one_out"]
Scale = Literal["group", "batch", "advantages", "none"]
DirectLoss = Literal["sigmoid", "ipo", "hinge", "robust", "simpo", "orpo", "kto"]

REFERENCE_FREE: frozenset[DirectLoss] = frozenset({"simpo", "orpo"})
"""Losses without a reference model."""

SMOOTHED: frozenset[DirectLoss] = frozenset({"sigmoid", "robust", "simpo"})
"""Losses that take `label_smoothing`."""


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


class RewardTrainerSection(Section):
    """The Bradley-Terry reward model."""

    num_layers: PositiveInt | None = None
    """Keep only the lowest n layers, for a smaller reward model; null keeps all."""
    num_epochs: PositiveInt = 1
    """Passes over the pairs."""
    pairs_per_step: PositiveInt = 16
    """Pairs in one optimizer step."""
    micro_batch_size: PositiveInt = 16
    """Pairs in one forward and backward pass; gradients are accumulated."""
    margin: Literal["none", "column"] = "none"
    """`column`: subtract the row's `margin` from the difference of rewards (Llama 2)."""
    center_coef: NonNegative = 0.0
    """Weight of (chosen + rejected)^2, which keeps rewards near zero."""


class RewardEvaluationSection(Section):
    """Evaluation of a reward model once it is trained."""

    judge: bool = False
    """Evaluate it on the held-out pairs as `tunesmith eval reward` does, beside a TF-IDF baseline fitted on the
    training pairs; written to reward_quality.json."""


class DPOSection(Section):
    """Direct preference optimisation (Rafailov et al. 2023) and its relatives."""

    SHORTHAND = "loss"

    loss: DirectLoss = "sigmoid"
    """DPO, IPO, SLiC's hinge, robust DPO, SimPO, ORPO, or KTO, which takes unpaired labels too."""
    beta: Positive = 0.1
    """Scale of the rewards, beta (log policy - log reference); IPO's tau, ORPO's lambda. For SimPO about 2."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5, allow_inf_nan=False)] = 0.0
    """Assumed share of wrong votes: conservative DPO with `sigmoid` and `simpo`, unbiased with `robust`."""
    simpo_gamma: NonNegative = 0.5
    """Target margin between the rewards, for `simpo`."""
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
        """True if the loss compares with the reference model."""
        return self.loss not in REFERENCE_FREE


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


class PolicyLossSection(Section):
    """Policy loss and updates, shared by PPO and GRPO."""

    surrogate: Surrogate = "clip"
    """PPO's clipped ratio, or CISPO: the log-prob weighted by a detached ratio of at most 1 + clip_high."""
    importance_sampling_level: Level = "token"
    """Ratio of new to old policy: of each token; of a completion, as the geometric mean of its tokens (GSPO, arXiv
    2507.18071, equation 7) or their product (RLOO)."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped below 1 - clip_low; not for cispo."""
    clip_high: Positive = 0.2
    """The ratio is clipped above 1 + clip_high; DAPO has 0.28."""
    dual_clip: Positive | None = None
    """Upper bound of the ratio for negative advantages (dual-clip PPO, TRL's delta), for example 3; null is off."""
    loss_normalization: Normalization = "token"
    """Mean over all tokens of the update; over completions, of the mean or the sum of their tokens; sum divided by
    completions x max_new_tokens; or mean over micro-batches of means over tokens."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus, a mean over tokens."""
    num_epochs: PositiveInt = 1
    """Passes over each rollout."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps in each pass."""
    micro_batch_size: PositiveInt = 16
    """Sequences in one forward and backward pass; gradients are accumulated."""

    @model_validator(mode="after")
    def _check_dual_clip(self) -> "PolicyLossSection":
        if self.dual_clip is not None and self.surrogate == "cispo":
            raise ValueError("dual_clip belongs to surrogate clip; set dual_clip: null for cispo")
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"dual_clip is {self.dual_clip}, not above 1 + clip_high, {1 + self.clip_high:g}; raise it"
            )
        return self


class PPOSection(PolicyLossSection):
    """Proximal policy optimisation (Schulman et al. 2017)."""

    num_epochs: PositiveInt = 2
    value_clip: Positive | None = 0.2
    """Clip range of values around those of the rollout; null is off."""
    value_coef: NonNegative = 0.1
    """Weight of the value loss."""
    gamma: Fraction = 1.0
    """Discount of later rewards."""
    lam: Fraction = 0.95
    """Lambda of generalised advantage estimation."""
    gae: Literal["auto", "loop"] = "auto"
    """Generalised advantage estimation of all completions at once, or token by token in Python, with equal results."""
    whiten_advantages: bool = True
    """Normalize advantages to mean 0 and variance 1 over the rollout."""
    whiten_rewards: bool = False
    """Scale rewards to variance 1 over the rollout, keeping their mean."""
    target_kl: Positive | None = None
    """Stop the updates of a rollout once the KL per token to its own policy exceeds this; null is off."""
    critic: Literal["shared", "separate", "none"] = "shared"
    """Value head on the policy's trunk, a separate model, or none: advantages are then the returns (REINFORCE++)."""
    critic_process: bool = False
    """Compute a separate critic in a process of its own, beside the policy, with equal results; on a CPU."""
    kl: KLSection = KLSection()

    @model_validator(mode="after")
    def _check_critic(self) -> "PPOSection":
        if self.critic_process and self.critic != "separate":
            raise ValueError(
                f"critic_process is true, but critic is {self.critic}: which another process cannot compute; "
                "set critic to separate, or critic_process to false"
            )
        if self.critic == "none" and self.lam != 1:
            raise ValueError(f"lam is {self.lam}, which weighs values, but critic is none; set lam: 1.0")
        return self


class GRPOKLSection(KLSection):
    """KL divergence to the reference policy, with GRPO's defaults: k3, in the loss."""

    coef: NonNegative = 0.04
    estimator: Estimator = "k3"
    place: Literal["reward", "loss"] = "loss"
    """Subtract it from the reward of a completion, or add it to the loss."""


class GRPOSection(PolicyLossSection):
    """Group-relative policy optimisation (Shao et al. 2024) and RLOO: the group is the baseline, without a critic."""

    baseline: Baseline = "mean"
    """Mean reward of the group (GRPO), or of its other completions (RLOO)."""
    scale: Scale = "group"
    """Divide advantages by the standard deviation of the group's rewards, of all rewards, of all advantages
    (REINFORCE++-baseline), or not at all."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Sum the rewards, then normalize; or normalize each within its group, sum, and scale to variance 1 over the step
    (GDPO), ignoring baseline and scale."""
    dynamic_sampling: NonNegativeInt = 0
    """Rounds of further prompts in a step, in place of groups with equal rewards (DAPO); 0 is off."""
    mask_truncated_completions: bool = False
    """Leave completions cut off by the length limit out of the loss, but not out of the baseline."""
    kl: GRPOKLSection = GRPOKLSection()

    @model_validator(mode="after")
    def _check_place_of_kl(self) -> "GRPOSection":
        if self.multi_objective_aggregation == "normalize_then_sum" and self.kl.place == "reward" and self.kl.coef > 0:
            raise ValueError(
                "multi_objective_aggregation is normalize_then_sum, which has no sum to take the KL from; set "
                "kl.place: loss"
            )
        return self


class BestOfNKLSection(KLSection):
    """KL divergence to the reference policy, off by default."""

    coef: NonNegative = 0.0


class BestOfNSection(Section):
    """Best-of-n: learn the best of n completions as SFT does (RAFT, Dong et al. 2023)."""

    keep: PositiveInt = 1
    """Completions to keep of each prompt, those with the highest reward."""
    num_epochs: PositiveInt = 1
    """Passes over the kept completions."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps in each pass."""
    micro_batch_size: PositiveInt = 16
    """Sequences in one forward and backward pass; gradients are accumulated."""
    kl: BestOfNKLSection = BestOfNKLSection()


class TeacherSource(Section):
    """A model whose distribution is learnt, and its weight beside other teachers."""

    SHORTHAND = "model"

    model: str
    """Hub id, local folder, GGUF file or run folder, with the student's tokenizer."""
    weight: Positive = 1.0
    """Weight of its divergence relative to those of the other teachers."""


class DistillSection(Section):
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
    num_epochs: PositiveInt = 1
    """Passes over the completions of a step."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps in each pass."""
    micro_batch_size: PositiveInt = 16
    """Sequences in one forward and backward pass; gradients are accumulated."""
