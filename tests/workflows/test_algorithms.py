"""The comparison of algorithms on a tiny model, killed once: what was done stays, and every figure follows from it."""

import json
from pathlib import Path

import pytest

from tunesmith.apps.cli.main import main
from tunesmith.apps.workflows import algorithms
from tunesmith.apps.workflows.algorithms import (
    Curve,
    Point,
    comparison_facts,
    go_on,
    read_curve,
    run_comparison,
    score_at,
)
from tunesmith.base.config.comparison import ComparisonOptions, comparison_options
from tunesmith.base.core.errors import ConfigError, RunError
from tunesmith.base.runs.folder import read_jsonl
from tunesmith.collect.statistics.intervals import mean_interval
from tunesmith.learn.rewards.builtin import SimulatedRater
from tunesmith.learn.trainers.api import Wishes

OPTIONS = ComparisonOptions(model="tiny:llama", seeds=1, steps=2, quick=True)


def share_of_small_letters(self: SimulatedRater, prompt: object, completion: object) -> float:
    """A score that differs between the random bytes of a tiny model, in which there is no sentiment."""
    text = str(completion)
    return sum(letter.islower() for letter in text) / max(1, len(text))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison that was killed in its first training, right after a point of the curve, and went on."""
    out = tmp_path_factory.mktemp("compared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedRater, "score", share_of_small_letters)
        evaluate = Curve.step_ended

        def killed(self: Curve, step: int, metrics: object) -> Wishes:
            wishes = evaluate(self, step, {})
            if wishes.save:
                raise KeyboardInterrupt
            return wishes

        with patch.context() as once:
            once.setattr(Curve, "step_ended", killed)
            with pytest.raises(KeyboardInterrupt):
                run_comparison(OPTIONS, out)
        (path,) = out.iterdir()
        return go_on(path)


@pytest.mark.nightly
def test_a_killed_comparison_goes_on_where_it_was(folder: Path) -> None:
    for name, steps in (("ppo", 2), ("grpo", 2), ("dpo", 8), ("best_of_n", 2)):
        (run,) = folder.glob(f"*-{name}-seed0-*")
        rows = read_jsonl(run / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(1, steps + 1))
        assert [point.step for point in read_curve(run)] == [steps // 2, steps]
        assert any(key.startswith("time/callback/") for row in rows for key in row)  # evaluations have their own time
        assert (run / "final").is_dir() and not (run / "checkpoints").exists()
    assert len(list(folder.glob("*-reward-*"))) == 1
    stamp = (folder / "comparison.json").stat().st_mtime_ns
    assert go_on(folder) == folder  # all is done: figures and page are written again
    assert (folder / "comparison.json").stat().st_mtime_ns > stamp


@pytest.mark.nightly
def test_every_figure_follows_from_the_curves_of_the_runs(folder: Path) -> None:
    facts = json.loads((folder / "comparison.json").read_text())
    base = Point(**json.loads((folder / "base.json").read_text()))
    curves = {}
    for name in algorithms.titles():
        (run,) = folder.glob(f"*-{name}-seed0-*")
        curves[name] = [[base, *read_curve(run)]]
    again = json.loads(json.dumps(comparison_facts(OPTIONS, curves)))
    assert {name: facts[name] for name in again} == again
    assert base.kl == 0 and facts["algorithms"]["ppo"]["curves"][0][-1]["kl"] != 0  # an estimate: it may be below 0
    page = (folder / "report.html").read_text()
    assert facts["said"] in page and "simulated rater" in page


@pytest.mark.nightly
def test_openings_of_the_curves_were_never_voted_on(folder: Path) -> None:
    trained = {row["prompt"] for row in read_jsonl(folder / "prompts.jsonl")}
    voted = {row["prompt"] for row in read_jsonl(folder / "votes.jsonl")}
    assert voted and voted <= trained
    assert len(trained) + algorithms.NUM_COMPARED == len(algorithms._openings(OPTIONS))


def test_the_score_at_a_kl_lies_on_the_line_between_two_evaluations() -> None:
    curve = [Point(0, 0.0, 0.1), Point(2, 1.0, 0.3), Point(4, 5.0, 0.7), Point(6, 3.0, 0.0), Point(8, 6.0, 0.9)]
    assert score_at(curve, 0.5) == pytest.approx(0.2)
    assert score_at(curve, 4.0) == pytest.approx(0.6)  # where it is first reached
    assert score_at(curve, 5.5) == pytest.approx(0.75)
    assert score_at(curve, 6.5) is None


def test_seeds_that_do_not_reach_a_kl_are_counted_and_left_out() -> None:
    def to(kl: float, score: float) -> list[Point]:
        return [Point(0, 0.0, 0.0), Point(1, kl, score)]

    curves = {
        "ppo": [to(4, 0.4), to(4, 0.6), to(3, 0.9)],
        "grpo": [to(8, 0.4), to(8, 0.4), to(8, 0.4)],
        "dpo": [to(1, 0.9)] * 3,
        "best_of_n": [to(2, 0.5)] * 3,
    }
    facts = comparison_facts(ComparisonOptions(), curves)
    at = {name: {one["kl"]: one for one in row["at"]} for name, row in facts["algorithms"].items()}
    assert at["dpo"][2.0] == {
        "kl": 2.0,
        "scores": [None] * 3,
        "num_reached": 0,
        "mean": None,
        "low": None,
        "high": None,
    }
    assert at["ppo"][4.0]["num_reached"] == 2
    assert (at["ppo"][4.0]["low"], at["ppo"][4.0]["high"]) == pytest.approx(mean_interval([0.4, 0.6]))
    assert facts["said"].startswith("At 2 nats best-of-n has the highest score, 0.50, before PPO with 0.37;")


def test_dpo_and_the_algorithms_of_the_demo_are_compared_in_a_fixed_order() -> None:
    expected = {"ppo": "PPO", "grpo": "GRPO", "dpo": "DPO", "best_of_n": "best-of-n"}
    assert list(algorithms.titles().items()) == list(expected.items())
    cfg = algorithms.recipe_of("best_of_n", OPTIONS, Path("comparison"), judge=Path("judge"))
    assert cfg.optimizer.schedule == "constant" and cfg.optimizer.learning_rate == 1e-4


def test_bad_options_are_refused_before_anything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"seeds: .*'0' given"):
        comparison_options({"seeds": "0"})
    assert main(["compare-algorithms", "--seeds", "0", "--out", str(tmp_path / "out")]) == 2
    assert "seeds" in capsys.readouterr().err and not (tmp_path / "out").exists()
    with pytest.raises(RunError, match=r"no folder of `tunesmith compare-algorithms`"):
        go_on(tmp_path)
