"""`tunesmith plan` prints a plan, or says what is wrong."""

import json

import pytest

from tunesmith.apps.cli.main import main

WORDS = [
    "plan",
    "--model",
    "llama-3-8b",
    "--nodes",
    "2",
    "--algorithm",
    "grpo",
    "--prompts",
    "16",
    "--new-tokens",
    "64",
]


def test_a_plan_has_memory_layout_time_cost_accuracy_and_advice(capsys: pytest.CaptureFixture[str]):
    assert main([*WORDS, "--price", "2.5"]) == 0
    shown = capsys.readouterr().out
    assert "8,030,261,248 parameters in 32 layers; on 2 x 8 h100" in shown
    for part in (
        "layout    DP",
        "GB of a rank",
        "KV cache",
        "total",
        "stage",
        "rollout",
        "a step",
        "accuracy  calibrated",
    ):
        assert part in shown
    assert "change first" in shown


def test_json_has_the_same_figures(capsys: pytest.CaptureFixture[str]):
    assert main([*WORDS, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts) == {
        *("num_parameters", "layout", "settings_to_fit", "memory_gb", "stages_s", "step_s", "queue_share"),
        *("cost_per_step", "calibration", "changes"),
    }
    assert facts["step_s"] == pytest.approx(sum(facts["stages_s"].values()))
    assert list(facts["memory_gb"]) == ["rollout", "scoring", "update"]
    assert facts["cost_per_step"] is None
    assert 0 < facts["calibration"]["error"] < 0.1


def test_keys_of_the_recipe_are_flags(capsys: pytest.CaptureFixture[str]):
    steps = []
    for coef in ("0", "0.1"):
        assert main([*WORDS, "--json", "--grpo.kl.coef", coef]) == 0
        steps.append(json.loads(capsys.readouterr().out)["stages_s"])
    assert "scoring" not in steps[0]
    assert steps[1]["scoring"] > 0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--model", "nothing"], "--model is nothing"),
        (["--nodes", "0"], "--nodes is 0"),
        (["--hardware", "h200"], "--hardware is h200"),
        (["--algorithm", "pppo"], "pppo"),
        (["--mean-new-tokens", "65"], "--mean-new-tokens is 65, more than 64"),
        (["--critic-nodes", "2"], "no critic of its own"),
        (["--rollout.slots", "2"], "rollout.slots"),
        (["--algorithm", "sft"], "rollout"),
        (["--algorithm", "live"], "live"),
        (["--price", "-1"], "--price is -1"),
        (["--model", "llama-3.1-405b", "--nodes", "1"], "nothing fits"),
    ],
)
def test_bad_input_exits_2_and_says_what_to_change(words: list[str], named: str, capsys: pytest.CaptureFixture[str]):
    assert main([*WORDS, *words]) == 2
    assert named in capsys.readouterr().err
