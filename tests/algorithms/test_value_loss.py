import math
from statistics import fmean, pvariance

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import grad, gradcheck

from tunesmith.base.core.errors import InputError
from tunesmith.learn.algorithms import value_loss
from tunesmith.learn.algorithms.sums import merged

seeds = st.integers(0, 2**32 - 1)
clips = st.none() | st.floats(0.01, 2)


def batch(seed, num_sequences=4, num_tokens=5, dtype=torch.float64):
    """Values, those of the rollout, returns and a right-padded mask with at least one token in each row."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_sequences, num_tokens)
    value_BT, old_value_BT, return_BT = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(3))
    lengths_B = torch.randint(1, num_tokens + 1, (num_sequences,), generator=generator)
    return value_BT.requires_grad_(), old_value_BT, return_BT, torch.arange(num_tokens)[None] < lengths_B[:, None]


def twin(value, old_value, target, clip):
    """Loss of one token, its derivative by `value`, and whether the clipped prediction stands in the loss."""
    free = 0.5 * (value - target) ** 2
    if clip is None or abs(value - old_value) <= clip:
        return free, value - target, False
    near = old_value + math.copysign(clip, value - old_value)
    held = 0.5 * (near - target) ** 2
    return (held, 0.0, True) if held > free else (free, value - target, False)


@given(seed=seeds, clip=clips, num_tokens=st.floats(1, 100))
def test_loss_gradient_and_statistics_equal_the_twin(seed, clip, num_tokens):
    value_BT, old_value_BT, return_BT, mask_BT = batch(seed)
    loss, stats = value_loss.clipped(value_BT, old_value_BT, return_BT, mask_BT, num_tokens, clip)
    (gradient_BT,) = grad(loss, value_BT)
    values, old_values, returns = (x[mask_BT].tolist() for x in (value_BT, old_value_BT, return_BT))
    twins = [twin(*number, clip) for number in zip(values, old_values, returns, strict=True)]
    assert loss.item() == pytest.approx(math.fsum(t[0] for t in twins) / num_tokens, abs=1e-10)
    assert gradient_BT[mask_BT].tolist() == pytest.approx([t[1] / num_tokens for t in twins], abs=1e-10)
    assert not gradient_BT[~mask_BT].any()
    errors = [r - v for r, v in zip(returns, values, strict=True)]
    expected = {
        "loss/value_avg": fmean(t[0] for t in twins),
        "val/clipfrac_avg": fmean(t[2] for t in twins),
        "val/mean": fmean(values),
        "val/return_mean": fmean(returns),
        "val/error": fmean(e**2 for e in errors),
    }
    if len(returns) > 1:
        expected["val/explained_variance"] = 1 - pvariance(errors) / pvariance(returns)
    assert stats.metrics() == pytest.approx(expected, abs=1e-10, rel=1e-8)


def test_loss_passes_gradcheck():
    value_BT, old_value_BT, return_BT, mask_BT = batch(0)
    for clip in (None, 0.3):
        assert gradcheck(
            lambda x, c=clip: value_loss.clipped(x, old_value_BT, return_BT, mask_BT, 9, c)[0], (value_BT,)
        )


def test_clipping_cuts_the_gradient_of_a_value_that_ran_past_its_bound_but_not_of_one_that_must_come_back():
    value_BT = torch.tensor([[1.0, 1.0]], requires_grad=True)
    return_BT = torch.tensor([[2.0, -1.0]])
    loss, stats = value_loss.clipped(value_BT, torch.zeros(1, 2), return_BT, torch.ones(1, 2), 2, 0.2)
    assert loss.item() == pytest.approx((0.5 * 1.8**2 + 0.5 * 2.0**2) / 2)
    assert grad(loss, value_BT)[0].tolist() == [[0.0, 1.0]]
    assert stats.metrics()["val/clipfrac_avg"] == 0.5


@given(seed=seeds, size=st.integers(1, 4), garbage=st.sampled_from([float("nan"), float("inf"), -1e30]))
def test_micro_batches_with_their_own_padding_add_up_to_the_full_batch(seed, size, garbage):
    value_BT, old_value_BT, return_BT, mask_BT = batch(seed)
    num_tokens = int(mask_BT.sum())
    loss, stats = value_loss.clipped(value_BT, old_value_BT, return_BT, mask_BT, num_tokens, 0.2)
    (gradient_BT,) = grad(loss, value_BT)
    parts = []
    for rows in torch.arange(4).split(size):
        dirty = [x[rows].masked_fill(~mask_BT[rows], garbage) for x in (value_BT, old_value_BT, return_BT)]
        parts.append(value_loss.clipped(*dirty, mask_BT[rows], num_tokens, 0.2))
    total = torch.stack([part[0] for part in parts]).sum()
    assert total.item() == pytest.approx(loss.item(), abs=1e-12)
    torch.testing.assert_close(grad(total, value_BT)[0], gradient_BT, atol=1e-14, rtol=0)
    assert merged(part[1] for part in parts).metrics() == pytest.approx(stats.metrics(), abs=1e-12)


def test_explained_variance_is_one_for_a_perfect_critic_and_absent_for_equal_returns():
    return_BT, mask_BT = torch.tensor([[1.0, 2.0, 3.0]]), torch.ones(1, 3)
    _, stats = value_loss.clipped(return_BT, return_BT, return_BT, mask_BT, 3, 0.2)
    assert stats.metrics()["val/explained_variance"] == pytest.approx(1.0)
    equal_BT = torch.full((1, 3), 0.1)
    _, stats = value_loss.clipped(return_BT, return_BT, equal_BT, mask_BT, 3, 0.2)
    assert "val/explained_variance" not in stats.metrics()


def test_statistics_are_detached_and_nothing_but_the_value_gets_a_gradient():
    value_BT, old_value_BT, return_BT, mask_BT = batch(0, dtype=torch.float32)
    old_value_BT.requires_grad_()
    return_BT.requires_grad_()
    loss, stats = value_loss.clipped(value_BT, old_value_BT, return_BT, mask_BT.long(), torch.tensor(9.0), 0.2)
    loss.backward()
    assert value_BT.grad is not None and old_value_BT.grad is None and return_BT.grad is None
    assert loss.dtype == torch.float32 and not stats.pack().requires_grad


def test_bad_input_is_refused():
    good = torch.zeros(2, 3)
    with pytest.raises(InputError, match=r"old_value_BT \(3,\)"):
        value_loss.clipped(good, torch.zeros(3), good, good, 6, 0.2)
    with pytest.raises(InputError, match="num_tokens is -6"):
        value_loss.clipped(good, good, good, good, -6, 0.2)
