"""The definition of the sampler against transformers' processors, Random123's vectors and a loop; refused arguments."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sample_cases import keys_of
from tunesmith.base.core.errors import InputError
from tunesmith.engine.kernels.sample.torch_impl import (
    LogitBias,
    NoiseKeys,
    SampleSettings,
    Seen,
    distribution,
    philox,
    sample,
    uniform,
)


def words(*texts: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([int(text, 16)]) for text in texts)


# The known answers that Random123 ships for philox4x32 with 10 rounds.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers(counter: str, key: str, expected: str):
    assert philox(words(*counter.split()), words(*key.split())) == words(*expected.split())


def test_noise_depends_on_each_of_its_keys():
    base = (3, 5, 7, 11)
    rows = [base, *(tuple(k + (i == j) for j, k in enumerate(base)) for i in range(4)), (3 + 2**32, *base[1:])]
    number_B = uniform(NoiseKeys(*(torch.tensor(column) for column in zip(*rows, strict=True))))
    assert len(set(number_B.tolist())) == len(rows)
    assert 0 <= float(number_B.min()) < float(number_B.max()) < 1


SETTINGS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 3, 39, 40, 99]),
        "top_p": st.sampled_from([0.05, 0.6, 0.93, 1.0]),
        "min_p": st.sampled_from([0.0, 0.02, 0.4]),
        "repetition_penalty": st.sampled_from([0.8, 1.0, 1.3]),
        "bias": st.sampled_from([{}, {4: 2.5}, {0: -3.0, 7: 1.5, 39: float("-inf")}]),
    }
)


@given(SETTINGS, st.integers(0, 10_000))
@settings(max_examples=150, deadline=None)
def test_the_distribution_is_that_of_transformers(options: dict, seed: int):
    generator = torch.Generator().manual_seed(seed)
    logits_BV = 3 * torch.randn(5, 40, generator=generator, dtype=torch.float64)
    ids_BS = torch.randint(40, (5, 8), generator=generator)
    expected_BV = logits_BV
    if options["bias"]:
        bias = [[[token], value] for token, value in options["bias"].items()]
        expected_BV = SequenceBiasLogitsProcessor(bias)(ids_BS, expected_BV)
    expected_BV = RepetitionPenaltyLogitsProcessor(options["repetition_penalty"])(ids_BS, expected_BV)
    expected_BV = TemperatureLogitsWarper(options["temperature"])(ids_BS, expected_BV)
    if options["top_k"]:
        expected_BV = TopKLogitsWarper(options["top_k"])(ids_BS, expected_BV)
    if options["top_p"] < 1:
        expected_BV = TopPLogitsWarper(options["top_p"])(ids_BS, expected_BV)
    expected_BV = MinPLogitsWarper(options["min_p"])(ids_BS, expected_BV).log_softmax(-1)
    found_BV = distribution(logits_BV, SampleSettings.same(5, **options), seen=Seen.of(ids_BS.tolist(), 40))
    assert torch.equal(found_BV.isfinite(), expected_BV.isfinite())
    torch.testing.assert_close(found_BV, expected_BV, atol=1e-9, rtol=1e-9)


def test_a_token_is_the_first_whose_running_sum_passes_the_noise():
    logits_BV = torch.randn(50, 9, generator=torch.Generator().manual_seed(1))
    drawn = sample(logits_BV, SampleSettings.same(50, top_p=0.8), keys_of(50))
    logp_BV = distribution(logits_BV, SampleSettings.same(50, top_p=0.8))
    for row, number in enumerate(uniform(keys_of(50)).tolist()):
        token, passed = 0, float(logp_BV[row, 0].exp())
        while passed <= number:
            token += 1
            passed += float(logp_BV[row, token].exp())
        assert int(drawn.token_B[row]) == token
        assert float(drawn.logp_B[row]) == pytest.approx(float(logp_BV[row, token]))
        raw = float(logits_BV[row].double().log_softmax(-1)[token])
        assert float(drawn.raw_logp_B[row]) == pytest.approx(raw)


def test_rows_with_different_settings_do_not_touch_each_other():
    logits_BV = torch.randn(3, 30, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    options = [{"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.2, "temperature": 0.5}]
    single = [SampleSettings.same(1, **option) for option in options]
    together = SampleSettings(
        *(torch.cat([getattr(s, name) for s in single]) for name in SampleSettings.__slots__ if name != "bias")
    )
    expected_BV = torch.cat([distribution(logits_BV[i : i + 1], s) for i, s in enumerate(single)])
    assert torch.equal(distribution(logits_BV, together), expected_BV)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("temperature", value) for value in (-1.0, 1e-9, float("nan"), float("inf"))),
        ("top_k", -1),
        *(("top_p", value) for value in (0.0, 1.1, float("nan"))),
        *(("min_p", value) for value in (-0.1, 1.0, float("nan"))),
        *(("repetition_penalty", value) for value in (0.0, -2.0, float("inf"), float("nan"))),
    ],
)
def test_a_setting_out_of_range_is_refused(option: str, value: float):
    with pytest.raises(InputError, match=f"row 0: {option} is .*must be"):
        SampleSettings.same(2, **{option: value})


def test_the_row_of_a_bad_setting_is_named():
    fine = SampleSettings.same(3)
    with pytest.raises(InputError, match=r"row 2: top_p is 2\.0"):
        SampleSettings(
            fine.temperature_B,
            fine.top_k_B,
            torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64),
            fine.min_p_B,
            fine.repetition_penalty_B,
        )


def test_settings_of_another_dtype_or_length_are_refused():
    fine = SampleSettings.same(3)
    rest = (fine.min_p_B, fine.repetition_penalty_B)
    with pytest.raises(InputError, match=r"top_p_B is torch.float32 of shape \(3,\); give torch.float64 \[3\]"):
        SampleSettings(fine.temperature_B, fine.top_k_B, torch.ones(3), *rest)
    with pytest.raises(InputError, match=r"top_k_B is torch.int64 of shape \(2,\)"):
        SampleSettings(fine.temperature_B, fine.top_k_B[:2], fine.top_p_B, *rest)
    with pytest.raises(InputError, match="logit bias is for 2 rows; the settings are for 3"):
        SampleSettings(fine.temperature_B, fine.top_k_B, fine.top_p_B, *rest, bias=LogitBias.of([{}, {}]))


@pytest.mark.parametrize("bias", [{3: float("nan")}, {3: float("inf")}, {-1: 1.0}])
def test_a_bias_that_means_nothing_is_refused(bias: dict[int, float]):
    with pytest.raises(InputError, match="row 1: logit bias"):
        LogitBias.of([{}, bias])


def test_a_bias_is_kept_row_by_row():
    bias = LogitBias.of([{7: -1.0}, {}, {2: float("-inf"), 9: 3.0}])
    assert bias.offset_B1.tolist() == [0, 1, 1, 3]
    assert bias.token_N.tolist() == [7, 2, 9]
    assert bias.value_N.tolist() == [-1.0, float("-inf"), 3.0]


@pytest.mark.parametrize("name", ["seed", "prompt", "sample", "position"])
def test_a_key_out_of_range_is_refused(name: str):
    columns = {key: torch.zeros(2, dtype=torch.int64) for key in ("seed_B", "prompt_B", "sample_B", "position_B")}
    with pytest.raises(InputError, match=f"row 1: {name} is -1"):
        NoiseKeys(**{**columns, f"{name}_B": torch.tensor([0, -1])})
    with pytest.raises(InputError, match="give int64"):
        NoiseKeys(**{**columns, f"{name}_B": torch.zeros(2)})
    if name != "seed":
        with pytest.raises(InputError, match=f"{name} is 4294967296"):
            NoiseKeys(**{**columns, f"{name}_B": torch.tensor([0, 2**32])})


def test_seen_tokens_may_be_repeated():
    seen = Seen.of([[3, 3, 1], []], vocabulary_size=5)
    assert seen.mask_SV.tolist() == [[False, True, False, True, False], [False] * 5]
