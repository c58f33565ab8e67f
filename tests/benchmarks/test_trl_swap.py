"""`benchmarks.trl_swap`: one import is changed, both sides are measured, curves are judged by their own spread."""

import json
from pathlib import Path

import pytest

from benchmarks import trl_swap
from benchmarks.trl_swap import CURVES, SCRIPTS, agreement, main, swapped
from tunesmith.base.core.errors import InputError

FOLDER = Path(trl_swap.__file__).parent / "swap"


@pytest.mark.parametrize("name", sorted({*SCRIPTS.values(), *CURVES}))
def test_one_import_of_a_script_is_changed(name: str):
    source = (FOLDER / f"{name}.py").read_text().splitlines()
    changed = swapped("\n".join(source), "elsewhere").splitlines()
    new = [line for line in changed if line not in source]
    assert [line.split()[:2] for line in new] == [["from", "trl"], ["from", "elsewhere"]]
    assert new[1].endswith("Trainer") and len(changed) == len(source) + 1


def test_a_script_without_the_import_is_refused():
    with pytest.raises(InputError, match="it must have one"):
        swapped("import trl\n", "elsewhere")


def test_curves_agree_within_the_spread_of_their_seeds():
    rising = [[index / 10 + seed / 100 for index in range(20)] for seed in range(3)]
    shifted = [[value + 0.01 for value in curve] for curve in rising]
    flat = [[0.1 + seed / 100] * 20 for seed in range(3)]
    assert agreement(shifted, rising)["agree"] is True
    facts = agreement(flat, rising)
    assert facts["agree"] is False
    assert facts["trl_rises_by"] == pytest.approx(1.5)
    late = [curve[:15] + [0.0] * 5 for curve in rising]
    assert agreement(late, rising)["agree"] is False


@pytest.mark.slow  # four processes that each import TRL, for each of two precisions
def test_a_smoke_run_has_the_figures_of_both_sides(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("trl")
    words = ["--model", "tiny:llama", "--quick", "--rounds", "2", "--threads", "1", "--ours", "trl", "--json"]
    assert main([*words, "--algorithm", "grpo"]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["first_losses"]["grpo"]["loss_difference"] == 0
    assert facts["first_losses"]["grpo"]["grad_norm"][0] > 0
    for row in facts["steps"]["grpo"].values():
        assert row["ratio_min"] <= row["ratio_median"] <= row["ratio_max"]
        assert row["peak_rss_ratio"] == row["peak_rss_gb"] / row["trl_peak_rss_gb"]


def test_bad_input_is_refused_before_anything_is_measured(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("trl")
    assert main(["--algorithm", "gpro"]) == 2
    assert "give grpo, dpo" in capsys.readouterr().err
