"""`benchmarks.estimates`: the announced times of a training are read and measured."""

import json

import pytest

from benchmarks.estimates import main, seconds_of


@pytest.mark.parametrize(
    ("text", "seconds"), [("840 ms", 0.84), ("12.3 s", 12.3), ("4 min 05 s", 245.0), ("2 h 10 min", 7800.0)]
)
def test_a_duration_is_read(text: str, seconds: float):
    assert seconds_of(text) == pytest.approx(seconds)


@pytest.mark.nightly
def test_a_training_is_measured_by_what_it_says(capsys: pytest.CaptureFixture[str]):
    assert main(["--model", "tiny:llama", "--quick", "--only", "grpo", "--json", "--quiet"]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    ((name, stage),) = facts["stages"].items()
    assert name == "grpo, 2 steps"
    assert facts["worst_factor"] == stage["factor"] >= 1
    assert stage["measured_s"] > 0
