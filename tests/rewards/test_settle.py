import logging
from collections.abc import Callable, Sequence

import pytest
import torch

from tunesmith.base.core.errors import RewardError
from tunesmith.engine.batch.rollout import Group
from tunesmith.learn.rewards.outcome import Failure, Logged, Outcome, Policy, Sample, SampleError, Scored, samples_of
from tunesmith.learn.rewards.scorer import Scores, Settler

BROKEN = SampleError("reward `a` raised ValueError: no; scoring this", "raised ValueError")


@pytest.fixture
def samples(make_group: Callable[..., Group]) -> list[Sample]:
    return samples_of([make_group("It was", "x", "y", "z", id="p:1")])


def settle(
    samples: list[Sample], *outcomes: list[Outcome], policies: Sequence[str], weights: Sequence[float] = ()
) -> Scores:
    settler = Settler("abc"[: len(outcomes)], [Policy(p) for p in policies], weights or [1.0] * len(outcomes))  # type: ignore[arg-type]
    return settler.settle(samples, [Scored(row, Logged(len(samples))) for row in outcomes], (1, 3))


def test_drop_leaves_the_sample_out_and_keeps_the_other_rewards_of_it(samples: list[Sample]):
    settled = settle(samples, [1.0, BROKEN, 3.0], [10.0, 20.0, None], policies=["drop", "fail"], weights=[1, -0.5])
    assert settled.total_PG[0].tolist() == [-4.0, 0.0, 3.0]
    assert settled.valid_PG[0].tolist() == [True, False, True]
    assert settled.parts["b"][0, :2].tolist() == [10.0, 20.0]
    assert [settled.parts[name][0].isnan().tolist() for name in "ab"] == [[False, True, False], [False, False, True]]
    assert settled.failures == (
        Failure("a", "prompt p:1, completion 1 ('y')", str(BROKEN), "drop", "raised ValueError"),
    )
    assert settled.total_PG.dtype == settled.parts["a"].dtype == torch.float32


def test_zero_counts_zero_for_that_reward_alone(samples: list[Sample]):
    settled = settle(samples, [1.0, BROKEN, 3.0], [10.0, 20.0, 30.0], policies=["zero", "fail"])
    assert settled.total_PG[0].tolist() == [11.0, 20.0, 33.0]
    assert settled.valid_PG.all()
    assert settled.parts["a"][0].tolist() == [1.0, 0.0, 3.0]
    assert [failure.action for failure in settled.failures] == ["zero"]


def test_of_two_failures_on_one_sample_the_one_that_drops_it_decides(samples: list[Sample]):
    settled = settle(samples, [BROKEN, 1.0, 1.0], [BROKEN, 1.0, 1.0], policies=["zero", "drop"])
    assert settled.valid_PG[0].tolist() == [False, True, True]
    assert [failure.action for failure in settled.failures] == ["zero", "drop"]


@pytest.mark.parametrize(
    ("policies", "valid"), [(["zero", "zero"], True), (["zero", "drop"], False), (["drop", "drop"], False)]
)
def test_where_no_reward_applies_the_strictest_policy_decides(samples: list[Sample], policies: list[str], valid: bool):
    settled = settle(samples, [None, 1.0, 1.0], [None, None, 1.0], policies=policies)
    assert settled.valid_PG[0].tolist() == [valid, True, True]
    assert settled.total_PG[0].tolist() == [0.0, 1.0, 2.0]
    (failure,) = settled.failures
    assert failure.reward == "a, b" and "no reward applies to prompt p:1, completion 0" in failure.reason
    with pytest.raises(RewardError, match="no reward applies to prompt p:1, completion 0"):
        settle(samples, [None, 1.0, 1.0], [None, None, 1.0], policies=["fail", policies[1]])


@pytest.mark.parametrize("value", [3e38, -1e30, 2e17])
def test_a_sum_whose_square_is_beyond_float32_is_a_failure(samples: list[Sample], value: float):
    settled = settle(samples, [value, 1.0, 1.0], policies=["drop"], weights=[10.0])
    assert settled.valid_PG[0].tolist() == [False, True, True] and settled.total_PG[0].tolist() == [0.0, 10.0, 10.0]
    with pytest.raises(RewardError, match=r"sum of rewards of prompt p:1, completion 0 .* is .*; 1e18 in size"):
        settle(samples, [value, 1.0, 1.0], policies=["fail"], weights=[10.0])


def test_fail_raises_and_so_does_dropping_everything(samples: list[Sample]):
    with pytest.raises(SampleError) as caught:
        settle(samples, [1.0, BROKEN, 3.0], policies=["fail"])
    assert caught.value is BROKEN
    with pytest.raises(RewardError, match=r"every one of 3 completions is left out .* nothing to learn.*ValueError"):
        settle(samples, [BROKEN] * 3, policies=["drop"])
    assert settle(samples, [BROKEN] * 3, policies=["zero"]).total_PG[0].tolist() == [0.0] * 3


def test_each_kind_of_failure_is_logged_once_with_its_sample_and_count(
    samples: list[Sample], caplog: pytest.LogCaptureFixture
):
    settler = Settler("ab", [Policy("drop"), Policy("zero")], [1.0, 1.0])
    other = SampleError("reward `b` returned nan", "returned no finite number")
    rows: list[list[Outcome]] = [[BROKEN, 1.0, BROKEN], [1.0, other, BROKEN]]
    retried = Scored([1.0] * 3, Logged(3), retried=BROKEN)
    with caplog.at_level(logging.WARNING, logger="tunesmith"):
        for _ in range(3):
            settler.settle(samples, [Scored(row, Logged(3)) for row in rows], (1, 3))
            settler.settle(samples, [retried, Scored([1.0] * 3, Logged(3))], (1, 3))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 4
    assert "2 of 3 completions are left out of training, prompt p:1, completion 0 ('x') first." in messages[0]
    assert (
        "reward `b` returned nan. 1 of 3 completions are counted as 0, prompt p:1, completion 1 ('y')." in messages[1]
    )
    assert "counted in rewards/num_failed" in messages[2]
    assert "Called with one completion at a time it did not fail" in messages[3]


def test_a_call_that_was_retried_is_a_failure_without_a_sample_lost(samples: list[Sample]):
    settled = Settler("a", [Policy("drop")], [1.0]).settle(
        samples, [Scored([1.0] * 3, Logged(3), retried=BROKEN)], (1, 3)
    )
    assert settled.valid_PG.all()
    assert settled.failures == (Failure("a", "3 completions together", str(BROKEN), "retry", "retried"),)
