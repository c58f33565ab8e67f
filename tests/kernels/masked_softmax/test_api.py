"""Scale, mask and softmax: against the definition in float64 and torch's softmax, with gradients, and refusals."""

from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import normal
from softmax_cases import MASKS, SHAPE, check_extreme_scores, check_mask, check_shape
from tunesmith.base.core.errors import InputError, NativeUnavailableError
from tunesmith.engine.kernels.masked_softmax import api, torch_impl
from tunesmith.engine.kernels.masked_softmax.api import masked_softmax
from tunesmith.engine.kernels.masked_softmax.torch_impl import KeyMask
from tunesmith.engine.kernels.native import Kernels, shared

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


@pytest.fixture(params=["native", "torch"])
def kernels(request, native) -> Kernels:
    return native if request.param == "native" else Kernels("torch")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MASKS)
def test_outputs_and_gradients_are_those_of_the_definition_in_float64(name: str, dtype: torch.dtype, kernels: Kernels):
    check_mask(MASKS[name], dtype, kernels, TOLERANCE[dtype])


def test_without_a_mask_it_is_torchs_softmax(kernels: Kernels):
    scores_BHQK = normal(2, 2, 5, 33)
    found = masked_softmax(scores_BHQK, scale=1.7, mask=KeyMask(causal=False), kernels=kernels)
    torch.testing.assert_close(found, torch.softmax(1.7 * scores_BHQK, -1))


@dataclass(frozen=True, slots=True)
class Case:
    sizes: tuple[int, int, int, int]
    causal: bool
    window: int | None
    offset: int | None
    padded: bool
    allowed: bool
    seed: int

    def mask(self) -> KeyMask:
        draw = torch.Generator().manual_seed(self.seed)
        batch, _, queries, keys = self.sizes
        bounds = torch.randint(-1, keys + 2, (batch, 2), generator=draw)
        allowed = torch.rand(batch, queries, keys, generator=draw) > 0.5
        return KeyMask(
            causal=self.causal,
            window=self.window,
            offset=self.offset,
            keys_B2=bounds if self.padded else None,
            allowed_BQK=allowed if self.allowed else None,
        )


CASES = st.builds(
    Case,
    sizes=st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(0, 5), st.integers(0, 40)),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 50),
    offset=st.none() | st.integers(-5, 45),
    padded=st.booleans(),
    allowed=st.booleans(),
    seed=st.integers(0, 999),
)


@given(case=CASES)
@settings(max_examples=150, deadline=None)
def test_any_shape_and_any_rules(case: Case):
    check_shape(case.sizes, case.mask(), Kernels(), scale=0.5, seed=case.seed)


def test_extreme_scores_stay_exact_and_rows_that_see_nothing_are_0(kernels: Kernels):
    check_extreme_scores(kernels)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_scores_that_are_not_finite_are_told_by_their_row_alone_and_only_where_seen(bad: float, kernels: Kernels):
    scores_BHQK = normal(1, 1, 20, 20)
    scores_BHQK[0, 0, 7, 3] = bad
    scores_BHQK[0, 0, 2, 9] = bad  # after its query
    found = masked_softmax(scores_BHQK, scale=1.0, mask=KeyMask(), kernels=kernels)[0, 0]
    clean = masked_softmax(scores_BHQK.nan_to_num(0.0, 0.0, 0.0), scale=1.0, mask=KeyMask(), kernels=kernels)[0, 0]
    others = [row for row in range(20) if row != 7]
    torch.testing.assert_close(found[others], clean[others])
    assert not found[7, 8:].any()
    if bad == -torch.inf:
        assert found[7, 3] == 0 and float(found[7].sum()) == pytest.approx(1.0)
    else:
        assert found[7, :8].isnan().all()


def test_a_row_of_nothing_but_minus_infinity_is_0(kernels: Kernels):
    scores_BHQK = torch.full((1, 1, 2, 18), -torch.inf)
    assert not masked_softmax(scores_BHQK, scale=1.0, mask=KeyMask(causal=False), kernels=kernels).any()


def test_one_key_gives_1(kernels: Kernels):
    found = masked_softmax(normal(3, 2, 4, 1), scale=1.0, mask=KeyMask(causal=False), kernels=kernels)
    assert torch.equal(found, torch.ones(3, 2, 4, 1))


def test_scores_with_gaps_and_masks_with_strides_give_the_same(kernels: Kernels):
    scores_BHQK = normal(2, 19, 7, 3).permute(0, 3, 2, 1)
    allowed_BQK = torch.rand(2, 19, 7, generator=torch.Generator().manual_seed(3)).transpose(1, 2) > 0.4
    mask = KeyMask(allowed_BQK=allowed_BQK)
    found = masked_softmax(scores_BHQK, scale=1.0, mask=mask, kernels=kernels)
    dense = replace(mask, allowed_BQK=allowed_BQK.contiguous())
    assert torch.equal(found, masked_softmax(scores_BHQK.contiguous(), scale=1.0, mask=dense, kernels=kernels))
    assert found.is_contiguous()


def test_a_row_does_not_depend_on_the_rows_beside_it_nor_on_threads(native: Kernels):
    scores_BHQK = normal(3, 4, 50, 61)
    whole = masked_softmax(scores_BHQK, scale=1.0, mask=KeyMask(), kernels=native)
    assert torch.equal(whole[1:2], masked_softmax(scores_BHQK[1:2], scale=1.0, mask=KeyMask(), kernels=native))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(whole, masked_softmax(scores_BHQK, scale=1.0, mask=KeyMask(), kernels=native))
    finally:
        torch.set_num_threads(before)


def test_half_and_double_precision_are_left_to_the_definition_and_refused_natively(native: Kernels):
    scores_BHQK = normal(1, 2, 3, 9)
    exact = torch_impl.masked_softmax(scores_BHQK.double(), 1.0, KeyMask())
    for dtype, tolerance in ((torch.float16, 2e-3), (torch.float64, 1e-6)):
        found = masked_softmax(scores_BHQK.to(dtype), scale=1.0, mask=KeyMask(), kernels=shared("auto"))
        torch.testing.assert_close(found.double(), exact, atol=tolerance, rtol=tolerance)
        with pytest.raises(NativeUnavailableError, match="is for bfloat16 and float32 and was given"):
            masked_softmax(scores_BHQK.to(dtype), scale=1.0, mask=KeyMask(), kernels=native)


def test_autocast_changes_nothing(kernels: Kernels):
    scores_BHQK = normal(1, 2, 3, 9)
    plain = masked_softmax(scores_BHQK, scale=1.0, mask=KeyMask(), kernels=kernels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(plain, masked_softmax(scores_BHQK, scale=1.0, mask=KeyMask(), kernels=kernels))


def test_torch_compile_sees_one_operator_with_gradients(native: Kernels):
    def work(scores_BHQK: torch.Tensor) -> torch.Tensor:
        return masked_softmax(scores_BHQK * 2, scale=0.5, mask=KeyMask(window=4), kernels=native).square().sum()

    scores_BHQK = normal(2, 2, 6, 6).requires_grad_()
    compiled = torch.compile(work, fullgraph=True, backend="aot_eager")
    (expected,) = torch.autograd.grad(work(scores_BHQK), scores_BHQK)
    (found,) = torch.autograd.grad(compiled(scores_BHQK), scores_BHQK)
    torch.testing.assert_close(found, expected)


def test_the_operators_keep_the_rules_of_torch_library():
    scores_BHQK, mask = normal(*SHAPE).requires_grad_(), MASKS["everything"]
    numbers = (0.5, mask.causal, 9, 12, "auto")
    torch.library.opcheck(api._softmax, (scores_BHQK, mask.keys_B2, mask.allowed_BQK, *numbers))
    p_BHQK, d_p_BHQK = torch.softmax(normal(*SHAPE), -1), normal(*SHAPE, seed=1)
    torch.library.opcheck(api._softmax_backward, (p_BHQK, d_p_BHQK, mask.keys_B2, *numbers))


SCORES = torch.zeros(2, 3, 4, 5)
WRONG = {
    r"scores are torch.int64": {"scores": SCORES.long()},
    r"scores are .* \(4, 5\).*\[sequences, heads, queries, keys\]": {"scores": SCORES[0, 0]},
    r"scale is nan": {"scale": float("nan")},
    r"mask.window is 0": {"mask": KeyMask(window=0)},
    r"mask.keys is torch.int32": {"mask": KeyMask(keys_B2=torch.zeros(2, 2, dtype=torch.int32))},
    r"mask.keys is .* \(3, 2\); give torch.int64 \[2, 2\]": {"mask": KeyMask(keys_B2=torch.zeros(3, 2).long())},
    r"mask.allowed is torch.float32": {"mask": KeyMask(allowed_BQK=torch.zeros(2, 4, 5))},
    r"mask.allowed is .*give torch.bool \[2 or 1, 4 or 1, 5\]": {
        "mask": KeyMask(allowed_BQK=torch.ones(2, 3, 5).bool())
    },
    r"mask.keys is on meta": {"mask": KeyMask(keys_B2=torch.zeros(2, 2, device="meta").long())},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_refused_by_name(message: str, kernels: Kernels):
    given_ = {"scores": SCORES, "scale": 1.0, "mask": KeyMask(), **WRONG[message]}
    with pytest.raises(InputError, match=message):
        masked_softmax(given_.pop("scores"), kernels=kernels, **given_)


def test_every_rule_of_a_mask_is_tried_above():
    used = {field.name for mask in MASKS.values() for field in fields(mask) if getattr(mask, field.name) is not None}
    assert used == {field.name for field in fields(KeyMask)}
