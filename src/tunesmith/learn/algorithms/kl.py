"""KL divergence to the reference policy: estimators, their place in the reward or the loss, and the coefficient.

Shapes: B sequences, T completion tokens. Log-probs in nats, of tokens drawn from the policy. With d = log policy - log
reference of a token (Schulman 2020, "Approximating KL divergence"; for the gradients, Tang and Munos 2025, arXiv
2506.09477):

| estimator            | mean over samples     | in the reward, no gradient | gradient as a loss, mean over samples |
|----------------------|-----------------------|----------------------------|---------------------------------------|
| k1 = d               | KL(policy, reference) | that of KL(policy, ref.)   | 0; `penalty` takes k2's instead       |
| k2 = d^2 / 2         | near it for small d   | biased                     | that of KL(policy, reference)         |
| k3 = exp(-d) - 1 + d | KL(policy, reference) | biased                     | that of KL(reference, policy)         |

GRPO puts k3 in the loss. Weighted by the ratio of the new policy to the one that drew the tokens, with the gradient
through the ratio too, k1 and k3 have the gradient of KL(policy, reference) as a loss, also in later updates over the
same tokens, where the unweighted estimates are off by the ratio (DeepSeek-AI 2025, arXiv 2512.02556, equation 7).
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tunesmith.base.config.policy_sections import Estimator
from tunesmith.base.core.errors import InputError
from tunesmith.engine.kernels.masking import check_shapes, kept

MAX_RELATIVE_ERROR = 0.2
"""Ziegler et al. 2019 (arXiv 1909.08593), section 2.2: the error that the controller acts on is clipped to +-0.2."""


def k1(logp_BT: Tensor, ref_logp_BT: Tensor) -> Tensor:
    """The log-ratio of each token: unbiased, of either sign. As a loss its gradient has mean 0: no restraint."""
    return logp_BT - ref_logp_BT


def k2(logp_BT: Tensor, ref_logp_BT: Tensor) -> Tensor:
    """Half the squared log-ratio of each token: never negative, biased in value, unbiased in gradient as a loss."""
    return 0.5 * (logp_BT - ref_logp_BT).square()


def k3(logp_BT: Tensor, ref_logp_BT: Tensor) -> Tensor:
    """exp(-d) - 1 + d of each token: never negative, unbiased, of lower variance than k1."""
    difference_BT = ref_logp_BT - logp_BT
    # expm1 keeps the digits that exp(x) - 1 loses where policy and reference nearly agree: where training starts.
    return torch.expm1(difference_BT) - difference_BT


ESTIMATORS: Mapping[Estimator, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def estimate(estimator: Estimator, logp_BT: Tensor, ref_logp_BT: Tensor) -> Tensor:
    """The named estimate of each token, differentiable. Raises `InputError` for an unknown name or differing shapes."""
    check_shapes(logp_BT=logp_BT, ref_logp_BT=ref_logp_BT)
    if estimator not in ESTIMATORS:  # a recipe cannot name another one, `PolicyTerms` can
        raise InputError(f"The KL estimator is {estimator!r}; choose one of {', '.join(ESTIMATORS)}.")
    return ESTIMATORS[estimator](logp_BT, ref_logp_BT)


def penalty(
    estimator: Estimator, logp_BT: Tensor, ref_logp_BT: Tensor, mask_BT: Tensor, ratio_BT: Tensor | None = None
) -> Tensor:
    """The KL estimate of each token as a loss, `[B, T]`, 0 outside the mask, times `ratio_BT` if it is given.

    The gradient flows through `logp_BT` and the ratio. Without a ratio k1 has the gradient of k2, as its own has mean
    0. In later epochs over a rollout the estimate is off by the ratio of the new policy to the one that drew the
    tokens, which clipping holds near 1 (GRPO accepts this); a differentiable `ratio_BT` corrects it. Raises
    `InputError` if shapes differ.
    """
    check_shapes(logp_BT=logp_BT, ref_logp_BT=ref_logp_BT, mask_BT=mask_BT, ratio_BT=ratio_BT)
    mask_BT = mask_BT.bool()
    logp_BT, ref_logp_BT = kept(logp_BT, mask_BT), kept(ref_logp_BT.detach(), mask_BT)
    kl_BT = estimate(estimator, logp_BT, ref_logp_BT)
    if ratio_BT is not None:
        return kept(ratio_BT, mask_BT) * kl_BT
    if estimator == "k1":
        guide_BT = k2(logp_BT, ref_logp_BT)
        kl_BT = kl_BT.detach() + (guide_BT - guide_BT.detach())
    return kl_BT


def per_sequence(kl_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Nats of each sequence, shape B, without gradient: the sum over its tokens inside the mask."""
    check_shapes(kl_BT=kl_BT, mask_BT=mask_BT)
    return kept(kl_BT.detach(), mask_BT.bool()).sum(dim=1)


def penalised_reward(score_B: Tensor, kl_BT: Tensor, mask_BT: Tensor, coef: float) -> Tensor:
    """Reward of each token, shape B T, without gradient: -coef times its KL, plus the score on the row's last token.

    Last is the last token inside the mask; the score of a row without any is left out. Ziegler et al. 2019, section 2.
    """
    check_shapes(kl_BT=kl_BT, mask_BT=mask_BT)
    check_shapes(score_B=score_B, rows_of_kl_BT=kl_BT.sum(dim=1))
    mask_BT = mask_BT.bool()
    reward_BT = kept(-coef * kl_BT.detach(), mask_BT)
    num_left_BT = mask_BT.flip(1).cumsum(1).flip(1)
    is_last_BT = mask_BT & (num_left_BT == 1)
    return reward_BT + kept(score_B.detach()[:, None].expand_as(reward_BT), is_last_BT)


class Controller:
    """The KL coefficient of a run. `value` is the coefficient of the next rollout.

    Without a target it stays as it is. With one it grows while the KL is above `target` nats per sequence and shrinks
    while it is below (Ziegler et al. 2019, section 2.2, with the rate of their code):

        error = clip(KL / target - 1, -0.2, 0.2)
        coef <- coef (1 + error num_sequences / horizon)

    Raises `InputError` for a coefficient of 0 with a target: the rule multiplies, so it would stay 0 for good.
    """

    def __init__(self, coef: float, target: float | None = None, horizon: float = 10_000.0) -> None:
        if target is not None and not coef > 0:
            raise InputError(f"The KL controller's coef is {coef}; it must be finite and positive.")
        self.value, self._target, self._horizon = float(coef), target, horizon

    def update(self, kl_per_sequence: float, num_sequences: int) -> None:
        """Move the coefficient, given the mean KL of `num_sequences` completions in nats per sequence. One that is not
        finite, as of a step that was refused, changes nothing.

        Raises `InputError` if `num_sequences` exceeds the horizon: far beyond it the factor is negative.
        """
        if self._target is None or not math.isfinite(kl_per_sequence):
            return
        if not 0 < num_sequences <= self._horizon:
            raise InputError(
                f"num_sequences is {num_sequences} with a KL horizon of {self._horizon:g}; it must be positive and at "
                f"most the horizon. Set the horizon to {num_sequences} or more."
            )
        error = min(max(kl_per_sequence / self._target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        self.value *= 1 + error * num_sequences / self._horizon

    def state_dict(self) -> dict[str, float]:
        """The coefficient."""
        return {"coef": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on with an adaptive coefficient; a fixed one is the recipe's, which may have been changed on purpose."""
        if self._target is not None:
            self.value = state["coef"]
