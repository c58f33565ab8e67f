"""GAE in C++ against its definition to the bit, and against the loop over tokens in float64."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gae_cases import gae_loop
from tunesmith.base.core.errors import InputError, NativeUnavailableError
from tunesmith.engine.kernels.gae import torch_impl
from tunesmith.engine.kernels.gae.api import gae
from tunesmith.engine.kernels.native import Kernels

SHAPES = [(1, 1), (1, 9), (3, 1), (4, 16), (5, 33), (9, 100), (64, 512)]
CORNERS = [(0.0, 0.0), (1.0, 1.0), (1.0, 0.0), (0.99, 0.95)]


@dataclass(frozen=True)
class Case:
    """Rewards, values and a mask with holes, garbage outside of it."""

    reward_BT: torch.Tensor
    value_BT: torch.Tensor
    mask_BT: torch.Tensor

    @classmethod
    def of(cls, num_rows: int, num_columns: int, *, share: float = 0.8, seed: int = 0) -> "Case":
        generator = torch.Generator().manual_seed(seed)
        reward_BT, value_BT = torch.randn(2, num_rows, num_columns, generator=generator).unbind()
        mask_BT = torch.rand(num_rows, num_columns, generator=generator) < share
        return cls(reward_BT.masked_fill(~mask_BT, float("nan")), value_BT.masked_fill(~mask_BT, float("inf")), mask_BT)


@pytest.fixture
def native(built) -> Kernels:
    return built("gae")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("gamma", "lam"), CORNERS)
def test_native_bits_are_those_of_the_definition(shape: tuple[int, int], gamma: float, lam: float, native: Kernels):
    for share in (0.0, 0.8, 1.0):
        case = Case.of(*shape, share=share)
        found = gae(case.reward_BT, case.value_BT, case.mask_BT, gamma, lam, kernels=native)
        exact = torch_impl.gae(case.reward_BT, case.value_BT, case.mask_BT, gamma, lam)
        assert torch.equal(found.advantage_BT, exact.advantage_BT)
        assert torch.equal(found.return_BT, exact.return_BT)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_rows=st.integers(0, 9),
    num_columns=st.integers(0, 70),
    share=st.floats(0, 1),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
)
def test_every_form_is_the_loop_over_tokens(seed, num_rows, num_columns, share, gamma, lam, built):
    case = Case.of(num_rows, num_columns, share=share, seed=seed)
    exact = gae_loop(case.reward_BT, case.value_BT, case.mask_BT, gamma, lam)
    for kernels in (built("gae"), Kernels("torch"), Kernels("auto")):
        found = gae(case.reward_BT, case.value_BT, case.mask_BT, gamma, lam, kernels=kernels)
        torch.testing.assert_close(found.advantage_BT.double(), exact.advantage_BT, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(found.return_BT.double(), exact.return_BT, atol=2e-5, rtol=1e-5)


def test_large_rewards_and_values_keep_their_digits(native: Kernels):
    case = Case.of(6, 50)
    reward_BT, value_BT = 1e4 * case.reward_BT, 1e4 * case.value_BT
    found = gae(reward_BT, value_BT, case.mask_BT, 1.0, 0.95, kernels=native)
    exact = gae_loop(reward_BT, value_BT, case.mask_BT, 1.0, 0.95)
    torch.testing.assert_close(found.advantage_BT.double(), exact.advantage_BT, atol=0.1, rtol=1e-5)


def test_what_is_not_finite_inside_the_mask_reaches_what_stands_before_it_and_nothing_else(native: Kernels):
    reward_BT, value_BT, mask_BT = torch.zeros(2, 5), torch.zeros(2, 5), torch.ones(2, 5, dtype=torch.bool)
    reward_BT[0, 2] = float("nan")
    advantage_BT = gae(reward_BT, value_BT, mask_BT, 1.0, 0.95, kernels=native).advantage_BT
    assert advantage_BT[0, :3].isnan().all() and not advantage_BT[0, 3:].isnan().any() and not advantage_BT[1].any()


def test_rows_and_columns_may_be_spread_and_dtypes_mixed(native: Kernels):
    case = Case.of(12, 31)
    plain = gae(case.reward_BT, case.value_BT, case.mask_BT, 0.9, 0.8, kernels=native)
    turned = gae(case.reward_BT.t().contiguous().t(), case.value_BT, case.mask_BT.long(), 0.9, 0.8, kernels=native)
    assert torch.equal(turned.advantage_BT, plain.advantage_BT)
    some = gae(case.reward_BT[::3, 1:], case.value_BT[::3, 1:], case.mask_BT[::3, 1:], 0.9, 0.8, kernels=native)
    assert torch.equal(some.advantage_BT, plain.advantage_BT[::3, 1:])
    half_BT = case.value_BT.bfloat16()
    mixed = gae(case.reward_BT, half_BT, case.mask_BT, 0.9, 0.8, kernels=native)
    assert torch.equal(
        mixed.return_BT, gae(case.reward_BT, half_BT.float(), case.mask_BT, 0.9, 0.8, kernels=native).return_BT
    )


def test_threads_change_no_bit(native: Kernels):
    case, num_threads, found = Case.of(300, 400), torch.get_num_threads(), []
    for threads in (1, 2):
        try:
            torch.set_num_threads(threads)
            found.append(gae(case.reward_BT, case.value_BT, case.mask_BT, 1.0, 0.95, kernels=native).advantage_BT)
        finally:
            torch.set_num_threads(num_threads)
    assert torch.equal(*found)


def test_torch_sees_an_operator_without_gradient(native: Kernels):
    case = Case.of(3, 8)
    arguments = (case.reward_BT, case.value_BT, case.mask_BT, 1.0, 0.95, native.choice)
    torch.library.opcheck(torch.ops.tunesmith.gae.default, arguments)
    leaf_BT = case.reward_BT.clone().requires_grad_()

    def advantage(reward_BT: torch.Tensor) -> torch.Tensor:
        return gae(reward_BT, case.value_BT, case.mask_BT, 1.0, 0.95, kernels=native).advantage_BT

    compiled = torch.compile(advantage, backend="aot_eager", fullgraph=True)(leaf_BT)
    assert torch.equal(compiled, advantage(leaf_BT)) and not compiled.requires_grad


def test_autocast_changes_nothing(native: Kernels):
    case = Case.of(3, 8)
    plain = gae(case.reward_BT, case.value_BT, case.mask_BT, 1.0, 0.95, kernels=native)
    with torch.autocast("cpu", torch.bfloat16):
        found = gae(case.reward_BT, case.value_BT, case.mask_BT, 1.0, 0.95, kernels=native)
    assert torch.equal(found.return_BT, plain.return_BT)


def test_float64_runs_as_defined_and_never_natively(native: Kernels):
    case = Case.of(3, 8)
    wide = (case.reward_BT.double(), case.value_BT, case.mask_BT, 0.9, 0.8)
    assert torch.equal(gae(*wide, kernels=Kernels("auto")).return_BT, torch_impl.gae(*wide).return_BT)
    with pytest.raises(NativeUnavailableError, match=r"torch\.float64"):
        gae(*wide, kernels=native)


def test_what_does_not_fit_is_refused(native: Kernels):
    good_BT = torch.zeros(2, 3)
    with pytest.raises(InputError, match=r"reward_BT \(2,\)"):
        gae(torch.zeros(2), good_BT, good_BT, 1.0, 0.95, kernels=native)
    with pytest.raises(InputError, match=r"reward_BT has shape \(3,\); give \[sequences, tokens\]"):
        gae(good_BT[0], good_BT[0], good_BT[0], 1.0, 0.95, kernels=native)
    with pytest.raises(InputError, match=r"gamma is 1\.5"):
        gae(good_BT, good_BT, good_BT, 1.5, 0.95, kernels=native)
    with pytest.raises(InputError, match="lam is nan"):
        gae(good_BT, good_BT, good_BT, 1.0, float("nan"), kernels=native)
