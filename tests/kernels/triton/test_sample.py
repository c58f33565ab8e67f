"""Draws in Triton's interpreter: the tokens of the definition, from the same noise, and their log-probs."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

import sample_cases
from sample_cases import OPTIONS, keys_of, logits_of, rows_of
from tunesmith.base.core.errors import TrainingError, TritonUnavailableError
from tunesmith.engine.kernels.launching import LaunchPlan
from tunesmith.engine.kernels.logprob.api import chosen_logp_entropy
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.kernels.sample import torch_impl, triton_impl
from tunesmith.engine.kernels.sample.api import draw_in_triton, sample
from tunesmith.engine.kernels.sample.torch_impl import Sampled, SampleSettings, Seen

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
assert_as_defined = partial(sample_cases.assert_as_defined, most_unclear=math.inf, rtol=1e-6)


@pytest.mark.parametrize(("name", "dtype"), list(zip(OPTIONS, DTYPES * len(OPTIONS), strict=False)))
def test_a_batch_draws_the_tokens_of_the_definition(name: str, dtype: torch.dtype, interpreted: Kernels):
    logits_BV, keys = logits_of(8, 333).to(dtype), keys_of(8, seed=2**40 + 3, position=12)
    seen = Seen(logits_of(30, 333) > 4, torch.randperm(30, generator=torch.Generator().manual_seed(0))[:8])
    assert_as_defined(logits_BV, SampleSettings.same(8, **OPTIONS[name]), keys, seen, interpreted)


@pytest.mark.parametrize("name", ["plain", "all", "greedy"])
def test_rows_of_several_tiles_draw_the_tokens_of_the_definition(name: str, interpreted: Kernels):
    logits_BV = logits_of(8, 9000)
    seen = Seen.of([list(range(row, 9000, 8)) for row in range(8)], 9000)
    options = {**OPTIONS[name], "top_k": 50 * OPTIONS[name].get("top_k", 0)}
    assert_as_defined(logits_BV, SampleSettings.same(8, **options), keys_of(8), seen, interpreted)


@given(
    st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.5, 1.0, 1.9]),
            "top_k": st.one_of(st.just(0), st.integers(1, 400)),
            "top_p": st.one_of(st.just(1.0), st.floats(1e-3, 0.9999)),
            "min_p": st.one_of(st.just(0.0), st.floats(1e-4, 0.9)),
            "repetition_penalty": st.sampled_from([1.0, 0.6, 1.4]),
            "bias": st.one_of(st.none(), st.fixed_dictionaries({0: st.sampled_from([-5.0, -0.25, 4.0])})),
        }
    ),
    st.sampled_from([1, 2, 15, 17, 127, 128, 129, 300]),
    st.sampled_from(DTYPES),
    st.integers(0, 10_000),
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_settings_draw_the_tokens_of_the_definition(interpreted, options, num_tokens, dtype, seed):
    logits_BV = logits_of(4, num_tokens, seed=seed).to(dtype)
    ids_BS = torch.randint(num_tokens, (4, 5), generator=torch.Generator().manual_seed(seed))
    seen = Seen.of(ids_BS.tolist(), num_tokens)
    assert_as_defined(logits_BV, SampleSettings.same(4, **options), keys_of(4, seed=seed), seen, interpreted)


@pytest.mark.parametrize(
    "options", [{"top_k": 1}, {"top_k": 300}, {"top_k": 299}, {"top_p": 1e-9}, {"top_p": 1 - 1e-9}]
)
def test_filters_at_their_ends_are_exact(options: dict, interpreted: Kernels):
    assert_as_defined(logits_of(6, 300), SampleSettings.same(6, **options), keys_of(6), None, interpreted)


def test_top_k_beyond_the_columns_of_a_tile_is_exact():
    logits_BV, chosen, keys = logits_of(4, 700), SampleSettings.same(4, top_k=200), keys_of(4)
    exact = torch_impl.sample(logits_BV, chosen, keys)
    numbers = (chosen.temperature_B, chosen.top_p_B, chosen.min_p_B, chosen.repetition_penalty_B)
    integers = (chosen.top_k_B, keys.seed_B, keys.seed_B, keys.prompt_B, keys.sample_B, keys.position_B)
    rows = (logits_BV, torch.stack(numbers, -1), torch.stack(integers, -1))
    token_B, scores_B2, status_B = triton_impl.draw(*rows, None, None, True, LaunchPlan(128, 8, 4))
    assert torch.equal(token_B, exact.token_B) and not status_B.any()
    torch.testing.assert_close(scores_B2, torch.stack((exact.logp_B, exact.raw_logp_B), -1), atol=1e-5, rtol=0)


def test_draws_follow_the_exact_distribution(interpreted: Kernels):
    num_draws, options = 100, {"top_p": 0.9, "temperature": 1.3}
    logits_1V = logits_of(1, 5, scale=1.0, seed=3)
    exact_V = torch_impl.distribution(logits_1V, SampleSettings.same(1, **options))[0].exp()
    logits_BV = logits_1V.expand(num_draws, -1)
    chosen = SampleSettings.same(num_draws, **options)
    token_B = sample(logits_BV, chosen, keys_of(num_draws, seed=5), kernels=interpreted).token_B
    count_V, possible_V = torch.bincount(token_B, minlength=5), exact_V > 0
    assert int(count_V[~possible_V].sum()) == 0
    assert stats.chisquare(count_V[possible_V].tolist(), (exact_V[possible_V] * num_draws).tolist()).pvalue > 1e-3


def test_hundreds_of_plain_draws_are_those_of_the_definition(interpreted: Kernels):
    assert_as_defined(logits_of(160, 50), SampleSettings.same(160), keys_of(160, position=2**32 - 1), None, interpreted)


@pytest.mark.parametrize("scale", [1e4, 1e-4, 0.0])
def test_extreme_logits_draw_the_tokens_of_the_definition(scale: float, interpreted: Kernels):
    logits_BV = logits_of(3, 200, scale=scale)
    for options in ({}, {"top_p": 0.5}, {"top_k": 50}, {"min_p": 0.5}):
        assert_as_defined(logits_BV, SampleSettings.same(3, **options), keys_of(3), None, interpreted)


def test_rows_with_settings_of_their_own_do_not_touch_each_other(interpreted: Kernels):
    logits_BV, keys = logits_of(len(OPTIONS), 200), keys_of(len(OPTIONS))
    single = [SampleSettings.same(1, **{**options, "bias": None}) for options in OPTIONS.values()]
    names = [name for name in SampleSettings.__slots__ if name != "bias"]
    together = SampleSettings(*(torch.cat([getattr(one, name) for one in single]) for name in names))
    seen = Seen(logits_of(1, 200) > 4, torch.zeros(len(OPTIONS), dtype=torch.int64))
    whole = sample(logits_BV, together, keys, seen=seen, kernels=interpreted)
    for row, chosen in enumerate(single):
        own = rows_of(keys, torch.tensor([row]))
        alone = replace(seen, slot_B=seen.slot_B[:1])
        part = sample(logits_BV[row : row + 1], chosen, own, seen=alone, kernels=interpreted)
        for field in Sampled.__slots__:
            assert torch.equal(getattr(part, field), getattr(whole, field)[row : row + 1])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_raw_log_probs_have_the_bits_of_the_training_loss(temperature: float, interpreted: Kernels):
    for dtype in DTYPES:
        logits_BV = logits_of(3, 5000).to(dtype)
        logits_BV[:, 0] = 13  # the bias makes it larger than all are without
        options = {"temperature": temperature, "top_p": 0.9, "bias": {0: 2.0}}
        drawn = sample(logits_BV, SampleSettings.same(3, **options), keys_of(3), kernels=interpreted)
        logp_N, _ = chosen_logp_entropy(logits_BV, drawn.token_B, temperature or 1.0, kernels=interpreted)
        assert torch.equal(logp_N, drawn.raw_logp_B)


def test_tokens_of_equal_logit_share_their_fate_and_zeros_are_equal(interpreted: Kernels):
    logits_BV = torch.tensor([1.0, 0.0, -0.0, 0.0, -1.0]).repeat(30, 1)
    for options in ({"top_k": 2}, {"top_p": 0.9}):
        drawn = sample(logits_BV, SampleSettings.same(30, **options), keys_of(30), kernels=interpreted)
        assert set(drawn.token_B.tolist()) == {0, 1, 2, 3}


def test_greedy_takes_the_lowest_id_of_the_largest(interpreted: Kernels):
    sample_cases.check_greedy_takes_the_lowest_id(interpreted)


@pytest.mark.parametrize(("dtype", "bad"), list(zip(DTYPES, [math.nan, math.inf, -math.inf], strict=True)))
def test_logits_that_are_not_finite_name_their_row(dtype, bad, interpreted: Kernels):
    logits_BV = logits_of(6, 101).to(dtype)
    logits_BV[2, 0] = logits_BV[4, 100] = bad
    with pytest.raises(TrainingError, match="row 2, 4 of 6: a logit of the model is not finite"):
        sample(logits_BV, SampleSettings.same(6, top_k=5, top_p=0.9), keys_of(6), kernels=interpreted)


def test_a_bias_that_leaves_nothing_or_overflows_names_its_row(interpreted: Kernels):
    sample_cases.check_a_bias_that_leaves_nothing_or_overflows(interpreted)


def test_logits_may_be_part_of_a_larger_tensor(interpreted: Kernels):
    sample_cases.check_parts_of_a_larger_tensor(interpreted)


def test_torch_knows_the_operator():
    settings_B4 = torch.tensor([[1.0, 0.9, 0.0, 1.0]], dtype=torch.float64).repeat(3, 1)
    given_ = (logits_of(3, 40), settings_B4, torch.zeros(3, 6, dtype=torch.int64), None, None, True)
    torch.library.opcheck(torch.ops.tunesmith.sample.default, given_)
    step = torch.compile(lambda logits: draw_in_triton(logits * 2, *given_[1:])[0], fullgraph=True, backend="aot_eager")
    assert torch.equal(step(given_[0]), draw_in_triton(given_[0] * 2, *given_[1:])[0])


def test_float64_is_refused(interpreted: Kernels):
    with pytest.raises(TritonUnavailableError, match="float64"):
        sample(logits_of(2, 5).double(), SampleSettings.same(2), keys_of(2), kernels=interpreted)
