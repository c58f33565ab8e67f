"""`benchmarks.active`: votes that a win rate needs, small runs with their figures, and the picture of a pool."""

import json
import xml.etree.ElementTree as ElementTree
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from benchmarks import active_picture
from benchmarks.active import compared, main, votes_needed
from benchmarks.active_pool import Pool, pool_curve, trained_heads
from tunesmith.base.schema.records import Pair, Prompt
from tunesmith.learn.live.selection import Preferences


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


def test_selections_are_compared_with_the_random_pairs_of_all_seeds_or_of_their_own():
    curves = {
        "random": [[(50, 0.7), (100, 0.7)], [(50, 0.8), (100, 0.8)]],
        "drts": [[(50, 0.7), (100, 0.7)], [(50, 0.6), (100, 0.9)]],
    }
    together, alone = (compared(curves, by_seed=by_seed) for by_seed in (False, True))
    assert together["target"] == alone["target"] == pytest.approx(0.75)
    assert together["drts"]["votes"] == [None, pytest.approx(75)] and together["drts"]["votes_ratio"] is None
    assert alone["drts"]["votes"] == [50, pytest.approx(50 + 50 * 2 / 3)]
    assert alone["drts"]["votes_ratio"] == pytest.approx((0.5 + 5 / 6) / 2)


def pool(num: int = 300, num_features: int = 12) -> Pool:
    """Pairs whose better answer is so by a linear rule on their features."""
    generator = torch.Generator().manual_seed(0)
    x_N2F = torch.randn(num, 2, num_features, generator=generator, dtype=torch.float64)
    theta_F = torch.linspace(-3, 3, num_features, dtype=torch.float64)
    is_turned_N = ((x_N2F[:, 0] - x_N2F[:, 1]) @ theta_F) < 0
    x_N2F[is_turned_N] = x_N2F[is_turned_N].flip(1)
    return Pool([Pair(Prompt(str(i), f"prompt {i}"), "chosen", "rejected") for i in range(num)], x_N2F, 0)


def test_each_head_is_the_mode_of_its_posterior():
    of = pool(60)
    keys = [str(i) for i in range(60)]
    weight_KF = trained_heads(of.x_N2F, keys, 5, seed=3)
    assert torch.equal(weight_KF, trained_heads(of.x_N2F, keys, 5, seed=3))
    prior_KF = trained_heads(of.x_N2F[:0], [], 5, seed=3)
    torch.testing.assert_close(prior_KF.mean(0), torch.zeros(12, dtype=torch.float64))
    # The heads lie around the mode of the live loop's model of the same votes, each by its own sample.
    difference_NF = of.x_N2F[:, 0] - of.x_N2F[:, 1]
    mode_F = Preferences(difference_NF, torch.zeros(60, dtype=torch.bool)).mode_F
    cosine_K = torch.nn.functional.cosine_similarity(weight_KF, mode_F[None], dim=1)
    assert cosine_K.min() > 0.6 and torch.nn.functional.cosine_similarity(weight_KF.mean(0), mode_F, dim=0) > 0.9
    assert (weight_KF - weight_KF.mean(0)).norm(dim=1).min() > 0.1


@pytest.mark.parametrize("beliefs", ["posterior", "heads"])
@pytest.mark.parametrize("method", ["random", "drts", "d_optimal"])
def test_a_pool_is_learnt_from_the_labels_that_were_asked_for(method: str, beliefs: str):
    options = Namespace(votes=100, every=50, round=20, heads=4, beliefs=beliefs)
    of = pool()
    found = pool_curve(of, method, 1, options)
    assert [num for num, _ in found] == [50, 100] and found[1][1] > 0.75
    assert found == pool_curve(of, method, 1, options)
    places, judged = of.split(1)
    assert not set(places) & set(judged) and len(places) + len(judged) == 300 and len(judged) > 50
    # A pool that is asked about to its end gives all selections the same labels.
    options.votes = options.every = len(places)
    assert pool_curve(of, method, 1, options)[0][1] == pytest.approx(
        pool_curve(of, "random", 1, options)[0][1], abs=0.03
    )


def test_a_quick_run_of_pools_has_its_figures_and_a_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data_dir: Path
):
    figures, drawn = tmp_path / "figures.json", tmp_path / "picture.svg"
    words = ["--quick", "--pool", "headlines", "--method", "infomax", "--seeds", "2", "--votes", "20", "--every", "10"]
    assert main([*words, "--round", "5", "--tokens", "400", "--quiet", "--out", str(figures)]) == 0
    assert "headlines: 40 pairs" in capsys.readouterr().out
    facts = json.loads(figures.read_text())["pools"]["headlines"]
    assert facts["num_pairs"] == 40 and 0 < facts["longer_wins"] < 1
    for method in ("random", "infomax"):
        assert [[num for num, _ in curve] for curve in facts[method]["curves"]] == [[10, 20], [10, 20]]
        assert {"votes", "votes_ratio", "low", "high"} <= set(facts[method])
    assert active_picture.main([str(figures), str(drawn)]) == 0
    root = ElementTree.fromstring(drawn.read_text())
    texts = [one.text for one in root.iter() if one.tag.endswith("text")]
    assert {"headlines", "random", "infomax"} <= set(texts) and "drts" not in texts


@pytest.mark.parametrize(
    ("words", "part"),
    [([], "give two files"), (["no.json", "x.svg"], "cannot be read"), (["empty", "x.svg"], "no pools")],
)
def test_a_picture_that_cannot_be_drawn_is_explained(
    words: list[str], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    Path("empty").write_text("{}")
    assert active_picture.main(words) == 2
    assert part in capsys.readouterr().err


def test_more_votes_between_measurements_than_there_are_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["--quick", "--votes", "10", "--every", "20"]) == 2
    assert "--every is 20, above --votes, 10" in capsys.readouterr().err
