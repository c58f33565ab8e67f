import json
from dataclasses import asdict

import pytest

from tunesmith.base.core.errors import DataError
from tunesmith.learn.evaluation.compare import Sample, read_samples, summarise

SAMPLE = Sample(
    prompt_index=0,
    completion_index=0,
    prompt_id="films:0",
    prompt="The film was",
    prompt_token_ids=(1, 2),
    token_ids_before=(3, 4),
    token_ids_after=(5,),
    text_before=" bad",
    text_after=" good",
    score_before=-0.5,
    score_after=0.25,
    logp_before_by_before=-3.5,
    logp_before_by_after=-4.0,
    logp_after_by_before=-6.0,
    logp_after_by_after=-2.5,
    finish_reason_before="length",
    finish_reason_after="stop",
    seed=0,
)


def test_samples_round_trip(tmp_path):
    comparison = summarise([SAMPLE])
    assert comparison.kl_per_sequence == 3.5
    assert read_samples(comparison.write_samples_jsonl(tmp_path / "s.jsonl")) == [SAMPLE]


def row(**changes):
    return json.dumps(asdict(SAMPLE) | changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (row() + "\n{broken", r"s\.jsonl:2: not JSON"),
        ("[1]", ":1: each line is one object"),
        (row(extra=1), ":1: each line is one object with"),
        (json.dumps({"prompt": "x"}), ":1: each line is one object with"),
        (row(score_after=None), "score_after is None"),
        (row(score_after=float("nan")), "score_after is nan"),
    ],
)
def test_a_damaged_file_is_named_by_line(tmp_path, text, message):
    path = tmp_path / "s.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_samples(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read_samples(tmp_path / "none.jsonl")
