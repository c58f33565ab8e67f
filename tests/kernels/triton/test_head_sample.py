"""Output layer and draw in one, in Triton's interpreter: the tokens and log-probs of the sampler over the logits."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drawn import normal

pytest.importorskip("triton", reason="needs Triton, which comes with torch's builds for CUDA")

from tunesmith.core.errors import InputError
from tunesmith.kernels.head_sample.triton_impl import LaunchPlan, draw, launch
from tunesmith.kernels.sample import torch_impl
from tunesmith.kernels.sample.records import NoiseKeys, SampleSettings
from tunesmith.kernels.sample.triton_impl import Rows
from tunesmith.kernels.sample.triton_impl import draw as draw_from_logits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SMALL = LaunchPlan(16, 32, 16, 32, 4, 2)
"""Tiles so small that a small case has many."""


def logits_of(hidden_BH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
    """What a linear map gives, in float64: rounded as the interpreter does, which cuts a bfloat16 off."""
    x_BV = (hidden_BH.double() @ weight_VH.double().t()).float()
    if hidden_BH.dtype == torch.bfloat16:
        return (x_BV.view(torch.int32) & -65536).view(torch.float32).double()
    return x_BV.to(hidden_BH.dtype).double()


def keys_of(num_rows: int, seed: int) -> NoiseKeys:
    row_B = torch.arange(num_rows)
    return NoiseKeys(torch.full_like(row_B, seed * 2**33 + 5), row_B + 7, row_B % 3, row_B * 11 + 1)


def given_of(how: SampleSettings, keys: NoiseKeys) -> tuple[torch.Tensor, torch.Tensor]:
    """Settings and integers, as the kernels take them."""
    settings_B4 = torch.stack((how.temperature_B, how.top_p_B, how.min_p_B, how.repetition_penalty_B), -1)
    zero_B = torch.zeros_like(keys.seed_B)
    integers = (how.top_k_B, zero_B, keys.seed_B, keys.prompt_B, keys.sample_B, keys.position_B)
    return settings_B4, torch.stack(integers, -1)


def is_clear(logits_BV: torch.Tensor, how: SampleSettings, keys: NoiseKeys) -> torch.Tensor:
    """Where no rounding decides: the noise falls on no limit between two tokens, nor are two logits the largest."""
    sum_BV = torch_impl.distribution(logits_BV, how).exp().cumsum(-1)
    distance_B = (sum_BV - torch_impl.uniform(keys)[:, None] * sum_BV[:, -1:]).abs().amin(-1)
    top_B2 = logits_BV.topk(2, -1).values
    gap_B = top_B2[:, 0] - top_B2[:, 1]
    return torch.where(how.temperature_B == 0, gap_B > 1e-2 * top_B2[:, 0].abs(), distance_B > 2e-5)


def assert_as_the_sampler(hidden_BH, weight_VH, temperature: float, seed: int = 0, plan: LaunchPlan = SMALL) -> int:
    """The number of rows that were compared."""
    num_rows = len(hidden_BH)
    how, keys = SampleSettings.same(num_rows, temperature=temperature), keys_of(num_rows, seed)
    logits_BV = logits_of(hidden_BH, weight_VH)
    expected = torch_impl.sample(logits_BV, how, keys)
    token_B, logp_B, status_B = draw(hidden_BH, weight_VH, *given_of(how, keys), plan)
    clear_B = is_clear(logits_BV, how, keys)
    assert not status_B.any()
    assert torch.equal(token_B[clear_B], expected.token_B[clear_B])
    # A 16-bit logit may be rounded to its neighbour.
    step = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[hidden_BH.dtype]
    slack = step * float(logits_BV.abs().max()) / (temperature or 1.0) + 1e-5
    torch.testing.assert_close(logp_B[clear_B], expected.logp_B[clear_B], atol=slack, rtol=1e-5)
    return int(clear_B.sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(("num_rows", "width", "num_tokens"), [(1, 8, 1), (21, 40, 300), (16, 33, 1000)])
def test_tokens_are_those_of_the_sampler(num_rows, width, num_tokens, temperature, dtype):
    hidden_BH = normal(num_rows, width, dtype=dtype)
    weight_VH = normal(num_tokens, width, dtype=dtype, seed=1, scale=0.5)
    compared = 1 if num_tokens == 1 else assert_as_the_sampler(hidden_BH, weight_VH, temperature)
    assert compared >= num_rows // 2
    if num_tokens == 1:
        how = SampleSettings.same(num_rows, temperature=temperature)
        token_B, logp_B, _ = draw(hidden_BH, weight_VH, *given_of(how, keys_of(num_rows, 0)), SMALL)
        assert not token_B.any() and float(logp_B.abs().max()) < 2e-2


@given(
    st.integers(1, 20),
    st.integers(1, 50),
    st.integers(2, 500),
    st.sampled_from([0.01, 0.3, 3.0, 100.0]),
    st.sampled_from([0.0, 0.5, 2.0]),
    st.sampled_from(DTYPES),
    st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_states_give_the_tokens_of_the_sampler(num_rows, width, num_tokens, scale, temperature, dtype, seed):
    weight_VH = normal(num_tokens, width, dtype=dtype, seed=seed + 1, scale=scale)
    assert_as_the_sampler(normal(num_rows, width, dtype=dtype, seed=seed), weight_VH, temperature, seed)


def test_the_plan_of_a_gpu_gives_the_same_tokens():
    hidden_BH, weight_VH = normal(5, 70), normal(700, 70, seed=1)
    assert assert_as_the_sampler(hidden_BH, weight_VH, 0.8, plan=launch(700, torch.float32)) == 5
    half_BH, half_VH = hidden_BH.half(), weight_VH.half()
    assert assert_as_the_sampler(half_BH, half_VH, 0.8, plan=launch(700, torch.float16)) == 5


def test_it_draws_what_the_sampler_in_triton_draws_over_logits():
    hidden_BH, weight_VH = normal(12, 24), normal(600, 24, seed=1)
    how, keys = SampleSettings.same(12, temperature=0.9), keys_of(12, 3)
    logits_BV = hidden_BH @ weight_VH.t()
    token_B, scores_B2, _ = draw_from_logits(Rows(logits_BV, *given_of(how, keys)))
    found = draw(hidden_BH, weight_VH, *given_of(how, keys), SMALL)
    clear_B = is_clear(logits_BV.double(), how, keys)
    assert clear_B.sum() >= 10
    assert torch.equal(found[0][clear_B], token_B[clear_B])
    torch.testing.assert_close(found[1][clear_B], scores_B2[clear_B, 1], atol=1e-5, rtol=1e-5)


def test_a_row_has_the_same_token_whatever_is_beside_it_and_however_it_stands():
    hidden_BH, weight_VH = normal(37, 24), normal(200, 24, seed=1)
    how, keys = SampleSettings.same(37, temperature=0.9), keys_of(37, 3)
    settings_B4, integers_B6 = given_of(how, keys)
    whole = draw(hidden_BH, weight_VH, settings_B4, integers_B6, SMALL)
    padded_BX, padded_VX = torch.zeros(37, 30), torch.zeros(200, 33)
    padded_BX[:, 3:27], padded_VX[:, :24] = hidden_BH, weight_VH
    for rows in (slice(5, 6), slice(1, 37), slice(0, 37, 5)):
        part = draw(padded_BX[rows, 3:27], padded_VX[:, :24], settings_B4[rows], integers_B6[rows], SMALL)
        assert torch.equal(part[0], whole[0][rows])
        torch.testing.assert_close(part[1], whole[1][rows])  # products of the interpreter are those of a BLAS


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_with_a_logit_that_is_not_finite_is_named_and_no_other(bad):
    hidden_BH, weight_VH = normal(3, 8), normal(70, 8, seed=1)
    hidden_BH[:, 0], weight_VH[:, 0] = 0.0, 1.0
    hidden_BH[1, 0] = bad
    how = SampleSettings.same(3)
    given_3 = given_of(how, keys_of(3, 0))
    token_B, _, status_B = draw(hidden_BH, weight_VH, *given_3, SMALL)
    assert status_B.tolist() == [0, 1, 0]
    assert all(0 <= token < 70 for token in token_B.tolist())
    weight_VH[65, 1] = bad  # one tile alone
    hidden_BH[1, 0] = 0.0
    assert draw(hidden_BH, weight_VH, *given_3, SMALL)[2].tolist() == [1, 1, 1]


def test_no_rows_give_no_tokens_and_what_does_not_fit_is_refused():
    weight_VH = normal(70, 8)
    how = given_of(SampleSettings.same(2), keys_of(2, 0))
    empty = draw(torch.empty(0, 8), weight_VH, how[0][:0], how[1][:0])
    assert [len(tensor) for tensor in empty] == [0, 0, 0]
    with pytest.raises(InputError, match=r"weight is torch\.float16 of shape \(70, 8\) on cpu; give"):
        draw(normal(2, 8), weight_VH.half(), *how)
    with pytest.raises(InputError, match=r"hidden is torch\.float64"):
        draw(normal(2, 8).double(), weight_VH, *how)
    with pytest.raises(InputError, match=r"settings is torch\.float32"):
        draw(normal(2, 8), weight_VH, how[0].float(), how[1])
    with pytest.raises(InputError, match=r"integers is torch\.int64 of shape \(1, 6\)"):
        draw(normal(2, 8), weight_VH, how[0], how[1][:1])
    with pytest.raises(InputError, match=r"weight has shape \(0, 8\); give \[vocabulary, hidden\], not empty"):
        draw(normal(2, 8), weight_VH[:0], *how)


def test_a_launch_covers_the_vocabulary():
    for dtype in DTYPES:
        for num_tokens in (1, 129, 49_152, 151_936):
            plan = launch(num_tokens, dtype)
            assert plan.tiles * plan.block_x >= num_tokens
            assert plan.tiles & (plan.tiles - 1) == 0
