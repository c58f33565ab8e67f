"""`benchmarks.planted`: every cause has a plant or a reason, one is planted for real, finished cases stay."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planted import VARIANTS, is_right, main, summary
from benchmarks.plants.causes import CAUSES, GRPO, HEALTHY, NOT_RUN, SEEN, Setup
from tunesmith.observe.profiling.rules import RULES

NAMES = {cause.name for cause in CAUSES}


def row(**changed: Any) -> dict[str, Any]:
    known = {
        "cause": "gil",
        "variant": "strong",
        "named": ["gil"],
        "named_first": True,
        "named_in_first_two": True,
        "step_s": 1.0,
        "predicted_saving_s": 0.5,
        "measured_saving_s": 0.4,
    }
    return known | changed


def test_every_rule_is_planted_or_the_reason_is_given():
    assert {rule.name for rule in RULES} == NAMES | set(NOT_RUN)
    assert len(NAMES) == len(CAUSES) >= 24
    assert len(HEALTHY) >= 10
    assert {cause.other for cause in CAUSES} <= NAMES


@pytest.mark.parametrize("cause", (*CAUSES, *SEEN), ids=lambda cause: cause.name)
def test_a_plant_changes_the_run_in_each_variant(cause: Any):
    for variant in VARIANTS:
        around = cause.around(variant)
        assert around.plus(cause.plant(variant)) != around
        assert around.settings["algorithm"] == cause.healthy.settings["algorithm"]


def test_a_setup_is_laid_over_another():
    other = Setup({"run.steps": 3, "model.name": "tiny:llama"}, {"A": "1"}, ("busy",), ("server",))
    both = GRPO.plus(other)
    assert both.settings == {**GRPO.settings, "run.steps": 3, "model.name": "tiny:llama"}
    assert both.rewards == ("signal", "busy")
    assert (both.environment, both.programs) == ({"A": "1"}, ("server",))


@pytest.mark.parametrize(
    ("predicted", "measured", "right"),
    [(0.5, 0.4, True), (0.4, 0.5, True), (0.7, 0.4, False), (0.2, 0.4, False), (None, None, False), (0.1, -0.1, False)],
)
def test_a_prediction_is_right_within_a_factor_of_one_and_a_half(
    predicted: float | None, measured: float | None, right: bool
):
    assert is_right(row(predicted_saving_s=predicted, measured_saving_s=measured)) is right


def test_the_summary_counts_what_is_missed_and_what_is_false():
    second = row(variant="together", named=["slow_reward", "gil"], named_first=False)
    missed = row(variant="mild", named=[], named_first=False, named_in_first_two=False, predicted_saving_s=None)
    healthy = [{"run": "grpo", "causes": {"starved": 0.2, "padding": 0.04}}]
    found = summary([row(), second, missed], healthy)
    assert (found["strong_first"], found["mild_first"], found["together_in_first_two"]) == (1, 0, 1)
    assert found["predicted_within_factor"] == pytest.approx(2 / 3)
    assert found["false_causes"] == {"grpo": {"starved": 0.2}}
    assert found["passed"] == {
        "strong_first": True,
        "mild_first": False,
        "together_in_first_two": True,
        "predicted_within_factor": False,
        "causes": False,
        "healthy": False,
    }


@pytest.mark.nightly
def test_a_cause_is_planted_in_a_real_run_and_its_advice_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "planted.json"
    assert main(["--quick", "--cause", "engine_fallback", "--cause", "healthy", "--json", "--out", str(out)]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    (planted,), (healthy,) = facts["rows"], facts["healthy"]
    assert "engine_fallback" in planted["named"]
    assert planted["followed"] == {"rollout.backend": "native"}
    assert planted["predicted_saving_s"] > 0
    assert healthy["run"] == "grpo" and "engine_fallback" not in healthy["causes"]
    assert json.loads(out.read_text()) == facts
    assert facts["not_run"]["gpu_idle"]


def test_finished_cases_are_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "planted.json"
    names = (*NAMES, *(cause.name for cause in SEEN))
    rows = [row(cause=name, variant=variant) for name in names for variant in VARIANTS]
    healthy = [{"run": name, "causes": {}} for name in HEALTHY]
    out.write_text(json.dumps({"rows": rows, "healthy": healthy}))
    assert main(["--out", str(out), "--quiet"]) == 0
    assert "strong_first: 1.0 passed" in capsys.readouterr().out


def test_an_unknown_cause_is_refused_with_those_that_exist(capsys: pytest.CaptureFixture[str]):
    assert main(["--cause", "gill"]) == 2
    assert "no planted cause 'gill'" in (said := capsys.readouterr().err) and "slow_disk" in said
