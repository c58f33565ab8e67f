"""Losses that learn from preferences without a reward model: DPO and its relatives for pairs, KTO for single labels.

The reward of a completion is beta (log policy - log reference), summed over its tokens; losses without a reference take
beta times the mean log-prob of a token. Shapes: S sides (0 chosen, 1 rejected), N pairs, B completions. `num_pairs` and
`num_completions` count those of the whole optimizer step, so that losses and gradients of its micro-batches add up to
those of one batch.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tunesmith.base.config.algorithms.dpo import DirectLossSection, DPOSection
from tunesmith.engine.kernels.masking import Denominator, check_denominator, check_shapes, total
from tunesmith.learn.algorithms.sums import Sums


@dataclass(frozen=True, slots=True)
class PairLogps:
    """N pairs: log-probs of both sides in nats, summed over the tokens of a completion.

    `logp_SN` is the policy's, `reference_SN` the starting model's (None for losses without one), `length_SN` tokens of
    each completion, `tie_N` true where neither side was preferred (None: nowhere), `weight_N` what multiplies the loss
    of each pair (None: nothing).
    """

    logp_SN: Tensor
    length_SN: Tensor
    reference_SN: Tensor | None = None
    tie_N: Tensor | None = None
    weight_N: Tensor | None = None

    def swapped(self) -> "PairLogps":
        """The pairs with the other side chosen."""
        reference_SN = None if self.reference_SN is None else self.reference_SN.flip(0)
        return PairLogps(self.logp_SN.flip(0), self.length_SN.flip(0), reference_SN, self.tie_N, self.weight_N)


@dataclass(frozen=True, slots=True)
class DirectStats(Sums):
    """Sums over pairs or single completions; records of micro-batches add up. Ties count as neither side."""

    num_losses: Tensor
    """Pairs, or single completions."""
    num_chosen: Tensor
    num_rejected: Tensor
    num_decided: Tensor
    """Pairs that are no tie."""
    loss: Tensor
    """Before the division by the global denominator."""
    correct: Tensor
    """Decided pairs whose chosen completion has the strictly higher reward."""
    chosen_reward: Tensor
    rejected_reward: Tensor
    chosen_logp: Tensor
    rejected_logp: Tensor

    def metrics(self) -> dict[str, float]:
        """Means under the names of TRL's trainers; those of nothing are left out. Waits for the device once."""
        sums = self.floats()
        metrics: dict[str, float] = {}
        if sums["num_losses"]:
            metrics["loss"] = sums["loss"] / sums["num_losses"]
        for side in ("chosen", "rejected"):
            if sums[f"num_{side}"]:
                metrics[f"rewards/{side}"] = sums[f"{side}_reward"] / sums[f"num_{side}"]
                metrics[f"logps/{side}"] = sums[f"{side}_logp"] / sums[f"num_{side}"]
        if sums["num_chosen"] and sums["num_rejected"]:
            metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        if sums["num_decided"]:
            metrics["rewards/accuracies"] = sums["correct"] / sums["num_decided"]
        return metrics


def paired(pairs: PairLogps, settings: DirectLossSection, *, num_pairs: Denominator) -> tuple[Tensor, DirectStats]:
    """Scalar loss, differentiable through `logp_SN`, and detached statistics.

    With the difference d of the two `rewards`, l = -log sigmoid and the label smoothing e, a pair costs

    - `sigmoid`: (1 - e) l(d) + e l(-d): DPO (Rafailov et al. 2023, arXiv 2305.18290, equation 7), with e > 0 its
      conservative form (Mitchell 2023).
    - `robust`: ((1 - e) l(d) - e l(-d)) / (1 - 2 e), unbiased if a share e of the votes is flipped (Chowdhury et al.
      2024, arXiv 2403.00409).
    - `hinge`: max(0, 1 - d) (Zhao et al. 2023, arXiv 2305.10425; Liu et al. 2023, arXiv 2309.06657).
    - `ipo`: (m[0] - m[1] - 1 / (2 beta))^2 with m = (logp - reference) / length, which makes completions of any length
      comparable, as TRL has it (Azar et al. 2023, arXiv 2310.12036, equation 17).
    - `sigmoid_norm`: l of the difference of the rewards per token, as TRL has it.
    - `exo_pair`: the KL divergence of (sigmoid(d), sigmoid(-d)) from (1 - e, e) (Ji et al. 2024, arXiv 2402.00856).
    - `nca_pair`: l(r[0]) + l(-r[0]) / 2 + l(-r[1]) / 2 of the rewards r (Chen et al. 2024, arXiv 2402.05369).
    - `bco_pair`: l(r[0]) + l(-r[1]) (Jung et al. 2024, arXiv 2404.04656, without its shift).
    - `sppo_hard`: (r[0] - 1/2)^2 + (r[1] + 1/2)^2 over beta^2 (Wu et al. 2024, arXiv 2405.00675).
    - `apo_zero`: sigmoid(-r[0]) + sigmoid(r[1]); `apo_down`: sigmoid(r[0]) + sigmoid(-d) (D'Oosterlinck et al. 2024,
      arXiv 2408.06266).
    - `discopop`: (1 - w) l(d) + w e^-d with w = sigmoid(d / discopop_tau) (Lu et al. 2024, arXiv 2406.08414).
    - `simpo`: as `sigmoid`, of d - gamma, without a reference (Meng et al. 2024, arXiv 2405.14734, equation 6).
    - `orpo`: -p[0] + beta l(o[0] - o[1]) without a reference, with the mean log-prob p of a token and the log odds
      o = p - log(1 - e^p) (Hong et al. 2024, arXiv 2403.07691, equation 6).

    A tie costs the mean of both orders, half a vote for each side. Under `ties: rao_kupper` a vote is one of three
    outcomes: chosen wins with probability sigmoid(d - log theta), the other with sigmoid(-d - log theta), and a tie has
    what is left, (theta^2 - 1) sigmoid(d - log theta) sigmoid(-d - log theta) (Rao and Kupper 1967; Chen et al. 2024,
    arXiv 2409.17431); the loss is the negative log-likelihood. The sum over pairs, ties included, each times its
    `weight_N`, is divided by `num_pairs`.
    Raises `InputError` if shapes differ or `num_pairs` is not positive.
    """
    check_shapes(logp_SN=pairs.logp_SN, length_SN=pairs.length_SN, reference_SN=pairs.reference_SN)
    check_shapes(**{"logp_SN[0]": pairs.logp_SN[0], "tie_N": pairs.tie_N, "weight_N": pairs.weight_N})
    check_denominator("num_pairs", num_pairs)
    pairs = _widened(pairs)
    if isinstance(settings, DPOSection) and settings.ties == "rao_kupper":
        loss_N = _rao_kupper(pairs, settings)
    else:
        loss_N = _loss(pairs, settings)
        if pairs.tie_N is not None:
            loss_N = torch.where(pairs.tie_N, 0.5 * (loss_N + _loss(pairs.swapped(), settings)), loss_N)
    if pairs.weight_N is not None:
        loss_N = loss_N * pairs.weight_N.to(loss_N.dtype)
    reward_SN, logp_SN = rewards(pairs, settings).detach(), pairs.logp_SN.detach()
    decided_N = torch.ones_like(loss_N, dtype=torch.bool) if pairs.tie_N is None else ~pairs.tie_N
    return loss_N.sum() / num_pairs, DirectStats(
        num_losses=total(torch.ones_like(loss_N)),
        num_chosen=total(decided_N),
        num_rejected=total(decided_N),
        num_decided=total(decided_N),
        loss=total(loss_N),
        correct=total((reward_SN[0] > reward_SN[1]) & decided_N),
        chosen_reward=total(reward_SN[0] * decided_N),
        rejected_reward=total(reward_SN[1] * decided_N),
        chosen_logp=total(logp_SN[0] * decided_N),
        rejected_logp=total(logp_SN[1] * decided_N),
    )


def rewards(pairs: PairLogps, settings: DirectLossSection) -> Tensor:
    """reward_SN that `rewards/*` report: beta (logp - reference), or beta times the mean log-prob without reference."""
    if settings.needs_reference:
        assert pairs.reference_SN is not None
        return settings.beta * (pairs.logp_SN - pairs.reference_SN)
    return settings.beta * pairs.logp_SN / pairs.length_SN


def kto(
    logp_B: Tensor,
    reference_B: Tensor,
    wanted_B: Tensor,
    settings: DPOSection,
    *,
    kl: float | Tensor,
    num_completions: Denominator,
    weight_B: Tensor | None = None,
) -> tuple[Tensor, DirectStats]:
    """Scalar loss of single labels, differentiable through `logp_B`, and detached statistics, the wanted as chosen.

    With r = logp - reference, a wanted completion costs w (1 - sigmoid(beta (r - kl))), an unwanted one
    u (1 - sigmoid(beta (kl - r))), with the weights w and u of `settings` (Ethayarajh et al. 2024, arXiv 2402.01306,
    equation 7), each times its `weight_B`, if there are any. `kl` is what `mismatched_kl` estimates. The sum is divided
    by `num_completions`.
    Raises `InputError` if shapes differ or `num_completions` is not positive.
    """
    check_shapes(logp_B=logp_B, reference_B=reference_B, wanted_B=wanted_B, weight_B=weight_B)
    check_denominator("num_completions", num_completions)
    wanted_B = wanted_B.bool()
    ratio_B = _wide(logp_B) - _wide(reference_B).detach()
    gain_B = settings.beta * torch.where(wanted_B, ratio_B - kl, kl - ratio_B)
    side_B = torch.full_like(ratio_B, settings.undesirable_weight).masked_fill(wanted_B, settings.desirable_weight)
    loss_B = side_B * torch.sigmoid(-gain_B)
    if weight_B is not None:
        loss_B = loss_B * weight_B.to(loss_B.dtype)
    reward_B, logp_B = settings.beta * ratio_B.detach(), logp_B.detach()
    nothing = total(loss_B.new_zeros(1))
    return loss_B.sum() / num_completions, DirectStats(
        num_losses=total(torch.ones_like(loss_B)),
        num_chosen=total(wanted_B),
        num_rejected=total(~wanted_B),
        num_decided=nothing,
        loss=total(loss_B),
        correct=nothing,
        chosen_reward=total(reward_B * wanted_B),
        rejected_reward=total(reward_B * ~wanted_B),
        chosen_logp=total(logp_B * wanted_B),
        rejected_logp=total(logp_B * ~wanted_B),
    )


def mismatched_kl(logp_B: Tensor, reference_B: Tensor) -> float:
    """KTO's estimate of the KL divergence to the reference, in nats, at least 0: the mean of logp - reference over
    completions that follow the prompts of others (Ethayarajh et al. 2024, section 4.1). No gradient flows.
    """
    check_shapes(logp_B=logp_B, reference_B=reference_B)
    return max(0.0, (logp_B.detach().double() - reference_B.detach().double()).mean().item())


def importance(logp_B: Tensor, drawn_B: Tensor, limit: float) -> Tensor:
    """weight_B = min(e^(logp - drawn), limit): truncated importance weights (Ionides 2008) of completions drawn with
    the log-probs `drawn_B`, summed over their tokens, under a policy that gives them `logp_B`. No gradient flows.
    """
    check_shapes(logp_B=logp_B, drawn_B=drawn_B)
    return (_wide(logp_B) - _wide(drawn_B)).detach().clamp(max=math.log(limit)).exp()


def _widened(pairs: PairLogps) -> PairLogps:
    """The pairs in fp32 or wider, the reference detached, the ties as truth values."""
    reference_SN = None if pairs.reference_SN is None else _wide(pairs.reference_SN).detach()
    tie_N = None if pairs.tie_N is None else pairs.tie_N.bool()
    logp_SN = _wide(pairs.logp_SN)
    return PairLogps(logp_SN, pairs.length_SN.to(logp_SN.dtype).clamp(min=1), reference_SN, tie_N, pairs.weight_N)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _loss(pairs: PairLogps, settings: DirectLossSection) -> Tensor:
    """loss_N of decided pairs."""
    reward_SN, beta = rewards(pairs, settings), settings.beta
    match settings.loss:
        case "ipo":
            mean_SN = reward_SN / (beta * pairs.length_SN)
            return (mean_SN[0] - mean_SN[1] - 1 / (2 * beta)).square()
        case "sigmoid_norm":
            mean_SN = reward_SN / pairs.length_SN
            return -logsigmoid(mean_SN[0] - mean_SN[1])
        case "orpo":
            mean_SN = pairs.logp_SN / pairs.length_SN
            odds_SN = mean_SN - _log_one_minus_exp(mean_SN)
            return -mean_SN[0] - beta * logsigmoid(odds_SN[0] - odds_SN[1])
        case _:
            return _loss_of_rewards(reward_SN[0], reward_SN[1], settings)


def _loss_of_rewards(chosen_N: Tensor, rejected_N: Tensor, settings: DirectLossSection) -> Tensor:
    margin = settings.simpo_gamma if settings.loss == "simpo" else 0.0
    difference_N, smoothing = chosen_N - rejected_N - margin, settings.label_smoothing
    right_N, wrong_N = -logsigmoid(difference_N), -logsigmoid(-difference_N)
    match settings.loss:
        case "hinge":
            return (1 - difference_N).clamp(min=0)
        case "robust":
            return ((1 - smoothing) * right_N - smoothing * wrong_N) / (1 - 2 * smoothing)
        case "exo_pair":
            share_N, other_N = torch.sigmoid(difference_N), torch.sigmoid(-difference_N)
            return -share_N * (right_N + math.log1p(-smoothing)) - other_N * (wrong_N + math.log(smoothing))
        case "nca_pair":
            return -logsigmoid(chosen_N) - (logsigmoid(-chosen_N) + logsigmoid(-rejected_N)) / 2
        case "bco_pair":
            return -logsigmoid(chosen_N) - logsigmoid(-rejected_N)
        case "sppo_hard":
            return ((chosen_N - 0.5).square() + (rejected_N + 0.5).square()) / settings.beta**2
        case "apo_zero":
            return torch.sigmoid(-chosen_N) + torch.sigmoid(rejected_N)
        case "apo_down":
            return torch.sigmoid(chosen_N) + torch.sigmoid(-difference_N)
        case "discopop":
            mix_N = difference_N / settings.discopop_tau
            exponential_N = (logsigmoid(mix_N) - difference_N).exp()  # w e^-d as one power, which does not overflow
            return torch.sigmoid(-mix_N) * right_N + exponential_N
        case _:
            return (1 - smoothing) * right_N + smoothing * wrong_N


def _rao_kupper(pairs: PairLogps, settings: DPOSection) -> Tensor:
    """loss_N where ties have a probability; smoothing takes a share of the decided votes for the other outcome."""
    reward_SN, threshold = rewards(pairs, settings), math.log(settings.tie_theta)
    difference_N = reward_SN[0] - reward_SN[1]
    wins_N, loses_N = logsigmoid(difference_N - threshold), logsigmoid(-difference_N - threshold)
    tied_N = math.log(settings.tie_theta**2 - 1) + wins_N + loses_N
    decided_N = (1 - settings.label_smoothing) * wins_N + settings.label_smoothing * loses_N
    return -(decided_N if pairs.tie_N is None else torch.where(pairs.tie_N, tied_N, decided_N))


def _log_one_minus_exp(x: Tensor) -> Tensor:
    """log(1 - e^x), by the one of two forms that does not cancel (Maechler 2012); x is kept a rounding step below 0."""
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    near = x > -math.log(2)
    # Each form sees only what it is good for, so that the gradient of the other is not NaN.
    by_expm1 = torch.log(-torch.expm1(torch.where(near, x, -1.0)))
    by_log1p = torch.log1p(-torch.exp(torch.where(near, -1.0, x)))
    return torch.where(near, by_expm1, by_log1p)
