"""Tokens and terms of the policy loss; `algorithms.policy_loss` has the equations.

Shapes: B sequences, T completion tokens.
"""

from dataclasses import dataclass

from torch import Tensor

from tunesmith.base.config.policy_sections import Estimator, Level, Surrogate
from tunesmith.base.core.errors import InputError


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """Terms and coefficients of the loss; see `algorithms.policy_loss.surrogate` for the equations.

    `kl_coef` weighs the KL to the reference policy, multiplied by the importance ratio with `corrects_kl`;
    `entropy_coef` weighs the entropy bonus.

    Raises:
        InputError: a number is outside its range.
    """

    surrogate: Surrogate = "clip"
    level: Level = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    temperature_positive: float = 1.0
    temperature_negative: float = 1.05
    kl_cov_share: float = 2e-4
    kl_cov_coef: float = 1.0
    kl: Estimator = "k3"
    kl_coef: float = 0.0
    corrects_kl: bool = False
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.clip_low < 1:
            raise InputError(f"clip_low is {self.clip_low}; it must lie between 0 and 1")
        for name, value, least in (
            ("clip_high", self.clip_high, 0.0),
            ("temperature_positive", self.temperature_positive, 0.0),
            ("temperature_negative", self.temperature_negative, 0.0),
            ("kl_cov_share", self.kl_cov_share, 0.0),
            ("kl_cov_coef", self.kl_cov_coef, 0.0),
            ("dual_clip", self.dual_clip, 1 + self.clip_high),
        ):
            if value is not None and not value > least:
                raise InputError(f"{name} is {value}; it must be above {least:g}")
        if self.dual_clip is not None and self.surrogate != "clip":
            raise InputError(
                f"dual_clip is {self.dual_clip} with surrogate {self.surrogate}; give None, or surrogate clip"
            )
        for name, value in (("kl_coef", self.kl_coef), ("entropy_coef", self.entropy_coef)):
            if not value >= 0:
                raise InputError(f"{name} is {value}; it must be 0 or more")


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """Per-token inputs, all `[B, T]`; `mask_BT` is true where a token counts.

    Log-probs in nats: `logp_BT` under the policy being trained, `old_logp_BT` under the one that drew the tokens,
    `reference_logp_BT` under the reference policy (None without a KL term); `entropy_BT` is None without a bonus.
    Gradients flow to `logp_BT` and `entropy_BT` only.
    """

    logp_BT: Tensor
    old_logp_BT: Tensor
    advantage_BT: Tensor
    mask_BT: Tensor
    reference_logp_BT: Tensor | None = None
    entropy_BT: Tensor | None = None
