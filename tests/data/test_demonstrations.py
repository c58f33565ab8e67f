"""Demonstrations in TRL's columns are read strictly, split by how they open, and encoded with what is learnt."""

from pathlib import Path

import pytest
from formats import write_jsonl

from tunesmith.base.config.sections import DemonstrationsSection
from tunesmith.base.core.errors import DataError
from tunesmith.base.schema.records import Demonstration, Prompt
from tunesmith.collect.data.demonstrations import load_demonstrations
from tunesmith.collect.data.sets import Sets, demonstration_sets
from tunesmith.engine.batch.targets import LearntSequence
from tunesmith.engine.models.tiny import byte_tokenizer

USER = {"role": "user", "content": "Hi"}
REPLY = {"role": "assistant", "content": "Yo"}


def sets(rows: list, max_length: int | None = None, **section: object) -> Sets[LearntSequence]:
    section = {"heldout_fraction": 0.0, **section}
    return demonstration_sets(
        DemonstrationsSection.model_validate(section), byte_tokenizer(), seed=0, given=rows, max_length=max_length
    )


def test_all_forms_of_trl_are_read_from_a_file(tmp_path: Path) -> None:
    rows = [
        {"prompt": "The film", "completion": " was fine.", "genre": "drama"},
        {"prompt": [USER], "completion": [REPLY]},
        {"prompt": [USER], "completion": "Yo"},
        {"messages": [USER, REPLY, USER]},
        {"text": "A story."},
    ]
    found = load_demonstrations(write_jsonl(tmp_path / "rows.jsonl", rows))
    assert [(item.prompt.content, item.completion) for item in found] == [
        ("The film", " was fine."),
        ((USER,), (REPLY,)),
        ((USER,), "Yo"),
        ("", (USER, REPLY)),
        ("", "A story."),
    ]
    assert found[0].prompt.id == "rows.jsonl:1"
    assert found[0].prompt.columns == {"genre": "drama"}


def test_texts_rows_and_records_are_taken_from_python() -> None:
    assert load_demonstrations(["A story."])[0] == Demonstration(Prompt("demonstrations[0]", ""), "A story.")
    record = Demonstration(Prompt("mine", "a"), "b")
    assert load_demonstrations([record]) == [record]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a"}, "no column `completion`; the row has `prompt`"),
        ({"completion": "a"}, "`completion` without the `prompt` that it answers; name it `text`"),
        ({"prompt": "a", "completion": " "}, "`completion` is empty"),
        ({"prompt": "a", "completion": [REPLY]}, "`prompt` is text but `completion` is a list of messages"),
        ({"prompt": [USER], "completion": [USER]}, "a completion ends with the assistant"),
        ({"messages": [USER]}, "no turn of the assistant, so there is nothing to learn"),
        ({"messages": "a"}, "`messages` is text; give a list of messages, or name the column `text`"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "its last message says nothing"),
        ({"messages": [USER, REPLY | {"weight": 0.5}]}, r"`messages\[1\]`: `weight` is 0.5"),
        ({"messages": [USER | {"weight": 0}, REPLY]}, r"`messages\[0\]`: `weight` is 0; turns of the assistant have"),
        ({"text": [USER]}, "`text` is a list of messages; name the column `messages`"),
        ({"text": ""}, "`text` is empty"),
        ({"prompts": "a", "completions": "b"}, "no column `completion`; .* did you mean `completions`"),
    ],
)
def test_a_row_that_cannot_be_used_says_why(row: dict, reason: str) -> None:
    with pytest.raises(DataError, match=rf"demonstrations\[0\]: .*{reason}"):
        load_demonstrations([row])


def test_openai_s_weights_say_which_turns_are_learnt() -> None:
    rows = [{"messages": [USER, REPLY | {"weight": 0}, USER, REPLY | {"weight": 1}]}]
    data = demonstration_sets(DemonstrationsSection(heldout_fraction=0), byte_tokenizer(), 0, rows)
    plain = [{"prompt": [USER, REPLY, USER], "completion": [REPLY]}]
    only_last = demonstration_sets(DemonstrationsSection(heldout_fraction=0), byte_tokenizer(), 0, plain)
    assert (data.train[0].ids, data.train[0].spans) == (only_last.train[0].ids, only_last.train[0].spans)


def test_no_source_is_an_error_that_names_the_key() -> None:
    with pytest.raises(DataError, match=r"`demonstrations\.source`"):
        load_demonstrations("")
    with pytest.raises(DataError, match="no demonstrations are left to train on"):
        sets([])


def test_a_longer_row_is_bad_or_cut_as_the_recipe_says() -> None:
    rows = [{"prompt": "abc", "completion": "defgh"}, {"prompt": "a", "completion": "b"}]
    with pytest.raises(
        DataError, match=r"\[0\]: too long: 9 tokens, the limit is 6 .*`demonstrations.truncate: right`"
    ):
        sets(rows, max_tokens=6)
    with pytest.raises(DataError, match="the limit is 6"):
        sets(rows, max_length=6)
    kept = sets(rows, max_tokens=6, skip_bad=True)
    assert len(kept.train) == 1
    assert kept.facts.tally.reasons == {"too long": 1}
    cut, whole = sets(rows, max_tokens=6, truncate="right").train
    assert (len(cut.ids), cut.spans) == (6, (range(3, 6),))
    assert whole.spans == (range(1, 3),)


def test_a_cut_that_leaves_nothing_to_learn_is_a_bad_row() -> None:
    with pytest.raises(DataError, match="what is learnt begins after it"):
        sets([{"prompt": "a long prompt", "completion": "b"}], max_tokens=6, truncate="right")


def test_messages_that_the_template_cannot_tell_apart_are_bad_rows() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ loop.length ~ m['content'] }}{% endfor %}"
    section = DemonstrationsSection(skip_bad=True, heldout_fraction=0.0)
    rows = [{"messages": [USER, REPLY, USER, REPLY]}, {"text": "a"}]
    found = demonstration_sets(section, tokenizer, 0, rows)
    assert found.facts.tally.reasons == {"refused by the chat template": 1}


def test_conversations_that_open_alike_are_held_out_together() -> None:
    rows: list = []
    for number in range(40):
        opening = {"role": "user", "content": f"Question {number}"}
        rows.append({"prompt": [opening], "completion": f"Answer {number}"})
        more = [opening, {"role": "assistant", "content": f"Answer {number}"}, USER]
        rows.append({"messages": [*more, REPLY]})
        rows.append({"prompt": more, "completion": "Another"})
    found = sets(rows, heldout_fraction=0.3)
    number_of = {f"demonstrations[{index}]": index // 3 for index in range(len(rows))}
    train, heldout = ({number_of[one.id] for one in side} for side in (found.train, found.heldout))
    assert len(heldout) > 3
    assert not train & heldout
    assert found.facts.leaks == ()


def test_held_out_rows_of_their_own_are_checked_for_leaks() -> None:
    rows = [{"prompt": "The film", "completion": " was"}, {"text": "alone"}]
    found = demonstration_sets(
        DemonstrationsSection(), byte_tokenizer(), 0, rows, [{"prompt": "the  FILM", "completion": " is"}]
    )
    assert (len(found.train), len(found.heldout), len(found.facts.leaks)) == (2, 1, 1)
    assert found.sample == "prompt: The film\ncompletion:  was"


def test_the_best_replies_of_oasst_are_read_and_learnt(data_dir: Path) -> None:
    source = "data:instruction/oasst1.en-validation.best-replies.jsonl.gz"
    assert (data_dir / source.removeprefix("data:")).exists()
    section = DemonstrationsSection(source=source, max_tokens=100_000, heldout_fraction=0.15)
    found = demonstration_sets(section, byte_tokenizer(), 0)
    assert len(found.train) + len(found.heldout) == 418
    tokenizer = byte_tokenizer()
    rows = {item.prompt.id: item for item in load_demonstrations(source)}
    for one in found.heldout:
        (span,) = one.spans
        learnt = tokenizer.decode(list(one.ids[span.start : span.stop]))
        assert learnt == f"{rows[one.id].completion}<|im_end|>"
