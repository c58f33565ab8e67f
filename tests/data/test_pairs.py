from pathlib import Path

import pytest

from tunesmith.base.core.errors import DataError
from tunesmith.base.schema.records import Pair, Prompt
from tunesmith.collect.data.pairs import load_preferences, write_pairs

USER = {"role": "user", "content": "Hello"}
GOOD = {"role": "assistant", "content": "Hi there"}
BAD = {"role": "assistant", "content": "Go away"}

TEXT_ROW = {"prompt": "It was", "chosen": " good", "rejected": " bad"}
CHAT_ROW = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}


def test_text_and_conversational_rows_become_pairs():
    text, chat = load_preferences([{**TEXT_ROW, "margin": 0.5, "rater": "ann"}, CHAT_ROW])
    prompt = Prompt(id="pairs[0]", content="It was", columns={"rater": "ann"})
    assert text == Pair(prompt, chosen=" good", rejected=" bad", margin=0.5, tie=False)
    assert chat == Pair(Prompt(id="pairs[1]", content=(USER,)), chosen=(GOOD,), rejected=(BAD,))


def test_without_a_prompt_texts_stand_alone_and_common_messages_become_the_prompt():
    text, chat, null = load_preferences(
        [
            {"chosen": "Q? yes", "rejected": "Q? no"},
            {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
            {"prompt": None, "chosen": "a", "rejected": "b"},
        ]
    )
    assert (text.prompt.content, null.prompt.content) == ("", "")
    assert (chat.prompt.content, chat.chosen, chat.rejected) == ((USER,), (GOOD,), (BAD,))


def test_a_tie_may_have_equal_sides():
    (pair,) = load_preferences([{"prompt": "It was", "chosen": " ok", "rejected": " ok", "tie": True}])
    assert pair.tie


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"chosen": ...}, "no column `chosen`; the row has `prompt`, `rejected`"),
        ({"rejected": ...}, "no column `rejected`"),
        ({"chosen": None}, "`chosen` is null"),
        ({"rejected": 5}, "`rejected` is a number"),
        ({"chosen": ""}, "`chosen` is empty"),
        ({"chosen": "  "}, "`chosen` is empty"),
        ({"prompt": ""}, "`prompt` is empty"),
        ({"rejected": " good"}, "are the same; remove the row, or mark it"),
        ({"tie": "yes"}, "`tie` is text; give true or false"),
        ({"tie": 1}, "`tie` is a number"),
        ({"margin": "0.5"}, "`margin` is text"),
        ({"margin": True}, "`margin` is true or false"),
        ({"margin": -1}, r"`margin` is -1; it must be from 0 to 1e\+18"),
        ({"margin": 1e39}, r"`margin` is 1e\+39; it must be from 0 to"),
        ({"margin": 10**400}, "`margin` is an integer of too many digits; it must be from 0 to"),
        ({"margin": float("nan")}, "`margin` is nan"),
        ({"margin": 0.5, "tie": True}, "a tie has no margin"),
        ({"chosen": [GOOD]}, "`prompt` is text but `chosen` is a list|`rejected` is text but `chosen` is a list"),
        ({"chosen": [USER], "rejected": [BAD], "prompt": [USER]}, "`chosen` ends with role 'user'"),
        ({"chosen": [{**GOOD, "content": " "}], "rejected": [BAD], "prompt": [USER]}, "its last message says nothing"),
        ({"chosen": "\ud800"}, "surrogate"),
    ],
)
def test_a_bad_row_is_refused_with_its_reason(changes: dict[str, object], reason: str):
    row = {key: value for key, value in {**TEXT_ROW, **changes}.items() if value is not ...}
    with pytest.raises(DataError, match=rf"(?s)1 bad row of 2 .*pairs\[1\]: .*({reason})"):
        load_preferences([CHAT_ROW, row])


def test_written_pairs_are_read_back(tmp_path: Path):
    tie = {"prompt": "It was", "chosen": " a", "rejected": " b", "tie": True}
    pairs = load_preferences(
        [{**TEXT_ROW, "margin": 0.25, "rater": "é"}, CHAT_ROW, tie, {"chosen": "x", "rejected": "y"}]
    )
    write_pairs(tmp_path / "pairs.jsonl", pairs)
    again = load_preferences(tmp_path / "pairs.jsonl")
    assert [pair.prompt.id for pair in again] == [f"pairs.jsonl:{line}" for line in (1, 2, 3, 4)]
    for before, after in zip(pairs, again, strict=True):
        assert (before.chosen, before.rejected, before.margin, before.tie) == (
            after.chosen,
            after.rejected,
            after.margin,
            after.tie,
        )
        assert (before.prompt.content, before.prompt.columns) == (after.prompt.content, after.prompt.columns)


def test_an_empty_source_says_what_to_give():
    with pytest.raises(DataError, match="name a JSONL file with `chosen` and `rejected` columns"):
        load_preferences("")
