"""The sentiment workflow runs through on a tiny model, its parts share no review, and its recipes are right."""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tunesmith.apps.cli.main import main
from tunesmith.apps.workflows.sentiment import (
    PIECES_PER_REVIEW,
    SentimentOptions,
    fit_judge,
    labelled_pairs,
    split_reviews,
)
from tunesmith.base.config.load import load_recipe
from tunesmith.base.core.errors import DataError
from tunesmith.collect.data.reviews import Review
from tunesmith.learn.evaluation.compare import recompute


def reviews(count: int) -> list[Review]:
    draw = random.Random(0)
    words = {True: ["great", "warm", "lovely"], False: ["dull", "awful", "poor"]}
    return [
        Review(
            f"r{i}",
            f"Film {i} was {draw.choice(words[i % 2 == 0])} and its plot {draw.choice(words[i % 2 == 0])}",
            i % 2 == 0,
        )
        for i in range(count)
    ]


def test_no_review_stands_in_two_parts_and_none_is_lost() -> None:
    rows = reviews(300)
    parts = split_reviews(rows, SentimentOptions(seed=3))
    ids = [
        one.id
        for part in (parts.demonstrations, parts.labelled, parts.judged, parts.beginnings, parts.heldout)
        for one in part
    ]
    assert sorted(ids) == sorted(one.id for one in rows)
    assert len(parts.heldout) == 15
    assert parts != split_reviews(rows, SentimentOptions(seed=4))
    assert parts == split_reviews(rows, SentimentOptions(seed=3))


def test_too_few_reviews_or_one_label_are_refused() -> None:
    with pytest.raises(DataError, match="59 reviews; give 60"):
        split_reviews(reviews(59), SentimentOptions())
    with pytest.raises(DataError, match="one label alone"):
        split_reviews([one for one in reviews(200) if one.is_positive], SentimentOptions())


def test_pairs_set_a_positive_piece_against_a_negative_one() -> None:
    rows = reviews(40)
    positive = [one.text for one in rows if one.is_positive]
    pairs = labelled_pairs(rows, seed=0)
    assert len(pairs) == 20 * PIECES_PER_REVIEW  # twenty reviews on either side
    assert all(pair.chosen in positive and pair.rejected not in positive for pair in pairs)


def test_the_judge_is_right_on_what_it_was_not_fitted_on_and_reads_prompt_and_completion() -> None:
    judge = fit_judge(reviews(200), seed=0)
    assert judge.accuracy > 0.95
    good, bad = judge.positive(["The film was", "The film was"], [" lovely", " awful"])
    assert good > 0.6 > 0.4 > bad
    good, bad = judge.positive(["A lovely film", "An awful film"], [" with a plot", " with a plot"])
    assert good > bad


@pytest.fixture
def one_core() -> Iterator[None]:
    """One core, and so one thread: of tiny matrices two threads on a busy machine mostly wait for each other."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


@pytest.mark.usefixtures("one_core")
def test_all_stages_run_and_the_figures_follow_from_the_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "reviews.jsonl").open("w") as file:
        for one in reviews(80):
            file.write(json.dumps({"text": one.text, "label": int(one.is_positive)}) + "\n")
    source = str(tmp_path / "reviews.jsonl")
    words = ["sentiment", "--reviews", source, "--judge", source, "--model", "scratch", "--quick"]
    assert main([*words, "--out", str(tmp_path / "runs"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert recompute(Path(facts["samples"]))["p_value"] == facts["p_value"]
    assert facts["num_prompts"] == 15
    assert 0 <= facts["mean_before"] <= 1
    page = Path(facts["report"]).read_text()
    assert "The training between them" in page
    assert "policy-reward" in page
    assert len(list(Path(facts["run_dir"]).glob("*-sentiment_imdb*"))) == 3


def test_the_hub_recipe_names_its_models_and_passes_a_dry_run_with_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe("ppo", recipe="sentiment_imdb_hub").recipe
    assert (recipe.model.name, recipe.reward[0].source) == ("lvwerra/gpt2-imdb", "lvwerra/distilbert-imdb")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": one.text}) + "\n" for one in reviews(9)))
    words = ["train", "ppo", "--recipe", "sentiment_imdb_hub", "--model", "tiny:gpt2", "--prompts", "texts.jsonl"]
    assert main([*words, "--reward", "sentiment", "--dry-run"]) == 0
