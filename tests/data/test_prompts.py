import json
import subprocess
import sys
from pathlib import Path

import pytest

from tunesmith.base.config.sections import PromptsSection
from tunesmith.base.core.errors import DataError
from tunesmith.base.schema.records import Prompt
from tunesmith.collect.data.prompts import film_prompts, load_prompts

USER = {"role": "user", "content": "Hello"}


def test_films_are_the_built_in_openings():
    prompts = load_prompts("films")
    assert prompts == film_prompts()
    assert prompts[0].id == "films:1"


def test_a_file_gives_prompts_with_ids_and_other_columns(tmp_path: Path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "Two plus two is", "answer": 4}\n{"prompt": [{"role": "user", "content": "Hi"}]}\n')
    assert load_prompts(str(path)) == load_prompts(path)
    text, chat = load_prompts(path)
    assert text == Prompt(id="p.jsonl:1", content="Two plus two is", columns={"answer": 4})
    assert chat == Prompt(id="p.jsonl:2", content=({"role": "user", "content": "Hi"},))
    assert chat.is_conversational


def test_another_column_can_hold_the_prompt(tmp_path: Path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"text": "A", "label": 1}\n')
    (prompt,) = load_prompts(path, PromptsSection(source=str(path), text_column="text"))
    assert (prompt.content, prompt.columns) == ("A", {"label": 1})


def test_python_lists_of_texts_messages_and_rows_are_taken():
    prompts = load_prompts(["A", [USER], {"prompt": "B", "answer": "b"}])
    assert [prompt.id for prompt in prompts] == ["prompts[0]", "prompts[1]", "prompts[2]"]
    assert [prompt.content for prompt in prompts] == ["A", (USER,), "B"]
    assert prompts[2].columns == {"answer": "b"}


def test_white_space_of_a_prompt_is_kept():
    assert load_prompts([" Once upon a time, "])[0].content == " Once upon a time, "


def test_null_fields_of_a_message_are_dropped_and_text_fields_kept():
    (prompt,) = load_prompts([[{**USER, "name": "Ann", "tool_calls": None}]])
    assert prompt.content == ({**USER, "name": "Ann"},)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"promt": "A"}, "no column `prompt`; the row has `promt`; did you mean `promt`"),
        ({"prompt": None}, "`prompt` is null; the row has none"),
        ({"prompt": 3}, "`prompt` is a number"),
        ({"prompt": ""}, "`prompt` is empty"),
        ({"prompt": " \n"}, "`prompt` is empty"),
        ({"prompt": []}, "an empty list"),
        ({"prompt": ["Hi"]}, r"`prompt\[0\]` is text; a message is"),
        ({"prompt": [{"content": "Hi"}]}, r"`prompt\[0\]`: `role` is missing"),
        ({"prompt": [{"role": "user", "content": None}]}, "`content` is null"),
        ({"prompt": [{"role": "user", "content": [{"type": "text"}]}]}, "`content` is a list; it must be text"),
        ({"prompt": [{"role": "human", "content": "Hi"}]}, "role 'human' is unknown, .*did you mean 'user'"),
        ({"prompt": [{"role": "usr", "content": "Hi"}]}, "did you mean 'user'"),
        ({"prompt": [{**USER, "tool_calls": [1]}]}, r"`tool_calls\[0\]` is no call"),
        ({"prompt": [{**USER, "tool_calls": [{"name": "f", "arguments": "[" * 100_000}]}]}, "is no valid JSON"),
        ({"prompt": [{**USER, "tool_calls": [{"name": "f", "arguments": '{"a": NaN}'}]}]}, "NaN is no JSON value"),
        ({"prompt": "A", "completions": 1}, "column `completions` has a name that reward functions receive"),
        ({"prompt": "\x00"}, "NUL"),
        ({"prompt": "A", "note": "\ud83d"}, "surrogate"),
        ({"prompt": "A", 3: "B"}, "column name 3 is no text"),
    ],
)
def test_a_bad_row_is_refused_with_its_reason(row: dict[str, object], reason: str):
    with pytest.raises(DataError, match=rf"(?s)1 bad row of 2 .*prompts\[1\]: .*({reason})"):
        load_prompts([{"prompt": "fine"}, row])


def test_bad_rows_of_a_file_are_all_counted(tmp_path: Path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "A"}\n\n{"prompt": ""}\n{"text": "A"}\n{"prompt": "unfini')
    with pytest.raises(
        DataError, match=r"(?s)4 bad rows of 5 .*p.jsonl:2: blank.*:3: .*empty.*:4: no col.*:5: .*cut off"
    ):
        load_prompts(path)


def test_an_empty_source_says_what_to_give():
    with pytest.raises(DataError, match="name a JSONL file with a `prompt` column, or `films`"):
        load_prompts("")
    with pytest.raises(DataError, match="the list of prompts has no rows"):
        load_prompts([])


ASKED = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}, {"role": "user", "content": "So?"}]
REPLY = {"role": "assistant", "content": "So."}


def test_a_conversation_in_messages_is_a_prompt_up_to_its_last_reply():
    prompts = load_prompts([{"messages": [*ASKED, REPLY], "n": 1}, {"messages": ASKED}])
    assert [prompt.content for prompt in prompts] == [tuple(ASKED), tuple(ASKED)]
    assert prompts[0].columns == {"n": 1}
    with pytest.raises(DataError, match="`messages` holds one reply and nothing that it answers"):
        load_prompts([{"messages": [REPLY]}])


def test_a_prompt_column_goes_before_messages_and_keeps_its_last_turn():
    (prompt,) = load_prompts([{"prompt": [*ASKED, REPLY], "messages": ASKED}])
    assert prompt.content == (*ASKED, REPLY)


def test_the_built_in_sums_are_prompts():
    prompts = load_prompts("arithmetic")
    assert len({prompt.id for prompt in prompts}) == len(prompts) > 2000


def test_real_questions_with_answers_are_read(data_dir: Path):
    section = PromptsSection(text_column="question")
    prompts = load_prompts(data_dir / "math" / "gsm8k.train.jsonl.gz", section)
    assert len(prompts) == 7473
    assert all("####" in str(prompt.columns["answer"]) for prompt in prompts)


def test_real_rows_of_messages_are_read(data_dir: Path):
    prompts = load_prompts(data_dir / "instruction" / "oasst1.en-validation.best-replies.jsonl.gz")
    assert len(prompts) == 418
    assert all(prompt.is_conversational for prompt in prompts)
    json.dumps([prompt.columns for prompt in prompts])


def test_reading_prompts_and_pairs_loads_no_torch():
    modules = "tunesmith.collect.data.prompts, tunesmith.collect.data.pairs, tunesmith.collect.data.split"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
