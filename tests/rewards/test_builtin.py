import pytest

from tunesmith.base.core.errors import RewardError
from tunesmith.engine.batch.rollout import Trajectory
from tunesmith.learn.rewards.builtin import (
    BUILTINS,
    SimulatedRater,
    length,
    match_format,
    overlong,
    sentiment,
    unique_chars,
)
from tunesmith.learn.rewards.functions import builtin_function

CHAT = [[{"role": "assistant", "content": "abba"}]]


def test_sentiment_is_the_simulated_raters_score():
    scores = sentiment()(prompts=["It was", "It was"], completions=[" great", " bad"], completion_ids=[[1], [2]])
    rater = SimulatedRater()
    assert scores == [rater.score("It was", " great"), rater.score("It was", " bad")]


def test_length_counts_the_unit_or_the_closeness_to_a_target():
    arguments = {"prompts": ["p"], "completions": ["two words"], "completion_ids": [[5, 6, 7]]}
    assert length()(**arguments) == [3.0]
    assert length(unit="words")(**arguments) == [2.0]
    assert length(unit="characters")(**arguments) == [9.0]
    assert length(unit="words", target=5)(**arguments) == [-3.0]
    assert length(target=3)(**arguments) == [0.0]


def test_format_finds_the_pattern_or_matches_the_whole():
    completions = ["answer: 42", "no answer", "42"]
    assert match_format(r"\d+")(completions=completions) == [1.0, 0.0, 1.0]
    assert match_format(r"\d+", whole=True)(completions=completions) == [0.0, 0.0, 1.0]
    assert match_format("b{2}")(completions=CHAT) == [1.0]


def test_unique_chars_counts_different_characters():
    assert unique_chars()(completions=["aab", ""]) == [2.0, 0.0]
    assert unique_chars()(completions=CHAT) == [2.0]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("format", {}, "the reward `format` needs `pattern`"),
        ("format", {"pattern": "("}, r"'\(', no regular expression"),
        ("format", {"pattern": 3}, "no regular expression"),
        ("format", {"patern": "x"}, "no argument `patern`; it takes `pattern`, `whole`; did you mean `pattern`"),
        ("sentiment", {"scale": 2}, "no argument `scale`; it takes none"),
        ("length", {"unit": "lines"}, "'lines'; allowed are tokens, words, characters"),
        ("length", {"target": -1}, "-1; give a number of tokens"),
        ("length", {"target": "ten"}, "'ten'; give a number"),
    ],
)
def test_wrong_arguments_are_named(name: str, arguments: dict[str, object], message: str):
    with pytest.raises(RewardError, match=message):
        builtin_function(name, arguments)


def test_every_built_in_scores_with_its_smallest_arguments():
    needed = {"format": {"pattern": "a"}, "overlong": {"max_completion_len": 2, "soft_punish_cache": 1}}
    for name in BUILTINS:
        function = builtin_function(name, needed.get(name, {}))
        if name == "environment":  # which has the numbers of an environment alone
            assert function(trajectories=[Trajectory((), (), "completed", 0.5)]) == [0.5]
            continue
        scores = function(prompts=["p"], completions=["a"], completion_ids=[[1]], answer=[1], trainer_state=None)
        assert isinstance(scores, list) and isinstance(scores[0], float)


@pytest.mark.parametrize(("limit", "cache"), [(10, 4), (10, 10), (7, 1)])
def test_overlong_is_trl_s_soft_punishment(limit: int, cache: int):
    ids = [[1] * count for count in range(1, 15)]
    ours = overlong(limit, cache)(completion_ids=ids)
    for count, reward in enumerate(ours, start=1):
        if count <= limit - cache:
            assert reward == 0.0
        else:
            assert reward == pytest.approx(max(-1.0, (limit - cache - count) / cache), abs=1e-12)
    theirs = pytest.importorskip("trl.rewards").get_soft_overlong_punishment(limit, cache)
    assert ours == pytest.approx(theirs(completion_ids=ids), abs=1e-12)


@pytest.mark.parametrize(("limit", "cache"), [(10, 0), (10, 11)])
def test_overlong_refuses_a_range_that_is_none(limit: int, cache: int):
    with pytest.raises(RewardError, match=f"soft_punish_cache {cache}; the second must be at least 1 and at most"):
        overlong(limit, cache)
