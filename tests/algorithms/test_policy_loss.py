import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import grad, gradcheck

from tunesmith.algorithms import policy_loss
from tunesmith.algorithms.sums import merged
from tunesmith.core.errors import InputError

seeds = st.integers(0, 2**32 - 1)
clips = st.floats(0.01, 0.5)


def batch(seed, num_sequences=4, num_tokens=5, spread=0.4, dtype=torch.float64):
    """Log-probs, those of the rollout, advantages and a right-padded mask with at least one token in each row."""
    generator = torch.Generator().manual_seed(seed)
    old_logp_BT = -3 * torch.rand(num_sequences, num_tokens, generator=generator, dtype=dtype)
    logp_BT = old_logp_BT + spread * torch.randn(num_sequences, num_tokens, generator=generator, dtype=dtype)
    advantage_BT = torch.randn(num_sequences, num_tokens, generator=generator, dtype=dtype)
    lengths_B = torch.randint(1, num_tokens + 1, (num_sequences,), generator=generator)
    mask_BT = torch.arange(num_tokens)[None] < lengths_B[:, None]
    return logp_BT.requires_grad_(), old_logp_BT, advantage_BT, mask_BT


def twin(logp, old_logp, advantage, clip_low, clip_high):
    """Loss of one token, its derivative by `logp`, and whether the clip cuts it below or above."""
    ratio = math.exp(logp) / math.exp(old_logp)
    if advantage > 0 and ratio > 1 + clip_high:
        return -(1 + clip_high) * advantage, 0.0, False, True
    if advantage < 0 and ratio < 1 - clip_low:
        return -(1 - clip_low) * advantage, 0.0, True, False
    return -ratio * advantage, -ratio * advantage, False, False


def tokens(*tensors_BT, mask_BT):
    """One tuple of numbers for each token inside the mask."""
    return list(zip(*(tensor[mask_BT].tolist() for tensor in tensors_BT), strict=True))


@given(seed=seeds, clip_low=clips, clip_high=clips, num_tokens=st.floats(1, 100))
def test_loss_gradient_and_statistics_equal_the_twin(seed, clip_low, clip_high, num_tokens):
    logp_BT, old_logp_BT, advantage_BT, mask_BT = batch(seed)
    loss, stats = policy_loss.clipped(logp_BT, old_logp_BT, advantage_BT, mask_BT, num_tokens, clip_low, clip_high)
    (gradient_BT,) = grad(loss, logp_BT)
    numbers = tokens(logp_BT, old_logp_BT, advantage_BT, mask_BT=mask_BT)
    twins = [twin(*number, clip_low, clip_high) for number in numbers]
    assert loss.item() == pytest.approx(math.fsum(t[0] for t in twins) / num_tokens, abs=1e-10)
    assert gradient_BT[mask_BT].tolist() == pytest.approx([t[1] / num_tokens for t in twins], abs=1e-10)
    assert not gradient_BT[~mask_BT].any()
    differences = [logp - old_logp for logp, old_logp, _ in numbers]
    low, high = sum(t[2] for t in twins) / len(twins), sum(t[3] for t in twins) / len(twins)
    ratios = [math.exp(d) for d in differences]
    mean_ratio = math.fsum(ratios) / len(ratios)
    expected = {
        "loss/policy_avg": math.fsum(t[0] for t in twins) / len(twins),
        "policy/approxkl_avg": math.fsum(d**2 / 2 for d in differences) / len(twins),
        "policy/clipfrac_avg": low + high,
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low + high,
        "val/ratio": mean_ratio,
        "val/ratio_var": math.fsum((r - mean_ratio) ** 2 for r in ratios) / len(ratios),
    }
    assert stats.metrics() == pytest.approx(expected, abs=1e-10)


def test_loss_passes_gradcheck():
    logp_BT, old_logp_BT, advantage_BT, mask_BT = batch(0)
    assert gradcheck(lambda x: policy_loss.clipped(x, old_logp_BT, advantage_BT, mask_BT, 9, 0.2, 0.3)[0], (logp_BT,))
    assert gradcheck(lambda x: policy_loss.entropy_bonus(x, mask_BT, 9), (logp_BT,))


@given(seed=seeds)
def test_the_first_pass_has_ratio_one_and_the_gradient_of_the_policy_gradient(seed):
    logp_BT, _, advantage_BT, mask_BT = batch(seed)
    num_tokens = int(mask_BT.sum())
    loss, stats = policy_loss.clipped(logp_BT, logp_BT.detach(), advantage_BT, mask_BT, num_tokens, 0.2, 0.2)
    metrics = stats.metrics()
    assert (metrics["val/ratio"], metrics["val/ratio_var"]) == (1.0, 0.0)
    assert metrics["policy/approxkl_avg"] == metrics["policy/clipfrac_avg"] == 0.0
    expected_BT = -(advantage_BT * mask_BT) / num_tokens
    torch.testing.assert_close(grad(loss, logp_BT)[0], expected_BT, atol=1e-14, rtol=0)


@given(seed=seeds, size=st.integers(1, 4), garbage=st.sampled_from([float("nan"), float("inf"), -1e30]))
def test_micro_batches_with_their_own_padding_add_up_to_the_full_batch(seed, size, garbage):
    logp_BT, old_logp_BT, advantage_BT, mask_BT = batch(seed)
    num_tokens = int(mask_BT.sum())
    loss, stats = policy_loss.clipped(logp_BT, old_logp_BT, advantage_BT, mask_BT, num_tokens, 0.2, 0.2)
    (gradient_BT,) = grad(loss, logp_BT)
    micro_losses, micro_stats = [], []
    for rows in torch.arange(4).split(size):
        longest = int(mask_BT[rows].sum(1).max())
        padded = [
            torch.cat(
                [x[rows, :longest].masked_fill(~mask_BT[rows, :longest], garbage), torch.full((len(rows), 2), garbage)],
                1,
            )
            for x in (logp_BT, old_logp_BT, advantage_BT)
        ]
        mask = torch.cat([mask_BT[rows, :longest], torch.zeros(len(rows), 2, dtype=torch.bool)], 1)
        micro_loss, micro_stat = policy_loss.clipped(*padded, mask, num_tokens, 0.2, 0.2)
        micro_losses.append(micro_loss)
        micro_stats.append(micro_stat)
    total = torch.stack(micro_losses).sum()
    assert total.item() == pytest.approx(loss.item(), abs=1e-12)
    torch.testing.assert_close(grad(total, logp_BT)[0], gradient_BT, atol=1e-14, rtol=0)
    assert merged(micro_stats).metrics() == pytest.approx(stats.metrics(), abs=1e-12)


@given(seed=seeds, num_tokens=st.floats(1, 100))
def test_entropy_bonus_equals_its_twin_and_ignores_padding(seed, num_tokens):
    entropy_BT, _, _, mask_BT = batch(seed)
    dirty_BT = entropy_BT.detach().masked_fill(~mask_BT, float("nan")).requires_grad_()
    bonus = policy_loss.entropy_bonus(dirty_BT, mask_BT, num_tokens)
    assert bonus.item() == pytest.approx(math.fsum(entropy_BT[mask_BT].tolist()) / num_tokens, abs=1e-10)
    torch.testing.assert_close(grad(bonus, dirty_BT)[0], mask_BT.double() / num_tokens)


@pytest.mark.parametrize("seed", range(4))
def test_loss_gradient_and_clip_ratios_equal_trl(trl_grpo_loss, seed):
    logp_BT, old_logp_BT, advantage_BT, mask_BT = batch(seed, 6, 7, dtype=torch.float32)
    entropy_BT = logp_BT.square()
    num_tokens = int(mask_BT.sum())
    arguments = (logp_BT, old_logp_BT, advantage_BT, mask_BT, num_tokens, 0.2, 0.28)
    theirs, expected = trl_grpo_loss(*arguments, entropy_BT=entropy_BT, entropy_coef=0.05)
    policy, stats = policy_loss.clipped(*arguments)
    bonus = policy_loss.entropy_bonus(entropy_BT, mask_BT, num_tokens)
    ours = policy - 0.05 * bonus
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-5)
    assert policy.item() == pytest.approx(expected["policy_loss"], abs=1e-5)
    assert bonus.item() == pytest.approx(expected["entropy"], abs=1e-5)
    torch.testing.assert_close(grad(ours, logp_BT, retain_graph=True)[0], grad(theirs, logp_BT)[0], atol=1e-5, rtol=0)
    for name in ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"):
        assert stats.metrics()[name] == pytest.approx(expected[name], abs=1e-6)
    assert stats.metrics()["policy/clipfrac_avg"] > 0


def test_statistics_are_detached_and_nothing_but_logp_gets_a_gradient():
    logp_BT, old_logp_BT, advantage_BT, mask_BT = batch(0)
    old_logp_BT.requires_grad_()
    advantage_BT.requires_grad_()
    loss, stats = policy_loss.clipped(logp_BT, old_logp_BT, advantage_BT, mask_BT.long(), torch.tensor(9.0), 0.2, 0.2)
    loss.backward()
    assert logp_BT.grad is not None and old_logp_BT.grad is None and advantage_BT.grad is None
    assert not stats.pack().requires_grad


def test_bf16_log_probs_give_an_fp32_loss():
    logp_BT, old_logp_BT, advantage_BT, mask_BT = (x.bfloat16() if x.is_floating_point() else x for x in batch(0))
    assert policy_loss.clipped(logp_BT, old_logp_BT, advantage_BT, mask_BT, 9, 0.2, 0.2)[0].dtype == torch.float32


def test_a_batch_without_tokens_has_no_loss_and_no_metrics():
    logp_BT, old_logp_BT, advantage_BT, mask_BT = batch(0)
    loss, stats = policy_loss.clipped(logp_BT, old_logp_BT, advantage_BT, mask_BT & False, 9, 0.2, 0.2)
    assert loss.item() == 0 and stats.metrics() == {}


def test_bad_input_is_refused():
    good = torch.zeros(2, 3)
    with pytest.raises(InputError, match=r"advantage_BT \(2,\)"):
        policy_loss.clipped(good, good, torch.zeros(2), good, 6, 0.2, 0.2)
    with pytest.raises(InputError, match="num_tokens is 0"):
        policy_loss.clipped(good, good, good, good, 0, 0.2, 0.2)
    with pytest.raises(InputError, match=r"clip_low is 1\.2"):
        policy_loss.clipped(good, good, good, good, 6, 1.2, 0.2)
    with pytest.raises(InputError, match=r"clip_high nan"):
        policy_loss.clipped(good, good, good, good, 6, 0.2, float("nan"))
