"""Several sources of pairs: names, weights that say how often a pair comes, and sources that are only evaluated on."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tunesmith.base.config.sections import MixedPairsSection, PairsSource
from tunesmith.base.core.errors import DataError
from tunesmith.collect.data.mixing import source_of
from tunesmith.collect.data.sets import PreferenceSets, preference_sets
from tunesmith.engine.models.tiny import byte_tokenizer

TOKENIZER = byte_tokenizer()


def written(path: Path, count: int, start: int = 0) -> str:
    """A file of `count` pairs, two of each prompt; prompts are the numbers from `start` on."""
    rows = [
        {"prompt": f"question {start + number // 2}", "chosen": f"good {number}", "rejected": f"poor {number}"}
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sets_of(seed: int = 0, **section: Any) -> PreferenceSets:
    return preference_sets(MixedPairsSection.model_validate(section), TOKENIZER, seed)


def test_held_out_pairs_of_each_source_are_known_and_a_prompt_of_two_sources_is_on_one_side(tmp_path: Path) -> None:
    sources = [
        {"name": "first", "source": written(tmp_path / "a.jsonl", 80)},
        {"name": "second", "source": written(tmp_path / "b.jsonl", 80, start=20)},
    ]
    data = sets_of(sources=sources, heldout_fraction=0.3)
    assert list(data.heldout_by_source) == ["first", "second"]
    assert all(source_of(item.prompt_id) == name for name, rows in data.heldout_by_source.items() for item in rows)
    assert len(data.train) + len(data.heldout) == 160
    keys = [{prompts[item.prompt_id] for item in side} for side, prompts in sides(data)]
    assert not keys[0] & keys[1] and not data.facts.leaks
    alone = sets_of(source=sources[0]["source"], heldout_fraction=0.3)
    assert [item.sequences for item in alone.heldout] == [item.sequences for item in data.heldout_by_source["first"]]
    assert alone.heldout_by_source == {"": alone.heldout}


def sides(data: PreferenceSets) -> list[tuple[Any, Any]]:
    return [(data.train, data.train_prompts), (data.heldout, data.heldout_prompts)]


def test_a_weight_says_how_often_a_pair_comes_with_all_pairs_of_its_prompt(tmp_path: Path) -> None:
    def counts(weight: float, seed: int = 0) -> Counter[str]:
        sources = [
            {"name": "often", "source": written(tmp_path / "a.jsonl", 200), "weight": weight},
            {"name": "once", "source": written(tmp_path / "b.jsonl", 10, start=500)},
        ]
        data = sets_of(seed, sources=sources, heldout_fraction=0.0)
        assert len(data.groups) == len(data.train)
        assert len({(item.prompt_id, copy) for item, (_, copy) in zip(data.train, data.groups, strict=True)}) == len(
            data.train
        )
        return Counter(item.prompt_id for item in data.train)

    half, often = counts(0.5), counts(2.5)
    once = {name for name in half if source_of(name) == "once"}
    assert len(once) == 10 and all(half[name] == often[name] == 1 for name in once)
    drawn = half.keys() - once
    assert 60 <= len(drawn) <= 140 and set(half.values()) == {1}
    assert {name for name, count in often.items() if count == 3} == drawn, "a larger weight keeps what a smaller had"
    assert sum(count == 2 for count in often.values()) == 200 - len(drawn)
    numbers = {int(name.rsplit(":", 1)[1]) - 1 for name in drawn}
    assert all((number ^ 1) in numbers for number in numbers), "both pairs of a prompt are drawn"
    assert counts(0.5) == half and counts(0.5, seed=1) != half


def test_copies_of_a_pair_are_no_group(tmp_path: Path) -> None:
    sources = [{"name": "twice", "source": written(tmp_path / "a.jsonl", 4), "weight": 2}]
    data = sets_of(sources=sources, heldout_fraction=0.0)
    assert [copy for _, copy in data.groups] == [0, 1] * 4
    assert Counter(data.groups) == dict.fromkeys(data.groups, 2)


def test_sources_that_are_only_evaluated_on_lose_the_prompts_that_are_trained_on(tmp_path: Path) -> None:
    others = [
        {"name": "near", "source": written(tmp_path / "b.jsonl", 40, start=10)},
        {"name": "far", "source": written(tmp_path / "c.jsonl", 40, start=900), "max_pairs": 7},
    ]
    data = sets_of(source=written(tmp_path / "a.jsonl", 40), heldout_sources=others, heldout_fraction=0.0)
    found = data.elsewhere_by_source
    assert {name: len(rows) for name, rows in found.items()} == {"near": 20, "far": 7}
    assert not {data.elsewhere.prompts[item.prompt_id] for item in found["near"]} & set(data.train_prompts.values())
    assert len(data.train) == 40 and not data.heldout


def test_a_source_of_which_nothing_is_left_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained = {"name": "mine", "source": written(tmp_path / "a.jsonl", 40)}
    with pytest.raises(DataError, match=r"a\.jsonl: all prompts are trained on.*leave again out of pairs\.heldout_so"):
        sets_of(sources=[trained], heldout_sources=[trained | {"name": "again"}], heldout_fraction=0.0)
    rare = {"name": "rare", "source": written(tmp_path / "b.jsonl", 40, start=500), "weight": 1e-9}
    data = sets_of(sources=[trained, rare], heldout_fraction=0.0)
    assert len(data.train) == 40 and "the weight 1e-09 of the source rare draws none of its pairs" in caplog.text
    with pytest.raises(DataError, match=r"of 40 the weights of pairs\.sources draw none; raise them"):
        sets_of(sources=[rare], heldout_fraction=0.0)


def test_sources_of_which_only_ties_are_left_are_refused(tmp_path: Path) -> None:
    """The weights left none but ties, and the model learnt that everything is equal; figures of a source of ties to
    evaluate on were left out without a word.
    """
    trained = {"name": "mine", "source": written(tmp_path / "a.jsonl", 40), "weight": 1e-9}
    rows = [{"prompt": f"tie {i}", "chosen": "good", "rejected": "fine", "tie": True} for i in range(4)]
    (tmp_path / "ties.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ties = {"name": "ties", "source": str(tmp_path / "ties.jsonl")}
    with pytest.raises(DataError, match=r"all 4 rows to train on are ties.* one completion is better"):
        sets_of(sources=[trained, ties], heldout_fraction=0.0)
    with pytest.raises(DataError, match=r"ties\.jsonl: all pairs left .* are ties.*leave ties out"):
        sets_of(source=trained["source"], heldout_sources=[ties], heldout_fraction=0.0)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"source": "x", "sources": [{"name": "a", "source": "y"}]}, "both source and sources are given"),
        ({"heldout_source": "x", "sources": [{"name": "a", "source": "y"}]}, "both heldout_source and sources"),
        (
            {"sources": [{"name": "a", "source": "y"}], "heldout_sources": [{"name": "a", "source": "z"}]},
            "several sources have the name 'a'",
        ),
        ({"sources": [{"name": "a/b", "source": "y"}]}, "name"),
        ({"sources": [{"name": "a", "source": ""}]}, "at least 1 character"),
        ({"sources": [{"name": "a", "source": "y", "weight": 0}]}, "greater than 0"),
        ({"sources": [{"name": "a", "source": "y", "weight": 1e12}]}, "less than or equal to 1000"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixedPairsSection.model_validate(section)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("votes.jsonl", "votes"),
        ("data:preference/hh-rlhf.helpful-*.test.jsonl.gz", "hh-rlhf.helpful-.test"),
        ("org/pairs:train", "pairs-train"),
        ("votes/2026/", "2026"),
        ("my votes.csv", "my-votes"),
        ("???", "source"),
    ],
)
def test_source_has_the_name_of_its_file(source: str, name: str) -> None:
    section = MixedPairsSection.model_validate({"sources": [{"source": source}]})
    assert [one.name for one in section.sources] == [name]


def test_given_name_stays_and_equal_names_are_refused() -> None:
    assert PairsSource.model_validate({"source": "votes.jsonl", "name": "films"}).name == "films"
    with pytest.raises(ValueError, match="several sources have the name 'votes'"):
        MixedPairsSection.model_validate({"sources": [{"source": "a/votes.jsonl"}, {"source": "b/votes.csv"}]})


def test_bad_rows_of_any_source_are_named_or_skipped(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text(
        '{"prompt": "p", "chosen": "a"}\n{"prompt": "q", "chosen": "a", "rejected": "b"}\n'
    )
    sources = [
        {"name": "good", "source": written(tmp_path / "a.jsonl", 4)},
        {"name": "bad", "source": str(tmp_path / "b.jsonl")},
    ]
    with pytest.raises(DataError, match=r"b\.jsonl:1"):
        sets_of(sources=sources)
    data = sets_of(sources=sources, skip_bad=True, heldout_fraction=0.0)
    assert len(data.train) == 5 and data.facts.tally.num_dropped == 1
    with pytest.raises(DataError, match=r"pairs are given, and pairs\.sources too"):
        preference_sets(MixedPairsSection.model_validate({"sources": sources}), TOKENIZER, 0, [])
