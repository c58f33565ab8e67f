"""Generalised advantage estimation, whitening, and advantages relative to a group.

Shapes: B sequences, T completion tokens, P prompts, G completions per prompt. `mask_BT` is true where a token counts.
Positions outside it are skipped as if they were not there, and come out as 0. Advantages are targets: no gradient flows
through anything in this file.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tunesmith.base.config.algorithms.grpo import Baseline, Scale
from tunesmith.base.core.errors import InputError
from tunesmith.engine.kernels.gae import api as kernel
from tunesmith.engine.kernels.gae.torch_impl import Advantages
from tunesmith.engine.kernels.masking import check_shapes, kept, total
from tunesmith.engine.kernels.native import shared

GROUP_EPS = 1e-4
"""Added to a standard deviation before dividing by it, as TRL's GRPO does."""


def gae(
    reward_BT: Tensor,
    value_BT: Tensor,
    mask_BT: Tensor,
    gamma: float,
    lam: float,
    by: Literal["auto", "loop"] = "auto",
) -> Advantages:
    """Advantages and returns of each token, in fp32 or wider, without gradient: `kernels.gae.torch_impl` has equation
    and definition.

    `value_BT` is the value of the state before the token is drawn. The value after a row's last token is 0: a
    completion is an episode, whether it ended by itself or at the length limit. Runs in C++ or in Triton where
    available; in C++ the bits are those of the definition. `by="loop"` goes token by token in Python. Raises
    `InputError` if shapes differ or gamma or lam lies outside 0 to 1.
    """
    if by == "loop":
        return _gae_by_loop(reward_BT.detach(), value_BT.detach(), mask_BT, gamma, lam)
    return kernel.gae(reward_BT, value_BT, mask_BT, gamma, lam, kernels=shared("auto"))


def _gae_by_loop(reward_BT: Tensor, value_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float) -> Advantages:
    """The equation as textbooks write it in code."""
    advantage_BT, return_BT = torch.zeros_like(reward_BT), torch.zeros_like(reward_BT)
    num_rows, num_columns = mask_BT.shape
    for b in range(num_rows):
        next_value = next_advantage = reward_BT.new_zeros(())
        for t in reversed(range(num_columns)):
            if mask_BT[b, t]:
                delta = reward_BT[b, t] + gamma * next_value - value_BT[b, t]
                next_advantage = delta + gamma * lam * next_advantage
                next_value = value_BT[b, t]
                advantage_BT[b, t] = next_advantage
                return_BT[b, t] = next_advantage + next_value
    return Advantages(advantage_BT, return_BT)


def gae_by_length(
    reward_BT: Tensor, value_BT: Tensor, mask_BT: Tensor, gamma: float, lam_per_length: float
) -> Advantages:
    """As `gae`, with a lambda for each row: 1 - 1 / (`lam_per_length` l) for one of l tokens, at least 0.

    The weights of the temporal differences then sum to about `lam_per_length` l, a share of the completion, however
    long it is (VAPO, Yue et al. 2025, arXiv 2504.05118).
    """
    length_B = mask_BT.sum(dim=1)
    advantage_BT, return_BT = torch.zeros_like(value_BT + reward_BT), torch.zeros_like(value_BT + reward_BT)
    for length in length_B.unique().tolist():
        rows_B = length_B == length
        lam = max(0.0, 1 - 1 / (lam_per_length * max(1, length)))
        found = gae(reward_BT[rows_B], value_BT[rows_B], mask_BT[rows_B], gamma, lam)
        advantage_BT[rows_B], return_BT[rows_B] = found.advantage_BT, found.return_BT
    return Advantages(advantage_BT, return_BT)


def whiten(x_BT: Tensor, mask_BT: Tensor, shift_mean: bool = True) -> Tensor:
    """`x_BT` scaled to variance 1 and, with `shift_mean`, moved to mean 0, by the elements inside the mask.

    The result is 0 outside the mask, in fp32 or wider, and carries no gradient. The variance is the unbiased one
    (n - 1) and 1e-8 is added to it, as TRL's PPO did; a lone element has variance 0. Raises `InputError` if shapes
    differ.
    """
    check_shapes(x_BT=x_BT, mask_BT=mask_BT)
    mask_BT = mask_BT.bool()
    x_BT = kept(x_BT.detach(), mask_BT)
    wide_BT, num, value = x_BT.double(), total(mask_BT), total(x_BT.double())
    mean = value / num.clamp(min=1)
    variance = ((total(wide_BT.square()) - value * mean) / (num - 1).clamp(min=1)).clamp(min=0)
    whitened_BT = (wide_BT - mean) * torch.rsqrt(variance + 1e-8) + (0.0 if shift_mean else mean)
    return kept(whitened_BT, mask_BT).to(x_BT.dtype)


class GroupAdvantages(NamedTuple):
    """Advantages, 0 for completions that are not valid; and whether the rewards of a group differ at all."""

    advantage_PG: Tensor
    varies_P: Tensor


def group_relative(
    reward_PG: Tensor,
    valid_PG: Tensor | None = None,
    *,
    baseline: Baseline = "mean",
    scale: Scale = "group",
    length_PG: Tensor | None = None,
    greedy_P: Tensor | None = None,
) -> GroupAdvantages:
    """Reward of each completion minus a baseline of its group, divided by a spread; fp32 or wider, without gradient.

    `baseline="mean"` is GRPO (Shao et al. 2024, arXiv 2402.03300, section 4.1); `"leave_one_out"` is the mean of the
    *other* completions, RLOO (Ahmadian et al. 2024, arXiv 2402.14740, equation 8), which is G / (G - 1) times as far;
    `"length_weighted"` weighs each reward by the tokens of its completion, `length_PG`: the baseline of least variance
    where the square of a gradient grows with length (OPO, Hao et al. 2025, arXiv 2505.23585); `"greedy"` is
    `greedy_P`, the reward of the completion of likeliest tokens (ReMax, Li et al. 2023, arXiv 2310.10505, equation 8).
    `scale="group"` divides by the group's unbiased standard deviation plus `GROUP_EPS`; `"batch"` by that of all valid
    rewards, which keeps the weight of hard and easy prompts (Liu et al. 2025, arXiv 2508.08221); `"advantages"` by that
    of reward minus baseline (REINFORCE++-baseline, Hu et al. 2025, arXiv 2501.03262); `"none"` does not divide (Dr.
    GRPO, Liu et al. 2025, arXiv 2503.20783). `"mean"` divides by the group's mean reward: with rewards of 0 and 1 that
    is the gradient of the log of the rate of success (MaxRL, Tajwar et al. 2026, arXiv 2602.02710).
    Where all valid rewards of a group are equal (with `"greedy"`: to that one) its advantages are exactly 0. Only
    completions with `valid_PG` take part. Raises `InputError` if shapes differ, or for rewards below 0 with
    `scale="mean"`.
    """
    valid_PG = torch.ones_like(reward_PG, dtype=torch.bool) if valid_PG is None else valid_PG.bool()
    check_shapes(reward_PG=reward_PG, valid_PG=valid_PG)
    reward_PG = kept(reward_PG.detach(), valid_PG)
    num_P1 = valid_PG.sum(dim=1, keepdim=True)
    mean_P1 = reward_PG.sum(dim=1, keepdim=True) / num_P1.clamp(min=1)
    varies_P1 = rewards_differ(reward_PG, valid_PG)[:, None]
    baseline_P1 = mean_P1
    if baseline == "length_weighted":
        if length_PG is None:
            raise InputError("the baseline `length_weighted` needs the lengths of the completions; give length_PG")
        weight_PG = kept(length_PG.to(reward_PG), valid_PG)
        baseline_P1 = (weight_PG * reward_PG).sum(dim=1, keepdim=True) / weight_PG.sum(dim=1, keepdim=True).clamp(min=1)
    if baseline == "greedy":
        if greedy_P is None:
            raise InputError("the baseline `greedy` needs the rewards of the greedy completions; give greedy_P")
        baseline_P1 = greedy_P.to(reward_PG)[:, None]
        varies_P1 = differs_from(reward_PG, greedy_P, valid_PG)[:, None]
    advantage_PG = kept(reward_PG - baseline_P1, valid_PG & varies_P1)
    gap_PG = advantage_PG if baseline in ("mean", "leave_one_out") else kept(reward_PG - mean_P1, valid_PG & varies_P1)
    std_P1 = ((gap_PG.square().sum(dim=1, keepdim=True)) / (num_P1 - 1).clamp(min=1)).sqrt()
    if baseline == "leave_one_out":
        advantage_PG = advantage_PG * num_P1 / (num_P1 - 1).clamp(min=1)
    if scale == "group":
        advantage_PG = advantage_PG / (std_P1 + GROUP_EPS)
    elif scale == "mean":
        if (reward_PG < 0).any():
            raise InputError(
                f"a reward is {reward_PG.min():g}, but the scale `mean` divides by the mean of a group's rewards, "
                "which must be 0 or more; take another scale, or shift the rewards"
            )
        advantage_PG = advantage_PG / torch.where(varies_P1, mean_P1, 1.0)
    elif scale != "none":
        known = (reward_PG if scale == "batch" else advantage_PG)[valid_PG]
        advantage_PG = advantage_PG / (_std(known) + GROUP_EPS)
    return GroupAdvantages(advantage_PG, varies_P1[:, 0])


class StateAdvantages(NamedTuple):
    """Advantages of turns, 0 where there is no turn; and whether another turn of the group has the same state."""

    advantage_PGK: Tensor
    is_shared_PGK: Tensor


def among_states(
    reward_PGK: Tensor,
    state_PGK: Tensor,
    has_turn_PGK: Tensor,
    *,
    discount: float,
    baseline: Baseline = "mean",
    scale: Scale = "group",
) -> StateAdvantages:
    """Advantage of each turn among the turns of its group that began in the same state, `[P, G, K]`: 0 for a turn whose
    state no other has.

    The advantage of a step in GiGPO (Feng et al. 2025, arXiv 2505.10978, section 4.2): the discounted return of turn k,
    the sum of `discount`^(l - k) times the reward of each turn l from k on, compared by `group_relative` with those of
    all turns that have its number in `state_PGK`. A trajectory may come to a state several times. `has_turn_PGK` is
    true for the turns that there are, which are the first ones of their row. Raises `InputError` if shapes differ.
    """
    check_shapes(reward_PGK=reward_PGK, state_PGK=state_PGK, has_turn_PGK=has_turn_PGK)
    return_PGK = kept(reward_PGK.detach(), has_turn_PGK)
    for k in reversed(range(return_PGK.shape[-1] - 1)):
        return_PGK[..., k] += discount * return_PGK[..., k + 1]
    prompt_PGK = torch.arange(len(state_PGK), device=state_PGK.device)[:, None, None].expand_as(state_PGK)
    keys_N2 = torch.stack([prompt_PGK[has_turn_PGK], state_PGK[has_turn_PGK]], dim=1)
    _, row_N, size_S = torch.unique(keys_N2, dim=0, return_inverse=True, return_counts=True)
    order_N = row_N.argsort(stable=True)
    first_N = (size_S.cumsum(0) - size_S)[row_N]  # where the turns of a state begin in their order
    column_N = torch.empty_like(row_N).scatter(0, order_N, torch.arange(len(row_N), device=row_N.device)) - first_N
    return_SM = return_PGK.new_zeros(len(size_S), max([1, *size_S.tolist()]))
    return_SM[row_N, column_N] = return_PGK[has_turn_PGK]
    is_there_SM = torch.zeros_like(return_SM, dtype=torch.bool)
    is_there_SM[row_N, column_N] = True
    found_SM = group_relative(return_SM, is_there_SM, baseline=baseline, scale=scale).advantage_PG
    advantage_PGK, is_shared_PGK = torch.zeros_like(return_PGK), torch.zeros_like(has_turn_PGK)
    advantage_PGK[has_turn_PGK] = found_SM[row_N, column_N]
    is_shared_PGK[has_turn_PGK] = (size_S > 1)[row_N]
    return StateAdvantages(advantage_PGK, is_shared_PGK)


def length_reward(reward_PG: Tensor, length_PG: Tensor, valid_PG: Tensor) -> Tensor:
    """Reward of each completion for being short beside the others of its group, from -0.5 to 0.5, `[P, G]`.

    With l the tokens of a completion, x = 0.5 - (l - min l) / (max l - min l) over the valid ones of the group. One
    that is right, with a reward above 0, gets x; another one min(0, x), so that a wrong one gains nothing by being
    short (Kimi k1.5, arXiv 2501.12599). 0 where all lengths are equal.
    """
    check_shapes(reward_PG=reward_PG, length_PG=length_PG, valid_PG=valid_PG)
    length_PG = length_PG.to(reward_PG)
    least_P1 = length_PG.masked_fill(~valid_PG, torch.inf).amin(dim=1, keepdim=True)
    range_P1 = length_PG.masked_fill(~valid_PG, -torch.inf).amax(dim=1, keepdim=True) - least_P1
    x_PG = 0.5 - (length_PG - least_P1) / range_P1
    return kept(torch.where(reward_PG > 0, x_PG, x_PG.clamp(max=0)), valid_PG & (range_P1 > 0))


def pass_at(num: int, reward_PG: Tensor, valid_PG: Tensor) -> GroupAdvantages:
    """Advantages for the chance that one of `num` completions is right, from rewards of 0 and 1; without gradient.

    A group of N valid completions, W of them wrong, has the chance R = 1 - C(W, num) / C(N, num), averaged over all its
    sets of `num`. With s = sqrt(R (1 - R)), a right completion has (1 - R) / s, a wrong one
    (1 - R - C(W - 1, num - 1) / C(N - 1, num - 1)) / s: the mean advantage of the sets that it is in (Chen et al. 2025,
    arXiv 2508.10751). A group in which R is 0 or 1 has advantages of 0.

    Raises:
        InputError: shapes differ, or a reward is neither 0 nor 1.
    """
    check_shapes(reward_PG=reward_PG, valid_PG=valid_PG)
    valid_PG, reward_PG = valid_PG.bool(), reward_PG.detach()
    others = reward_PG[valid_PG & (reward_PG != 0) & (reward_PG != 1)]
    if others.numel():
        raise InputError(f"a reward is {others[0]:g}, but pass_at needs rewards of 0 (wrong) and 1 (right)")
    is_right_PG = valid_PG & (reward_PG == 1)
    advantage_PG = torch.zeros_like(reward_PG)
    for p, (valid_G, is_right_G) in enumerate(zip(valid_PG, is_right_PG, strict=True)):
        num_valid, num_wrong = int(valid_G.sum()), int((valid_G & ~is_right_G).sum())
        if num_valid < num or num_wrong == num_valid or num_wrong < num:
            continue  # no set is whole, or all sets are wrong, or all are right
        chance = 1 - math.comb(num_wrong, num) / math.comb(num_valid, num)
        spread = math.sqrt(chance * (1 - chance))
        wrong = (1 - chance - math.comb(num_wrong - 1, num - 1) / math.comb(num_valid - 1, num - 1)) / spread
        right_and_wrong = reward_PG.new_tensor([(1 - chance) / spread, wrong])
        advantage_PG[p] = kept(torch.where(is_right_G, *right_and_wrong), valid_G)
    return GroupAdvantages(advantage_PG, (advantage_PG != 0).any(dim=1))


def normalized_sum(part_RPG: Tensor, weight_R: Tensor, valid_PG: Tensor) -> GroupAdvantages:
    """Advantages from R rewards, each compared within its own group, then added with their weights and scaled together.

    `part_RPG` holds the rewards without their weights, NaN where one does not apply: there it counts nothing. GDPO
    (Liu et al. 2026, arXiv 2601.05242): each reward loses its group's mean and is divided by its group's unbiased
    standard deviation plus `GROUP_EPS`; the weighted sums are divided likewise by that of all valid completions. So a
    reward of small spread counts as much as one of large spread, and different mixtures do not fall together. A group
    varies if any of its rewards does. Raises `InputError` if shapes differ.
    """
    check_shapes(part_PG=part_RPG[0], valid_PG=valid_PG)
    check_shapes(weight_R=weight_R, rewards_R=part_RPG[:, 0, 0])
    valid_PG, part_RPG = valid_PG.bool(), part_RPG.detach()
    compared = [group_relative(part_PG, valid_PG & ~part_PG.isnan()) for part_PG in part_RPG]
    varies_P = torch.stack([part.varies_P for part in compared]).any(dim=0)
    sum_PG = torch.stack([part.advantage_PG * w for part, w in zip(compared, weight_R, strict=True)]).sum(dim=0)
    # The sums of a group's parts are zero, and so is their mean; what is left of it is rounding.
    known = sum_PG[valid_PG]
    centred_PG = kept(sum_PG - (known.mean() if known.numel() else 0.0), valid_PG & varies_P[:, None])
    return GroupAdvantages(centred_PG / (_std(known) + GROUP_EPS), varies_P)


def _std(x_N: Tensor) -> Tensor:
    """Unbiased standard deviation, 0 of fewer than two numbers."""
    return x_N.std() if x_N.numel() > 1 else x_N.new_zeros(())


def rewards_differ(reward_PG: Tensor, valid_PG: Tensor) -> Tensor:
    """True for each group, shape P, in which two valid rewards differ. A mean would carry rounding errors."""
    high_P = reward_PG.masked_fill(~valid_PG, -torch.inf).amax(dim=1)
    low_P = reward_PG.masked_fill(~valid_PG, torch.inf).amin(dim=1)
    return high_P > low_P


def differs_from(reward_PG: Tensor, baseline_P: Tensor, valid_PG: Tensor) -> Tensor:
    """True for each group with a valid reward that is not `baseline_P`, shape `[P]`."""
    return ((reward_PG != baseline_P.to(reward_PG)[:, None]) & valid_PG).any(dim=1)


def highest(score_PG: Tensor, valid_PG: Tensor, num: int) -> Tensor:
    """True for the `num` valid completions of each group with the highest score, `[P, G]`; of equal ones the first."""
    order_PG = score_PG.masked_fill(~valid_PG, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    return torch.zeros_like(valid_PG).scatter(1, order_PG[:, :num], True) & valid_PG
