"""The policy loss in C++ and with its gradient written out, against the definition by autograd in float64."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_cases import NOISE, TERMS, Case, check
from tunesmith.core.errors import InputError, NativeUnavailableError
from tunesmith.kernels.native import Kernels
from tunesmith.kernels.policy_loss import torch_impl
from tunesmith.kernels.policy_loss.api import policy_loss
from tunesmith.kernels.policy_loss.records import PolicyTerms, PolicyTokens

WHOLE = PolicyTerms(kl_coef=0.1, entropy_coef=0.01, dual_clip=3.0)


@pytest.fixture(params=["native", "torch"])
def kernels(request, built) -> Kernels:
    return built("policy_loss") if request.param == "native" else Kernels("torch")


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_rows=st.integers(0, 4),
    num_columns=st.integers(0, 40),
    share=st.sampled_from([0.0, 0.7, 1.0]),
    terms=TERMS,
    noise=NOISE,
    per_row=st.booleans(),
)
def test_loss_sums_and_gradients_are_those_of_autograd(
    seed, num_rows, num_columns, share, terms, noise, per_row, built
):
    case = Case.of(num_rows, num_columns, terms, noise=noise, share=share, per_row=per_row, seed=seed)
    tolerance = 2e-6 if noise < 1 else 1e-4
    check(case, built("policy_loss"), tolerance=tolerance)
    check(case, Kernels("torch"), tolerance=tolerance)


@pytest.mark.parametrize("level", ["sequence", "product"])
@pytest.mark.parametrize("surrogate", ["clip", "cispo"])
@pytest.mark.parametrize("corrects_kl", [False, True])
def test_a_ratio_of_the_whole_completion_is_left_to_torch(level, surrogate, corrects_kl, built):
    terms = PolicyTerms(surrogate=surrogate, level=level, kl_coef=0.3, corrects_kl=corrects_kl, entropy_coef=0.2)
    check(Case.of(5, 9, terms, noise=0.1, per_row=True), Kernels("auto"))
    with pytest.raises(InputError, match=f"level is '{level}', which kernels 'native' do not have"):
        check(Case.of(5, 9, terms), built("policy_loss"))


@pytest.mark.parametrize("dual_clip", [None, 1.5, 3.0])
def test_every_side_of_the_clip_is_counted_and_cut(dual_clip: float | None, kernels: Kernels):
    terms = PolicyTerms(clip_low=0.2, clip_high=0.28, dual_clip=dual_clip)
    old_BT = torch.tensor([[-1.0, -3.0, -1.0, -3.0, -2.0, -9.0]])
    logp_BT = torch.tensor([[-2.0, -2.0, -2.0, -2.0, -2.0, -2.0]])
    advantage_BT = torch.tensor([[-1.0, 1.0, 1.0, -1.0, 1.0, -1.0]])
    tokens = PolicyTokens(logp_BT.requires_grad_(), old_BT, advantage_BT, torch.ones(1, 6, dtype=torch.bool))
    loss, sums = policy_loss(tokens, terms, 6.0, kernels=kernels)
    (gradient_BT,) = torch.autograd.grad(loss, logp_BT)
    dual = dual_clip is not None and dual_clip < torch.e
    assert (gradient_BT == 0).tolist() == [[True, True, False, dual, False, dual_clip is not None]]
    counts = [float(sums.clipped_low), float(sums.clipped_high), float(sums.clipped_dual)]
    assert counts == [1, 1, dual + (dual_clip is not None)]
    check(Case(tokens, terms, 6.0, 1.0), kernels, tolerance=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_dtypes_are_computed_in_float32(dtype: torch.dtype, kernels: Kernels):
    check(Case.of(6, 50, WHOLE, dtype=dtype), kernels, tolerance=1e-5)


def test_float64_stays_float64():
    case = Case.of(3, 8, WHOLE, dtype=torch.float64)
    check(case, Kernels("auto"), tolerance=1e-13)
    tokens = replace(case.tokens, logp_BT=case.tokens.logp_BT.float())
    check(replace(case, tokens=tokens), Kernels("auto"))


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_a_ratio_beyond_the_range_of_floats_gives_a_gradient_that_is_refused(advantage: float, kernels: Kernels):
    logp_BT = torch.tensor([[1e4, -1.0]]).requires_grad_()
    old_BT, advantage_BT = torch.tensor([[-1.0, -1.0]]), torch.full((1, 2), advantage)
    tokens = PolicyTokens(logp_BT, old_BT, advantage_BT, torch.ones(1, 2, dtype=torch.bool))
    loss, _ = policy_loss(tokens, PolicyTerms(), 2.0, kernels=kernels)
    (gradient_BT,) = torch.autograd.grad(loss, logp_BT)
    assert not gradient_BT[0, 0].isfinite() and gradient_BT[0, 1].isfinite()
    tokens = replace(tokens, old_logp_BT=torch.tensor([[1e4, -1.0]]), logp_BT=torch.tensor([[-1e4, -1.0]]))
    assert policy_loss(tokens, PolicyTerms(), 2.0, kernels=kernels)[0].isfinite()


def test_nan_inside_the_mask_is_not_hidden(kernels: Kernels):
    case = Case.of(2, 20, WHOLE, share=1.0)
    for name in ("logp_BT", "old_logp_BT", "advantage_BT", "reference_logp_BT", "entropy_BT"):
        dirty_BT = getattr(case.tokens, name).clone()
        dirty_BT[1, 3] = float("nan")
        tokens = replace(case.tokens, **{name: dirty_BT})
        assert policy_loss(tokens, WHOLE, 1.0, kernels=kernels)[0].isnan()


def test_k3_keeps_its_digits_where_policy_and_reference_nearly_agree(kernels: Kernels):
    terms = PolicyTerms(kl="k3", kl_coef=1.0)
    logp_BT = torch.full((1, 33), -0.001953125)
    reference_BT = logp_BT + torch.linspace(-1e-3, 1e-3, 33)
    tokens = PolicyTokens(logp_BT, logp_BT, torch.zeros(1, 33), torch.ones(1, 33, dtype=torch.bool), reference_BT)
    wide = replace(tokens, logp_BT=logp_BT.double(), reference_logp_BT=reference_BT.double())
    _, sums = policy_loss(tokens, terms, 1.0, kernels=kernels)
    exact = torch_impl.policy_loss(wide, terms, 1.0, 1.0)[1].kl
    rtol = 1e-5 if kernels.choice == "native" else 1e-3  # the definition subtracts two nearly equal numbers
    torch.testing.assert_close(sums.kl, exact, rtol=rtol, atol=0)


def test_strides_threads_and_the_dtype_of_the_mask_change_no_bit(kernels: Kernels):
    case = Case.of(70, 301, WHOLE, per_row=True)
    plain = policy_loss(case.tokens, WHOLE, case.denominator, 3.0, kernels=kernels)[0]
    turned = PolicyTokens(
        *(tensor.t().contiguous().t() for tensor in vars_of(case.tokens)[:3]),
        case.tokens.mask_BT.long(),
        *vars_of(case.tokens)[4:],
    )
    if kernels.choice == "native":
        assert torch.equal(policy_loss(turned, WHOLE, case.denominator, 3.0, kernels=kernels)[0], plain)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - num_threads if num_threads < 3 else 1)
        again = policy_loss(case.tokens, WHOLE, case.denominator, 3.0, kernels=kernels)[0]
    finally:
        torch.set_num_threads(num_threads)
    if kernels.choice == "native":
        assert torch.equal(again, plain)
    torch.testing.assert_close(again, plain)


def vars_of(tokens: PolicyTokens) -> list[torch.Tensor]:
    return [getattr(tokens, name) for name in PolicyTokens.__dataclass_fields__]


def test_torch_sees_an_operator_with_a_gradient(kernels: Kernels):
    case, leaves = Case.of(3, 8, WHOLE).with_leaves()

    def loss_of(logp_BT: torch.Tensor, entropy_BT: torch.Tensor) -> torch.Tensor:
        tokens = replace(case.tokens, logp_BT=logp_BT, entropy_BT=entropy_BT)
        return policy_loss(tokens, WHOLE, 7.0, 5.0, kernels=kernels)[0]

    compiled = torch.compile(loss_of, backend="aot_eager", fullgraph=True)(*leaves)
    plain = loss_of(*leaves)
    assert torch.equal(compiled, plain)
    for found, expected in zip(torch.autograd.grad(compiled, leaves), torch.autograd.grad(plain, leaves), strict=True):
        assert torch.equal(found, expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(loss_of(*leaves), plain)


def test_what_does_not_fit_is_refused(built):
    native, tokens = built("policy_loss"), Case.of(2, 3, WHOLE).tokens
    with pytest.raises(InputError, match=r"old_logp_BT \(2, 2\)"):
        policy_loss(replace(tokens, old_logp_BT=tokens.old_logp_BT[:, 1:]), WHOLE, 1.0, kernels=native)
    with pytest.raises(InputError, match=r"advantage_BT is torch\.int64"):
        policy_loss(replace(tokens, advantage_BT=tokens.mask_BT.long()), WHOLE, 1.0, kernels=native)
    for name in ("reference_logp_BT", "entropy_BT"):
        with pytest.raises(InputError, match=f"{name} is None and its coefficient"):
            policy_loss(replace(tokens, **{name: None}), WHOLE, 1.0, kernels=native)
    with pytest.raises(InputError, match="denominator is 0"):
        policy_loss(tokens, WHOLE, 0, kernels=native)
    with pytest.raises(InputError, match=r"denominator has shape \(3, 1\); give a number or \[2, 1\]"):
        policy_loss(tokens, WHOLE, torch.ones(3, 1), kernels=native)
    with pytest.raises(NativeUnavailableError, match=r"torch\.float64"):
        policy_loss(Case.of(2, 3, WHOLE, dtype=torch.float64).tokens, WHOLE, 1.0, kernels=native)
    for settings_, said in (
        ({"clip_low": 1.0}, "clip_low is 1.0; it must lie between 0 and 1"),
        ({"dual_clip": 1.1}, "dual_clip is 1.1; it must be above 1.2"),
        ({"dual_clip": 3.0, "surrogate": "cispo"}, "dual_clip is 3.0 with surrogate cispo"),
        ({"kl_coef": -1.0}, "kl_coef is -1.0; it must be 0 or more"),
    ):
        with pytest.raises(InputError, match=said):
            PolicyTerms(**settings_)
