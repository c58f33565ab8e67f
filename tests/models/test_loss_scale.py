"""Float16 weights: the factor on the loss, what overflows, and what vanishes without it."""

import math

import pytest
import torch
from pydantic import ValidationError

from tunesmith.base.config.sections import OptimizerSection
from tunesmith.base.core.errors import TrainingError
from tunesmith.engine.models.optimizer import MasterAdamW

PLAIN = OptimizerSection(learning_rate=1e-3, max_grad_norm=1e9)


class Weights(torch.nn.Module):
    """A matrix and a vector of one dtype."""

    def __init__(self, dtype=torch.float16):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrix = torch.nn.Parameter(torch.randn(6, 5, generator=generator).to(dtype))
        self.vector = torch.nn.Parameter(torch.randn(5, generator=generator).to(dtype))

    def loss(self, step, scale=1.0):
        inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(step)).to(self.matrix.dtype)
        return ((inputs @ self.matrix + self.vector).float().square().mean()) * scale


def snapshot(module, optimizer):
    tensors = [*module.parameters(), *optimizer.state_dict().tensors.values()]
    return [tensor.detach().clone() for tensor in tensors]


def test_a_float16_gradient_that_overflows_halves_the_scale_and_is_no_failure():
    weights = Weights(torch.float16)
    optimizer = MasterAdamW(weights, PLAIN, total_steps=9)
    before = snapshot(weights, optimizer)
    for scale in (65536.0, 32768.0):
        optimizer.scaled(weights.loss(0, 40.0)).backward()
        report = optimizer.step()
        assert (report.overflowed, report.refused, report.loss_scale) == (True, False, scale)
        assert report.num_refused_in_row == 0
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(weights, optimizer), strict=True))
    assert (optimizer.num_steps, optimizer.weight_version, optimizer.num_refused) == (0, 0, 0)
    while (report := scaled_step(weights, optimizer, 40.0)).overflowed:
        pass
    assert (report.refused, optimizer.num_steps, optimizer.weight_version) == (False, 1, 1)


def scaled_step(weights, optimizer, factor=1.0):
    loss = weights.loss(0, factor)
    optimizer.scaled(loss).backward()
    return optimizer.step(loss=loss.item())


def test_the_scale_doubles_after_enough_good_updates_and_one_overflow_starts_the_count_anew():
    weights = Weights(torch.float16)
    section = PLAIN.model_copy(update={"loss_scale": 8.0, "loss_scale_window": 3, "learning_rate": 1e-6})
    optimizer = MasterAdamW(weights, section, total_steps=99)
    assert [scaled_step(weights, optimizer).loss_scale for _ in range(7)] == [8, 8, 8, 16, 16, 16, 32]
    assert scaled_step(weights, optimizer, 1e5).overflowed
    assert [scaled_step(weights, optimizer).loss_scale for _ in range(4)] == [16, 16, 16, 32]


def test_at_the_lowest_scale_a_bad_gradient_is_a_failure_and_a_bad_loss_is_one_at_any():
    weights = Weights(torch.float16)
    optimizer = MasterAdamW(weights, PLAIN.model_copy(update={"loss_scale": 2.0}), total_steps=9)
    for expected in ((True, False, 0), (False, True, 1), (False, True, 2)):
        optimizer.scaled(weights.loss(0) + weights.vector[2].float() * math.inf).backward()
        report = optimizer.step(loss=1.0)
        assert (report.overflowed, report.refused, report.num_refused_in_row) == expected
        assert report.bad_parameter == "vector"
    weights = Weights(torch.float16)
    optimizer = MasterAdamW(weights, PLAIN, total_steps=9)
    optimizer.scaled(weights.loss(0) * math.nan).backward()
    report = optimizer.step(loss=math.nan)
    assert (report.overflowed, report.refused, report.loss_scale) == (False, True, 65536.0)


def test_norm_and_step_are_those_without_a_scale():
    """Gradients of float16 weights, with a scale and without, in a range where neither loses bits."""
    reports, masters, means = [], [], []
    for scale in (1.0, 1024.0):
        weights = Weights(torch.float16)
        section = OptimizerSection(learning_rate=1e-3, max_grad_norm=0.5, loss_scale=scale)
        optimizer = MasterAdamW(weights, section, total_steps=5)
        reports.append([scaled_step(weights, optimizer).grad_norm for _ in range(5)])
        masters.append(torch.cat([slot.master.flatten() for slot in optimizer._slots]))
        means.append(optimizer.state_dict().tensors["exp_avg/matrix"])
    assert reports[0] == pytest.approx(reports[1], rel=1e-3)
    torch.testing.assert_close(masters[0], masters[1], atol=1e-5, rtol=0)
    torch.testing.assert_close(means[0], means[1], atol=1e-5, rtol=1e-3)


def test_gradients_that_vanish_in_float16_are_kept_by_the_scale():
    moved = []
    for scale in (1.0, 65536.0):
        weights = Weights(torch.float16)
        start = weights.vector.detach().clone()
        optimizer = MasterAdamW(weights, PLAIN.model_copy(update={"loss_scale": scale}), total_steps=5)
        scaled_step(weights, optimizer, 1e-8)
        moved.append(bool((weights.vector != start).any()))
    assert moved == [False, True]


def test_a_loss_that_was_not_scaled_is_an_error_for_float16_alone():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weights = Weights(dtype)
        optimizer = MasterAdamW(weights, PLAIN, total_steps=9)
        loss = weights.loss(0)
        if dtype == torch.float16:
            loss.backward()
            with pytest.raises(TrainingError, match=r"call optimizer\.scaled\(loss\)\.backward\(\)"):
                optimizer.step()
        else:
            assert optimizer.scaled(loss) is loss
            loss.backward()
            assert optimizer.step().loss_scale is None


@pytest.mark.parametrize("scale", [0.5, 3.0, 1000.0])
def test_a_loss_scale_that_is_no_power_of_two_is_refused(scale):
    with pytest.raises(ValidationError, match="give a power of two"):
        OptimizerSection(loss_scale=scale)
