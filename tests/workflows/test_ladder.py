"""The ladder on a tiny model: every level works on the same tokens, passes its gates, and is on the page."""

import json
from pathlib import Path
from typing import Any

import pytest

from tunesmith.apps.cli.main import main
from tunesmith.apps.workflows.ladder import Contender, LadderOptions, Measured, check_same_work, gates_of, recipe
from tunesmith.apps.workflows.ladder_side import Learnt, Side, Taken, Worker
from tunesmith.base.config.levels import LEVELS, TECHNIQUES
from tunesmith.base.core.errors import InputError, TrainingError

OPTIONS = LadderOptions("tiny:llama", rounds=1, quick=True)


pytestmark = pytest.mark.timeout(1800)  # its fixture trains at every level: minutes, and more beside other work


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("ladder") / "ladder.html"
    words = ["ladder", "--model", "tiny:llama", "--quick", "--rounds", "1", "--quiet", "--out", str(out)]
    assert main(words) == 0
    return json.loads(out.with_suffix(".json").read_text())


@pytest.mark.nightly
def test_every_level_has_its_figures(facts: dict[str, Any]) -> None:
    assert list(facts["levels"]) == list(LEVELS)
    for level in facts["levels"].values():
        assert {"step_s", "ratio", "tokens_per_s", "cpu_util", "peak_memory_gb"} <= level.keys()
        assert level["step_s"] == pytest.approx(level["ppo_s"] + level["grpo_s"])
        assert level["ratio"] == pytest.approx(facts["levels"]["baseline"]["step_s"] / level["step_s"])
        assert level["cpu_util"] > 0 and level["peak_memory_gb"] > 0


@pytest.mark.nightly
def test_every_technique_of_the_upper_levels_is_left_out_once(facts: dict[str, Any]) -> None:
    names = [technique.name for technique in TECHNIQUES if technique.level in ("advanced", "optimal")]
    assert [row["name"] for row in facts["techniques"]] == names
    assert all(row["ratio_without"] > 0 for row in facts["techniques"])


@pytest.mark.nightly
def test_every_gate_is_passed(facts: dict[str, Any]) -> None:
    assert len(facts["gates"]) == 3 * (4 + 5)
    assert [gate for gate in facts["gates"] if not gate["passed"]] == []
    assert facts["passed"]
    assert any(gate["value"] > 0 for gate in facts["gates"] if "gradient" in gate["name"])


@pytest.mark.nightly
def test_the_page_shows_levels_techniques_and_gates(facts: dict[str, Any], tmp_path: Path) -> None:
    from tunesmith.observe.reports.html import write_ladder_report

    page = write_ladder_report(tmp_path / "ladder.html", facts).read_text()
    for text in (*LEVELS, "without fused kernels", "grpo optimal: gradient, relative", "tiny:llama"):
        assert text in page


def learnt(**changes: float) -> Learnt:
    return Learnt(**{"loss": 0.5, "gradient_distance": 0.0, "logp_difference": 0.0, "gain": 0.1, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": 0.6},
        {"gradient_distance": 0.5},
        {"logp_difference": 0.2},
        {"gain": 0.01},
        {"gain": float("nan")},
    ],
)
def test_a_level_that_computes_something_else_fails_its_gate(changes: dict[str, float]) -> None:
    found = Measured(learnt={level: learnt() for level in LEVELS})
    assert all(gate.passed for gate in gates_of("ppo", found))
    found.learnt["optimal"] = learnt(**changes)
    (failed,) = [gate for gate in gates_of("ppo", found) if not gate.passed]
    assert failed.name.startswith("ppo optimal")


def test_a_run_that_learns_less_fails_its_gate() -> None:
    found = Measured(learnt={level: learnt() for level in LEVELS}, run_gain=dict.fromkeys(LEVELS, 0.3))
    found.run_gain["advanced"] = 0.1
    (failed,) = [gate for gate in gates_of("grpo", found) if not gate.passed]
    assert failed.name.startswith("grpo advanced: reward gained")


def test_steps_of_different_work_are_not_compared() -> None:
    found = Measured(taken={"basic": [Taken(1.0, 100, 0.5, None)], "optimal": [Taken(1.0, 99, 0.5, None)]})
    with pytest.raises(TrainingError, match="99, 100 tokens"):
        check_same_work(found)


def test_a_wrong_gradient_is_seen(tmp_path: Path) -> None:
    """The same lesson with other weights in between has another gradient."""
    from tunesmith.apps.workflows.ladder_side import Lesson

    side, cfg = Side(["One", "Two"]), recipe("grpo", Contender("optimal"), OPTIONS)
    side.build(cfg)
    groups = side.draw()
    lesson = Lesson(groups, side.logps(groups), tmp_path / "gradient.safetensors", 1)
    assert side.learn(lesson).gradient_distance == 0.0
    side.build(cfg)
    assert side.learn(lesson).gradient_distance < 1e-6
    side.step(0)
    assert side.learn(lesson).gradient_distance > 0.05


def test_errors_of_a_process_reach_the_command() -> None:
    with Worker(["One"]) as worker, pytest.raises(InputError, match="nowhere"):
        worker.call("build", recipe("ppo", Contender("optimal"), LadderOptions("./nowhere", quick=True)))


def test_a_process_that_ends_is_an_error_and_no_wait() -> None:
    with Worker(["One"]) as worker, pytest.raises(TrainingError, match="ended with exit code"):
        worker.call("no_such_method")


def test_a_page_needs_a_folder_that_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ladder", "--out", "/nowhere/ladder.html"]) == 2
    assert "--out" in capsys.readouterr().err
