"""Each row of TRL's page of data set formats is read, from a `datasets` object and folder, and becomes TRL's tokens."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trl import extract_prompt
from trl.data_utils import maybe_apply_chat_template

from tunesmith.base.core.errors import DataError
from tunesmith.base.schema.records import Pair, Prompt
from tunesmith.collect.data.answers import AnswerTable, encode_pairs
from tunesmith.collect.data.collate import TokenLimit
from tunesmith.collect.data.demonstrations import load_demonstrations
from tunesmith.collect.data.pairs import load_judgements, load_preferences
from tunesmith.collect.data.prompts import load_prompts
from tunesmith.collect.data.rows import BadRows
from tunesmith.engine.models.tiny import EOS_ID, byte_tokenizer
from tunesmith.engine.models.tokenizer import encode_demonstration, encode_pair_side, encode_prompt

ASK = [{"role": "user", "content": "What color is the sky?"}]
BLUE, GREEN = ([{"role": "assistant", "content": f"It is {color}."}] for color in ("blue", "green"))
SKY = {"prompt": "The sky is"}

Loader = Callable[[Any], list[Any]]
FORMATS: list[tuple[str, Loader, dict[str, Any]]] = [
    ("language modelling", load_demonstrations, {"text": "The sky is blue."}),
    ("language modelling", load_demonstrations, {"messages": [*ASK, *BLUE]}),
    ("prompt only", load_prompts, SKY),
    ("prompt only", load_prompts, {"prompt": ASK}),
    ("prompt completion", load_demonstrations, {**SKY, "completion": " blue."}),
    ("prompt completion", load_demonstrations, {"prompt": ASK, "completion": BLUE}),
    ("preference", load_preferences, {**SKY, "chosen": " blue.", "rejected": " green."}),
    ("preference", load_preferences, {"chosen": "The sky is blue.", "rejected": "The sky is green."}),
    ("preference", load_preferences, {"prompt": ASK, "chosen": BLUE, "rejected": GREEN}),
    ("preference", load_preferences, {"chosen": [*ASK, *BLUE], "rejected": [*ASK, *GREEN]}),
    ("unpaired preference", load_judgements, {**SKY, "completion": " blue.", "label": True}),
    ("unpaired preference", load_judgements, {"prompt": ASK, "completion": GREEN, "label": False}),
]


def encoded(kind: str, item: Any, row: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Our token ids of the row, by TRL's names for them."""
    tokenizer = byte_tokenizer()
    if kind == "language modelling":
        return {"text": encode_demonstration(tokenizer, item, "all").ids}
    if kind == "preference":
        table = AnswerTable()
        (pair,) = encode_pairs([item], tokenizer, TokenLimit(1000), table, BadRows())
        chosen, rejected = table.answers[pair.chosen], table.answers[pair.rejected]
        return {"prompt": chosen.prompt_ids, "chosen": chosen.completion_ids, "rejected": rejected.completion_ids}
    prompt: Prompt = item if isinstance(item, Prompt) else item.prompt
    ids = {"prompt": encode_prompt(tokenizer, prompt)}
    if kind != "prompt only":
        ids["completion"] = encode_pair_side(tokenizer, prompt, item.completion)[len(ids["prompt"]) :]
    return ids


@pytest.mark.parametrize(("kind", "load", "row"), FORMATS, ids=[kind for kind, _, _ in FORMATS])
def test_a_row_has_the_tokens_that_trl_trains_on(kind: str, load: Loader, row: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    data = Dataset.from_list([row])
    data.save_to_disk(str(tmp_path / "folder"))
    (item,) = load(list(data))
    (again,) = load(str(tmp_path / "folder"))
    ours = encoded(kind, item, row)
    assert encoded(kind, again, row) == ours
    theirs = extract_prompt(row) if kind == "preference" and "prompt" not in row else row
    texts = maybe_apply_chat_template(dict(theirs), tokenizer)
    for name, ids in ours.items():
        expected = tuple(
            tokenizer(str(texts[name]).removesuffix("\n") if name != "prompt" else texts[name])["input_ids"]
        )
        # TRL appends the end-of-sequence token to text where it trains on it.
        assert ids in (expected, (*expected, EOS_ID)), f"{name}: {tokenizer.decode(ids)!r}"
    if kind == "unpaired preference":
        assert item.is_wanted is row["label"]


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("The sky is blue.", "The sky is green.", "The sky is"),
        ("It is great", "It is gross", "It is"),  # words stay whole
        ("One\n\ntwo", "One\n\nthree", "One"),
        ("Blue.", "Green.", ""),
        ("The sky", "The sky is", "The"),
    ],
)
def test_words_that_two_texts_begin_with_are_the_prompt_of_a_policy(chosen: str, rejected: str, prompt: str) -> None:
    tokenizer, table = byte_tokenizer(), AnswerTable()
    (pair,) = load_preferences([{"chosen": chosen, "rejected": rejected}])
    (found,) = encode_pairs([pair], tokenizer, TokenLimit(1000), table, BadRows())
    for text, place in ((chosen, found.chosen), (rejected, found.rejected)):
        answer = table.answers[place]
        assert tokenizer.decode(answer.prompt_ids, skip_special_tokens=True) == prompt
        assert tokenizer.decode(answer.completion_ids, skip_special_tokens=True) == text[len(prompt) :]


def test_two_texts_without_a_prompt_need_no_begin_of_sequence_token() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = None
    pair = Pair(Prompt("1", ""), "The sky is blue.", "The sky is green.")
    (found,) = encode_pairs([pair], tokenizer, TokenLimit(1000), AnswerTable(), BadRows())
    assert found.prompt_id == "1"


def test_stepwise_supervision_is_refused_and_not_read_as_a_ranking() -> None:
    row = {"prompt": "9.8 or 9.11?", "completions": ["9.11 has 0.11.", "So 9.11."], "labels": [True, False]}
    for load in (load_preferences, load_judgements):
        with pytest.raises(DataError, match="there is no trainer for stepwise supervision; write a row for each step"):
            load([row])
