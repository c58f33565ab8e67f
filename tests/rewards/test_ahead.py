"""Scores made while others are still drawn are those made afterwards: numbers, order, logs, failures and errors."""

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import RewardError
from tunesmith.base.core.trace import span, trace
from tunesmith.engine.batch.rollout import Group
from tunesmith.engine.models.load import new_reward_model
from tunesmith.engine.models.tiny import byte_tokenizer
from tunesmith.learn.rewards.ahead import PORTION_ROWS, one_answer, portions
from tunesmith.learn.rewards.calling import FunctionReward
from tunesmith.learn.rewards.outcome import TrainerState, samples_of
from tunesmith.learn.rewards.scorer import Scorer, Scores

GroupMaker = Callable[..., Group]
STATE = TrainerState(3, 10)


@pytest.fixture
def groups(make_group: GroupMaker) -> list[Group]:
    """Twelve groups of three, of many lengths."""
    return [
        make_group(f"It was {'very ' * (i % 4)}", *(f" word{'s' * (5 * i % 7 + j)}" for j in range(3)), id=f"p:{i}")
        for i in range(12)
    ]


def lengths(completions: Sequence[str], **_: object) -> list[float]:
    return [float(len(text)) for text in completions]


async def later(completions: Sequence[str], **_: object) -> list[float]:
    await asyncio.sleep(0)
    return [float(text.count("s")) for text in completions]


def while_drawing(scorer: Scorer, groups: Sequence[Group], order: Sequence[int]) -> Scores:
    """The scores of groups that end in `order`."""
    ahead = scorer.ahead(len(groups), len(groups[0].completions), STATE)
    assert ahead is not None
    with ahead:
        for place in order:
            ahead.add(place, groups[place])
        return scorer.score(groups, state=STATE, ahead=ahead)


def shuffled(count: int, seed: int = 0) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def both(sources: Sequence[Any], groups: Sequence[Group], **options: Any) -> tuple[Scores, Scores]:
    afterwards = Scorer(sources, policy_tokenizer=byte_tokenizer(), **options)
    meanwhile = Scorer(sources, policy_tokenizer=byte_tokenizer(), while_drawing=True, **options)
    return afterwards.score(groups, state=STATE), while_drawing(meanwhile, groups, shuffled(len(groups)))


def assert_same(first: Scores, second: Scores) -> None:
    assert torch.equal(first.total_PG, second.total_PG) and torch.equal(first.valid_PG, second.valid_PG)
    assert list(first.parts) == list(second.parts)
    for name, part_PG in first.parts.items():
        assert torch.equal(part_PG.nan_to_num(nan=-99.0), second.parts[name].nan_to_num(nan=-99.0))
    assert first.columns == second.columns
    assert list(first.metrics()) == list(second.metrics())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_reward_model_gives_the_same_bits(family: str, dtype: str, groups: list[Group]) -> None:
    model = new_reward_model(ModelSection(name=f"tiny:{family}", dtype=dtype))  # type: ignore[arg-type]
    torch.nn.init.normal_(model.model.score.weight, generator=torch.Generator().manual_seed(0))
    first, second = both([model, lengths, later], groups, weights=[0.3, 0.1, -0.7])
    assert_same(first, second)
    assert len(first.total_PG.unique()) > 12


def test_a_model_gets_the_same_portions_and_a_function_one_group_at_a_time(groups: list[Group]) -> None:
    sizes: list[int] = []

    def counted(completions: Sequence[str], **_: object) -> list[float]:
        sizes.append(len(completions))
        return [0.0] * len(completions)

    both([counted], groups)
    assert sizes == [36] + [3] * 12
    assert [len(portion.samples) for portion in portions(12, 3)] == [15, 15, 6]
    assert [len(portion.samples) for portion in portions(3, 2 * PORTION_ROWS)] == [2 * PORTION_ROWS] * 3


def test_functions_are_called_in_the_order_in_which_groups_end_in_one_thread(groups: list[Group]) -> None:
    seen: list[tuple[str, str]] = []

    def first(prompts: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
        seen.append((threading.current_thread().name, str(completion_ids[0])))
        return [0.0] * len(prompts)

    scorer = Scorer([first], while_drawing=True)
    order = shuffled(12)
    while_drawing(scorer, groups, order)
    assert [ids for _, ids in seen] == [str(list(groups[i].completions[0].token_ids)) for i in order]
    scorer.score(groups)  # an evaluation: what the thread has opened must suit it too
    assert len({name for name, _ in seen}) == 1
    assert seen[0][0] != threading.current_thread().name


def test_what_functions_log_stands_where_it_stood(groups: list[Group]) -> None:
    def logs(completions: Sequence[str], log_extra: Any, log_metric: Any, trainer_state: Any, **_: object) -> list[Any]:
        log_extra("text", list(completions))
        log_metric("step", trainer_state.global_step)
        return [None if len(text) % 2 else 1.0 for text in completions]

    first, second = both([lengths, logs], groups)
    assert_same(first, second)
    assert first.metrics() == second.metrics()
    assert second.metrics()["step"] == 3.0


@pytest.mark.parametrize("on_error", ["drop", "zero"])
def test_failures_follow_the_policy_and_are_listed_alike(on_error: Any, groups: list[Group]) -> None:
    def fragile(completions: Sequence[str], **_: object) -> list[float]:
        return [1 / (len(text) % 5) for text in completions]

    async def strange(completions: Sequence[str], **_: object) -> list[float]:
        return [float("nan") if len(text) % 3 == 0 else 1.0 for text in completions]

    first, second = both([fragile, strange, lengths], groups, on_error=on_error)
    assert_same(first, second)
    assert first.failures == second.failures and len(first.failures) > 4


def failing(word_length: int) -> Callable[..., list[float]]:
    def fails(completions: Sequence[str], **_: object) -> list[float]:
        if any(len(text) == word_length for text in completions):
            raise ValueError(f"length {word_length}")
        return [0.0] * len(completions)

    return fails


async def async_failing(completions: Sequence[str], **_: object) -> list[float]:
    return [1 / (len(text) - 8) for text in completions]


@pytest.mark.parametrize(
    "sources",
    [
        [failing(9)],
        [failing(9), failing(7)],
        [lengths, failing(8), async_failing],
        [async_failing, lengths],
        [lambda completions, unknown, **_: [0.0] * len(completions)],
        [lambda completions, **_: "no list"],
    ],
)
def test_the_error_is_the_same(sources: list[Any], groups: list[Group]) -> None:
    """Whichever group ends first, the first failing sample of the first failing reward is named.

    An answer that suits no sample is that of a call, whose size differs.
    """
    with pytest.raises(RewardError) as afterwards:
        Scorer(sources).score(groups)
    for seed in range(4):
        with pytest.raises(RewardError) as meanwhile:
            while_drawing(Scorer(sources, while_drawing=True), groups, shuffled(12, seed))
        assert str(meanwhile.value).replace(" 3 completions", " 36 completions") == str(afterwards.value)


def test_scoring_begins_while_groups_are_missing(groups: list[Group]) -> None:
    began = threading.Event()

    def notes(completions: Sequence[str], **_: object) -> list[float]:
        began.set()
        return [0.0] * len(completions)

    scorer = Scorer([notes], while_drawing=True)
    ahead = scorer.ahead(12, 3, STATE)
    assert ahead is not None
    with ahead:
        ahead.add(5, groups[5])
        assert began.wait(30)


def test_async_functions_of_all_groups_wait_at_the_same_time(groups: list[Group]) -> None:
    waiting: list[int] = []

    async def waits(completions: Sequence[str], **_: object) -> list[float]:
        waiting.append(1)
        while len(waiting) < 12:
            await asyncio.sleep(0)
        return lengths(completions)

    scores = while_drawing(Scorer([waits], while_drawing=True), groups, range(12))
    assert torch.equal(scores.total_PG, Scorer([lengths]).score(groups).total_PG)


def test_an_async_function_that_blocks_the_loop_fails_and_those_that_ended_count(groups: list[Group]) -> None:
    release = threading.Event()

    async def blocks(completions: Sequence[str], **_: object) -> list[float]:
        if completions[0] == groups[4].completions[0].text:
            for _ in range(50):  # long enough for the others to end
                await asyncio.sleep(0)
            release.wait()
        return [1.0] * len(completions)

    scorer = Scorer([later, blocks], on_error="zero", timeout_s=1.0, while_drawing=True)
    try:
        scores = while_drawing(scorer, groups, range(12))
    finally:
        release.set()
    assert "blocks the event loop" in scores.failures[0].reason
    assert scores.parts["blocks"][0].tolist() == [1.0] * 3
    assert while_drawing(scorer, groups, range(12)).failures == ()


def test_what_is_not_scored_yet_is_dropped_if_the_engine_fails(groups: list[Group]) -> None:
    release, calls = threading.Event(), []

    def slow(completions: Sequence[str], **_: object) -> list[float]:
        calls.append(completions)
        release.wait()
        return [0.0] * len(completions)

    scorer = Scorer([slow], while_drawing=True)
    ahead = scorer.ahead(12, 3, STATE)
    assert ahead is not None
    with pytest.raises(KeyError), ahead:
        for place in range(6):
            ahead.add(place, groups[place])
        raise KeyError("the engine fails")
    release.set()
    assert while_drawing(scorer, groups, range(12)).valid_PG.all()
    assert len(calls) <= 1 + 12


def test_groups_that_were_not_handed_out_are_a_defect(groups: list[Group]) -> None:
    with pytest.raises(RuntimeError, match="11 of 12 groups were handed out"):
        while_drawing(Scorer([lengths], while_drawing=True), groups, range(11))


def test_the_seconds_of_each_reward_are_kept_apart_from_the_wait(groups: list[Group]) -> None:
    with trace() as record, span("reward"):
        while_drawing(Scorer([lengths, later], while_drawing=True), groups, range(12))
    assert set(record.seconds) == {"reward", "reward/lengths", "reward/async", "reward/async/later"}
    assert record.num_calls["reward/lengths"] == 12
    assert record.covered_s == record.seconds["reward"]


def test_without_it_nothing_is_scored_ahead(groups: list[Group]) -> None:
    assert Scorer([lengths]).ahead(12, 3, STATE) is None


def test_answers_to_portions_are_joined_by_place_whatever_their_order(groups: list[Group]) -> None:
    reward, samples = FunctionReward(lengths), samples_of(groups)
    answers = {part: reward.outcomes([samples[i] for i in part.samples]) for part in reversed(portions(12, 3))}
    assert one_answer(answers).numbers() == [float(len(sample.completion.text)) for sample in samples]
