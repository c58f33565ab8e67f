"""The demo end to end on the real model, cut short: every part works together and every figure can be checked."""

import json
import math
import os
from pathlib import Path

import pytest

from tunesmith.core.errors import ModelError
from tunesmith.data.pairs import load_pairs
from tunesmith.evaluation.compare import recompute
from tunesmith.models import assets
from tunesmith.telemetry.run_folder import read_jsonl
from tunesmith.workflows.demo import DemoOptions, DemoResult, run_demo

KEYS = (
    *("num_improved", "num_prompts", "mean_before", "mean_after", "median_before", "median_after", "p_value"),
    *("kl_per_sequence", "distinct2_ratio", "reward_model_accuracy", "num_heldout_votes", "minutes", "peak_rss_gb"),
    *("report", "samples"),
)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> DemoResult:
    """One quick demo; skipped where SmolLM2 is neither installed nor cached, which fails under CI."""
    try:
        assets.resolve(assets.SMOLLM2)
    except ModelError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"SmolLM2 is not here: {error}")
    return run_demo(DemoOptions(quick=True, out=str(tmp_path_factory.mktemp("demo"))))


def test_the_result_has_every_figure_as_plain_json(result: DemoResult) -> None:
    facts = json.loads(json.dumps(result.to_json()))
    assert set(KEYS) <= set(facts)
    assert facts["num_prompts"] == 15
    assert all(math.isfinite(facts[key]) for key in KEYS[:13])


def test_every_figure_of_the_comparison_follows_from_the_samples_file(result: DemoResult) -> None:
    facts = result.to_json()
    again = recompute(Path(str(facts["samples"])))
    assert {key: facts[key] for key in KEYS[:9]} == {key: again[key] for key in KEYS[:9]}
    row = read_jsonl(Path(str(facts["samples"])))[0]
    assert {"prompt", "token_ids_before", "token_ids_after", "text_before", "text_after", "score_after"} <= row.keys()


def test_compared_openings_were_never_voted_on_or_trained_on(result: DemoResult) -> None:
    compared = {row.prompt for row in result.comparison.rows}
    voted = {
        str(pair.prompt.content)
        for name in ("votes.jsonl", "heldout_votes.jsonl")
        for pair in load_pairs(result.run_dir / name)
    }
    trained = {row["prompt"] for path in result.run_dir.glob("*-demo_ppo-*/samples.jsonl") for row in read_jsonl(path)}
    assert trained
    assert not compared & (voted | trained)


def test_held_out_votes_are_about_other_openings(result: DemoResult) -> None:
    train, heldout = (
        {str(pair.prompt.content) for pair in load_pairs(result.run_dir / name)}
        for name in ("votes.jsonl", "heldout_votes.jsonl")
    )
    assert train
    assert heldout
    assert not train & heldout


def test_the_report_says_that_the_rater_is_simulated(result: DemoResult) -> None:
    page = Path(str(result.to_json()["report"])).read_text(encoding="utf-8")
    assert "simulated" in page
    assert "<html" in page
