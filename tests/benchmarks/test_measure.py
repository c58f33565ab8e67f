"""Measurements: alternating order, the first round left out, facts of the machine."""

import json
from pathlib import Path

import pytest

from benchmarks import measure


def test_versions_alternate_and_the_first_round_is_left_out():
    calls: list[str] = []
    result = measure.ratio("x", fast=lambda: calls.append("f"), slow=lambda: calls.append("s"), num_rounds=3)
    assert "".join(calls) == "fs" + "sf" + "fs" + "sf"
    assert result.num_rounds == 3
    assert result.lower_quartile <= result.median <= result.upper_quartile


def test_the_ratio_is_slow_over_fast(monkeypatch: pytest.MonkeyPatch):
    durations_s = {"fast": 0.5, "slow": 2.0}
    monkeypatch.setattr(measure, "seconds", lambda work: durations_s[work()])
    result = measure.ratio("x", fast=lambda: "fast", slow=lambda: "slow", num_rounds=4)
    assert (result.median, result.fast_ms, result.slow_ms) == (4.0, 500.0, 2000.0)


def test_results_carry_machine_and_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    path = measure.write("x", [measure.Ratio("gae", 2.0, 1.9, 2.1, 1.0, 2.0, 5)])
    content = json.loads(path.read_text())
    assert path == tmp_path / "benchmarks" / "x.json"
    assert content["ratios"][0]["median"] == 2.0
    assert {"device", "packages", "commit", "num_threads"} <= set(content["machine"])
