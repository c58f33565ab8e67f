"""The benchmark of guessed tokens."""

import json

import pytest

from benchmarks import drafts


def test_both_sides_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "tiny:llama", "--quick", "--rounds", "2", "--threads", "1", "--quiet", "--json"]
    assert drafts.main([*words, "--workload", "lists"]) == 0
    workloads = json.loads(capsys.readouterr().out)["workloads"]
    assert list(workloads) == ["lists, T=0", "lists, T=0.7"]
    for figures in workloads.values():
        assert figures["tokens_per_s"] > 0
        assert 0 <= figures["steps_saved"] < 1
        assert 0 <= figures["share_right"] <= 1
    assert workloads["lists, T=0"]["share_right"] > 0


def test_an_unknown_workload_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert drafts.main(["--model", "tiny:llama", "--workload", "songs"]) == 2
    assert "there are chat, films, correct, summary, lists, again, four" in capsys.readouterr().err
