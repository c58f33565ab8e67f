"""AdamW and gradient norms in C++ and in torch against a float64 twin, and to the bit where bits are promised."""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drawn import normal
from tunesmith.base.core.errors import InputError, NativeUnavailableError
from tunesmith.engine.kernels.adamw import torch_impl
from tunesmith.engine.kernels.adamw.api import adamw, add_gradient, sums_of_squares
from tunesmith.engine.kernels.adamw.torch_impl import (
    CODED,
    AdamWSettings,
    CodedMoments,
    FloatMoments,
    ParameterUpdate,
    zero_moments,
)
from tunesmith.engine.kernels.native import Kernels

SETTINGS = AdamWSettings(0.9, 0.95, 1e-8)
SIZES = [1, 15, 16, 17, 255, 256, 1000, 40_003]


@pytest.fixture(params=["native", "torch"])
def kernels(request, native) -> Kernels:
    return native if request.param == "native" else Kernels("torch")


class Twin:
    """AdamW in float64, written from the paper."""

    def __init__(self, start: torch.Tensor) -> None:
        self.weight = start.double().clone()
        self.mean, self.square = torch.zeros_like(self.weight), torch.zeros_like(self.weight)
        self.count = 0

    def step(self, gradient: torch.Tensor, rate: float, decay: float, factor: float = 1.0) -> None:
        self.count += 1
        g = gradient.double() * factor
        self.mean = SETTINGS.beta1 * self.mean + (1 - SETTINGS.beta1) * g
        self.square = SETTINGS.beta2 * self.square + (1 - SETTINGS.beta2) * g**2
        mean = self.mean / (1 - SETTINGS.beta1**self.count)
        square = self.square / (1 - SETTINGS.beta2**self.count)
        self.weight = self.weight - rate * decay * self.weight - rate * mean / (square**0.5 + SETTINGS.eps)


class Ours:
    """The same through the API; with `dtype`, a 16-bit weight beside the master."""

    def __init__(self, start: torch.Tensor, dtype: torch.dtype | None = None, *, coded: bool = False) -> None:
        self.master = start.clone()
        self.weight = None if dtype is None else start.to(dtype)
        self.moments = zero_moments(self.master, coded=coded)
        self.count = 0

    def update(self, gradient: torch.Tensor, rate: float, decay: float) -> ParameterUpdate:
        self.count += 1
        return ParameterUpdate(gradient, self.master, self.weight, self.moments, self.count, rate, decay)

    def tensors(self) -> list[torch.Tensor]:
        weight = [] if self.weight is None else [self.weight]
        return [self.master, *weight, *(getattr(self.moments, f.name) for f in dataclasses.fields(self.moments))]


def run(ours: Ours, kernels: Kernels, *, steps: int, dtype: torch.dtype = torch.float32, factor: float = 1.0) -> None:
    for step in range(steps):
        gradient = normal(*ours.master.shape, seed=step + 1, scale=0.1).to(dtype)
        adamw([ours.update(gradient, 1e-3 / (step + 1), 0.1)], SETTINGS, factor, kernels=kernels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_a_trajectory_is_that_of_the_twin_in_float64(size: int, dtype: torch.dtype, kernels: Kernels):
    start = normal(size)
    ours, twin = Ours(start, torch.bfloat16 if dtype == torch.bfloat16 else None), Twin(start)
    run(ours, kernels, steps=20, dtype=dtype, factor=0.37)
    for step in range(20):
        twin.step(normal(size, seed=step + 1, scale=0.1).to(dtype), 1e-3 / (step + 1), 0.1, 0.37)
    torch.testing.assert_close(ours.master.double(), twin.weight, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(ours.moments.exp_avg.double(), twin.mean, atol=1e-7, rtol=2e-6)
    torch.testing.assert_close(ours.moments.exp_avg_sq.double(), twin.square, atol=1e-9, rtol=2e-6)
    if ours.weight is not None:
        assert torch.equal(ours.weight, ours.master.bfloat16())


def test_the_definition_in_float64_is_the_twin():
    start = normal(30, 7).double()
    ours, twin = Ours(start), Twin(start)
    for step in range(10):
        gradient = normal(30, 7, seed=step + 1).double()
        torch_impl.adamw(ours.update(gradient, 1e-2, 0.1), SETTINGS, 0.5)
        twin.step(gradient, 1e-2, 0.1, 0.5)
    torch.testing.assert_close(ours.master, twin.weight, atol=1e-13, rtol=1e-12)


def test_rounding_errors_are_no_larger_than_those_of_torch(native: Kernels):
    """The mean distance to float64 after 200 steps of a size at which rounding shows."""
    start = normal(20_000)
    twin, both = Twin(start), {choice: Ours(start) for choice in ("native", "torch")}
    for step in range(200):
        gradient = normal(20_000, seed=step + 1)
        twin.step(gradient, 1e-5, 0.0)
        adamw([both["native"].update(gradient, 1e-5, 0.0)], SETTINGS, kernels=native)
        adamw([both["torch"].update(gradient, 1e-5, 0.0)], SETTINGS, kernels=Kernels("torch"))
    error = {choice: (ours.master.double() - twin.weight).square().mean().sqrt() for choice, ours in both.items()}
    assert error["native"] <= 1.02 * error["torch"]


def test_parameters_of_every_kind_go_in_one_call(kernels: Kernels):
    """Sizes from 1 to several blocks, with and without a 16-bit weight, matrices and scalars, at rates of their own."""
    shapes = [(3, 5), (1,), (70_000,), (), (129, 130), (16,)]
    each = [Ours(normal(*shape, seed=i), torch.bfloat16 if i % 2 else None) for i, shape in enumerate(shapes)]
    alone = [Ours(normal(*shape, seed=i), torch.bfloat16 if i % 2 else None) for i, shape in enumerate(shapes)]
    for step in range(3):
        gradients = [normal(*shape, seed=10 * step + i) for i, shape in enumerate(shapes)]
        gradients = [g.bfloat16() if i in (1, 2) else g for i, g in enumerate(gradients)]
        jobs = [
            (ours, g, 1e-3 * (i + 1), 0.1 * (i % 3)) for i, (ours, g) in enumerate(zip(each, gradients, strict=True))
        ]
        adamw([ours.update(g, rate, decay) for ours, g, rate, decay in jobs], SETTINGS, 0.5, kernels=kernels)
        for one, (_, g, rate, decay) in zip(alone, jobs, strict=True):
            adamw([one.update(g, rate, decay)], SETTINGS, 0.5, kernels=kernels)
    for ours, one in zip(each, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours.tensors(), one.tensors(), strict=True))


@pytest.mark.parametrize("coded", [False, True])
def test_no_bit_depends_on_the_number_of_threads(coded: bool, native: Kernels):
    results: list[list[torch.Tensor]] = []
    num_threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            ours = Ours(normal(100_003), torch.bfloat16, coded=coded)
            run(ours, native, steps=3, dtype=torch.bfloat16)
            sums = sums_of_squares([ours.master, ours.weight], kernels=native)  # type: ignore[list-item]
            results.append([*ours.tensors(), torch.tensor(sums)])
    finally:
        torch.set_num_threads(num_threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_parameter_with_gaps_in_memory_is_updated_too(kernels: Kernels):
    start, gradient = normal(12, 9), normal(12, 9, seed=1)
    turned, plain = Ours(start.t().contiguous().t()), Ours(start)
    adamw([turned.update(gradient, 1e-2, 0.1)], SETTINGS, kernels=kernels)
    adamw([plain.update(gradient, 1e-2, 0.1)], SETTINGS, kernels=kernels)
    torch.testing.assert_close(turned.master, plain.master, atol=1e-7, rtol=1e-6)
    (sum_turned,) = sums_of_squares([gradient.t()], kernels=kernels)
    assert sum_turned == pytest.approx(gradient.double().square().sum().item(), rel=1e-6)


def test_a_weight_as_small_as_a_denormal_of_bfloat16_is_rounded_not_lost(native: Kernels):
    ours = Ours(torch.full((20,), 3e-39), torch.bfloat16)
    adamw([ours.update(torch.zeros(20), 1e-3, 0.0)], SETTINGS, kernels=native)
    assert ours.weight is not None
    assert ours.weight[0] != 0
    assert torch.equal(ours.weight, ours.master.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_of_squares_are_those_of_float64(dtype: torch.dtype, kernels: Kernels):
    if dtype == torch.float16 and kernels.choice == "native":
        kernels = Kernels("auto")
    gradients = [normal(size, seed=size).to(dtype) for size in SIZES]
    found = sums_of_squares(gradients, kernels=kernels)
    exact = [g.double().square().sum().item() for g in gradients]
    assert found == pytest.approx(exact, rel=1e-13 if kernels.choice == "native" else 1e-5)
    extreme = torch.tensor([1e30, 1e-30, 0.0])[:, None].expand(3, 20).contiguous()
    found = sums_of_squares(list(extreme), kernels=kernels)
    assert found == pytest.approx((20 * extreme[:, 0].double() ** 2).tolist(), rel=1e-6, abs=0)


@pytest.mark.parametrize("size", SIZES)
def test_gradients_add_up_in_float32_with_the_bits_of_torch(size: int, kernels: Kernels):
    first, second, third = (normal(size, seed=i).bfloat16() for i in range(3))
    total = add_gradient(first, second, kernels=kernels)
    assert torch.equal(total, first.float() + second.float())
    expected = total + third.float()
    assert add_gradient(total, third, kernels=kernels) is total
    assert torch.equal(total, expected)
    turned = normal(5, size).t().bfloat16()
    assert torch.equal(add_gradient(turned, turned, kernels=kernels), 2 * turned.float())


@given(
    st.lists(st.floats(width=32, allow_nan=True), min_size=1, max_size=60),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_sum_is_finite_exactly_where_all_elements_are(kernels, values, dtype):
    gradient = torch.tensor(values, dtype=torch.float32).to(dtype)
    (found,) = sums_of_squares([gradient], kernels=kernels)
    assert math.isfinite(found) == bool(gradient.isfinite().all())


def test_levels_ascend_from_0_to_1_and_thin_out_by_decades():
    for num_bits in (7, 8):
        levels = torch_impl.levels(num_bits).tolist()
        assert len(levels) == 2**num_bits
        assert (levels[0], levels[-1]) == (0.0, 1.0)
        assert all(a < b for a, b in itertools.pairwise(levels))
        top = [level for level in levels if 0.1 < level < 1]
        second = [level for level in levels if 0.01 < level < 0.1]
        assert len(top) == 2 * len(second) == 2 ** (num_bits - 1)


def decoded(moments: CodedMoments) -> FloatMoments:
    return torch_impl._decoded(moments)


def test_moments_of_8_bits_are_coded_natively_as_defined(native: Kernels):
    both = [Ours(normal(3000), coded=True) for _ in range(2)]
    for step in range(4):
        gradient = normal(3000, seed=step + 1) * torch.logspace(-6, 0, 3000)
        adamw([both[0].update(gradient, 1e-3, 0.0)], SETTINGS, kernels=native)
        adamw([both[1].update(gradient, 1e-3, 0.0)], SETTINGS, kernels=Kernels("torch"))
        torch.testing.assert_close(both[0].master, both[1].master, atol=1e-7, rtol=1e-5)
        for a, b in zip(both[0].tensors()[1:], both[1].tensors()[1:], strict=True):
            if a.dtype == torch.uint8:  # the two differ by rounding before they are coded
                assert (a != b).float().mean() < 2e-3
                a.copy_(b)
            else:
                torch.testing.assert_close(a, b, atol=0, rtol=2e-6)
                a.copy_(b)
        both[0].master.copy_(both[1].master)


def test_coded_moments_are_right_on_average(kernels: Kernels):
    """Rounding up or down by chance: the mean over many elements that should be equal is what was to be coded."""
    gradient = torch.full((100 * CODED,), 0.0317)
    gradient[::CODED] = 1.0  # the largest of each group
    ours, exact = Ours(torch.zeros_like(gradient), coded=True), Ours(torch.zeros_like(gradient))
    for step in range(30):
        shrunk = gradient * (1 if step < 10 else 0.01)
        for one in (ours, exact):
            adamw([one.update(shrunk, 0.0, 0.0)], SETTINGS, kernels=kernels)
    assert isinstance(ours.moments, CodedMoments)
    assert isinstance(exact.moments, FloatMoments)
    found, small = decoded(ours.moments), gradient < 1
    mean = found.exp_avg[small].mean() / exact.moments.exp_avg[small].mean()
    root = found.exp_avg_sq[small].sqrt().mean() / exact.moments.exp_avg_sq[small].sqrt().mean()
    assert abs(mean - 1) < 0.02
    assert abs(root - 1) < 0.02


def test_a_coded_square_is_never_0_beside_a_gradient(kernels: Kernels):
    gradient = torch.full((CODED,), 1e-9)
    gradient[0] = 1.0
    ours = Ours(torch.zeros(CODED), coded=True)
    for _ in range(5):
        adamw([ours.update(gradient, 1e-3, 0.0)], SETTINGS, kernels=kernels)
    assert (ours.moments.exp_avg_sq > 0).all()
    assert (ours.master.abs() <= 6e-3).all(), "no step is longer than the rate allows"


def test_zero_gradients_leave_coded_moments_and_weights_at_rest(kernels: Kernels):
    ours = Ours(normal(1000), coded=True)
    before = ours.master.clone()
    adamw([ours.update(torch.zeros(1000), 1e-2, 0.0)], SETTINGS, kernels=kernels)
    assert torch.equal(ours.master, before)
    assert not ours.moments.exp_avg_sq.any()


def test_what_does_not_fit_is_refused(native: Kernels):
    ours = Ours(normal(4, 5))
    with pytest.raises(InputError, match=r"gradient has shape \(5, 4\); give that of the master, \(4, 5\)"):
        adamw([ours.update(normal(5, 4), 1e-3, 0.0)], SETTINGS, kernels=native)
    half = Ours(normal(4, 5))
    half.master = half.master.half()
    with pytest.raises(InputError, match=r"the master is torch\.float16; give float32"):
        adamw([half.update(normal(4, 5), 1e-3, 0.0)], SETTINGS, kernels=native)
    with pytest.raises(NativeUnavailableError, match="choose auto or torch"):
        adamw([ours.update(normal(4, 5).half(), 1e-3, 0.0)], SETTINGS, kernels=native)
