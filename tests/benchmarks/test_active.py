"""`benchmarks.active`: votes that a win rate needs, and a small run with its figures."""

import json

import pytest

from benchmarks.active import main, votes_needed


def test_the_votes_of_a_rate_are_read_off_the_smoothed_curve():
    rising = [(100, 0.6), (200, 0.7), (300, 0.8)]
    assert votes_needed(rising, 0.5) == 0
    assert votes_needed(rising, 0.65) == pytest.approx(150)
    assert votes_needed(rising, 0.8) == 300
    assert votes_needed(rising, 0.81) is None
    # A lucky measurement is pooled with the worse one behind it: 0.7 twice.
    assert votes_needed([(100, 0.8), (200, 0.6), (300, 0.75)], 0.75) == pytest.approx(300)
    assert votes_needed([(100, 0.8), (200, 0.6), (300, 0.9)], 0.8) == pytest.approx(250)
    assert votes_needed([(100, 0.3), (200, 0.6)], 0.55) == pytest.approx(100 + 100 * (0.55 - 0.4) / (0.6 - 0.4))


@pytest.mark.nightly
def test_a_quick_run_has_the_figures_and_the_same_ones_again(capsys: pytest.CaptureFixture[str]):
    words = ["--quick", "--method", "drts", "--seeds", "1", "--votes", "48", "--every", "16", "--completions", "4"]
    found = []
    for _ in range(2):
        assert main([*words, "--pairs", "20", "--json", "--quiet"]) == 0
        found.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    facts = found[0]
    assert facts["random"] == found[1]["random"] and facts["drts"] == found[1]["drts"]
    for method in ("random", "drts"):
        (curve,) = facts[method]["curves"]
        assert [votes for votes, _ in curve] == [16, 32, 48] and all(0 <= rate <= 1 for _, rate in curve)
