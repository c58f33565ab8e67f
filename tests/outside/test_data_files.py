"""Data files of other tools: columns for the chat template, whole conversations beside a prompt, nulls of Parquet."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tunesmith import load_prompts
from tunesmith.base.config.algorithms.dpo import DPOSection
from tunesmith.base.config.sections import DemonstrationsSection, ModelSection, PairsSection, PromptsSection
from tunesmith.base.core.errors import DataError
from tunesmith.base.schema.records import Message
from tunesmith.collect.data import sets
from tunesmith.collect.data.demonstrations import load_demonstrations
from tunesmith.collect.data.pairs import load_judgements, load_preferences
from tunesmith.engine.batch.rollout import Completion
from tunesmith.engine.models.load import new_reward_model
from tunesmith.engine.models.tiny import byte_tokenizer
from tunesmith.engine.models.tokenizer import PreTrainedTokenizerBase, decode, encode_prompt
from tunesmith.learn.rewards.model import ModelReward
from tunesmith.learn.rewards.outcome import Sample

USER, REPLY = {"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "Yes."}
OTHER = {"role": "assistant", "content": "No."}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
TEMPLATE = """\
{%- if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% if thinks %}<thinks>{% endif %}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer whose template writes the tools, and `<thinks>` if it is asked to."""
    found = byte_tokenizer()
    found.chat_template = TEMPLATE
    return found


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """`rows` as a JSONL or Parquet file."""
    if path.suffix == ".parquet":
        names = {name: None for row in rows for name in row}  # a table takes the columns of its first row
        pq.write_table(pa.Table.from_pylist([names | row for row in rows]), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("as_text", [False, True], ids=["list", "JSON text"])
def test_tools_reach_the_template_in_every_trainer(
    suffix: str, as_text: bool, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Rows with `tools` as in TRL; the model was trained without the schema. Reported: issue 45.5."""
    further = {"tools": json.dumps(TOOLS) if as_text else TOOLS, "chat_template_kwargs": {"thinks": True}}
    head = f"<tools>{json.dumps(TOOLS, separators=(', ', ': '))}</tools><thinks><user>Rain?"
    pair = write(tmp_path / f"p{suffix}", [{"prompt": [USER], "chosen": [REPLY], "rejected": [OTHER], **further}] * 2)
    pairs = PairsSection(source=str(pair), heldout_fraction=0)
    encoded = sets.preference_sets(pairs, tokenizer, 0).train[0]
    assert [decode(tokenizer, ids).startswith(head) for ids in encoded.sequences] == [True, True]
    answers = sets.direct_sets(pairs, tokenizer, DPOSection(), 0).answers
    assert [decode(tokenizer, one.prompt_ids) for one in answers] == [f"{head}<assistant>"] * 2
    labels = write(tmp_path / f"k{suffix}", [{"prompt": [USER], "completion": [REPLY], "label": True, **further}] * 2)
    kto = PairsSection(source=str(labels), heldout_fraction=0)
    answers = sets.direct_sets(kto, tokenizer, DPOSection(loss="kto"), 0).answers
    assert decode(tokenizer, answers[0].prompt_ids) == f"{head}<assistant>"
    prompts = write(tmp_path / f"g{suffix}", [{"prompt": [USER], **further}])
    (prompt,) = sets.prompt_sets(PromptsSection(source=str(prompts)), tokenizer, 0).train
    assert decode(tokenizer, encode_prompt(tokenizer, prompt)) == f"{head}<assistant>"
    for row in ({"prompt": [USER], "completion": [REPLY]}, {"messages": [USER, REPLY]}):
        shown = write(tmp_path / f"s{suffix}", [{**row, **further}] * 2)
        section = DemonstrationsSection(source=str(shown), heldout_fraction=0)
        learnt = sets.demonstration_sets(section, tokenizer, 0).train[0]
        assert decode(tokenizer, learnt.ids).startswith(head)
        assert [decode(tokenizer, learnt.ids[span.start : span.stop]) for span in learnt.spans] == ["Yes."]


def test_a_reward_model_with_another_template_sees_the_tools(tokenizer: PreTrainedTokenizerBase) -> None:
    """The judge of an answer must see what the answer could call. Reported: issue 45.5."""
    model = new_reward_model(ModelSection(name="tiny:llama"))
    model.tokenizer.chat_template = TEMPLATE.replace("<tools>", "<TOOLS>")
    reward = ModelReward(model, policy_tokenizer=tokenizer)
    (prompt,) = load_prompts([{"prompt": [USER], "tools": TOOLS}])
    completion = Completion((1,), logps=(-0.5,), raw_logps=(-0.5,), text="Yes.", finish_reason="stop")
    ids = reward.encode(Sample(prompt, encode_prompt(tokenizer, prompt), completion, 0))
    assert decode(model.tokenizer, ids).startswith("<TOOLS>")


@pytest.mark.parametrize(
    ("further", "message"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False}}, "`enable_thinking` for the chat template"),
        ({"chat_template_kwargs": {"add_generation_prompt": True}}, "sets `add_generation_prompt`, which the trainer"),
        ({"chat_template_kwargs": "x"}, "`chat_template_kwargs` is text; give an object"),
        ({"tools": "weather"}, "`tools` is text that is no JSON"),
        ({"tools": 3}, "`tools` is a number; give a list of schemas"),
        ({"images": ["cat.png"]}, "`images` is for models that see or hear"),
        ({"image": "cat.png"}, "`image` is for models that see or hear"),
        ({"system": "Be brief."}, "`system` is no column of its own here; make it the first message"),
    ],
)
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER]},
        {"prompt": [USER], "completion": [REPLY]},
        {"messages": [USER, REPLY]},
        {"prompt": [USER], "chosen": [REPLY], "rejected": [OTHER]},
        {"chosen": [USER, REPLY], "rejected": [USER, OTHER]},
        {"prompt": [USER], "completion": [REPLY], "label": True},
        {"prompt": [USER], "completions": [[REPLY], [OTHER]]},
    ],
    ids=["prompt", "completion", "messages", "pair", "whole pair", "label", "ranking"],
)
def test_what_the_template_does_not_read_is_refused_by_name(
    row: dict[str, Any], further: dict[str, Any], message: str
) -> None:
    """Arguments that a template lacks, pictures: never without a word. Reported: issue 45.5."""
    tokenizer = byte_tokenizer()
    rows = [{**row, **further}] * 2
    with pytest.raises(DataError, match=message):
        if "chosen" in row or "completions" in row:
            sets.preference_sets(PairsSection(heldout_fraction=0), tokenizer, 0, rows)
        elif "label" in row:
            sets.direct_sets(PairsSection(heldout_fraction=0), tokenizer, DPOSection(loss="kto"), 0, rows)
        elif "completion" in row or "messages" in row:
            sets.demonstration_sets(DemonstrationsSection(heldout_fraction=0), tokenizer, 0, rows)
        else:
            sets.prompt_sets(PromptsSection(), tokenizer, 0, rows)


def test_tools_of_a_text_are_refused() -> None:
    """Text goes through no template, so that nothing would read its tools. Reported: issue 45.5."""
    for row in ({"prompt": "Rain?"}, {"prompt": "Rain?", "chosen": " Yes", "rejected": " No"}):
        with pytest.raises(DataError, match="`tools` is for the chat template, which text does not go through"):
            (load_preferences if "chosen" in row else load_prompts)([{**row, "tools": TOOLS}])  # type: ignore[operator]


WHOLE: dict[str, tuple[Any, tuple[Message, ...], Any]] = {
    "messages": ([USER], (USER,), [USER]),
    "behind a system message": ([USER], (SYSTEM, USER), [SYSTEM, USER]),
    "with the system message": ([SYSTEM, USER], (SYSTEM, USER), [SYSTEM, USER]),
    "text": ("Rain?", (USER,), [USER]),
    "text behind a system message": ("Rain?", (SYSTEM, USER), [SYSTEM, USER]),
    "text of an earlier turn": ("Rain?", (USER, OTHER, USER), [USER, OTHER, USER]),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_conversations_beside_their_prompt(name: str) -> None:
    """UltraFeedback and its like repeat the prompt in `chosen`; it was in the input twice. Reported: issue 45.5."""
    given, prompt, head = WHOLE[name]
    (pair,) = load_preferences([{"prompt": given, "chosen": [*head, REPLY], "rejected": [*head, OTHER]}])
    assert (pair.prompt.content, pair.chosen, pair.rejected) == (prompt, (REPLY,), (OTHER,))  # type: ignore[union-attr]
    (ranking,) = load_preferences([{"prompt": given, "completions": [[*head, REPLY], [*head, OTHER]]}])
    assert (ranking.prompt.content, ranking.completions) == (prompt, ((REPLY,), (OTHER,)))  # type: ignore[union-attr]
    (judged,) = load_judgements([{"prompt": given, "completion": [*head, REPLY], "label": True}])
    assert (judged.prompt.content, judged.completion) == (prompt, (REPLY,))  # type: ignore[union-attr]
    (shown,) = load_demonstrations([{"prompt": given, "completion": [*head, REPLY]}])
    assert (shown.prompt.content, shown.completion) == (prompt, (REPLY,))
    (shown,) = load_demonstrations([{"prompt": given, "messages": [*head, REPLY]}])
    assert (shown.prompt.content, shown.completion) == ("", (*prompt, REPLY))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": [USER], "chosen": [USER, REPLY], "rejected": [OTHER]}, "`chosen` begins with a turn of the user"),
        (
            {"prompt": [USER], "chosen": [{**USER, "content": "rain ?"}, REPLY], "rejected": [OTHER]},
            "`chosen` begins with a turn of the user after the prompt, which it seems to repeat",
        ),
        ({"prompt": [USER], "chosen": [SYSTEM, REPLY], "rejected": [OTHER]}, "begins with a turn of the system"),
        (
            {"prompt": [USER, REPLY], "chosen": [USER, REPLY], "rejected": [OTHER]},
            "`chosen` is empty|begins with a turn",
        ),
        ({"prompt": "Rain today?", "chosen": "Rain today? Yes", "rejected": "Rain today? No"}, "repeat `prompt`"),
        ({"prompt": [USER], "completion": [{**USER, "content": "Snow?"}, REPLY]}, "`completion` begins with a turn"),
        ({"prompt": [{**USER, "content": "Snow?"}], "messages": [USER, REPLY]}, "`messages` begins with a turn"),
        ({"prompt": "Snow?", "messages": [USER, REPLY]}, "`prompt` is no part of `messages`"),
    ],
)
def test_a_repeated_prompt_that_is_not_recognised_is_refused(row: dict[str, Any], message: str) -> None:
    """A prompt that differs in a space, or one side alone that is whole. Reported: issue 45.5."""
    load: Any = load_preferences if "chosen" in row else load_demonstrations
    with pytest.raises(DataError, match=message):
        load([row])


def test_continued_conversations_are_left_alone() -> None:
    """An answer may have several turns, after a reply, a tool, or a system message. Reported: issue 45.5."""
    tool = {"role": "tool", "content": "12 C"}
    for prompt, answer in (
        ([USER, REPLY], [{**USER, "content": "Snow?"}, OTHER]),
        ([USER], [REPLY, {**USER, "content": "Snow?"}, OTHER]),
        ([USER], [tool, REPLY]),
        ([SYSTEM], [USER, REPLY]),
    ):
        (shown,) = load_demonstrations([{"prompt": prompt, "completion": answer}])
        assert (shown.prompt.content, shown.completion) == (tuple(prompt), tuple(answer))


MIXED: dict[str, list[dict[str, Any]]] = {
    "prompts": [
        {"prompt": "The capital of France is", "answer": "Paris"},
        {"messages": [USER, REPLY], "answer": "Yes"},
    ],
    "demonstrations": [
        {"prompt": "Rain?", "completion": " Yes."},
        {"messages": [USER, REPLY]},
        {"text": "It rains."},
    ],
    "pairs": [
        {"prompt": "Rain?", "chosen": " Yes.", "rejected": " No.", "margin": 1.5},
        {"prompt": "Rain?", "chosen": " Yes.", "rejected": " No.", "tie": True},
        {"prompt": "Rain?", "completions": [" Yes.", " No."], "scores": [2.0, 1.0]},
        {"chosen": "Snow falls.", "rejected": "Snow flies."},
    ],
    "judgements": [
        {"prompt": "Rain?", "completion": " Yes.", "label": True},
        {"prompt": "Rain?", "completion": " No.", "label": False, "tools": None},
        {"prompt": "Rain?", "chosen": " Yes.", "rejected": " No."},
    ],
}


@pytest.mark.parametrize("kind", MIXED)
def test_parquet_gives_the_rows_of_jsonl(kind: str, tmp_path: Path) -> None:
    """Parquet has every column in every row, null where JSONL has none; rows were refused. Reported: issue 45.26."""
    load: Any = {
        "prompts": load_prompts,
        "demonstrations": load_demonstrations,
        "pairs": load_preferences,
        "judgements": load_judgements,
    }[kind]
    nulls = [{name: None for row in MIXED[kind] for name in row} | row for row in MIXED[kind]]
    expected = load(write(tmp_path / "rows.jsonl", MIXED[kind]))
    assert load(write(tmp_path / "rows.jsonl", nulls)) == expected
    found = load(write(tmp_path / "rows.parquet", MIXED[kind]))
    assert [repr(one).replace("rows.parquet", "rows.jsonl") for one in found] == list(map(repr, expected))


def test_a_reward_gets_the_columns_of_all_rows_at_every_step() -> None:
    """Of mixed rows, a step without a row that has `answer` ended the run. Reported: issue 45.26."""
    rows = [{"prompt": "2 + 2 =", "answer": 4}, {"prompt": "Rain?"}]
    prompts = sets.prompt_sets(PromptsSection(), byte_tokenizer(), 0, rows).train
    assert [dict(prompt.columns) for prompt in prompts] == [{"answer": 4}, {"answer": None}]


def test_tools_of_a_row_are_described_where_the_template_does_not_read_them() -> None:
    """One file of rows with tools is for models of all kinds. Reported: issue 47.4."""
    tokenizer, pairs = byte_tokenizer(), PairsSection(heldout_fraction=0)
    rows = [{"prompt": [USER], "tools": TOOLS}] * 2
    told = '{"type": "function"'
    (prompt, _) = sets.prompt_sets(PromptsSection(), tokenizer, 0, rows).train
    assert told in decode(tokenizer, encode_prompt(tokenizer, prompt))
    rows = [{**row, "completion": [REPLY]} for row in rows]
    demonstrations = sets.demonstration_sets(DemonstrationsSection(heldout_fraction=0), tokenizer, 0, rows).train
    assert told in decode(tokenizer, demonstrations[0].ids)
    rows = [{"prompt": [USER], "tools": TOOLS, "chosen": [REPLY], "rejected": [OTHER]}] * 2
    assert sets.preference_sets(pairs, tokenizer, 0, rows).train
    judged = [{"prompt": [USER], "tools": TOOLS, "completion": [REPLY], "label": number == 0} for number in range(2)]
    assert sets.direct_sets(pairs, tokenizer, DPOSection(loss="kto"), 0, judged).train
