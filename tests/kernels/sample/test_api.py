"""Both ways to draw, in C++ and in torch, against the definition in float64 and against exact distributions."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

from sample_cases import (
    OPTIONS,
    assert_as_defined,
    check_a_bias_that_leaves_nothing_or_overflows,
    check_greedy_takes_the_lowest_id,
    check_parts_of_a_larger_tensor,
    keys_of,
    logits_of,
    rows_of,
)
from tunesmith.base.core.errors import InputError, NativeUnavailableError, TrainingError
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.kernels.sample import torch_impl
from tunesmith.engine.kernels.sample.api import sample
from tunesmith.engine.kernels.sample.torch_impl import LogitBias, NoiseKeys, Sampled, SampleSettings, Seen

NUM_DRAWS = 200_000


@pytest.fixture(params=["native", "torch"])
def kernels(request, native) -> Kernels:
    return native if request.param == "native" else Kernels("torch")


@pytest.mark.parametrize("name", sorted(set(OPTIONS) - {"greedy"}))
def test_draws_follow_the_exact_distribution(name: str, kernels: Kernels):
    logits_1V = logits_of(1, 12, scale=1.5, seed=3)
    seen = Seen.of([[0, 4, 4, 7]], 12)
    exact_V = torch_impl.distribution(logits_1V, SampleSettings.same(1, **OPTIONS[name]), seen=seen)[0].exp()
    drawn = sample(
        logits_1V.expand(NUM_DRAWS, -1).contiguous(),
        SampleSettings.same(NUM_DRAWS, **OPTIONS[name]),
        keys_of(NUM_DRAWS, seed=5),
        seen=replace(seen, slot_B=torch.zeros(NUM_DRAWS, dtype=torch.int64)),
        kernels=kernels,
    )
    count_V = torch.bincount(drawn.token_B, minlength=12)
    possible_V = exact_V > 0
    assert int(count_V[~possible_V].sum()) == 0
    assert stats.chisquare(count_V[possible_V].numpy(), (exact_V[possible_V] * NUM_DRAWS).numpy()).pvalue > 1e-3
    torch.testing.assert_close(drawn.logp_B, exact_V.log().float()[drawn.token_B], atol=1e-5, rtol=0)


@pytest.mark.parametrize("key", ["seed", "prompt", "sample", "position"])
def test_draws_that_differ_in_one_key_alone_are_independent(key: str, native: Kernels):
    columns = {f"{name}_B": torch.full((NUM_DRAWS,), 9) for name in ("seed", "prompt", "sample", "position")}
    keys = NoiseKeys(**{**columns, f"{key}_B": torch.arange(NUM_DRAWS)})
    token_B = sample(torch.zeros(NUM_DRAWS, 4), SampleSettings.same(NUM_DRAWS), keys, kernels=native).token_B
    neighbours = torch.bincount(4 * token_B[:-1:2] + token_B[1::2], minlength=16)
    assert stats.chisquare(neighbours.numpy()).pvalue > 1e-3


SETTINGS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.5, 0.7, 1.0, 1.9]),
        "top_k": st.one_of(st.just(0), st.integers(1, 400)),
        "top_p": st.one_of(st.just(1.0), st.floats(1e-3, 0.9999)),
        "min_p": st.one_of(st.just(0.0), st.floats(1e-4, 0.9)),
        "repetition_penalty": st.one_of(st.just(1.0), st.floats(0.5, 2.0).map(lambda value: round(value, 3))),
        "bias": st.one_of(st.none(), st.fixed_dictionaries({0: st.integers(-20, 20).map(lambda value: value / 4)})),
    }
)


@given(
    SETTINGS,
    st.sampled_from([1, 2, 15, 16, 17, 127, 128, 129, 257, 1000]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 10_000),
)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_native_draws_are_those_of_the_definition(native, options, num_tokens, dtype, seed):
    logits_BV = logits_of(24, num_tokens, seed=seed).to(dtype)
    ids_BS = torch.randint(num_tokens, (24, 5), generator=torch.Generator().manual_seed(seed))
    seen = Seen.of(ids_BS.tolist(), num_tokens)
    chosen = SampleSettings.same(24, **options)
    assert_as_defined(logits_BV, chosen, keys_of(24, seed=seed), seen, native, most_unclear=math.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_batch_over_the_vocabulary_of_a_real_model(name: str, dtype: torch.dtype, native: Kernels):
    logits_BV = logits_of(16, 49152).to(dtype)
    seen = Seen.of([list(range(row, 49152, 64)) for row in range(16)], 49152)
    options = {**OPTIONS[name], "top_k": 50 * OPTIONS[name].get("top_k", 0)}
    assert_as_defined(logits_BV, SampleSettings.same(16, **options), keys_of(16), seen, native)


def test_top_k_beyond_the_number_of_blocks_is_exact(native: Kernels):
    logits_BV = logits_of(16, 5000)
    for k in (39, 40, 41, 4999, 5000, 6000):
        assert_as_defined(logits_BV, SampleSettings.same(16, top_k=k), keys_of(16), None, native)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_row_does_not_depend_on_the_batch_its_slot_or_the_threads(name: str, kernels: Kernels):
    logits_BV, keys = logits_of(40, 777), keys_of(40, seed=3, position=12)
    seen = Seen(logits_of(50, 777) > 4, torch.randperm(50, generator=torch.Generator().manual_seed(0))[:40])
    whole = sample(logits_BV, SampleSettings.same(40, **OPTIONS[name]), keys, seen=seen, kernels=kernels)
    num_threads = torch.get_num_threads()
    for rows in (torch.tensor([17]), torch.tensor([39, 3, 17, 0]), torch.arange(39, -1, -1)):
        try:
            torch.set_num_threads(3 - num_threads if num_threads < 3 else 1)
            part = sample(
                logits_BV[rows],
                SampleSettings.same(len(rows), **OPTIONS[name]),
                rows_of(keys, rows),
                seen=replace(seen, slot_B=seen.slot_B[rows]),
                kernels=kernels,
            )
        finally:
            torch.set_num_threads(num_threads)
        for field in Sampled.__slots__:
            if kernels.choice == "native" or field == "token_B":
                assert torch.equal(getattr(part, field), getattr(whole, field)[rows])


def test_the_raw_log_prob_does_not_depend_on_bias_penalty_or_filters(native: Kernels):
    logits_BV, seen = logits_of(30, 500), Seen.of([[1, 2, 3]] * 30, 500)
    greedy = sample(logits_BV, SampleSettings.same(30, temperature=0), keys_of(30), kernels=native)
    same = {int(token): 1e4 for token in greedy.token_B}
    forced = SampleSettings.same(30)
    bias = LogitBias.of([{int(token): same[int(token)]} for token in greedy.token_B])
    found = sample(logits_BV, replace(forced, bias=bias), keys_of(30), seen=seen, kernels=native)
    assert torch.equal(found.token_B, greedy.token_B)
    assert torch.equal(found.raw_logp_B, greedy.raw_logp_B)
    assert torch.equal(found.logp_B, torch.zeros(30))


def test_greedy_takes_the_lowest_id_of_the_largest(kernels: Kernels):
    check_greedy_takes_the_lowest_id(kernels)


def test_tokens_of_equal_logit_share_their_fate(kernels: Kernels):
    logits_BV = torch.tensor([3.0, 1.0, 1.0, 1.0, 0.0]).repeat(400, 1)
    for options in ({"top_k": 2}, {"top_p": 0.75}):
        drawn = sample(logits_BV, SampleSettings.same(400, **options), keys_of(400), kernels=kernels)
        assert set(drawn.token_B.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("column", [0, 15, 99, 100])
def test_logits_that_are_not_finite_name_their_row(dtype, bad, column, kernels: Kernels):
    logits_BV = logits_of(6, 101).to(dtype)
    logits_BV[[2, 4], column] = bad
    with pytest.raises(TrainingError, match=r"row 2, 4 of 6: a logit of the model is not finite"):
        sample(logits_BV, SampleSettings.same(6), keys_of(6), kernels=kernels)


def test_a_bias_that_leaves_nothing_or_overflows_names_its_row(kernels: Kernels):
    check_a_bias_that_leaves_nothing_or_overflows(kernels)


def test_logits_may_be_part_of_a_larger_tensor(kernels: Kernels):
    check_parts_of_a_larger_tensor(kernels)


def test_what_does_not_fit_is_refused_before_any_work(native: Kernels):
    logits_BV, three = logits_of(3, 10), SampleSettings.same(3)

    def refused(match: str, logits=logits_BV, chosen=three, keys=None, seen=None):
        with pytest.raises(InputError, match=match):
            sample(logits, chosen, keys or keys_of(3), seen=seen, kernels=native)

    refused(r"give floating-point \[rows, columns\]", logits=logits_BV.long())
    refused("give floating-point", logits=logits_BV[0])
    refused("give floating-point", logits=logits_BV[:0])
    refused("settings are for 2 rows and the logits have 3", chosen=SampleSettings.same(2))
    refused("noise keys are for 4 rows", keys=keys_of(4))
    refused(r"token 10; ids must lie in \[0, 10\)", chosen=SampleSettings.same(3, bias={10: 1.0}))
    refused(r"give bool \[slots, 10\]", seen=Seen.of([[1]] * 3, 11))
    refused(r"give 3 int64 in \[0, 3\)", seen=replace(Seen.of([[1]] * 3, 10), slot_B=torch.tensor([0, 1, 3])))


def test_float64_is_drawn_from_as_defined_and_never_natively(native: Kernels):
    logits_BV, chosen = logits_of(8, 100).double(), SampleSettings.same(8, top_p=0.9)
    found = sample(logits_BV, chosen, keys_of(8), kernels=Kernels("auto"))
    exact = torch_impl.sample(logits_BV, chosen, keys_of(8))
    assert all(torch.equal(getattr(found, name), getattr(exact, name)) for name in Sampled.__slots__)
    with pytest.raises(NativeUnavailableError, match=r"bfloat16 and float32 and was given torch\.float64"):
        sample(logits_BV, chosen, keys_of(8), kernels=native)


def test_without_a_compiler_drawing_goes_on_in_torch(monkeypatch, tmp_path, native):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("TUNESMITH_CACHE", str(tmp_path))
    logits_BV, chosen = logits_of(8, 100), SampleSettings.same(8)
    found = sample(logits_BV, chosen, keys_of(8), kernels=Kernels("auto"))
    assert torch.equal(found.token_B, sample(logits_BV, chosen, keys_of(8), kernels=native).token_B)
    with pytest.raises(NativeUnavailableError, match=r"no C\+\+ compiler"):
        sample(logits_BV, chosen, keys_of(8), kernels=Kernels("native"))
