import math
from functools import partial
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gae_cases import gae_loop
from tunesmith.base.core.errors import InputError
from tunesmith.learn.algorithms import advantages

seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 7)


def batch(seed, num_sequences, num_tokens):
    """Rewards, values and a right-padded mask with rows of 0 to `num_tokens` tokens, fp64."""
    generator = torch.Generator().manual_seed(seed)
    reward_BT = torch.randn(num_sequences, num_tokens, generator=generator, dtype=torch.float64)
    value_BT = torch.randn(num_sequences, num_tokens, generator=generator, dtype=torch.float64)
    lengths_B = torch.randint(0, num_tokens + 1, (num_sequences,), generator=generator)
    return reward_BT, value_BT, torch.arange(num_tokens)[None] < lengths_B[:, None]


def gae_twin(rewards, values, gamma, lam):
    """Advantages of one unpadded row as the explicit sum over later deltas, equation 16 of the paper."""
    following = [*values[1:], 0.0][: len(values)]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, following, strict=True)]
    return [math.fsum((gamma * lam) ** k * deltas[t + k] for k in range(len(deltas) - t)) for t in range(len(deltas))]


@given(seed=seeds, num_sequences=sizes, num_tokens=sizes, gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_both_forms_equal_the_explicit_sum(seed, num_sequences, num_tokens, gamma, lam):
    reward_BT, value_BT, mask_BT = batch(seed, num_sequences, num_tokens)
    for function in (advantages.gae, partial(advantages.gae, by="loop"), gae_loop):
        advantage_BT, return_BT = function(reward_BT, value_BT, mask_BT, gamma, lam)
        for b, length in enumerate(mask_BT.sum(1).tolist()):
            twin = gae_twin(reward_BT[b, :length].tolist(), value_BT[b, :length].tolist(), gamma, lam)
            padding = [0.0] * (num_tokens - length)
            assert advantage_BT[b].tolist() == pytest.approx(twin + padding, abs=1e-10)
            returns = [a + v for a, v in zip(twin, value_BT[b, :length].tolist(), strict=True)]
            assert return_BT[b].tolist() == pytest.approx(returns + padding, abs=1e-10)


@given(seed=seeds, num_tokens=sizes)
def test_skipped_positions_may_lie_anywhere_in_a_row(seed, num_tokens):
    reward_BT, value_BT, _ = batch(seed, 1, num_tokens)
    mask_BT = torch.rand(1, num_tokens, generator=torch.Generator().manual_seed(seed)) < 0.5
    without = advantages.gae(
        reward_BT[mask_BT][None], value_BT[mask_BT][None], torch.ones(1, int(mask_BT.sum())), 0.9, 0.8
    )
    for function in (advantages.gae, partial(advantages.gae, by="loop"), gae_loop):
        advantage_BT, return_BT = function(reward_BT, value_BT, mask_BT, 0.9, 0.8)
        torch.testing.assert_close(advantage_BT[mask_BT][None], without.advantage_BT)
        torch.testing.assert_close(return_BT[mask_BT][None], without.return_BT)
        assert not advantage_BT[~mask_BT].any() and not return_BT[~mask_BT].any()


@given(seed=seeds, num_padding=st.integers(0, 4), garbage=st.sampled_from([float("nan"), float("inf"), 1e30]))
def test_padding_changes_nothing(seed, num_padding, garbage):
    reward_BT, value_BT, mask_BT = batch(seed, 3, 5)
    plain = advantages.gae(reward_BT, value_BT, mask_BT, 0.99, 0.95)
    padding = torch.full((3, num_padding), garbage, dtype=torch.float64)
    reward_BT, value_BT = (torch.cat([x.masked_fill(~mask_BT, garbage), padding], 1) for x in (reward_BT, value_BT))
    mask_BT = torch.cat([mask_BT, torch.zeros(3, num_padding, dtype=torch.bool)], 1)
    padded = advantages.gae(reward_BT, value_BT, mask_BT, 0.99, 0.95)
    assert torch.equal(padded.advantage_BT[:, :5], plain.advantage_BT) and not padded.advantage_BT[:, 5:].any()
    assert torch.equal(padded.return_BT[:, :5], plain.return_BT) and not padded.return_BT[:, 5:].any()


@given(seed=seeds, num_sequences=sizes, num_tokens=sizes, share=st.floats(0.05, 3))
def test_a_lambda_by_length_is_that_of_each_row(seed, num_sequences, num_tokens, share):
    reward_BT, value_BT, mask_BT = batch(seed, num_sequences, num_tokens)
    found = advantages.gae_by_length(reward_BT, value_BT, mask_BT, 0.9, share)
    for b, length in enumerate(mask_BT.sum(dim=1).tolist()):
        lam = max(0.0, 1 - 1 / (share * max(1, length)))
        twin = gae_twin(reward_BT[b, :length].tolist(), value_BT[b, :length].tolist(), 0.9, lam)
        padding = [0.0] * (num_tokens - length)
        assert found.advantage_BT[b].tolist() == pytest.approx(twin + padding, abs=1e-10)
        returns = [a + v for a, v in zip(twin, value_BT[b, :length].tolist(), strict=True)]
        assert found.return_BT[b].tolist() == pytest.approx(returns + padding, abs=1e-10)


def test_the_two_ends_of_lambda_are_reward_to_go_and_one_step_error():
    reward_BT, value_BT, _ = batch(0, 2, 6)
    mask_BT = torch.ones(2, 6, dtype=torch.bool)
    to_go_BT = reward_BT.flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(advantages.gae(reward_BT, value_BT, mask_BT, 1.0, 1.0).return_BT, to_go_BT)
    next_value_BT = torch.cat([value_BT[:, 1:], torch.zeros(2, 1)], 1)
    one_step = advantages.gae(reward_BT, value_BT, mask_BT, 0.9, 0.0).return_BT
    torch.testing.assert_close(one_step, reward_BT + 0.9 * next_value_BT)


def test_long_rows_stay_accurate_in_fp32():
    generator = torch.Generator().manual_seed(0)
    reward_BT, value_BT = torch.randn(2, 2, 4096, generator=generator).unbind()
    mask_BT = torch.ones(2, 4096, dtype=torch.bool)
    fast = advantages.gae(reward_BT, value_BT, mask_BT, 1.0, 0.95).advantage_BT
    torch.testing.assert_close(
        fast.double(), gae_loop(reward_BT, value_BT, mask_BT, 1.0, 0.95).advantage_BT, atol=1e-4, rtol=1e-4
    )


def test_targets_carry_no_gradient_and_bf16_is_widened():
    reward_BT, value_BT = torch.randn(2, 3, 4, requires_grad=True).unbind()
    mask_BT = torch.ones(3, 4, dtype=torch.long)
    result = advantages.gae(reward_BT, value_BT.bfloat16(), mask_BT, 1.0, 0.95)
    assert not result.advantage_BT.requires_grad and not result.return_BT.requires_grad
    assert result.advantage_BT.dtype == torch.float32
    assert not advantages.whiten(reward_BT, mask_BT).requires_grad


def test_an_empty_batch_gives_an_empty_result():
    assert advantages.gae(torch.zeros(2, 0), torch.zeros(2, 0), torch.zeros(2, 0), 1.0, 1.0).advantage_BT.shape == (
        2,
        0,
    )


def test_gae_refuses_bad_input():
    function, good = advantages.gae, torch.zeros(2, 3)
    with pytest.raises(InputError, match=r"reward_BT \(2,\)"):
        function(torch.zeros(2), good, good, 1.0, 0.95)
    with pytest.raises(InputError, match=r"gamma is 1\.5"):
        function(good, good, good, 1.5, 0.95)
    with pytest.raises(InputError, match="lam is nan"):
        function(good, good, good, 1.0, float("nan"))


def whiten_twin(numbers, shift_mean):
    mean = math.fsum(numbers) / len(numbers)
    variance = math.fsum((x - mean) ** 2 for x in numbers) / max(len(numbers) - 1, 1)
    return [(x - mean) / math.sqrt(variance + 1e-8) + (0.0 if shift_mean else mean) for x in numbers]


@given(seed=seeds, num_sequences=sizes, num_tokens=sizes, shift_mean=st.booleans(), scale=st.floats(0.01, 100))
def test_whitening_equals_its_twin(seed, num_sequences, num_tokens, shift_mean, scale):
    x_BT, _, mask_BT = batch(seed, num_sequences, num_tokens)
    x_BT = (x_BT + 1) * scale
    white_BT = advantages.whiten(x_BT, mask_BT, shift_mean)
    assert not white_BT[~mask_BT].any()
    if mask_BT.any():
        twin = whiten_twin(x_BT[mask_BT].tolist(), shift_mean)
        assert white_BT[mask_BT].tolist() == pytest.approx(twin, abs=1e-10, rel=1e-10)


@given(seed=seeds, offset=st.floats(-1e4, 1e4), scale=st.floats(0.1, 100), shift_mean=st.booleans())
def test_whitened_numbers_have_variance_one_and_mean_zero_or_their_own(seed, offset, scale, shift_mean):
    x_BT = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale + offset
    mask_BT = torch.ones(4, 8, dtype=torch.bool)
    mask_BT[0, 5:] = False
    white = advantages.whiten(x_BT.masked_fill(~mask_BT, float("nan")), mask_BT, shift_mean)[mask_BT]
    assert white.var().item() == pytest.approx(1, abs=1e-4)
    assert white.mean().item() == pytest.approx(0 if shift_mean else x_BT[mask_BT].mean().item(), abs=1e-8)


def test_one_or_equal_numbers_whiten_to_zero_not_to_nan():
    assert advantages.whiten(torch.tensor([[5.0]]), torch.ones(1, 1)).tolist() == [[0.0]]
    assert advantages.whiten(torch.full((2, 3), 0.1), torch.ones(2, 3)).abs().max() < 1e-6
    assert advantages.whiten(torch.ones(2, 3), torch.zeros(2, 3)).tolist() == [[0.0] * 3] * 2


def rewards(seed, num_prompts, num_completions):
    """Rewards, some groups all equal, and a mask in which some completions are dropped, fp64."""
    generator = torch.Generator().manual_seed(seed)
    reward_PG = torch.randn(num_prompts, num_completions, generator=generator, dtype=torch.float64)
    reward_PG[torch.rand(num_prompts, generator=generator) < 0.3] = 0.1
    return reward_PG, torch.rand(num_prompts, num_completions, generator=generator) < 0.7


def spread(numbers):
    """Unbiased standard deviation; 0 for fewer than two numbers."""
    if len(numbers) < 2:
        return 0.0
    mean = math.fsum(numbers) / len(numbers)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1))


def group_twin(reward_PG, valid_PG, baseline, scale):
    """The definition, completion by completion in plain fp64 numbers."""
    groups = [
        [number if counts else None for number, counts in zip(numbers, mask, strict=True)]
        for numbers, mask in zip(reward_PG.tolist(), valid_PG.tolist(), strict=True)
    ]
    over_all = spread([number for group in groups for number in group if number is not None])
    twin = []
    for group in groups:
        known = [number for number in group if number is not None]
        divisor = {"group": spread(known) + 1e-4, "batch": over_all + 1e-4}.get(scale, 1.0)
        for place, number in enumerate(group):
            others = [other for k, other in enumerate(group) if other is not None and k != place]
            compared = known if baseline == "mean" else others
            if number is None or len(set(known)) < 2:
                twin.append(0.0)
            else:
                twin.append((number - math.fsum(compared) / len(compared)) / divisor)
    if scale == "advantages":
        valid = [is_valid for row in valid_PG.tolist() for is_valid in row]
        over_advantages = spread([number for number, is_valid in zip(twin, valid, strict=True) if is_valid])
        twin = [number / (over_advantages + 1e-4) for number in twin]
    return twin


def mixture(seed, num_rewards=3, num_prompts=4, num_completions=5):
    """Several rewards of different size, NaN where one does not apply, some groups flat in one; weights; and a mask."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rewards, num_prompts, num_completions)
    part_RPG = (
        torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0 ** torch.arange(num_rewards)[:, None, None]
    )
    part_RPG[torch.rand(shape[:2], generator=generator) < 0.3] = 0.1
    part_RPG[torch.rand(shape, generator=generator) < 0.1] = math.nan
    valid_PG = (torch.rand(shape[1:], generator=generator) < 0.9) & ~part_RPG.isnan().all(dim=0)
    return part_RPG, torch.tensor([1.0, 0.5, -2.0], dtype=torch.float64)[:num_rewards], valid_PG


def mixture_twin(part_RPG, weight_R, valid_PG):
    """GDPO, reward by reward and group by group in plain fp64 numbers."""
    sums = {}
    for part_PG, weight in zip(part_RPG.tolist(), weight_R.tolist(), strict=True):
        for p, row in enumerate(part_PG):
            places = [g for g, number in enumerate(row) if valid_PG[p, g] and not math.isnan(number)]
            known = [row[g] for g in places]
            for g in places:
                gap = row[g] - math.fsum(known) / len(known) if len(set(known)) > 1 else 0.0
                sums[p, g] = sums.get((p, g), 0.0) + weight * gap / (spread(known) + 1e-4)
    for place in valid_PG.nonzero().tolist():
        sums.setdefault(tuple(place), 0.0)
    mean = math.fsum(sums.values()) / len(sums) if sums else 0.0
    divisor = spread(list(sums.values())) + 1e-4
    return {place: (number - mean) / divisor for place, number in sums.items()}


@given(seed=seeds)
def test_rewards_that_are_normalised_one_by_one_equal_their_twin(seed):
    part_RPG, weight_R, valid_PG = mixture(seed)
    result = advantages.normalized_sum(part_RPG, weight_R, valid_PG)
    twin = mixture_twin(part_RPG, weight_R, valid_PG)
    for p, g in torch.cartesian_prod(torch.arange(4), torch.arange(5)).tolist():
        assert result.advantage_PG[p, g].item() == pytest.approx(twin.get((p, g), 0.0), abs=1e-9, rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_rewards_that_are_normalised_one_by_one_are_trl_s_normalize_then_sum(trl_advantages, seed):
    part_RPG, weight_R, valid_PG = mixture(seed)
    part_RPG = torch.where(valid_PG & ~part_RPG.isnan().any(dim=0), part_RPG, math.nan)  # TRL knows no third state
    part_RPG[:, :, 0] = torch.arange(3.0)[:, None]  # a group is never empty
    valid_PG = ~part_RPG.isnan().any(dim=0)
    expected = trl_advantages(
        "GRPOTrainer",
        part_RPG[0],
        _calculate_rewards=lambda *_: part_RPG.flatten(1).T.float().clone(),
        multi_objective_aggregation="normalize_then_sum",
        reward_func_names=["a", "b", "c"],
        reward_funcs=[None] * 3,
        reward_weights=weight_R.float(),
    )
    result = advantages.normalized_sum(part_RPG.float(), weight_R, valid_PG)
    torch.testing.assert_close(result.advantage_PG, expected, atol=1e-5, rtol=1e-4)


def test_a_reward_of_small_spread_counts_as_much_as_one_of_large_spread():
    part_RPG = torch.tensor([[[0.0, 1.0, 0.0, 1.0]], [[0.0, 0.0, 900.0, 900.0]]])
    valid_PG, equal_R = torch.ones(1, 4, dtype=torch.bool), torch.ones(2)
    advantage_PG = advantages.normalized_sum(part_RPG, equal_R, valid_PG).advantage_PG
    assert advantage_PG[0, 1].item() == pytest.approx(advantage_PG[0, 2].item(), abs=1e-3)
    summed_PG = advantages.group_relative(part_RPG.sum(0), valid_PG).advantage_PG
    assert summed_PG[0, 2] - summed_PG[0, 1] > 1.5


def test_groups_vary_if_any_reward_does_and_flat_groups_have_advantages_of_exactly_zero():
    part_RPG = torch.tensor([[[0.1, 0.1, 0.1], [0.1, 0.1, 0.1]], [[1 / 3, 1 / 3, 1 / 3], [0.0, 1.0, 0.0]]])
    result = advantages.normalized_sum(part_RPG, torch.ones(2), torch.ones(2, 3, dtype=torch.bool))
    assert result.varies_P.tolist() == [False, True]
    assert result.advantage_PG[0].tolist() == [0.0] * 3
    alone = advantages.normalized_sum(part_RPG[1:], torch.ones(1), torch.ones(2, 3, dtype=torch.bool))
    assert torch.equal(alone.advantage_PG, result.advantage_PG)
    with pytest.raises(InputError, match="valid_PG"):
        advantages.normalized_sum(part_RPG, torch.ones(2), torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(InputError, match="weight_R"):
        advantages.normalized_sum(part_RPG, torch.ones(3), torch.ones(2, 3, dtype=torch.bool))


baselines = st.sampled_from(["mean", "leave_one_out"])
scales = st.sampled_from(["group", "batch", "advantages", "none"])


@given(seed=seeds, num_prompts=sizes, num_completions=sizes, baseline=baselines, scale=scales)
def test_group_advantages_equal_their_twin(seed, num_prompts, num_completions, baseline, scale):
    reward_PG, valid_PG = rewards(seed, num_prompts, num_completions)
    result = advantages.group_relative(reward_PG, valid_PG, baseline=baseline, scale=scale)
    twin = group_twin(reward_PG, valid_PG, baseline, scale)
    assert result.advantage_PG.flatten().tolist() == pytest.approx(twin, abs=1e-9, rel=1e-9)
    assert result.varies_P.tolist() == [
        len(set(group[mask].tolist())) > 1 for group, mask in zip(reward_PG, valid_PG, strict=True)
    ]


@given(seed=seeds, num_prompts=sizes, num_completions=sizes)
def test_a_baseline_weighted_by_lengths_equals_its_twin(seed, num_prompts, num_completions):
    reward_PG, valid_PG = rewards(seed, num_prompts, num_completions)
    length_PG = torch.randint(1, 9, reward_PG.shape, generator=torch.Generator().manual_seed(seed))
    options = {"baseline": "length_weighted", "scale": "none", "length_PG": length_PG}
    found_PG = advantages.group_relative(reward_PG, valid_PG, **options).advantage_PG
    for p, mask in enumerate(valid_PG.tolist()):
        known = [(float(r), int(n)) for r, n, ok in zip(reward_PG[p], length_PG[p], mask, strict=True) if ok]
        is_flat = len({reward for reward, _ in known}) < 2
        baseline = math.fsum(r * n for r, n in known) / max(1, sum(n for _, n in known))
        twin = [float(r) - baseline if ok and not is_flat else 0.0 for r, ok in zip(reward_PG[p], mask, strict=True)]
        assert found_PG[p].tolist() == pytest.approx(twin, abs=1e-9)
    by_std = advantages.group_relative(reward_PG, valid_PG, **{**options, "scale": "group"}).advantage_PG
    for p, mask in enumerate(valid_PG):
        torch.testing.assert_close(by_std[p], found_PG[p] / (spread(reward_PG[p][mask].tolist()) + 1e-4))
    with pytest.raises(InputError, match="length_PG"):
        advantages.group_relative(reward_PG, valid_PG, baseline="length_weighted")


@given(seed=seeds, num_completions=st.integers(2, 7), num=st.integers(2, 4))
def test_advantages_of_pass_at_k_are_means_over_all_sets_of_k(seed, num_completions, num):
    """Every set of k completions is right if one of them is; its advantage is shared by all of its completions."""
    generator = torch.Generator().manual_seed(seed)
    reward_PG = (torch.rand(3, num_completions, generator=generator) < 0.4).double()
    valid_PG = torch.rand(3, num_completions, generator=generator) < 0.8
    found = advantages.pass_at(num, reward_PG, valid_PG)
    for p, mask in enumerate(valid_PG.tolist()):
        known = [g for g, ok in enumerate(mask) if ok]
        sets = [(one, max(float(reward_PG[p, g]) for g in one)) for one in combinations(known, num)]
        mean = math.fsum(r for _, r in sets) / len(sets) if sets else 0.0
        spread = math.sqrt(math.fsum((r - mean) ** 2 for _, r in sets) / len(sets)) if sets else 0.0
        twin = [0.0] * num_completions
        for g in known if spread > 0 else ():
            own = [(r - mean) / spread for one, r in sets if g in one]
            twin[g] = math.fsum(own) / len(own)
        assert found.advantage_PG[p].tolist() == pytest.approx(twin, abs=1e-9)
        assert bool(found.varies_P[p]) == (spread > 0)


def test_short_ones_are_rewarded_and_wrong_ones_gain_nothing():
    reward_PG = torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 1.0, 0.0]])
    length_PG = torch.tensor([[4, 8, 2, 10], [3, 3, 3, 9], [5, 5, 5, 5]])
    valid_PG = torch.tensor([[True] * 4, [True, True, True, False], [True] * 4])
    found = advantages.length_reward(reward_PG, length_PG, valid_PG)
    assert found.tolist() == [[0.25, -0.25, 0.0, -0.5], [0.0] * 4, [0.0] * 4]


def test_pass_at_k_needs_rewards_of_zero_and_one():
    with pytest.raises(InputError, match=r"a reward is 0\.5, but pass_at needs rewards of 0"):
        advantages.pass_at(2, torch.tensor([[0.0, 0.5, 1.0]]), torch.ones(1, 3, dtype=torch.bool))


@given(seed=seeds, num_prompts=sizes, num_completions=sizes)
def test_divided_by_the_mean_advantages_are_the_gradient_of_the_log_of_the_mean(seed, num_prompts, num_completions):
    """d log(mean r) = sum of (r - mean) / mean of the score function, over the completions of a group (MaxRL)."""
    reward_PG, valid_PG = rewards(seed, num_prompts, num_completions)
    reward_PG = reward_PG.abs()
    result = advantages.group_relative(reward_PG, valid_PG, scale="mean")
    twin = []
    for numbers, mask in zip(reward_PG.tolist(), valid_PG.tolist(), strict=True):
        known = [number for number, counts in zip(numbers, mask, strict=True) if counts]
        mean = math.fsum(known) / max(1, len(known))
        is_flat = len(set(known)) < 2
        twin += [
            (number - mean) / mean if counts and not is_flat else 0.0
            for number, counts in zip(numbers, mask, strict=True)
        ]
    assert result.advantage_PG.flatten().tolist() == pytest.approx(twin, abs=1e-9, rel=1e-9)


def test_rewards_below_zero_cannot_be_divided_by_their_mean():
    with pytest.raises(InputError, match=r"a reward is -0\.5, but the scale `mean` divides by the mean"):
        advantages.group_relative(torch.tensor([[1.0, -0.5]]), scale="mean")
    flat = advantages.group_relative(torch.zeros(1, 3), scale="mean")
    assert flat.advantage_PG.tolist() == [[0.0, 0.0, 0.0]] and flat.varies_P.tolist() == [False]


@pytest.mark.parametrize("num_completions", [2, 5])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_advantages_are_those_of_trl_s_grpo_trainer(scale, num_completions, trl_advantages):
    reward_PG, valid_PG = (x for x in rewards(3, 6, num_completions))
    expected = trl_advantages("GRPOTrainer", reward_PG.masked_fill(~valid_PG, math.nan).float(), scale_rewards=scale)
    result = advantages.group_relative(reward_PG.float(), valid_PG, scale=scale)
    # Where all rewards of a group are equal, TRL leaves the rounding error of their mean, divided by 1e-4.
    torch.testing.assert_close(result.advantage_PG, expected, atol=2e-4, rtol=1e-5)
    varied = valid_PG & result.varies_P[:, None]
    torch.testing.assert_close(result.advantage_PG[varied], expected[varied], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("num_completions", [2, 5])
def test_leave_one_out_advantages_are_those_of_trl_s_rloo_trainer(num_completions, trl_advantages):
    reward_PG, valid_PG = rewards(4, 6, num_completions)
    expected = trl_advantages(
        "RLOOTrainer", reward_PG.masked_fill(~valid_PG, math.nan).float(), normalize_advantages=False
    )
    result = advantages.group_relative(reward_PG.float(), valid_PG, baseline="leave_one_out", scale="none")
    torch.testing.assert_close(result.advantage_PG, expected, atol=1e-6, rtol=1e-5)


@given(seed=seeds)
def test_the_greedy_baseline_is_taken_off_each_reward_and_equal_rewards_may_differ_from_it(seed):
    reward_PG, valid_PG = rewards(seed, 5, 3)
    reward_PG[0] = 0.5
    greedy_P = torch.tensor([0.5, 0.5, 1.0, -1.0, 0.0])
    found = advantages.group_relative(reward_PG, valid_PG, baseline="greedy", scale="none", greedy_P=greedy_P)
    for p, (row, is_valid) in enumerate(zip(reward_PG.tolist(), valid_PG.tolist(), strict=True)):
        gaps = [(reward - greedy_P[p].item()) * valid for reward, valid in zip(row, is_valid, strict=True)]
        assert found.advantage_PG[p].tolist() == pytest.approx(gaps, abs=1e-12)
        assert found.varies_P[p].item() == any(gaps)
    assert not found.varies_P[0]
    with pytest.raises(InputError, match="give greedy_P"):
        advantages.group_relative(reward_PG, valid_PG, baseline="greedy", scale="none")


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e8 + 0.7, -0.0])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_group_of_equal_rewards_has_advantages_of_exactly_zero(reward, baseline, scale, dtype):
    reward_PG = torch.full((2, 7), reward, dtype=dtype)
    reward_PG[1, 3] += 1
    result = advantages.group_relative(reward_PG, baseline=baseline, scale=scale)
    assert result.advantage_PG[0].tolist() == [0.0] * 7
    assert result.varies_P.tolist() == [False, reward_PG[1, 3].item() != reward_PG[1, 0].item()]


@given(
    seed=seeds, garbage=st.sampled_from([math.nan, math.inf, -math.inf, 1e30, 0.0]), baseline=baselines, scale=scales
)
def test_a_dropped_completion_counts_for_nothing(seed, garbage, baseline, scale):
    reward_PG, valid_PG = rewards(seed, 3, 5)
    plain = advantages.group_relative(reward_PG, valid_PG, baseline=baseline, scale=scale)
    reward_PG = reward_PG.masked_fill(~valid_PG, garbage)
    again = advantages.group_relative(reward_PG, valid_PG, baseline=baseline, scale=scale)
    assert torch.equal(plain.advantage_PG, again.advantage_PG) and torch.equal(plain.varies_P, again.varies_P)
    assert not plain.advantage_PG[~valid_PG].any()
    if scale not in ("batch", "advantages"):  # each group is what it would be without its dropped completions
        for p in range(3):
            known = reward_PG[p][valid_PG[p]][None]
            alone = advantages.group_relative(known, baseline=baseline, scale=scale) if known.numel() else None
            if alone is not None:
                torch.testing.assert_close(again.advantage_PG[p][valid_PG[p]], alone.advantage_PG[0])


@given(seed=seeds, shift=st.floats(-100, 100), baseline=baselines, scale=scales)
def test_a_reward_added_to_a_whole_group_changes_nothing(seed, shift, baseline, scale):
    reward_PG, valid_PG = rewards(seed, 4, 5)
    moved_PG = reward_PG + shift * (1 if scale == "batch" else torch.arange(4.0)[:, None])
    plain, moved = (
        advantages.group_relative(x, valid_PG, baseline=baseline, scale=scale).advantage_PG
        for x in (reward_PG, moved_PG)
    )
    torch.testing.assert_close(moved, plain, atol=1e-8, rtol=1e-8)


@given(seed=seeds, scale=scales)
def test_advantages_of_a_group_sum_to_zero(seed, scale):
    reward_PG, valid_PG = rewards(seed, 4, 6)
    advantage_PG = advantages.group_relative(reward_PG, valid_PG, scale=scale).advantage_PG
    assert advantage_PG.sum(1).tolist() == pytest.approx([0.0] * 4, abs=1e-9)


@given(seed=seeds, factor=st.floats(0.5, 100))
def test_the_scale_of_rewards_does_not_matter_once_it_is_divided_out(seed, factor):
    reward_PG = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for scale in ("group", "batch", "advantages"):
        plain, scaled = (
            advantages.group_relative(x, scale=scale).advantage_PG for x in (reward_PG, factor * reward_PG)
        )
        torch.testing.assert_close(scaled, plain, atol=1e-3, rtol=1e-2)


@given(seed=seeds, num_completions=st.integers(2, 7))
def test_leave_one_out_is_the_mean_baseline_times_g_over_g_minus_one(seed, num_completions):
    reward_PG = torch.randn(3, num_completions, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mean, others = (
        advantages.group_relative(reward_PG, baseline=baseline, scale="none").advantage_PG
        for baseline in ("mean", "leave_one_out")
    )
    torch.testing.assert_close(others, mean * num_completions / (num_completions - 1))


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_completion_alone_in_its_group_has_advantage_zero(baseline, scale):
    result = advantages.group_relative(torch.tensor([[3.0], [-2.0]]), baseline=baseline, scale=scale)
    assert result.advantage_PG.tolist() == [[0.0], [0.0]] and result.varies_P.tolist() == [False, False]
    one_left = torch.tensor([[True, False, False]])
    result = advantages.group_relative(torch.tensor([[3.0, 1.0, 2.0]]), one_left, baseline=baseline, scale=scale)
    assert result.advantage_PG.tolist() == [[0.0] * 3] and result.varies_P.tolist() == [False]


def test_group_advantages_carry_no_gradient_widen_bf16_and_need_one_shape():
    reward_PG = torch.randn(2, 3, requires_grad=True)
    assert not advantages.group_relative(reward_PG).advantage_PG.requires_grad
    assert advantages.group_relative(reward_PG.bfloat16()).advantage_PG.dtype == torch.float32
    with pytest.raises(InputError, match="valid_PG"):
        advantages.group_relative(reward_PG, torch.ones(3, 2))


def among_states_twin(rewards, states, lengths, discount, scale):
    """GiGPO's step advantages in plain loops: one list of returns for each state of a group."""
    found = [[[0.0] * len(row) for row in group] for group in rewards]
    for p, group in enumerate(rewards):
        members: dict[int, list[tuple[int, int, float]]] = {}
        for g, row in enumerate(group):
            for k in range(lengths[p][g]):
                value = sum(discount ** (later - k) * row[later] for later in range(k, lengths[p][g]))
                members.setdefault(states[p][g][k], []).append((g, k, value))
        for turns in members.values():
            returns = [value for *_, value in turns]
            mean = math.fsum(returns) / len(returns)
            if max(returns) == min(returns):
                continue
            spread = math.sqrt(math.fsum((value - mean) ** 2 for value in returns) / (len(returns) - 1)) + 1e-4
            for g, k, value in turns:
                found[p][g][k] = (value - mean) / (spread if scale == "group" else 1.0)
    return found


@given(
    seed=seeds,
    shape=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4)),
    num_states=st.integers(1, 4),
    discount=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    scale=st.sampled_from(["group", "none"]),
)
def test_advantages_among_turns_of_one_state_equal_their_twin(seed, shape, num_states, discount, scale):
    generator = torch.Generator().manual_seed(seed)
    reward_PGK = torch.randn(shape, generator=generator, dtype=torch.float64)
    state_PGK = torch.randint(num_states, shape, generator=generator)
    length_PG = torch.randint(shape[2] + 1, shape[:2], generator=generator)
    has_turn_PGK = torch.arange(shape[2]) < length_PG[..., None]
    arguments = state_PGK, has_turn_PGK
    found = advantages.among_states(reward_PGK, *arguments, discount=discount, scale=scale)
    twin = among_states_twin(reward_PGK.tolist(), state_PGK.tolist(), length_PG.tolist(), discount, scale)
    expected_PGK = torch.tensor(twin, dtype=torch.float64).reshape(shape)
    torch.testing.assert_close(found.advantage_PGK, expected_PGK, atol=1e-9, rtol=1e-9)
    garbage_PGK = torch.where(has_turn_PGK, reward_PGK, 1e30)
    again = advantages.among_states(garbage_PGK, *arguments, discount=discount, scale=scale)
    assert torch.equal(again.advantage_PGK, found.advantage_PGK)
    for p, g, k in has_turn_PGK.nonzero().tolist():
        same = (state_PGK[p] == state_PGK[p, g, k]) & has_turn_PGK[p]
        assert found.is_shared_PGK[p, g, k] == (same.sum() > 1)


def test_turns_of_no_trajectory_and_of_another_group_have_no_share_in_a_state():
    none = torch.zeros(2, 2, 0)
    assert advantages.among_states(none, none.long(), none.bool(), discount=1.0).advantage_PGK.shape == (2, 2, 0)
    reward_PGK = torch.tensor([[[1.0]], [[5.0]]])
    found = advantages.among_states(reward_PGK, torch.zeros(2, 1, 1).long(), torch.ones(2, 1, 1).bool(), discount=1.0)
    assert found.advantage_PGK.flatten().tolist() == [0.0, 0.0] and not found.is_shared_PGK.any()
    with pytest.raises(InputError, match="state_PGK"):
        advantages.among_states(reward_PGK, torch.zeros(2, 2, 1).long(), torch.ones(2, 1, 1).bool(), discount=1.0)
