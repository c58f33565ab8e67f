"""Settings and keys that cannot be drawn with are refused, naming the row."""

import pytest
import torch

from tunesmith.core.errors import InputError
from tunesmith.kernels.sample.records import LogitBias, NoiseKeys, SampleSettings, Seen


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
