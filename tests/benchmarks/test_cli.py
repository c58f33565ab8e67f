"""`bench rollout`, `step`, `update`, `kernels` and `gpu`: a smoke run has every figure that is promised."""

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common import ROOT

NAMED = {"gemma", "phi", "phi3", "olmo2", "smollm3", "granite", "gpt_neox", "stablelm"} | {
    "mixtral",
    "olmoe",
    "qwen3_moe",
    "gpt_oss",
}
"""Families that are to run on the native engine."""


def main(words: Sequence[str]) -> int:
    """The exit code of the benchmark named by the first word."""
    return importlib.import_module(f"benchmarks.{words[0]}").main(words[1:])


def keys(value: Any, place: str = "") -> set[str]:
    """Names of all values in nested mappings; labels that name sizes and contenders are one, "*"."""
    if not isinstance(value, Mapping):
        return {place}
    names = {name: "*" if "@" in name or place.endswith(("gflops", "packages")) else name for name in value}
    return {found for name, item in value.items() for found in keys(item, f"{place}/{names[name]}")}


def committed(name: str) -> dict:
    """The figures in the repository."""
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())


def _facts(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main([*words, "--model", "tiny:llama", "--quick", "--rounds", "2", "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.nightly
def test_bench_rollout_has_the_promised_figures_and_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "rollout.json"
    words = ["rollout", "--workload", "plain", "--backend", "transformers", "--threads", "1", "--out", str(out)]
    facts = _facts(capsys, *words)
    plain = facts["workloads"]["plain"]
    assert plain["ratio_min"] <= plain["ratio_median"] <= plain["ratio_max"]
    assert {"tokens_per_s", "roofline_share", "peak_rss_gb", "prefill_tokens_per_s", "decode_tokens_per_s"} <= set(
        plain
    )
    assert plain["greedy_equal"] is True
    assert plain["against"] in plain["ratios"]
    assert len(plain["contenders"]) == 2  # sdpa and eager
    assert facts["logp_diff_max"] < 1
    assert json.loads(out.read_text()) == facts
    known = committed("rollout")
    known["workloads"] = {"plain": known["workloads"]["plain"]}
    assert keys(facts) == keys(known)


@pytest.mark.nightly
def test_bench_rollout_in_8_bits_is_compared_with_the_models_own_weights(capsys: pytest.CaptureFixture[str]):
    words = ["rollout", "--workload", "plain", "--threads", "1", "--weights", "int8", "--against", "native"]
    facts = _facts(capsys, *words)
    plain = facts["workloads"]["plain"]
    assert facts["weights"] == "int8"
    assert list(plain["ratios"]) == ["native"] and "greedy" not in plain
    assert 0 < facts["logp_diff_max"] < 0.2


@pytest.mark.slow
def test_bench_step_has_the_promised_figures(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("trl")
    facts = _facts(capsys, "step", "--threads", "1")
    assert facts["ratio_min"] <= facts["ratio_median"] <= facts["ratio_max"]
    assert facts["peak_rss_ratio"] == pytest.approx(
        facts["peak_rss_gb"] / facts["trl"]["default_precision"]["peak_rss_gb"]
    )
    assert {"rollout", "reference", "update/forward", "update/backward", "update/optimizer"} <= set(facts["stages"])
    assert facts["trl"]["micro_batch_size"] in (8, 16)
    # The trainer may have more stages than it had when the file was written.
    assert keys({**facts, "stages": {}}) == keys({**committed("step"), "stages": {}})


@pytest.mark.slow
def test_bench_update_has_the_promised_figures_from_equal_gradients(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("trl")
    facts = _facts(capsys, "update", "--threads", "1")
    assert set(facts["workloads"]) == {"ragged", "shared"}
    for figures in facts["workloads"].values():
        assert figures["ratio_min"] <= figures["ratio_median"] <= figures["ratio_max"]
        assert figures["memory_ratio"] == figures["memory_gb"] / figures["trl"]["default_precision"]["memory_gb"]
        assert set(figures["stages"]) == {"forward", "backward", "optimizer"}
        assert figures["grad_norm"] == pytest.approx(figures["trl"]["grad_norm"], rel=0.02)
    assert keys(facts) == keys(committed("update"))


@pytest.mark.nightly
def test_bench_families_has_the_promised_figures(capsys: pytest.CaptureFixture[str]):
    assert main(["families", "--quick", "--json", "--family", "phi3", "--family", "exaone4"]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])["families"]
    assert facts["phi3"] == {"engine": "native", "greedy_equal": True, "logp_diff_max": 0, "trains": True}
    assert facts["exaone4"]["engine"] == "transformers" and "its numbers" in facts["exaone4"]["reason"]
    rows = committed("families")["families"]
    native = {name for name, row in rows.items() if row["engine"] == "native" and row["greedy_equal"] and row["trains"]}
    assert native >= NAMED and not any(rows[name]["logp_diff_max"] for name in native)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["update", "--rounds", "0"], "rounds is 0"),
        (["update", "--workload", "raged"], "ragged, shared"),
        (["update", "--micro-batch-size", "0"], "micro_batch_size is 0"),
        (["update", "--out", "no/such/folder/x.json"], "--out"),
        (["rollout", "--workload", "plian"], "plain, seed, shared"),
        (["rollout", "--against", "sglang"], "transformers, transformers-cb, native, undrafted, vllm, llamacpp"),
        (["rollout", "--workload", "plain", "--against", "vllm"], "TUNESMITH_VLLM_PYTHON is not set"),
        (["rollout", "--workload", "plain", "--quick", "--against", "llamacpp"], "LLAMA_CPP names no folder"),
        (["rollout", "--rounds", "0"], "rounds is 0"),
        (["rollout", "--workload", "shared"], "--quick"),
        (["rollout", "--out", "no/such/folder/x.json"], "--out"),
        (["step", "--rounds", "0"], "rounds is 0"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("TUNESMITH_VLLM_PYTHON", raising=False)
    assert main([*words, "--model", "tiny:llama"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.nightly
def test_bench_kernels_has_the_promised_figures_and_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "kernels.json"
    words = ["kernels", "--quick", "--rounds", "2", "--threads", "1", "--json", "--out", str(out)]
    assert main(words) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads(out.read_text()) == facts
    known = committed("kernels")
    for removed in ("segment_sum", "policy_loss"):
        known["kernels"].pop(removed, None)
    if "digest" not in known["kernels"]:  # measured at the next release
        known["kernels"]["digest"] = known["kernels"]["gae"]
    assert keys(facts) == keys(known)
    for figures in facts["kernels"].values():
        assert figures["ratio_min"] <= figures["ratio_median"] <= figures["ratio_max"]
        assert figures["copy_share"] > 0 and 0 <= figures["max_error"] <= figures["tolerance"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--op", "gea"], "there is no operation 'gea'; give preference, logprob"),
        (["--rounds", "0"], "rounds is 0"),
        (["--threads", "0"], "threads is 0"),
        (["--device", "cuda"], "torch sees no CUDA device"),
        (["--out", "no/such/folder/x.json"], "--out"),
    ],
)
def test_bad_input_of_bench_kernels_is_refused_before_anything_is_measured(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert main(["kernels", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.nightly
def test_bench_gpu_shows_what_it_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["gpu", "--device", "cpu", "--quick", "--out", str(tmp_path)]
    assert main([*words, "--row", "ceilings", "--row", "gae"]) == 0
    shown = capsys.readouterr().out
    assert "ceilings, copy (torch)" in shown and "gae, tokens (" in shown and "unmeasured: engine: 256 x 256" in shown
    assert main([*words, "--row", "gae", "--json"]) == 0  # finished: nothing is measured again
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "gpu.json").read_text())["rows"] == facts["rows"]
    assert set(facts["rows"]) == {"ceilings", "gae"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--out", "x"], "torch sees no CUDA device"),
        (["--device", "cpu", "--out", "x"], "give --quick"),
        (["--device", "cpu", "--quick", "--out", "x", "--row", "gea"], "there is no row 'gea'"),
        (["--quick"], "required: --out"),
    ],
)
def test_bad_input_of_bench_gpu_is_refused_before_anything_is_measured(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    if "cuda" in said and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert main(["gpu", *words]) == 2
    assert said in capsys.readouterr().err
