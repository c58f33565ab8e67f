"""The trend of rewards over length: against a twin that fits a constant for each prompt, and where it is damaged."""

import math

import numpy as np
import pytest

from tunesmith.base.core.errors import ModelError
from tunesmith.engine.models.length_trend import LengthTrend


def crowd(seed: int, num_prompts: int, num_answers: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """(Rewards with a trend that bends, a constant of each prompt that grows with its lengths, and noise; tokens;
    prompts).
    """
    random = np.random.default_rng(seed)
    prompts = [f"p{i}" for i in range(num_prompts) for _ in range(num_answers)]
    size_M = np.repeat(random.uniform(10, 200, num_prompts), num_answers)
    tokens_M = (size_M * random.uniform(0.3, 3, len(prompts))).astype(int)
    of_prompt_M = -np.log(size_M)
    reward_M = of_prompt_M + 2 * np.minimum(np.log1p(tokens_M), 4) + random.normal(scale=0.1, size=len(prompts))
    return reward_M, tokens_M, prompts


@pytest.mark.parametrize(("num_prompts", "num_points"), [(20, 2), (60, 3), (300, 5)])
def test_it_is_the_least_squares_fit_with_a_constant_for_each_prompt(num_prompts: int, num_points: int) -> None:
    reward_M, tokens_M, prompts = crowd(1, num_prompts, 2)
    found = LengthTrend.fitted(reward_M, tokens_M.tolist(), prompts)
    assert found is not None and len(found.log_tokens) == num_points and found.num_answers == len(prompts)
    # The twin: hats at the points in place of hinges, and a column for each prompt.
    x_M, points = np.log1p(tokens_M.astype(np.float64)), np.array(found.log_tokens)
    hats = np.stack([np.interp(x_M, points, one) for one in np.eye(len(points))[1:]], axis=1)
    dummies = np.array([[float(one == prompt) for one in dict.fromkeys(prompts)] for prompt in prompts])
    solution = np.linalg.lstsq(np.concatenate([hats, dummies], axis=1), reward_M, rcond=None)[0]
    twin_M = hats @ solution[: len(points) - 1]
    np.testing.assert_allclose(found.at(tokens_M.tolist()), twin_M - twin_M.mean(), atol=1e-9)
    assert found.slope > 0, "though long prompts have lower rewards"


def test_what_is_left_has_no_trend_within_prompts_and_its_mean() -> None:
    reward_M, tokens_M, prompts = crowd(2, 300, 3)
    found = LengthTrend.fitted(reward_M, tokens_M.tolist(), prompts)
    assert found is not None
    left_M = reward_M - found.at(tokens_M.tolist())
    assert left_M.mean() == pytest.approx(reward_M.mean())
    again = LengthTrend.fitted(left_M, tokens_M.tolist(), prompts)
    assert again is not None
    np.testing.assert_allclose(again.rewards, 0, atol=1e-9)


def test_it_goes_on_straight_beyond_its_points() -> None:
    trend = LengthTrend((1.0, 2.0, 3.0), (0.0, 1.0, 0.5), 9)
    tokens = [0, 1, 20, 2000]
    expected = [-1.0, math.log(2) - 1, 0.5 - 0.5 * (math.log(21) - 3), 0.5 - 0.5 * (math.log(2001) - 3)]
    np.testing.assert_allclose(trend.at(tokens), expected)
    assert trend.slope == pytest.approx(math.log(2) * 0.25)
    assert LengthTrend.of_config(trend.to_json()) == trend


def test_answers_of_equal_length_have_none() -> None:
    assert LengthTrend.fitted(np.arange(4.0), [3, 3, 8, 8], ["a", "a", "b", "b"]) is None
    assert LengthTrend.fitted(np.arange(3.0), [3, 5, 8], ["a", "b", "c"]) is None


@pytest.mark.parametrize(
    "change",
    [
        {"log_tokens": [1.0]},
        {"log_tokens": [2.0, 1.0]},
        {"rewards": [0.0, float("nan")]},
        {"rewards": None},
        {"num_answers": "9"},
    ],
)
def test_a_damaged_one_is_refused(change: dict[str, object]) -> None:
    facts = LengthTrend((1.0, 2.0), (0.0, 1.0), 9).to_json()
    with pytest.raises(ModelError, match=r"tunesmith_length_trend in config\.json is damaged"):
        LengthTrend.of_config({**facts, **change})
    with pytest.raises(ModelError, match="damaged"):
        LengthTrend.of_config([])
