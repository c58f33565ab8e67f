"""`bench gpu` on a CPU in a quick run: every row, rows that fail, starting again, and what the table makes of it."""

import json
import shutil
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.gpu import DERIVED, SUMMARY, measure
from benchmarks.gpu_rows import ROWS
from tunesmith.base.core.errors import InputError
from tunesmith.base.core.faults import VARIABLE

FAULTS = "gae/tokens:raise"


def options(out: Path, **changed: object) -> Namespace:
    defaults = {"row": (), "device": "cpu", "minutes": 8.0, "seed": 0, "again": False, "quick": True}
    return Namespace(**{"out": out, **defaults, **changed})


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a start leaves in which one row failed, and the process that measured it with it."""
    out = tmp_path_factory.mktemp("bench") / "gpu"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, FAULTS)
        measure(options(out))
    return out


def read(path: Path) -> dict:
    return json.loads(path.read_text())


@pytest.mark.nightly
def test_every_row_is_measured_and_stands_in_a_file_of_its_own(first: Path):
    facts = read(first / SUMMARY)
    assert list(facts["rows"]) == list(ROWS)
    assert sorted(path.name for path in first.iterdir()) == sorted([SUMMARY, *(f"{name}.json" for name in ROWS)])
    for name, row in facts["rows"].items():
        own = read(first / f"{name}.json")
        assert row["status"] == own["status"] == ("failed" if name == "gae" else "done")
        for key, setting in row["settings"].items():
            assert {k: v for k, v in setting.items() if k not in DERIVED} == own["settings"][key]


@pytest.mark.nightly
def test_a_setting_has_its_times_and_the_shares_that_follow_from_them(first: Path):
    facts = read(first / SUMMARY)
    for row in facts["rows"].values():
        for setting in row["settings"].values():
            assert setting["is_correct"] and {"size", "picked", "against", "floors", "notes", "facts"} <= set(setting)
            assert set(setting["shares"]) == set(setting["timings"])
            for name, timing in setting["timings"].items():
                assert 0 < timing["least_s"] <= timing["median_s"] and timing["num_calls"] >= 1
                assert setting["shares"][name]["times_ours"] > 0
    softmax = facts["rows"]["masked_softmax"]["settings"]["causal"]
    assert set(softmax["timings"]) == {"ours", "eager", "compile"}
    assert softmax["notes"].get("liger", "not installed") == "not installed"
    assert softmax["shares"]["ours"]["copy_share"] > 0 and softmax["max_error"] <= softmax["tolerance"]
    head = facts["rows"]["head"]["settings"]["Qwen2.5-0.5B forward and backward"]
    assert {"ours", "eager", "compile"} <= set(head["timings"])
    assert head["shares"]["ours"]["matrix_share"] > 0


@pytest.mark.nightly
def test_the_engine_stands_beside_generate_with_its_log_probs_and_launches(first: Path):
    engine = read(first / SUMMARY)["rows"]["engine"]["settings"]
    assert engine["256 x 256"]["shares"]["ours"]["roofline_share"] > 0
    assert engine["256 x 256"]["facts"]["tokens_per_s"] > 0
    scored = engine["log-probs"]["facts"]
    assert 0 <= scored["logp_diff_mean_transformers"] <= scored["logp_diff_max_transformers"] < 0.2
    launches = engine["launches"]["facts"]
    assert launches["before"]["operators"] > 0 and launches["after"]["operators"] > 0
    update = read(first / SUMMARY)["rows"]["update"]["settings"]["GRPO"]
    assert update["facts"]["before"]["operators"] > 0 and set(update["timings"]) == {"ours", "eager"}


@pytest.mark.nightly
def test_a_row_that_fails_keeps_its_error_and_the_rows_behind_it_are_measured(first: Path):
    facts = read(first / SUMMARY)
    assert facts["failed"] == ["gae: tokens"]
    (lines,) = facts["rows"]["gae"]["errors"].values()
    assert lines[0] == "the process of Rows ended with exit code 1; it wrote last:"
    assert lines[-1] == "RuntimeError: fault at gae/tokens"
    assert facts["rows"]["gated"]["status"] == "done"


@pytest.mark.nightly
def test_bars_say_what_was_reached(first: Path):
    bars = {(bar["row"], bar["setting"], bar["quantity"]): bar for bar in read(first / SUMMARY)["bars"]}
    softmax = bars["masked_softmax", "causal", "copy_share"]
    assert softmax["least"] == 0.85 and softmax["holds"] == (softmax["reached"] >= 0.85)
    assert ("engine", "256 x 256", "times_eager") in bars and ("upload", "a PPO batch", "times_eager") in bars


@pytest.mark.nightly
def test_a_second_start_measures_what_is_missing_or_failed_and_nothing_else(first: Path, tmp_path: Path):
    out = tmp_path / "gpu"
    shutil.copytree(first, out)
    cut_off = read(out / "ceilings.json")
    del cut_off["settings"]["matrix"]
    (out / "ceilings.json").write_text(json.dumps(cut_off | {"left": ["matrix"]}))
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    said: list[str] = []
    facts = measure(options(out), said.append)
    assert [line.partition(" ours")[0] for line in said] == ["ceilings: matrix", "gae: tokens"]
    assert facts["failed"] == [] and facts["unmeasured"] == [] and facts["has_one_source"]
    assert {row["status"] for row in facts["rows"].values()} == {"done"}
    changed = {path.name for path in out.iterdir() if before[path.name] != path.read_bytes()}
    assert changed == {"ceilings.json", "gae.json", SUMMARY}
    assert list(read(out / "ceilings.json")["settings"]) == ["copy", "matrix"]


@pytest.mark.nightly
def test_the_summary_alone_is_enough_to_go_on(first: Path, tmp_path: Path):
    shutil.copy(first / SUMMARY, tmp_path)
    rows = tuple(name for name in ROWS if name != "gae")
    facts = measure(options(tmp_path, row=rows))
    assert facts["rows"] == read(first / SUMMARY)["rows"]


def test_without_time_nothing_begins_and_all_is_left(tmp_path: Path):
    said: list[str] = []
    facts = measure(options(tmp_path, minutes=1e-4), said.append)
    assert len(said) == len(ROWS) and facts["rows"] == {}
    assert len(facts["unmeasured"]) == sum(len(row.units) for row in ROWS.values())
    assert facts["ceilings"] == {"copy_gb_per_s": None, "matrix_tflop_per_s": None}
    assert not any(bar["holds"] for bar in facts["bars"])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"row": ("gea",)}, "there is no row 'gea'; give ceilings, engine"),
        ({"quick": False}, "give --quick"),
        ({"minutes": 0.0}, "minutes is 0.0"),
        ({"minutes": float("nan")}, "minutes is nan"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(changed: dict, said: str, tmp_path: Path):
    with pytest.raises(InputError, match=said):
        measure(options(tmp_path / "gpu", **changed))
    assert not (tmp_path / "gpu").exists()


@pytest.mark.nightly
def test_figures_of_another_start_are_not_mixed_in(first: Path):
    with pytest.raises(InputError, match=r"seed 0 and this start has 1; give another --out"):
        measure(options(first, seed=1))


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is no folder"):
        measure(options(tmp_path / "file"))
    (tmp_path / "gae.json").write_text("{")
    with pytest.raises(InputError, match=r"gae\.json cannot be read"):
        measure(options(tmp_path))
    (tmp_path / "gae.json").write_text('{"format": 0}')
    with pytest.raises(InputError, match="format 0"):
        measure(options(tmp_path))
