import math

import pytest

from tunesmith.observe.reports import text
from tunesmith.observe.reports.views import MOST_TOKENS, token_parts


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.12345, "0.123"),
        (-0.5, "\u22120.500"),
        (1234, "1\u202f234"),
        (3e-5, "3.00e\u221205"),
        (262.04, "262.0"),
        (None, "\u2013"),
        (math.nan, "\u2013"),
    ],
)
def test_decimal(value, shown):
    assert text.decimal(value) == shown


@pytest.mark.parametrize(
    "tokens",
    [
        None,
        [],
        {"parts": None},
        {"parts": ["a", None, 3]},
        {"parts": [], "left_out": "many"},
        {"parts": [{"turn": {}, "pieces": "abc", "logps": None}, {"pieces": [[1], None], "advantage": "x"}]},
        {"parts": [{"turn": 1, "pieces": ["a", "b"], "logps": [math.nan], "reward": "much", "sample": [1]}]},
    ],
)
def test_damaged_tokens_show_what_is_there(tokens):
    for part in token_parts({"tokens": tokens}):
        assert isinstance(part.title, str) and all(isinstance(one.text, str) for one in part.tokens)


def test_more_tokens_than_a_run_records_are_cut():
    parts = token_parts({"tokens": {"parts": [{"turn": 1, "pieces": ["x" * 9_999] * 1_999}] * 3}})
    assert sum(len(part.tokens) for part in parts) == MOST_TOKENS
    assert max(len(one.text) for part in parts for one in part.tokens) == 200


def test_scores_have_two_decimals_and_no_negative_zero():
    assert [text.score(value) for value in (0.5, -0.126, -0.001, None)] == ["0.50", "\u22120.13", "0.00", "\u2013"]


def test_small_words():
    assert text.signed(0.5) == "+0.500" and text.signed(-0.5) == "\u22120.500" and text.signed(0.0) == "0.000"
    assert (
        text.p_value(6e-5) == "p < 0.001" and text.p_value(0.0312) == "p = 0.031" and text.p_value(None) == "p \u2013"
    )
    assert text.percent(0.806) == "81\u202f%"
    assert [text.duration(s) for s in (0.25, 12.34, 245, 7_800)] == ["250 ms", "12.3 s", "4 min 05 s", "2 h 10 min"]


def test_a_long_text_is_cut_and_says_so():
    assert text.cut("x" * 5_000).endswith("(1000 more characters)")
    assert text.short("a  b\n" * 100, 10) == "a b a b a…"


def test_conversations_and_odd_prompts_are_text():
    assert text.prompt_text([{"role": "user", "content": "hi"}, {"content": "yo"}]) == "user: hi\nyo"
    assert text.prompt_text(None) == "" and text.prompt_text(["a", 3]) == "a\n3"


def test_nested_facts_become_rows():
    assert text.flatten({"cpu": {"cores": 2}, "flags": ["a", "b"], "gpu": None}) == [
        ("cpu.cores", "2"),
        ("flags", "a, b"),
        ("gpu", ""),
    ]


def test_only_finite_numbers_count_as_numbers():
    assert [text.number(value) for value in (1, 2.5, True, None, "3", math.nan, math.inf)] == [1.0, 2.5] + [None] * 5


def test_a_list_of_objects_has_a_row_for_each_key_by_index():
    facts = {"run": {"steps": 3}, "reward": [{"source": "a", "weight": 1.0}, {"source": "b"}], "names": ["x", "y"]}
    assert text.flatten(facts) == [
        ("run.steps", "3"),
        ("reward.0.source", "a"),
        ("reward.0.weight", "1.0"),
        ("reward.1.source", "b"),
        ("names", "x, y"),
    ]
    assert text.flatten({"reward": []}) == [("reward", "")]
