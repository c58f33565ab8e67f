"""Where the prompt of an exchange ends: common messages, and dialogues written as text."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.base.config.sections import PairsSection
from tunesmith.base.core.errors import DataError
from tunesmith.collect.data.pairs import as_messages, is_dialogue, load_preferences, split_messages, split_text
from tunesmith.collect.data.rows import BadRows

CHOSEN = "\n\nHuman: Hi\n\nAssistant: Yo.\n\nHuman: Sum?\n\nAssistant: 4,\n\nsurely"
REJECTED = "\n\nHuman: Hi\n\nAssistant: Yo.\n\nHuman: Sum?\n\nAssistant: 5"

WORDS = st.text("ab \n:", max_size=8)
TURNS = st.lists(st.tuples(st.sampled_from(["Human", "Assistant"]), WORDS), min_size=1, max_size=4)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_a_dialogue_becomes_messages_with_the_last_answers_apart():
    (pair,) = load_preferences([{"chosen": CHOSEN, "rejected": REJECTED}])
    assert pair.prompt.content == (message("user", "Hi"), message("assistant", "Yo."), message("user", "Sum?"))
    assert pair.chosen == (message("assistant", "4,\n\nsurely"),)
    assert pair.rejected == (message("assistant", "5"),)


def test_a_dialogue_can_stay_text():
    (pair,) = load_preferences([{"chosen": CHOSEN, "rejected": REJECTED}], PairsSection(dialogues="text"))
    assert pair.prompt.content == "\n\nHuman: Hi\n\nAssistant: Yo.\n\nHuman: Sum?\n\nAssistant:"
    assert (pair.chosen, pair.rejected) == (" 4,\n\nsurely", " 5")


def test_dialogues_that_part_before_the_last_answer_keep_what_they_share_as_prompt():
    other = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Sum?\n\nAssistant: 5"
    (pair,) = load_preferences([{"chosen": CHOSEN, "rejected": other}])
    assert pair.prompt.content == (message("user", "Hi"),)
    assert len(pair.chosen) == len(pair.rejected) == 3


@given(TURNS, TURNS, TURNS)
def test_prompt_and_answer_together_are_the_whole_dialogue(start: list, first: list, second: list):
    chosen, rejected = ("".join(f"\n\n{who}: {text}" for who, text in (*start, *side)) for side in (first, second))
    text = split_text(chosen, rejected)
    assert (f"{text.prompt}{text.chosen}", f"{text.prompt}{text.rejected}") == (chosen, rejected)
    assert text.chosen and text.rejected
    turns = as_messages(chosen), as_messages(rejected)
    exchange = split_messages(*turns)
    assert ((*exchange.prompt, *exchange.chosen), (*exchange.prompt, *exchange.rejected)) == turns


def test_other_texts_are_no_dialogues():
    assert is_dialogue(CHOSEN)
    for text in ("Human: Hi\n\nAssistant: Yo", "\n\nHuman: Hi", "Q? A", (message("user", "\n\nHuman:\n\nAssistant:"),)):
        assert not is_dialogue(text)


def test_a_text_prompt_beside_whole_conversations_that_contain_it_is_not_repeated():
    asked = message("user", "Sum?")
    row = {"prompt": "Sum?", "messages": [asked], "chosen": [asked, message("assistant", "4")]}
    (pair,) = load_preferences([{**row, "rejected": [asked, message("assistant", "5")]}])
    assert (pair.prompt.content, pair.chosen) == ((asked,), (message("assistant", "4"),))
    with pytest.raises(DataError, match="`prompt` is text but `chosen` is a list"):
        load_preferences([{**row, "prompt": "Other", "rejected": [asked, message("assistant", "5")]}])


@pytest.mark.parametrize("form", ["messages", "text"])
def test_real_dialogues_are_refused_strictly_with_every_bad_line_and_load_with_skip_bad(form: str, data_dir: Path):
    path = data_dir / "preference" / "hh-rlhf.helpful-base.test.jsonl.gz"
    section = PairsSection.model_validate({"dialogues": form})
    with pytest.raises(DataError, match=r"6 bad rows of 2354") as caught:
        load_preferences(path, section)
    for line in (722, 2169):
        assert f":{line}: `chosen` and `rejected` are the same" in str(caught.value)
    for line in (121, 741, 1215, 2064):
        assert f":{line}: `rejected` is empty" in str(caught.value)
    bad = BadRows(skip=True)
    pairs = load_preferences(path, section, bad)
    assert bad.finish().reasons == {"empty": 4, "same completions": 2}
    assert len(pairs) == 2348 and all(pair.prompt.content for pair in pairs)


def test_other_real_dialogues_load_with_skip_bad(data_dir: Path):
    bad = BadRows(skip=True)
    pairs = load_preferences(data_dir / "preference" / "hh-rlhf.helpful-rejection-sampled.test.jsonl.gz", None, bad)
    assert (len(pairs), bad.finish().reasons) == (2717, {"same completions": 32})
