import asyncio
import contextvars
import functools
import itertools
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from tunesmith.base.core.errors import RewardError
from tunesmith.engine.batch.rollout import Group
from tunesmith.learn.rewards.calling import FunctionReward, ObjectReward
from tunesmith.learn.rewards.outcome import Policy, Sample, SampleError, samples_of

GroupMaker = Callable[..., Group]
DROP = Policy("drop")


@pytest.fixture
def samples(make_group: GroupMaker) -> list[Sample]:
    return samples_of([make_group("It was", " good", " bad", id="p.jsonl:7", columns={"answer": 4})])


def kinds(outcomes: Sequence[object]) -> list[object]:
    """Numbers as they are, failures by their kind."""
    return [outcome.kind if isinstance(outcome, SampleError) else outcome for outcome in outcomes]


def run_async(reward: FunctionReward | ObjectReward, samples: Sequence[Sample]) -> list[object]:
    return kinds(asyncio.run(reward.outcomes_async(samples)).outcomes)


@pytest.mark.parametrize(
    "output",
    [
        [1, 2],
        (1.0, 2.0),
        np.array([1.0, 2.0]),
        torch.tensor([1.0, 2.0]),
        iter([True, 2]),
        [np.float32(1), torch.tensor(2)],
    ],
)
def test_any_list_of_numbers_is_taken(samples: list[Sample], output: object):
    assert FunctionReward(lambda **kwargs: output, "f").score(samples) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ([1.0], r"returned 1 scores for 2 completions; it must return one for each. .*completion 1 \(' ?bad'\)"),
        ([1.0, 2.0, 3.0], "returned 3 scores for 2 completions"),
        (0.5, "returned an object of type float; it must return a list"),
        (None, "returned an object of type NoneType"),
        ("12", "returned an object of type str"),
        ({0: 1.0, 1: 2.0}, "returned an object of type dict"),
        ([1.0, "2"], r"returned '2' for prompt p.jsonl:7, completion 1 \('bad'\); it must be a finite number"),
        ([float("nan"), 1.0], r"returned nan for prompt p.jsonl:7, completion 0 \('good'\)"),
        ([1.0, float("inf")], "returned inf for prompt p.jsonl:7, completion 1"),
        ([1.0, [2.0]], r"returned \[2.0\] for"),
        ([1.0, object()], "returned <object object"),
    ],
)
def test_what_is_no_score_is_named_with_its_sample(samples: list[Sample], output: object, message: str):
    with pytest.raises(RewardError, match=f"reward `f` {message}"):
        FunctionReward(lambda **kwargs: output, "f").score(samples)


def test_a_function_that_raises_is_named_with_the_sample_it_fails_on(samples: list[Sample]):
    def fragile(completions, **kwargs):
        return [1 / (len(text) - 4) for text in completions]

    message = (
        r"reward `fragile` raised ZeroDivisionError: .*\(test_calling.py, line \d+\); "
        r"scoring prompt p.jsonl:7, completion 1 \('bad'\)"
    )
    with pytest.raises(RewardError, match=message) as caught:
        FunctionReward(fragile).score(samples)
    assert caught.value.exit_code == 2


def test_a_function_that_fails_on_the_batch_alone_names_its_first_sample(samples: list[Sample]):
    def one_by_one(completions, **kwargs):
        (text,) = completions
        return [len(text)]

    with pytest.raises(
        RewardError, match=r"raised ValueError: .*2 completions together, from prompt p.jsonl:7, completion 0"
    ):
        FunctionReward(one_by_one).score(samples)


def test_async_functions_are_recognised():
    async def later(**kwargs):
        return []

    class Judge:
        async def __call__(self, **kwargs):
            return []

    assert FunctionReward(later).is_async and FunctionReward(Judge()).is_async
    assert FunctionReward(functools.partial(later, x=1)).is_async
    assert not FunctionReward(lambda **kwargs: []).is_async


def test_numbers_beyond_float32_and_tensors_of_several_numbers_are_no_scores(samples: list[Sample]):
    outputs = ([1e300, 1.0], [10**400, 1.0], [10**5000, 1.0], [torch.ones(2), 1.0], [1j, 1.0])
    for output in outputs:
        outcomes = FunctionReward(lambda output=output, **kwargs: output, "f").outcomes(samples).outcomes
        assert kinds(outcomes) == ["returned no finite number", 1.0]
    with pytest.raises(RewardError, match=r"returned an integer of 16610 bits for prompt p.jsonl:7, completion 0"):
        FunctionReward(lambda **kwargs: outputs[2], "f").score(samples)


def test_an_iterator_is_read_under_the_guard_and_may_be_endless(samples: list[Sample]):
    def breaks(**kwargs):
        yield 1.0
        raise KeyError("second")

    with pytest.raises(RewardError, match="raised KeyError: 'second'"):
        FunctionReward(breaks).score(samples)
    with pytest.raises(RewardError, match="returned 3 scores for 2 completions"):
        FunctionReward(lambda **kwargs: itertools.repeat(1.0), "endless").score(samples)


def test_a_function_that_ends_the_interpreter_has_failed(samples: list[Sample]):
    def leaves(**kwargs):
        raise SystemExit(3)

    async def leaves_later(**kwargs):
        raise SystemExit(3)

    assert kinds(FunctionReward(leaves).outcomes(samples).outcomes) == ["raised SystemExit"] * 2
    assert run_async(FunctionReward(leaves_later), samples) == ["raised SystemExit"] * 2


def test_under_fail_the_search_ends_at_the_first_sample_that_fails(samples: list[Sample]):
    sizes: list[int] = []

    def never(completions, **kwargs):
        sizes.append(len(completions))
        raise ValueError

    with pytest.raises(RewardError, match="completion 0"):
        FunctionReward(never).score(samples)
    assert sizes == [2, 1]


def fragile(completions, answer, log_metric, log_extra, **kwargs):
    """Fails on the text of four characters."""
    log_extra("answers", answer)
    log_metric("calls", len(completions))
    return [1 / (len(text) - 4) for text in completions]


async def fragile_later(**kwargs):
    return fragile(**kwargs)


def too_short(completions, **kwargs):
    return [1.0 for text in completions if len(text) != 4]


@pytest.mark.parametrize(
    ("function", "kind"),
    [(fragile, "raised ZeroDivisionError"), (too_short, "returned a list of the wrong length")],
)
def test_otherwise_only_the_samples_that_fail_alone_have_failed(
    samples: list[Sample], function: Callable[..., object], kind: str
):
    scored = FunctionReward(function, policy=DROP).outcomes(samples)
    assert kinds(scored.outcomes) == [1.0, kind]
    assert "completion 1 ('bad')" in str(scored.outcomes[1])
    assert scored.retried is None


def test_an_async_function_is_searched_in_the_same_way(samples: list[Sample]):
    assert run_async(FunctionReward(fragile_later, policy=DROP), samples) == [1.0, "raised ZeroDivisionError"]


def test_what_a_failed_call_logged_does_not_count(samples: list[Sample]):
    logged = FunctionReward(fragile, policy=DROP).outcomes(samples).logged
    assert logged.columns == {"answers": [4, None]}
    assert logged.means() == {"calls": 1.0}


def test_a_function_that_fails_on_the_batch_alone_is_noted_and_its_numbers_count(samples: list[Sample]):
    def one_by_one(completions, **kwargs):
        (text,) = completions
        return [len(text)]

    scored = FunctionReward(one_by_one, policy=DROP).outcomes(samples)
    assert scored.outcomes == [5.0, 4.0]
    assert "2 completions together" in str(scored.retried)


def test_a_row_without_the_column_fails_alone_and_no_row_with_it_is_an_error_under_every_policy(
    make_group: GroupMaker,
):
    def needs(answer, **kwargs):
        return [float(value) for value in answer]

    rows = [make_group("a", "x", columns={"answer": 3}), make_group("b", "y", columns={"level": 1})]
    outcomes = FunctionReward(needs, policy=DROP).outcomes(samples_of(rows)).outcomes
    assert kinds(outcomes) == [3.0, "raised TypeError"]
    with pytest.raises(RewardError, match="`needs` needs `answer`, but the prompts have no such column"):
        FunctionReward(needs, policy=DROP).outcomes(samples_of(rows[1:]))


def test_log_extra_takes_one_value_for_each_completion(samples: list[Sample]):
    def logs(completions, log_extra, **kwargs):
        log_extra("note", ["one"] * 3)
        return [1.0] * len(completions)

    with pytest.raises(RewardError, match=r"reward `logs`: log_extra\('note', ...\) was given 3 values for 1"):
        FunctionReward(logs).score(samples)


def test_a_call_that_hangs_fails_as_a_whole_and_is_not_repeated(samples: list[Sample]):
    release = threading.Event()
    sizes: list[int] = []

    def hangs(completions, **kwargs):
        sizes.append(len(completions))
        release.wait()
        return [1.0] * len(completions)

    try:
        outcomes = FunctionReward(hangs, policy=Policy("drop", timeout_s=0.05)).outcomes(samples).outcomes
    finally:
        release.set()
    assert kinds(outcomes) == ["hung", "hung"] and sizes == [2]
    message = str(outcomes[0])
    assert "reward `hangs` did not return within timeout_s, 0.05 seconds" in message
    assert "its thread tunesmith-reward-hangs-1 is left behind" in message
    assert "2 completions together, from prompt p.jsonl:7, completion 0" in message


def test_after_a_hang_the_next_call_has_a_fresh_thread(samples: list[Sample]):
    release = threading.Event()
    threads: list[str] = []

    def hangs_once(completions, **kwargs):
        threads.append(threading.current_thread().name)
        if len(threads) == 1:
            release.wait()
        return [1.0] * len(completions)

    reward = FunctionReward(hangs_once, policy=Policy("drop", timeout_s=2.0))
    try:
        assert kinds(reward.outcomes(samples).outcomes) == ["hung", "hung"]
        for _ in range(2):
            assert reward.outcomes(samples).outcomes == [1.0, 1.0]
    finally:
        release.set()
    assert len(set(threads)) == 2 and threads[1] == threads[2]


def test_without_a_time_limit_a_function_runs_in_the_callers_thread(samples: list[Sample]):
    threads: list[threading.Thread] = []

    def where(completions, **kwargs):
        threads.append(threading.current_thread())
        return [0.0] * len(completions)

    FunctionReward(where).score(samples)
    FunctionReward(where, policy=Policy(timeout_s=60)).score(samples)
    assert threads[0] is threading.current_thread() and threads[1] is not threads[0] and threads[1].daemon


def test_with_a_time_limit_errors_and_context_are_those_of_a_plain_call(samples: list[Sample]):
    variable = contextvars.ContextVar("variable", default=0.0)
    variable.set(7.0)

    def own_timeout(completions, **kwargs):
        raise TimeoutError("the service is slow")

    def reads(completions, **kwargs):
        return [variable.get()] * len(completions)

    limit = Policy(timeout_s=60)
    assert FunctionReward(reads, policy=limit).score(samples) == [7.0, 7.0]
    message = r"raised TimeoutError: the service is slow \(test_calling.py, line \d+\); scoring .*completion 0"
    with pytest.raises(RewardError, match=message):
        FunctionReward(own_timeout, policy=limit).score(samples)


def test_an_async_function_that_hangs_is_cancelled_even_against_its_will(samples: list[Sample]):
    async def stubborn(completions, **kwargs):
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if released:
                    raise

    released = False

    async def scenario() -> list[object]:
        nonlocal released
        outcomes = (await FunctionReward(stubborn, policy=Policy("drop", 0.05)).outcomes_async(samples)).outcomes
        released = True  # so that the loop of this test can end
        return kinds(outcomes)

    assert asyncio.run(scenario()) == ["hung", "hung"]


def test_an_async_function_that_is_cancelled_from_inside_has_failed(samples: list[Sample]):
    async def cancelled(completions, **kwargs):
        raise asyncio.CancelledError

    assert run_async(FunctionReward(cancelled), samples) == ["raised CancelledError"] * 2


def test_objects_with_name_and_score_are_guarded_too(samples: list[Sample]):
    class Judge:
        name = "judge"

        def score(self, samples: Sequence[Sample]) -> list[float | None]:
            return [1 / sample.index for sample in samples]

    class LateJudge(Judge):
        async def score(self, samples: Sequence[Sample]) -> list[float | None]:
            return [float(sample.index) for sample in samples]

    outcomes = ObjectReward(Judge(), DROP).outcomes(samples).outcomes
    assert kinds(outcomes) == ["raised ZeroDivisionError", 1.0]
    late = ObjectReward(LateJudge(), DROP)
    assert late.is_async and run_async(late, samples) == [0.0, 1.0]
