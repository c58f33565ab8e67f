"""Pieces of `bench gpu`: floors, shares, bars, clocks, counts; no process is started."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import pytest
import torch

from benchmarks import cases
from benchmarks.cases import (
    Case,
    Setting,
    head_case,
    logits_case,
    preference_case,
    preference_ways,
    sampling_case,
)
from benchmarks.gpu_measure import Clock, Floor, Measured, Timing, count_launches, measured_case
from benchmarks.gpu_models import generation_floors, update_floor
from benchmarks.gpu_table import bars, failures, shares
from benchmarks.layer_cases import (
    attention_case,
    gae_case,
    gated_case,
    masked_softmax_case,
    policy_loss_case,
    rms_norm_case,
    shared_prefix_case,
)
from tunesmith.engine.kernels.native import Kernels, has_triton
from tunesmith.engine.kernels.preference.torch_impl import PreferenceBatch
from tunesmith.engine.models.tiny import tiny_model

CPU = torch.device("cpu")


def setting(**changed: object) -> dict:
    """A work of 1 GB and 4 GFLOP, then one of 3 GB: ours takes 8 s, eager 16."""
    floors = (Floor(10**9, 4 * 10**9), Floor(3 * 10**9))
    timings = {"ours": Timing(8.0, 7.0, 0.1, 3), "eager": Timing(16.0, 16.0, 0.1, 3)}
    measured = Measured("size", "triton", "eager", floors, timings, max_error=0.1, tolerance=0.5)
    return {**asdict(measured), **changed}


def test_a_floor_is_the_longer_of_its_bytes_and_its_operations():
    assert Floor(10, 30).seconds(bytes_per_s=5, flops_per_s=10) == 3.0
    assert Floor(10, 10).seconds(bytes_per_s=5, flops_per_s=10) == 2.0


def test_shares_are_of_the_rates_that_were_measured_part_by_part():
    found = shares(setting(), (1e9, 1e9))
    assert found["ours"] == {
        "gb_per_s": 0.5,
        "tflop_per_s": 0.0005,
        "copy_share": 0.5,
        "matrix_share": 0.5,
        "roofline_share": (4 + 3) / 8,
        "times_ours": 1.0,
    }
    assert found["eager"]["times_ours"] == 2.0


def test_without_ceilings_there_are_no_shares():
    found = shares(setting(), (None, None))
    assert found["ours"]["copy_share"] is found["ours"]["roofline_share"] is None
    assert found["ours"]["gb_per_s"] == 0.5


@pytest.mark.parametrize(
    ("error", "share", "holds"), [(0.1, 0.9, True), (0.1, 0.8, False), (0.6, 0.9, False), (None, 0.9, False)]
)
def test_a_bar_holds_where_the_share_suffices_and_the_result_is_right(error: float | None, share: float, holds: bool):
    measured = setting(max_error=error, floors=[{"num_bytes": 10**9, "num_flops": 0}])
    records = {"masked_softmax": {"settings": {"causal": measured}, "errors": {}}}
    ceilings = (1e9 / 8 / share, None)
    (bar,) = [bar for bar in bars(records, ceilings) if bar["row"] == "masked_softmax"]
    assert bar["reached"] == pytest.approx(share) and bar["holds"] == holds
    assert bool(failures(records)) == (error != 0.1)


def test_the_floor_of_drawing_counts_what_each_step_reads_and_computes():
    model = tiny_model("qwen2", tie_word_embeddings=True).model  # 2 layers of 4 heads over 2, of 8 numbers; 259 tokens
    sequences, prompt, new = 3, 5, 4
    layer = 32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 64
    weights, token = 2 * layer + 259 * 32, 2 * 2 * 16
    contexts = [6, 7, 8]  # of the three steps behind the first token
    prefill, decoding = generation_floors(model, sequences, prompt, new)
    assert prefill.num_bytes == 4 * (weights + sequences * prompt * token)
    assert prefill.num_flops == 2 * 2 * layer * 15 + 2 * 259 * 32 * 3 + 2 * 2 * 32 * sequences * prompt**2
    assert decoding.num_bytes == 4 * sum(weights + sequences * (context + 1) * token for context in contexts)
    assert decoding.num_flops == sum(2 * weights * sequences + 4 * 2 * 32 * sequences * c for c in contexts)
    update = update_floor(model, num_tokens=10, num_scored=4)
    assert update.num_flops == 6 * 2 * layer * 10 + 6 * 259 * 32 * 4


def test_the_clock_calls_all_in_turns_and_counts_its_calls():
    calls: list[str] = []
    works = {name: lambda name=name: calls.append(name) for name in ("a", "b")}
    found = Clock(CPU, quick=True).measure(works, num_bytes=8)
    assert calls == ["a", "b"] and found["a"].num_calls == 1
    assert found["a"].least_s <= found["a"].median_s


def test_what_others_cannot_run_is_noted_and_ours_is_measured():
    def broken() -> None:
        raise RuntimeError("no such device")

    case = Case(
        ours=lambda: 1,
        plain=lambda: 2,
        max_error=lambda: 0.0,
        tolerance=0.0,
        num_bytes=8,
        size="",
        against="",
        picked="torch",
        liger=broken,
        compiles=False,
    )
    found = measured_case(case, Clock(CPU, quick=True))
    assert set(found.timings) == {"ours", "eager"}
    assert found.notes == {"liger": "RuntimeError: no such device"}


def test_operators_are_counted_and_the_difference_of_two_works_is_that_of_its_steps():
    numbers = torch.ones(4)

    def steps(count: int) -> None:
        for _ in range(count):
            numbers.neg_()

    few, many = (count_launches(lambda count=count: steps(count), CPU) for count in (2, 12))
    assert many["operators"] - few["operators"] == 10
    assert many["kernels"] == many["launches"] == many["graphs"] == 0


def test_all_ways_to_take_votes_select_the_same(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton", reason="needs Triton, which comes with torch's builds for CUDA")
    monkeypatch.setattr(cases, "BLOCKS", (16, 32))
    a_BN, b_BN = torch.randn(2, 12, 40).unbind()
    batch = PreferenceBatch(a_BN, b_BN, (torch.arange(12) % 2).float())
    out_BN = torch.empty_like(a_BN)
    selected_BN = torch.where(batch.choices_B[:, None] == 1, a_BN, b_BN)
    weights_N = torch.zeros(40)
    ways = preference_ways(batch, weights_N, out_BN, Kernels("triton"))
    assert {"process", "process, atomic", "process, block 16", "tuning, block 32, atomic"} <= set(ways)
    assert len(ways) == 2 * 2 * 3
    for name, way in ways.items():
        weights_N.zero_()
        out_BN.fill_(torch.nan)
        way()
        if name.startswith("process"):  # the other one has memory of its own
            assert torch.equal(out_BN, selected_BN), name
            torch.testing.assert_close(weights_N, 1e-6 * selected_BN.mean(0))
        else:
            torch.testing.assert_close(weights_N, 1e-6 * selected_BN.sum(0))  # of batches of one pair


@pytest.mark.parametrize(
    ("op", "build"),
    [
        ("preference", partial(preference_case, all_ways=True)),
        ("masked_softmax", masked_softmax_case),
        ("policy_loss", policy_loss_case),
        ("logprob", logits_case),
        ("logprob", partial(logits_case, with_gradients=True)),
        ("logprob", partial(head_case, width=16, num_tokens=300, with_gradients=True)),
        ("sample", sampling_case),
        ("sample", partial(sampling_case, top_p=1.0)),
        ("gae", gae_case),
        ("rms_norm", partial(rms_norm_case, with_gradients=True)),
        ("gated", partial(gated_case, with_gradients=True)),
        ("attention", attention_case),
        ("attention", shared_prefix_case),
    ],
)
def test_what_a_gpu_runs_is_right_in_the_interpreter(op: str, build: Callable[[Setting], Case]):
    pytest.importorskip("triton", reason="needs Triton, which comes with torch's builds for CUDA")
    if not has_triton(op):
        pytest.skip(f"{op} has no Triton kernel")
    case = build(Setting(CPU, seed=0, quick=True, choice="triton"))
    assert case.picked == "triton"
    assert case.max_error() <= case.tolerance
    for work in case.variants.values():
        work()
