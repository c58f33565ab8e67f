import pytest

from tunesmith.base.core.errors import RewardError
from tunesmith.learn.rewards.outcome import Logged, Policy, SampleError, Scored


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("skip",), "on_error is 'skip'; allowed are fail, drop, zero"),
        (("drop", 0), "timeout_s is 0; give a positive number"),
        (("drop", -1.0), "timeout_s is -1.0"),
        (("drop", float("nan")), "timeout_s is nan"),
        (("drop", float("inf")), "timeout_s is inf"),
    ],
)
def test_a_policy_that_says_nothing_is_refused(arguments: tuple[object, ...], message: str):
    with pytest.raises(RewardError, match=message):
        Policy(*arguments)  # type: ignore[arg-type]


def test_numbers_are_the_outcomes_or_the_first_failure():
    assert Scored([1.0, None], Logged(2)).numbers() == [1.0, None]
    with pytest.raises(SampleError, match="second"):
        Scored([1.0, SampleError("second", "kind"), SampleError("third", "kind")], Logged(3)).numbers()


def test_what_single_calls_log_is_put_together():
    logged = Logged(3)
    for place in (2, 0):
        one = Logged(1)
        one.extra("text", [f"t{place}"])
        one.metric("count", place)
        logged.add(one, [place])
    assert logged.columns == {"text": ["t0", None, "t2"]}
    assert logged.means() == {"count": 1.0}
