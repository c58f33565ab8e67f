"""What the policy loss is told and what it sums up.

Shapes: B sequences, T completion tokens, S sums.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from tunesmith.core.errors import InputError

Level = Literal["token", "sequence", "product"]
"""A ratio for each token; one for a completion, the geometric mean of its tokens' (GSPO, Zheng et al. 2025, arXiv
2507.18071, equation 7); or their product, the ratio of the whole completion."""

Estimator = Literal["k1", "k2", "k3"]
"""Of the KL to the reference policy, after Schulman 2020, "Approximating KL divergence"."""


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """Which terms the loss has, and their numbers.

    `clip` is PPO's clipped ratio with its two sides apart, `cispo` the log-prob weighted by a ratio cut at
    1 + clip_high; where the advantage is negative the ratio counts no more than `dual_clip`. `kl_coef` weighs the KL to
    the reference policy, multiplied by the ratio with `corrects_kl`; `entropy_coef` the entropy bonus.

    Raises:
        InputError: a number lies outside of what it may be.
    """

    surrogate: Literal["clip", "cispo"] = "clip"
    level: Level = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl: Estimator = "k3"
    kl_coef: float = 0.0
    corrects_kl: bool = False
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.clip_low < 1:
            raise InputError(f"clip_low is {self.clip_low}; it must lie between 0 and 1")
        for name, value, least in (
            ("clip_high", self.clip_high, 0.0),
            ("dual_clip", self.dual_clip, 1 + self.clip_high),
        ):
            if value is not None and not value > least:
                raise InputError(f"{name} is {value}; it must be above {least:g}")
        if self.dual_clip is not None and self.surrogate == "cispo":
            raise InputError(f"dual_clip is {self.dual_clip} with surrogate cispo; give None, or surrogate clip")
        for name, value in (("kl_coef", self.kl_coef), ("entropy_coef", self.entropy_coef)):
            if not value >= 0:
                raise InputError(f"{name} is {value}; it must be 0 or more")


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """Numbers of each token, all `[B, T]`; `mask_BT` is true where a token counts.

    Log-probs in nats: `logp_BT` of the policy that learns, `old_logp_BT` of the one that drew the tokens,
    `reference_logp_BT` of the one that the KL is to, None without that term; `entropy_BT` None without a bonus.
    Gradients flow to `logp_BT` and `entropy_BT` alone.
    """

    logp_BT: Tensor
    old_logp_BT: Tensor
    advantage_BT: Tensor
    mask_BT: Tensor
    reference_logp_BT: Tensor | None = None
    entropy_BT: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PolicySums:
    """Sums over the tokens inside the mask: detached float64 scalars.

    `loss` is the surrogate's, before any denominator. `approx_kl` is (log ratio)^2 / 2. `clipped_low`, `clipped_high`
    and `clipped_dual` count tokens whose gradient is cut, or weight bounded. `ratio` and its square are at the level of
    the loss. `kl` is to the reference, as it counts but for its coefficient; `entropy` in nats; 0 where not given.
    """

    num_tokens: Tensor
    loss: Tensor
    approx_kl: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    clipped_dual: Tensor
    ratio: Tensor
    ratio_square: Tensor
    kl: Tensor
    entropy: Tensor
