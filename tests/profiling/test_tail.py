"""Steps that take far longer than the others: which, where, how much of the run, and what is none of them."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tunesmith.base.runs.folder import RunFolder
from tunesmith.observe.profiling.cause import Cause
from tunesmith.observe.profiling.diagnosis import as_text, diagnose
from tunesmith.observe.profiling.facts import read_facts
from tunesmith.observe.profiling.tail import tails

Row = dict[str, object]


def rows(count: int, **slow: Sequence[int]) -> list[Row]:
    """Steps of a second, half in the rollout, with ten more seconds in a stage at some."""
    made: list[Row] = []
    for step in range(1, count + 1):
        row: dict[str, float] = {"step": step, "time/rollout_s": 0.5, "time/reward_s": 0.1, "time/other_s": 0.4}
        row["time/step_s"] = 1.0
        for stage, steps in slow.items():
            if step in steps:
                row[f"time/{stage}_s"] = row.get(f"time/{stage}_s", 0.0) + 10.0
                row["time/step_s"] += 10.0
        made.append(dict(row))
    return made


def causes(folder: Path, made: Sequence[Row], places: Sequence[Row] = (), **recipe: object) -> dict[str, Cause]:
    run = RunFolder.create(folder, "grpo", {"algorithm": "grpo", "run": {"checkpoint_every": 0}, **recipe})
    for name, lines in (("metrics.jsonl", made), ("places.jsonl", places)):
        (run.path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {cause.name: cause for cause in diagnose(read_facts(run.path)).causes}


def test_slow_steps_have_their_share_of_the_run(tmp_path: Path):
    cause = causes(tmp_path, rows(21, reward=[6, 11]))["slow_steps"]
    assert cause.share == pytest.approx(20 / 40)
    assert cause.predicted_saving_s == pytest.approx(20 / 20)
    assert cause.figures == {"stage": "reward", "steps": [6, 11], "lost_s": pytest.approx(20)}
    assert "steps 6, 11 take up to 10.1 s there" in cause.evidence


def test_the_innermost_stage_that_has_it_is_named():
    made = rows(20, reward=[6, 11])
    for row in made:
        row["time/reward/rules_s"], row["time/reward/judge_s"] = 0.05, 10.05 if row["step"] in (6, 11) else 0.05
    (tail,) = tails(made, {})
    assert (tail.path, tail.usual_s, tail.longest_s) == ("reward/judge", 0.05, 10.05)


@pytest.mark.parametrize(
    ("stage", "setting"), [("checkpoint", "checkpoint_every"), ("evaluate", "eval_every"), ("log", "sample_every")]
)
def test_work_that_is_due_is_no_tail_and_one_that_takes_far_longer_is(stage: str, setting: str):
    settings = {f"recipe.run.{setting}": 5}
    assert tails(rows(20, **{stage: [5, 10, 15, 20]}), settings) == []
    made = rows(20, **{stage: [5, 10, 15, 20]})
    made[9][f"time/{stage}_s"], made[9]["time/step_s"] = 90.0, 91.0
    (tail,) = tails(made, settings)
    assert (tail.path, tail.steps, tail.lost_s) == (stage, (10,), pytest.approx(80.0))


def test_a_tail_is_not_counted_again_by_the_rule_of_its_stage(tmp_path: Path):
    made = rows(21)
    for row in made:
        late = 30.0 if row["step"] == 10 else 0.01
        row |= {"time/checkpoint_s": late, "time/step_s": 1.0 + late}
    found = causes(tmp_path, made, run={"checkpoint_every": 1})
    assert list(found) == ["slow_steps"]
    assert found["slow_steps"].figures["stage"] == "checkpoint"


def test_the_first_step_and_the_first_one_after_a_resume_warm_up(tmp_path: Path):
    made, places = rows(20, rollout=[1, 12]), [{"first_step": 12, "step": 12, "new": True, "places": []}]
    assert list(causes(tmp_path / "resumed", made, places)) == []
    assert "slow_steps" in causes(tmp_path / "slow", made)


def test_how_long_the_first_step_took_is_said(tmp_path: Path):
    run = RunFolder.create(tmp_path, "grpo", {"algorithm": "grpo"})
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows(9, rollout=[1])))
    assert "not counted: 11 s of the first step" in as_text(diagnose(read_facts(run.path)))


def test_a_stall_of_all_stages_names_none(tmp_path: Path):
    made = rows(20)
    for row in made:
        if row["step"] == 7:
            row |= {"time/rollout_s": 5.5, "time/reward_s": 5.1, "time/update_s": 5.0, "time/step_s": 16.0}
        else:
            row["time/update_s"] = 0.0
    cause = causes(tmp_path, made)["slow_steps"]
    assert cause.figures["stage"] == "step"
    assert "cpu/others" in cause.advice


@pytest.mark.parametrize(
    ("figure", "usual", "slow", "said"),
    [
        ("gc/pause_s", 0.01, 9.5, "garbage collector"),
        ("cpu/throttled_s", 0.0, 9.0, "quota"),
        ("faults/major", 0.0, 90_000.0, "read back from disk"),
        ("completions/max_length", 60.0, 900.0, "A few completions are far longer"),
    ],
)
def test_a_figure_that_explains_the_slow_steps_is_named(
    tmp_path: Path, figure: str, usual: float, slow: float, said: str
):
    made = rows(20, rollout=[8, 13])
    for row in made:
        row[figure] = slow if row["step"] in (8, 13) else usual
    cause = causes(tmp_path, made)["slow_steps"]
    assert said in cause.symptom
    assert figure in cause.evidence


def place(kind: str, seconds: float, **more: object) -> Row:
    return {
        "stage": "reward",
        "kind": kind,
        "file": "/a/r.py",
        "line": 3,
        "function": "f",
        "text": "g()",
        "s": seconds,
        **more,
    }


def test_the_line_at_which_slow_steps_lose_the_time_is_named(tmp_path: Path):
    seen = [{"first_step": step, "step": step, "places": [place("computes", 0.1)]} for step in range(2, 21)]
    seen[8 - 2]["places"] = [place("disk", 9.9, line=7), place("computes", 0.1)]
    cause = causes(tmp_path, rows(20, reward=[8]), seen)["slow_steps"]
    assert "in `reward`: it waits for the disk." in cause.symptom
    assert "/a/r.py:7 in f" in cause.evidence
    assert (cause.figures["kind"], cause.figures["line"]) == ("disk", 7)


def test_waits_of_usual_steps_are_causes_ranked_by_their_share_of_the_run(tmp_path: Path):
    others = place("sleep", 0.4, text="time.sleep(1)")
    seen = [
        {"first_step": step, "step": step, "places": [place("lock", 0.5, others=others, threads=8), place("disk", 0.2)]}
        for step in range(2, 21)
    ]
    found = causes(tmp_path, rows(20), seen)
    assert list(found) == ["lock", "disk"]
    assert found["lock"].share == pytest.approx(0.5)
    assert "(8 threads)" in found["lock"].evidence
    assert "another thread sleeps at" in found["lock"].evidence


def test_a_wait_below_the_floor_is_none(tmp_path: Path):
    seen = [{"first_step": step, "step": step, "places": [place("lock", 0.02)]} for step in range(2, 21)]
    assert causes(tmp_path, rows(20), seen) == {}


def test_a_damaged_file_of_places_costs_itself_alone(tmp_path: Path):
    seen: list[Row] = [
        {"first_step": "a", "step": 2},
        {"first_step": 2, "step": 2, "places": [1, {"kind": "magic"}, {}]},
    ]
    assert causes(tmp_path, rows(20), seen) == {}
