import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from tunesmith.base.config.sections import RewardSource
from tunesmith.base.core.errors import RewardError
from tunesmith.base.core.trace import span, trace
from tunesmith.engine.batch.rollout import Group
from tunesmith.learn.rewards.builtin import SimulatedRater
from tunesmith.learn.rewards.outcome import Sample, TrainerState
from tunesmith.learn.rewards.scorer import Scorer, joined

GroupMaker = Callable[..., Group]


@pytest.fixture
def groups(make_group: GroupMaker) -> list[Group]:
    return [make_group("It was", " good", " bad", id="p:1"), make_group("It is", " a", " bcd", id="p:2")]


def lengths(completions, **kwargs):
    return [float(len(text)) for text in completions]


def even_only(completions, **kwargs):
    return [1.0 if len(text) % 2 == 0 else None for text in completions]


def test_the_total_is_the_weighted_sum_in_the_layout_of_the_groups(groups: list[Group]):
    scores = Scorer(["unique_chars", lengths], weights=[1.0, -0.5]).score(groups)
    assert scores.parts["unique_chars"].tolist() == [[4, 4], [2, 4]]
    assert scores.parts["lengths"].tolist() == [[5, 4], [2, 4]]
    assert scores.total_PG.tolist() == [[1.5, 2.0], [1.0, 2.0]]
    assert scores.total_PG.dtype == torch.float32


def test_scores_of_several_calls_are_those_of_one_call(groups: list[Group], make_group: GroupMaker):
    def noting(completions, log_metric, log_extra, **kwargs):
        log_metric("mean", sum(map(len, completions)) / len(completions))
        if len(completions) != 4:
            log_extra("text", completions)
        return [float("nan") if text == " bcd" else float(len(text)) for text in completions]

    more = [make_group("They", " x", " yy", id="p:3")]
    scorer = Scorer([noting, "unique_chars"], weights=[1.0, 2.0], on_error="drop")
    both, whole = joined([scorer.score(groups), scorer.score(more)]), scorer.score([*groups, *more])
    assert torch.equal(both.total_PG, whole.total_PG) and torch.equal(both.valid_PG, whole.valid_PG)
    assert both.metrics() == pytest.approx(whole.metrics())
    assert [str(f) for f in both.failures] == [str(f) for f in whole.failures] and len(both.failures) == 1
    assert both.columns == {"text": [None] * 4 + [" x", " yy"]}
    only = scorer.score(more)
    assert joined([only]) is only


def test_sections_of_a_recipe_bring_weight_and_arguments(groups: list[Group]):
    sources = [
        RewardSource(source="format", weight=2.0, arguments={"pattern": "good"}),
        RewardSource(source="length", arguments={"unit": "words"}),
    ]
    assert Scorer(sources).score(groups).total_PG.tolist() == [[3, 1], [1, 1]]


def test_sentiment_is_the_simulated_raters_score(groups: list[Group]):
    rater = SimulatedRater()
    expected = torch.tensor([[rater.score(g.prompt.content, c.text) for c in g.completions] for g in groups])
    assert torch.equal(Scorer(["sentiment"]).score(groups).total_PG, expected)


def test_none_counts_for_nothing_in_the_sum_and_in_the_means(groups: list[Group]):
    scores = Scorer([lengths, even_only], weights=[1.0, 10.0]).score(groups)
    assert scores.total_PG.tolist() == [[5, 14], [12, 14]]
    assert scores.parts["even_only"].isnan().tolist() == [[True, False], [False, False]]
    metrics = scores.metrics()
    assert metrics["rewards/even_only/mean"] == 1.0
    assert metrics["rewards/lengths/mean"] == 3.75
    assert metrics["reward"] == 11.25
    assert metrics["reward_std"] == pytest.approx(torch.tensor([5.0, 14, 12, 14]).std().item())


def test_a_sample_without_any_reward_is_an_error_that_names_it(groups: list[Group]):
    with pytest.raises(
        RewardError, match=r"no reward applies to prompt p:1, completion 0 \('good'\): `even_only` returned None"
    ):
        Scorer([even_only]).score(groups)


def test_rewards_of_one_name_are_told_apart(groups: list[Group]):
    scorer = Scorer(["length", "unique_chars", "length", "length"])
    assert scorer.names == ("length", "unique_chars", "length_2", "length_3")
    assert list(scorer.score(groups).parts) == list(scorer.names)


def test_functions_receive_trainer_state_and_may_log(groups: list[Group]):
    def logs(completions, trainer_state, log_metric, log_extra, **kwargs):
        log_metric("my/metric", 1.0)
        log_metric("my/metric", 2.0)
        log_extra("upper", [text.upper() for text in completions])
        return [float(trainer_state.global_step)] * len(completions)

    scores = Scorer([logs]).score(groups, state=TrainerState(global_step=7, max_steps=9))
    assert scores.total_PG.tolist() == [[7, 7], [7, 7]]
    assert scores.metrics()["my/metric"] == 1.5
    assert scores.columns == {"upper": [" GOOD", " BAD", " A", " BCD"]}


def test_async_functions_run_at_the_same_time_on_one_loop(groups: list[Group]):
    loops: list[asyncio.AbstractEventLoop] = []
    met = {"first": False, "second": False}

    def meets(own: str, other: str):
        async def reward(completions, **kwargs):
            loops.append(asyncio.get_running_loop())
            met[own] = True
            while not met[other]:
                await asyncio.sleep(0)
            return [1.0] * len(completions)

        reward.__name__ = own
        return reward

    scorer = Scorer([meets("first", "second"), lengths, meets("second", "first")])
    for _ in range(2):
        assert scorer.score(groups).total_PG.tolist() == [[7, 6], [4, 6]]
    assert len(set(loops)) == 1


def test_two_async_functions_that_wait_for_each_other_both_return(groups: list[Group]):
    """One after the other they would wait for ever."""
    events = {"a": asyncio.Event(), "b": asyncio.Event()}

    def waits(own: str, other: str):
        async def reward(completions, **kwargs):
            events[own].set()
            await events[other].wait()
            return [1.0] * len(completions)

        return reward

    assert Scorer([waits("a", "b"), waits("b", "a")]).score(groups).total_PG.tolist() == [[2, 2], [2, 2]]


def test_results_stand_in_the_order_of_the_rewards_whichever_ends_first(groups: list[Group]):
    def ends(after: list[asyncio.Event], own: asyncio.Event, value: float):
        async def reward(completions, log_extra, log_metric, **kwargs):
            for event in after:
                await event.wait()
            log_extra("who", [value] * len(completions))
            log_metric(f"value_{value:g}", value)
            own.set()
            return [value] * len(completions)

        reward.__name__ = f"r{value:g}"
        return reward

    def scores(first_ends_last: bool):
        one, two = asyncio.Event(), asyncio.Event()
        first = ends([two] if first_ends_last else [], one, 1.0)
        second = ends([] if first_ends_last else [one], two, 2.0)
        return Scorer([first, lengths, second]).score(groups)

    early, late = scores(first_ends_last=False), scores(first_ends_last=True)
    assert list(early.parts) == list(late.parts) == ["r1", "lengths", "r2"]
    assert all(torch.equal(early.parts[name], late.parts[name]) for name in early.parts)
    assert early.columns == late.columns == {"who": [2.0] * 4}
    assert list(early.metrics().items()) == list(late.metrics().items())


def test_an_async_function_that_fails_leaves_the_others_their_results(groups: list[Group]):
    failed = asyncio.Event()

    async def fails(completions, **kwargs):
        failed.set()
        raise ValueError("no")

    async def later(completions, **kwargs):
        await failed.wait()
        await asyncio.sleep(0)
        return [3.0] * len(completions)

    async def hangs(completions, **kwargs):
        await asyncio.Event().wait()

    section = Scorer([fails, later, hangs], on_error="zero", timeout_s=2.0).score(groups)
    assert section.total_PG.tolist() == [[3, 3], [3, 3]]
    assert {failure.reward for failure in section.failures} == {"fails", "hangs"}
    assert section.metrics()["rewards/num_failed"] == 8.0


def test_an_async_function_that_blocks_the_loop_fails_and_those_that_ended_count(groups: list[Group]):
    release = threading.Event()

    async def quick(completions, **kwargs):
        return [1.0] * len(completions)

    async def blocks(completions, **kwargs):
        for _ in range(50):  # long enough for the other to end
            await asyncio.sleep(0)
        release.wait()
        return [9.0] * len(completions)

    scorer = Scorer([quick, blocks], on_error="zero", timeout_s=1.0)
    try:
        scores = scorer.score(groups)
    finally:
        release.set()
    assert scores.total_PG.tolist() == [[1, 1], [1, 1]]
    assert "an `async def` blocks the event loop" in scores.failures[0].reason
    assert scorer.score(groups).total_PG.tolist() == [[10, 10], [10, 10]]


def test_async_functions_run_where_a_loop_is_already_running(groups: list[Group]):
    async def later(completions, **kwargs):
        await asyncio.sleep(0)
        return [2.0] * len(completions)

    async def notebook_cell():
        return Scorer([later]).score(groups).total_PG.sum().item()

    assert asyncio.run(notebook_cell()) == 8.0


def test_an_async_function_that_raises_is_named_with_its_sample(groups: list[Group]):
    async def fragile(completions, **kwargs):
        return [1 / (len(text) - 2) for text in completions]

    with pytest.raises(
        RewardError, match=r"reward `fragile` raised ZeroDivisionError.*scoring prompt p:2, completion 0 \('a'\)"
    ):
        Scorer([fragile]).score(groups)


def test_an_object_with_name_and_score_is_a_reward(groups: list[Group]):
    class Judge:
        name = "judge"

        def score(self, samples: Sequence[Sample]) -> list[float | None]:
            return [float(sample.index) for sample in samples]

    assert Scorer([Judge()]).score(groups).parts["judge"].tolist() == [[0, 1], [0, 1]]


def breaks_on_bad(completions, **kwargs):
    return [1.0 if text != " bad" else 1 / 0 for text in completions]


def test_a_dropped_completion_is_marked_and_left_out_of_the_means(groups: list[Group]):
    sources = [lengths, breaks_on_bad]
    scores = Scorer(sources, on_error="drop").score(groups)
    assert scores.valid_PG.tolist() == [[True, False], [True, True]]
    assert scores.total_PG.tolist() == [[6, 0], [3, 5]]
    metrics = scores.metrics()
    assert metrics["reward"] == pytest.approx(14 / 3)
    assert metrics["reward_std"] == pytest.approx(torch.tensor([6.0, 3, 5]).std().item())
    assert metrics["rewards/lengths/mean"] == pytest.approx(11 / 3)
    assert metrics["rewards/breaks_on_bad/mean"] == 1.0
    assert metrics["rewards/num_failed"] == metrics["rewards/num_dropped"] == 1.0
    (failure,) = scores.failures
    assert (failure.reward, failure.action) == ("breaks_on_bad", "drop")
    assert failure.sample == "prompt p:1, completion 1 ('bad')"
    assert "ZeroDivisionError" in failure.reason


def test_sections_have_policies_of_their_own(tmp_path: Path, groups: list[Group]):
    (tmp_path / "fragile.py").write_text(
        "def fragile(completions, **kwargs):\n"
        "    return [1.0 if text != ' bad' else float('nan') for text in completions]\n"
    )
    source = f"{tmp_path / 'fragile.py'}:fragile"
    zero = Scorer([lengths, RewardSource(source=source, on_error="zero", timeout_s=60)]).score(groups)
    assert zero.total_PG.tolist() == [[6, 4], [3, 5]] and zero.valid_PG.all()
    drop = Scorer([lengths, RewardSource(source=source, on_error="drop")]).score(groups)
    assert drop.valid_PG.tolist() == [[True, False], [True, True]]
    with pytest.raises(RewardError, match=r"`fragile` returned nan for prompt p:1, completion 1"):
        Scorer([lengths, RewardSource(source=source)], on_error="drop").score(groups)
    assert Scorer([source], on_error="zero").score(groups).metrics()["rewards/num_failed"] == 1.0


def test_a_clean_call_has_no_failures_and_every_completion_is_valid(groups: list[Group]):
    scores = Scorer([lengths]).score(groups)
    assert scores.failures == () and scores.valid_PG.all()
    assert scores.metrics()["rewards/num_failed"] == scores.metrics()["rewards/num_dropped"] == 0.0


def test_dropping_every_completion_is_an_error(groups: list[Group]):
    def never(**kwargs):
        raise ConnectionError("refused")

    with pytest.raises(RewardError, match=r"every one of 4 completions is left out .*ConnectionError: refused"):
        Scorer([never], on_error="drop").score(groups)


def test_a_part_that_applies_nowhere_has_no_metric(groups: list[Group]):
    metrics = Scorer([lengths, lambda completions, **kwargs: [None] * len(completions)]).score(groups).metrics()
    assert [name for name in metrics if name.startswith("rewards/<lambda>")] == []


def test_an_unknown_policy_is_refused(groups: list[Group]):
    with pytest.raises(RewardError, match="on_error is 'ignore'; allowed are fail, drop, zero"):
        Scorer([lengths], on_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="on_error"):
        RewardSource(source="length", on_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="timeout_s"):
        RewardSource(source="length", timeout_s=0)


def test_spans_of_a_function_with_a_time_limit_stand_inside_its_own(groups: list[Group]):
    def with_span(completions, **kwargs):
        with span("inner"):
            return [0.0] * len(completions)

    with trace() as record:
        Scorer([with_span], timeout_s=60).score(groups)
    assert set(record.seconds) == {"with_span", "with_span/inner"}


def test_the_time_of_each_reward_is_traced(groups: list[Group]):
    with trace() as record:
        Scorer([lengths, "unique_chars"]).score(groups)
    assert set(record.seconds) == {"lengths", "unique_chars"}


def test_rewards_and_weights_must_fit(groups: list[Group], make_group: GroupMaker):
    with pytest.raises(RewardError, match="no reward is given; give at least one, for example a built-in: sentiment"):
        Scorer([])
    with pytest.raises(RewardError, match="1 weights for 2 rewards"):
        Scorer(["length", "sentiment"], weights=[1.0])
    with pytest.raises(RewardError, match="must be finite"):
        Scorer(["length"], weights=[float("nan")])
    with pytest.raises(RewardError, match=r"groups of \[1, 2\] completions"):
        Scorer(["length"]).score([groups[0], make_group("x", "y")])
    with pytest.raises(RewardError, match="groups of no completions"):
        Scorer(["length"]).score([])


def test_a_function_of_a_file_is_a_reward(tmp_path: Path, groups: list[Group]):
    (tmp_path / "mine.py").write_text(
        "def shout(completions, **kwargs):\n    return [c.count('!') for c in completions]\n"
    )
    scores = Scorer([f"{tmp_path / 'mine.py'}:shout"]).score(groups)
    assert scores.parts["shout"].tolist() == [[0, 0], [0, 0]]


def test_trls_own_reward_function_works_unchanged(make_group: GroupMaker):
    trl_rewards = pytest.importorskip("trl.rewards", reason="TRL is not installed")
    group = make_group(({"role": "user", "content": "2+2?"},), "<think>\nsum\n</think>\n4", "4")
    assert Scorer([trl_rewards.think_format_reward]).score([group]).total_PG.tolist() == [[1.0, 0.0]]
