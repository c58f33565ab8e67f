"""`benchmarks.feedback`: users of an application, by OpenAI's client, teach a live loop that answers them."""

import json

import pytest

from benchmarks.feedback import main

pytest.importorskip("openai")


@pytest.mark.nightly
def test_a_quick_run_has_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--kind", "edits", "--seconds", "40", "--pairs", "10", "--json", "--quiet"]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = facts["edits"]
    assert found["problems"] == [] and found["feedback"] > 0
    assert 0 <= found["low"] <= found["win_rate"] <= found["high"] <= 1
    assert found["feedback_to_version_s"] is None or found["feedback_to_version_s"] > 0
