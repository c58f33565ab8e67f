"""Losses of reward models: Bradley-Terry for pairs, with margins and ties, and Plackett-Luce for rankings; of several
heads on bootstrap samples.

Shapes: B pairs; R rankings, K completions of a ranking, C choices; H heads. `num_pairs` and `num_rankings` count those
of the whole optimizer step, so that the losses and gradients of its micro-batches add up to those of one batch.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tunesmith.base.core.errors import InputError
from tunesmith.base.core.seeds import derive
from tunesmith.base.schema.records import MAX_TIED
from tunesmith.engine.kernels.masking import Denominator, check_denominator, check_shapes, kept, total
from tunesmith.learn.algorithms.sums import Sums


@dataclass(frozen=True, slots=True)
class PreferenceStats(Sums):
    """Sums over pairs; records of micro-batches add up. Decided pairs are those that are no tie."""

    num_pairs: Tensor
    num_decided: Tensor
    loss: Tensor
    """Loss of each pair, centering included, before the division by the global denominator."""
    correct: Tensor
    """Decided pairs whose chosen completion has the strictly higher reward."""
    margin: Tensor
    """Chosen minus rejected reward of the decided pairs."""
    reward: Tensor
    """Rewards of both completions, so of twice `num_pairs` completions."""
    reward_square: Tensor

    def metrics(self) -> dict[str, float]:
        """Means under the names of TRL's RewardTrainer; without pairs they are left out. Waits for the device once."""
        sums = self.floats()
        num_pairs = sums["num_pairs"]
        return _means(sums, num_losses=num_pairs, num_completions=2 * num_pairs) if num_pairs else {}


def _means(sums: Mapping[str, float], *, num_losses: float, num_completions: float) -> dict[str, float]:
    """The metrics of pairs and of rankings: a loss of each of `num_losses`, rewards of `num_completions`."""
    mean_reward = sums["reward"] / num_completions
    variance = max(0.0, sums["reward_square"] / num_completions - mean_reward**2)
    metrics = {
        "loss": sums["loss"] / num_losses,
        "mean_reward": mean_reward,
        "std_reward": variance**0.5,
        "tie_fraction": 1 - sums["num_decided"] / sums["num_pairs"],
    }
    if sums["num_decided"] > 0:
        metrics["accuracy"] = sums["correct"] / sums["num_decided"]
        metrics["margin"] = sums["margin"] / sums["num_decided"]
    return metrics


def bradley_terry(
    chosen_B: Tensor,
    rejected_B: Tensor,
    margin_B: Tensor | None = None,
    tie_B: Tensor | None = None,
    *,
    num_pairs: Denominator,
    center_coef: float = 0.0,
    weight_B: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, PreferenceStats]:
    """Scalar loss, differentiable through both rewards, and detached statistics.

    With d = chosen - rejected, a decided pair costs -log sigmoid(d - margin); the margin is 0 where unknown (Llama 2,
    arXiv 2307.09288, equation 2). A tie is half a vote for each side: -(log sigmoid(d) + log sigmoid(-d)) / 2, least at
    d = 0; its margin is not used. With `label_smoothing` e a decided pair costs (1 - e) times its loss and e times that
    of the other answer, -log sigmoid(-(d - margin)), as if so many votes were wrong (Mitchell 2023, "cDPO"; DPO has it
    under this name). `center_coef` weighs (chosen + rejected)^2 of every pair, which holds rewards near 0
    (Eisenstein et al. 2023, arXiv 2312.09244; TRL's `center_rewards_coefficient`). The sum over all pairs, ties
    included, each with its weight, is divided by `num_pairs`.
    Raises `InputError` if shapes differ or `num_pairs` is not positive.
    """
    check_shapes(chosen_B=chosen_B, rejected_B=rejected_B, margin_B=margin_B, tie_B=tie_B, weight_B=weight_B)
    check_denominator("num_pairs", num_pairs)
    every_B = torch.ones_like(chosen_B, dtype=torch.bool)
    decided_B = every_B if tie_B is None else ~tie_B.bool()
    chosen_B, rejected_B = kept(chosen_B, every_B), kept(rejected_B, every_B)
    difference_B = chosen_B - rejected_B
    wanted_B = difference_B if margin_B is None else difference_B - kept(margin_B.detach(), decided_B)
    # Half of the vote goes to the other side where the pair is a tie, none where it is decided.
    tied_B = 0.5 * (logsigmoid(difference_B) + logsigmoid(-difference_B))
    won_B = logsigmoid(wanted_B)
    if label_smoothing > 0:
        won_B = (1 - label_smoothing) * won_B + label_smoothing * logsigmoid(-wanted_B)
    loss_B = -torch.where(decided_B, won_B, tied_B)
    if center_coef > 0:
        loss_B = loss_B + center_coef * (chosen_B + rejected_B).square()
    if weight_B is not None:
        loss_B = loss_B * weight_B
    reward_B = torch.cat([chosen_B, rejected_B]).detach().double()
    return loss_B.sum() / num_pairs, PreferenceStats(
        num_pairs=total(every_B),
        num_decided=total(decided_B),
        loss=total(loss_B),
        correct=total((difference_B > 0) & decided_B),
        margin=total(kept(difference_B, decided_B)),
        reward=total(reward_B),
        reward_square=total(reward_B.square()),
    )


@dataclass(frozen=True, slots=True)
class RankingStats(Sums):
    """Sums over rankings; records of micro-batches add up. Decided pairs are completions of different places."""

    num_rankings: Tensor
    num_completions: Tensor
    num_pairs: Tensor
    num_decided: Tensor
    loss: Tensor
    """Loss of each ranking, centering included, before the division by the global denominator."""
    correct: Tensor
    """Decided pairs whose better completion has the strictly higher reward."""
    margin: Tensor
    """Better minus worse reward of the decided pairs."""
    reward: Tensor
    reward_square: Tensor

    def metrics(self) -> dict[str, float]:
        """Means under the names of `PreferenceStats.metrics`; the loss is that of a ranking."""
        sums = self.floats()
        num_rankings = sums["num_rankings"]
        return _means(sums, num_losses=num_rankings, num_completions=sums["num_completions"]) if num_rankings else {}


@dataclass(frozen=True, slots=True)
class _Choice:
    """One term of the loss: from the completions `among`, one of `taken` was preferred, each with an equal share."""

    ranking: int
    among: tuple[int, ...]
    taken: tuple[int, ...]
    weight: float


def plackett_luce(
    reward_RK: Tensor,
    rank_RK: Tensor,
    *,
    num_rankings: Denominator,
    center_coef: float = 0.0,
    weight_R: Tensor | None = None,
) -> tuple[Tensor, RankingStats]:
    """Scalar loss of R rankings of up to K completions, differentiable through the rewards, and detached statistics.

    `rank_RK` holds the place of each completion, 1 the best, 0 in the padding; it is read on the host, so keep it on
    the CPU. A ranking is a series of choices: the best of all, then the best of the rest, each with probability softmax
    of the rewards (Luce 1959, Plackett 1975); the loss is the negative log-likelihood. Completions of one place stand
    for every order of theirs: the loss is the mean over these orders. Two completions give `bradley_terry`, ties
    included. `center_coef` weighs the mean of (a + b)^2 over the pairs of a ranking. The sum over rankings, each
    with its weight, is divided by `num_rankings`.
    Raises `InputError` if shapes differ, a ranking has fewer than two completions or more than MAX_TIED of one place,
    or `num_rankings` is not positive.
    """
    check_shapes(reward_RK=reward_RK, rank_RK=rank_RK)
    check_denominator("num_rankings", num_rankings)
    choices = [choice for row, ranks in enumerate(rank_RK.tolist()) for choice in _choices(row, ranks)]
    rank_RK = rank_RK.to(reward_RK.device)
    present_RK = rank_RK > 0
    reward_RK = kept(reward_RK, present_RK)
    row_C, among_CK, taken_CK = _choice_tensors(choices, reward_RK)
    reward_CK = reward_RK[row_C]
    log_total_C = reward_CK.masked_fill(among_CK == 0, -torch.inf).logsumexp(dim=1)
    weight_C = reward_RK.new_tensor([choice.weight for choice in choices])
    loss_R = reward_RK.new_zeros(len(reward_RK)).index_add(
        0, row_C, weight_C * (log_total_C - (taken_CK * reward_CK).sum(dim=1))
    )
    size_R = present_RK.sum(dim=1)
    num_pairs_R = size_R * (size_R - 1) / 2
    if center_coef > 0:  # sum over pairs of (a + b)^2 = (K - 2) sum a^2 + (sum a)^2
        squares_R = (size_R - 2) * reward_RK.square().sum(dim=1) + reward_RK.sum(dim=1).square()
        loss_R = loss_R + center_coef * squares_R / num_pairs_R
    if weight_R is not None:
        loss_R = loss_R * weight_R
    difference_RKK = reward_RK[:, :, None] - reward_RK[:, None, :]
    decided_RKK = present_RK[:, :, None] & (rank_RK[:, :, None] < rank_RK[:, None, :])
    wide_RK = reward_RK.detach().double()
    return loss_R.sum() / num_rankings, RankingStats(
        num_rankings=total(torch.ones_like(loss_R)),
        num_completions=total(size_R),
        num_pairs=total(num_pairs_R),
        num_decided=total(decided_RKK),
        loss=total(loss_R),
        correct=total((difference_RKK > 0) & decided_RKK),
        margin=total(kept(difference_RKK, decided_RKK)),
        reward=total(wide_RK),
        reward_square=total(wide_RK.square()),
    )


def _choices(row: int, ranks: list[int]) -> list[_Choice]:
    """The choices of one ranking. Of m completions of one place, every subset of them may be what is left to choose
    from; the subsets of one size share the weight of one choice.
    """
    places = sorted(set(ranks) - {0})
    if sum(rank > 0 for rank in ranks) < 2:
        raise InputError(f"Ranking {row} has fewer than two completions; leave it out.")
    choices: list[_Choice] = []
    for place in places:
        tied = [k for k, rank in enumerate(ranks) if rank == place]
        worse = [k for k, rank in enumerate(ranks) if rank > place]
        if len(tied) > MAX_TIED:
            raise InputError(f"Ranking {row} has {len(tied)} completions of one place; at most {MAX_TIED} may tie.")
        for size in range(len(tied), 0 if worse else 1, -1):  # one alone is no choice
            subsets = list(itertools.combinations(tied, size))
            choices += [_Choice(row, (*subset, *worse), subset, 1 / len(subsets)) for subset in subsets]
    return choices


def _choice_tensors(choices: list[_Choice], like_RK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row of each of C choices `[C]`, 1 for the completions it is made among `[C, K]`, and shares of the taken."""
    among_CK = [[0.0] * like_RK.shape[1] for _ in choices]
    taken_CK = [[0.0] * like_RK.shape[1] for _ in choices]
    for among, taken, choice in zip(among_CK, taken_CK, choices, strict=True):
        for k in choice.among:
            among[k] = 1.0
        for k in choice.taken:
            taken[k] = 1 / len(choice.taken)
    rows = torch.tensor([choice.ranking for choice in choices], device=like_RK.device)
    return rows, like_RK.new_tensor(among_CK), like_RK.new_tensor(taken_CK)


@dataclass(frozen=True, slots=True)
class Spread(Sums):
    """Sums over the decided pairs: their number, and the standard deviation of the heads' margins."""

    num_decided: Tensor
    margin_spread: Tensor


@dataclass(frozen=True, slots=True)
class HeadsStats:
    """Statistics of several heads: those of their mean reward, with the loss that is the heads' mean, and the spread of
    their margins. Records of micro-batches add up.
    """

    mean: PreferenceStats | RankingStats
    spread: Spread

    def __add__(self, other: Self) -> "HeadsStats":
        return HeadsStats(self.mean + other.mean, self.spread + other.spread)  # type: ignore[operator]

    def metrics(self) -> dict[str, float]:
        """Those of the mean reward, and `margin_spread`, a mean over decided pairs."""
        sums, metrics = self.spread.floats(), self.mean.metrics()
        if sums["num_decided"] > 0:
            metrics["margin_spread"] = sums["margin_spread"] / sums["num_decided"]
        return metrics


HeadLoss = Callable[[Tensor, Tensor | None], tuple[Tensor, PreferenceStats | RankingStats]]
"""The loss, with its statistics, of the rewards `[R, K]` of one head and the weight of each pair or ranking `[R]`."""


def heads_loss(
    reward_RKH: Tensor, rank_RK: Tensor, weight_RH: Tensor | None, loss_of: HeadLoss
) -> tuple[Tensor, HeadsStats]:
    """Scalar loss, the mean of `loss_of` over H heads, two at least, and detached statistics.

    Each head learns its own bootstrap sample of R pairs or rankings (Osband et al. 2016, arXiv 1602.04621): `weight_RH`
    says how often each is in it, as `bootstrap_weights` draws; without weights each counts once. `rank_RK` has the
    places, 1 the best, 0 in the padding. The gradient of the trunk is the mean over the heads; that of a head is 1/H of
    what it were alone, which an update of Adam does not depend on.
    """
    found = [
        loss_of(reward_RKH[..., h], None if weight_RH is None else weight_RH[:, h]) for h in range(reward_RKH.shape[-1])
    ]
    loss = torch.stack([one for one, _ in found]).mean()
    wide_RKH = reward_RKH.detach()
    of_mean = loss_of(wide_RKH.mean(-1), None)[1]
    of_heads = torch.stack([stats.loss for _, stats in found]).mean()
    return loss, HeadsStats(replace(of_mean, loss=of_heads), _spread(wide_RKH, rank_RK.to(wide_RKH.device)))


def _spread(reward_RKH: Tensor, rank_RK: Tensor) -> Spread:
    present_RK = rank_RK > 0
    reward_RKH = kept(reward_RKH, present_RK[..., None].expand_as(reward_RKH)).double()
    spread_RKK = (reward_RKH[:, :, None] - reward_RKH[:, None, :]).std(-1)
    decided_RKK = present_RK[:, :, None] & (rank_RK[:, :, None] < rank_RK[:, None, :])
    return Spread(total(decided_RKK), total(kept(spread_RKK, decided_RKK)))


@dataclass(frozen=True, slots=True)
class LeftOut(Sums):
    """Sums over pairs; records of micro-batches add up."""

    num_pairs: Tensor
    num_left_out: Tensor

    def metrics(self) -> dict[str, float]:
        """`left_out`, the share of the pairs."""
        sums = self.floats()
        return {"left_out": sums["num_left_out"] / sums["num_pairs"]}


def uncontradicted(margin_NK: Tensor, tie_N: Tensor, confidence: float) -> tuple[Tensor, LeftOut]:
    """(weight_N: 0 for each of N pairs of which every one of K heads says, with the probability `confidence` at least,
    that the other answer is better, 1 for all others and for ties; how many these are).

    A head's probability of the other answer is sigmoid(-margin). Nothing of it is differentiable.
    """
    most = -math.log(confidence / (1 - confidence))
    against_N = (margin_NK.detach() <= most).all(dim=-1) & ~tie_N
    return (~against_N).to(margin_NK.dtype), LeftOut(total(torch.ones_like(against_N)), total(against_N))


def bootstrap_weights(keys: Sequence[str], num_heads: int, seed: int) -> Tensor:
    """How often each of R items is in the bootstrap sample of each of H heads, float32 `[R, H]`: from a Poisson
    distribution with mean 1, the limit of drawing as many with replacement (Oza and Russell 2001).

    A weight is a function of `seed`, the item's key and the head, so it is the same in each epoch and after a restart;
    items of one key are drawn together.
    """
    rows = [[_poisson(derive(seed, "bootstrap", key, head)) for head in range(num_heads)] for key in keys]
    return torch.tensor(rows, dtype=torch.float32).reshape(len(keys), num_heads)


def _poisson(draw: int) -> int:
    """The quantile of a Poisson distribution with mean 1 at the share `draw` / 2^63."""
    share, number, density = draw / 2**63, 0, math.exp(-1)
    while share >= density and number < _MOST_COPIES:
        share, number = share - density, number + 1
        density /= number
    return number


_MOST_COPIES = 16
"""Beyond this a Poisson variable of mean 1 has a probability below 1e-14."""
