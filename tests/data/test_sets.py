"""What a trainer starts from: one rule for every kind of bad row, held-out data, leaks."""

import json
import logging
from pathlib import Path

import pytest

from tunesmith.base.config.algorithms.dpo import DPOSection
from tunesmith.base.config.sections import PairsSection, PromptsSection
from tunesmith.base.core.errors import DataError
from tunesmith.collect.data.rows import Tally
from tunesmith.collect.data.sets import direct_sets, preference_sets, prompt_sets
from tunesmith.engine.models.tiny import byte_tokenizer

TOKENIZER = byte_tokenizer()

BAD_PAIRS = (
    (b'{"id": 1, "prompt": "A", "chosen": "b", "rejected": "c"}', None),
    (b"", "blank line"),
    (b"{oops", "not parsed"),
    (b'{"prompt": "A", "chosen": "\xff", "rejected": "c"}', "not UTF-8"),
    (b'{"prompt": "A", "chosen": "\\ud83d", "rejected": "c"}', "bad character"),
    (b'{"prompt": "A", "chosen": "\\u0000", "rejected": "c"}', "bad character"),
    (b'{"prompt": "A", "chosen": 7, "rejected": "c"}', "wrong type"),
    (b'{"prompt": "A", "chosen": "b"}', "missing column"),
    (b'{"prompt": "A", "chosen": "b", "rejected": "c", "margin": -1}', "bad value"),
    (b'{"prompt": "A", "chosen": "b", "rejected": ""}', "empty"),
    (b'{"prompt": "A", "chosen": "b", "rejected": "b"}', "same completions"),
    (b'{"id": 1, "prompt": "A", "chosen": "b", "rejected": "d"}', "repeated id"),
    (b'{"prompt": "A", "chosen": "' + b"b" * 1_000_000 + b'", "rejected": "c"}', "too long"),
    ('{"prompt": "A \U0001f600 שלום", "chosen": "b", "rejected": "c"}'.encode(), None),
    (b'{"prompt": "A", "chosen": "unfin', "cut off"),
)


def write(path: Path, *rows: dict[str, object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def pair(prompt: str) -> dict[str, object]:
    return {"prompt": prompt, "chosen": f"{prompt} yes", "rejected": f"{prompt} no"}


@pytest.fixture
def bad_file(tmp_path: Path) -> str:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join(line for line, _ in BAD_PAIRS))
    return str(path)


@pytest.mark.parametrize(("line", "kind"), [item for item in BAD_PAIRS if item[1]], ids=lambda value: str(value)[:20])
def test_each_kind_of_bad_row_is_refused_strictly_and_dropped_when_skipping(line: bytes, kind: str, tmp_path: Path):
    path = tmp_path / "p.jsonl"
    good = [first for first, is_bad in BAD_PAIRS if not is_bad]
    path.write_bytes(b"\n".join([good[0], line] if kind == "cut off" else [good[0], line, good[1]]))
    with pytest.raises(DataError, match=r"1 bad row of [23] in .*\s+p\.jsonl:2: "):
        preference_sets(PairsSection(source=str(path)), TOKENIZER, 0)
    data = preference_sets(PairsSection(source=str(path), skip_bad=True, heldout_fraction=0), TOKENIZER, 0)
    assert data.facts.tally.reasons == {kind: 1}


def test_all_bad_rows_of_a_file_land_in_one_tally(bad_file: str, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        data = preference_sets(PairsSection(source=bad_file, skip_bad=True), TOKENIZER, 0)
    tally = data.facts.tally
    assert (tally.num_rows, tally.num_used) == (15, 2)
    assert tally.reasons == {"bad character": 2} | {
        kind: 1 for _, kind in BAD_PAIRS if kind and kind != "bad character"
    }
    assert "bad.jsonl: 2 of 15 rows used; dropped: bad character 2" in caplog.text
    (finding,) = data.facts.findings
    assert (finding.name, finding.step, finding.message) == ("bad_rows", 0, str(tally))
    json.dumps(data.facts.to_json())


def test_too_long_rows_of_both_sides_of_the_split_are_named_together(tmp_path: Path):
    rows = [{"prompt": f"q{n}", "chosen": "b" * 40, "rejected": "c"} for n in range(12)]
    section = PairsSection(source=write(tmp_path / "p.jsonl", *rows), max_tokens=20, heldout_fraction=0.5)
    with pytest.raises(DataError, match="12 bad rows of 12"):
        preference_sets(section, TOKENIZER, 0)
    with pytest.raises(DataError, match=r"12 bad rows of 12 .*none is left to use"):
        preference_sets(section.model_copy(update={"skip_bad": True}), TOKENIZER, 0)


@pytest.mark.parametrize(
    ("max_tokens", "max_length", "limit"), [(20, None, 20), (20, 30, 20), (50, 30, 30), (50, -4, 0)]
)
def test_the_smaller_of_max_tokens_and_the_model_s_context_is_the_limit(
    max_tokens: int, max_length: int | None, limit: int, tmp_path: Path
):
    source = write(tmp_path / "p.jsonl", pair("x" * 60), {"prompt": "x" * 60, "chosen": "y", "rejected": "z"})
    with pytest.raises(DataError, match=rf"p\.jsonl:1: too long: .* the limit is {limit} .*the model's context"):
        preference_sets(PairsSection(source=source, max_tokens=max_tokens), TOKENIZER, 0, max_length=max_length)
    with pytest.raises(
        DataError, match=rf"p\.jsonl:1: too long: 60 tokens, the limit is {limit} .*the model's context"
    ):
        prompt_sets(PromptsSection(source=source, max_tokens=max_tokens), TOKENIZER, 0, max_length=max_length)


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_direct_losses_take_what_is_too_long_or_cut_its_prompt(loss: str):
    rows = [{"prompt": f"{n:02d}" + "x" * 60, "chosen": "yes", "rejected": "no"} for n in range(4)]
    settings = DPOSection.model_validate({"loss": loss})
    section = PairsSection(max_tokens=20, heldout_fraction=0.5)
    with pytest.raises(DataError, match=r"4 bad rows of 4 .*(?s:.*)or set `pairs\.truncate` to left or both"):
        direct_sets(section, TOKENIZER, settings, 0, rows)
    data = direct_sets(section.model_copy(update={"truncate": "left"}), TOKENIZER, settings, 0, rows)
    assert max(len(answer.prompt_ids) + len(answer.completion_ids) for answer in data.answers) == 20
    assert data.train and data.heldout
    assert len(data.train) + len(data.heldout) == (8 if loss == "kto" else 4)
    assert data.facts.tally == Tally(4, 4)


def test_prompts_follow_the_same_rule(tmp_path: Path):
    rows = [{"prompt": "fine"}, {"prompt": "x" * 100}, {"prompt": ""}, {"prompt": "ok"}, {"prompt": "a"}]
    source = write(tmp_path / "p.jsonl", *rows)
    section = PromptsSection(source=source, max_tokens=50, prefix_tokens=(2, 3), skip_bad=True)
    data = prompt_sets(section, TOKENIZER, 0)
    assert [prompt.id for prompt in data.train] == ["p.jsonl:1", "p.jsonl:2", "p.jsonl:4"]
    assert data.facts.tally == Tally(5, 3, {"empty": 1, "too short": 1})
    whole = prompt_sets(section.model_copy(update={"prefix_tokens": None}), TOKENIZER, 0)
    assert whole.facts.tally.reasons == {"empty": 1, "too long": 1}
    assert whole.mean_tokens == pytest.approx((4 + 2 + 1) / 3)
    with pytest.raises(DataError, match=r"(?s)1 bad row of 5 .*p\.jsonl:3: `prompt` is empty"):
        prompt_sets(section.model_copy(update={"skip_bad": False}), TOKENIZER, 0)


def test_held_out_data_may_be_a_source_of_its_own_and_leaks_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    train = write(tmp_path / "train.jsonl", *map(pair, ("A", "B", "C")))
    test = write(tmp_path / "test.jsonl", *map(pair, ("D", " b")))
    section = PairsSection(source=train, heldout_source=test, heldout_fraction=0.9)
    with caplog.at_level(logging.WARNING):
        data = preference_sets(section, TOKENIZER, 0)
    assert (len(data.train), len(data.heldout)) == (3, 2)
    assert [leak.heldout for leak in data.facts.leaks] == ["test.jsonl:2"]
    assert "1 of 2 held-out prompts are trained on (test.jsonl:2 = train.jsonl:2)" in caplog.text
    assert [finding.name for finding in data.facts.findings] == ["leak"]
    assert data.facts.heldout_tally == Tally(2, 2)
    prompts = prompt_sets(PromptsSection(source=train, heldout_source=test), TOKENIZER, 0)
    assert (len(prompts.train), len(prompts.heldout), len(prompts.facts.leaks)) == (3, 2, 1)


def test_the_split_column_holds_rows_of_one_value_together():
    rows = [{"prompt": f"{a} + {b}", "pair": f"{min(a, b)},{max(a, b)}"} for a in range(9) for b in range(9)]
    data = prompt_sets(PromptsSection(split_column="pair", heldout_fraction=0.3), TOKENIZER, 0, rows)
    sides = [{prompt.columns["pair"] for prompt in side} for side in (data.train, data.heldout)]
    assert sides[0].isdisjoint(sides[1]) and all(sides)
    assert data.facts.leaks == ()


def test_rankings_become_pairs_or_stay_rankings():
    rows = [{"prompt": "A", "completions": ["x", "yy", "zzz"]}, pair("B")]
    expanded = preference_sets(PairsSection(heldout_fraction=0), TOKENIZER, 0, rows)
    assert [item.ranks for item in expanded.train] == [(1, 2)] * 4
    ranked = preference_sets(PairsSection(heldout_fraction=0, rankings="plackett_luce"), TOKENIZER, 0, rows)
    assert [item.ranks for item in ranked.train] == [(1, 2, 3), (1, 2)]
    assert ranked.facts.tally == expanded.facts.tally == Tally(2, 2)
    assert ranked.sample == "prompt: A\nplace 1: x\nplace 2: yy\nplace 3: zzz"


def test_a_ranking_with_too_many_ties_is_a_bad_row_of_plackett_luce_alone():
    rows = [{"prompt": "A", "completions": list("abcdefghi"), "scores": [0] * 9}, pair("B")]
    assert len(preference_sets(PairsSection(heldout_fraction=0), TOKENIZER, 0, rows).train) == 37
    with pytest.raises(DataError, match=r"9 completions share a place, at most 8 may; set `pairs.rankings: pairs`"):
        preference_sets(PairsSection(heldout_fraction=0, rankings="plackett_luce"), TOKENIZER, 0, rows)


def test_rows_that_the_chat_template_refuses_are_bad_rows():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}ok"
    rows = [
        [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Yo"}],
        [{"role": "user", "content": "A"}],
    ]
    data = prompt_sets(PromptsSection(skip_bad=True), tokenizer, 0, rows)
    assert data.facts.tally.reasons == {"refused by the chat template": 1}


def test_nothing_to_train_on_is_an_error():
    with pytest.raises(DataError, match="no pairs are left to train on"):
        preference_sets(PairsSection(), TOKENIZER, 0, [])
    with pytest.raises(DataError, match=r"no prompts are left to train on; .*prompts.heldout_fraction"):
        prompt_sets(PromptsSection(heldout_fraction=1.0), TOKENIZER, 0, ["A", "B"])
