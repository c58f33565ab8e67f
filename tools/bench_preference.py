"""Selection by votes against a copy of as many bytes, over batch sizes, tiles and both ways to sum.

    python tools/bench_preference.py [--device cuda] [--rounds 15] [--most 1000000] [--out FILE]

One batch in place (`process_user_preference`), and an epoch over ten batches (`iterative_tuning`), with outputs of 512
numbers. Bytes are those of the selected rows, read and written. Ours and the copy alternate in one process; the share
is the median of their ratios. On a GPU each width of a tile is measured, deterministic and atomic; the tiles of the
C++ are fixed. Written to benchmarks/preference.json, or to FILE.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tunesmith.kernels.native import Kernels
from tunesmith.kernels.preference.api import update_in_place
from tunesmith.kernels.preference.records import PreferenceBatch
from tunesmith.kernels.preference.tuning import iterative_tuning
from tunesmith.telemetry.machine import machine_facts

_WIDTH = 512
_BATCHES = 10
_BATCH_SIZES = (1_000, 10_000, 100_000, 1_000_000)
_BLOCKS = (64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class Measured:
    """One setting: median milliseconds, GB/s of it, and how its speed stands to a copy's (median and least)."""

    what: str
    num_pairs: int
    dtype: str
    ms: float
    gb_per_s: float
    copy_share: float
    copy_share_min: float


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, until the device has ended it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start_s = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start_s


def against_copy(
    what: str, work: Callable[[], object], out_BN: torch.Tensor, num_rounds: int, times: int = 1
) -> Measured:
    """`work`, which selects `out` so many times, against as many copies of it; the first round is left out."""
    source_BN, target_BN = torch.zeros_like(out_BN), torch.zeros_like(out_BN)

    def copy() -> None:
        for _ in range(times):
            target_BN.copy_(source_BN)

    pairs: list[tuple[float, float]] = []
    for index in range(num_rounds + 1):
        if index % 2:
            copy_s, ours_s = seconds(copy, out_BN.device), seconds(work, out_BN.device)
        else:
            ours_s, copy_s = seconds(work, out_BN.device), seconds(copy, out_BN.device)
        pairs.append((ours_s, copy_s))
    ours_s = statistics.median(ours for ours, _ in pairs[1:])
    shares = [copied / ours for ours, copied in pairs[1:]]
    size = 2 * times * out_BN.numel() * out_BN.element_size()
    kind = str(out_BN.dtype).removeprefix("torch.")
    measured = Measured(
        what, times * len(out_BN), kind, 1e3 * ours_s, size / ours_s / 1e9, statistics.median(shares), min(shares)
    )
    print(
        f"{what:<28} {kind:<9} {measured.num_pairs:>9} pairs {measured.ms:>9.3f} ms {measured.gb_per_s:>8.1f} GB/s "
        f"{measured.copy_share:>6.0%} of a copy (least {measured.copy_share_min:.0%})",
        flush=True,
    )
    return measured


def batch_of(num_pairs: int, dtype: torch.dtype, device: torch.device) -> PreferenceBatch:
    """Random outputs and choices, ties among them."""
    a_BN, b_BN = (torch.empty(num_pairs, _WIDTH, dtype=dtype, device=device).normal_() for _ in range(2))
    drawn_B = torch.randint(0, 41, (num_pairs,), device=device)
    return PreferenceBatch(a_BN, b_BN, torch.where(drawn_B == 40, 0.5, (drawn_B < 20).float()))


def measure(num_pairs: int, dtype: torch.dtype, device: torch.device, num_rounds: int) -> list[Measured]:
    """All settings at one batch size."""
    batch = batch_of(num_pairs, dtype, device)
    weights_N, out_BN = torch.zeros(_WIDTH, device=device), torch.zeros_like(batch.outputs_a_BN)
    kernels = Kernels()

    def one(deterministic: bool) -> Callable[[], object]:
        return lambda: update_in_place(
            batch, weights_N, scale=1e-6, out_BN=out_BN, deterministic=deterministic, kernels=kernels
        )

    found = [against_copy("in place", one(True), out_BN, num_rounds)]
    if device.type == "cuda":
        found.append(against_copy("in place, atomic", one(False), out_BN, num_rounds))
        found += over_blocks(batch, weights_N, out_BN, num_rounds)
    size = max(1, num_pairs // _BATCHES)
    starts = range(0, size * _BATCHES, size)
    parts = [
        PreferenceBatch(
            batch.outputs_a_BN[start : start + size],
            batch.outputs_b_BN[start : start + size],
            batch.choices_B[start : start + size],
        )
        for start in starts
    ]
    found.append(
        against_copy(
            f"epoch of {len(parts)} batches",
            lambda: iterative_tuning(parts, weights_N, learning_rate=1e-6, kernels=kernels),
            out_BN[:size],
            num_rounds,
            times=len(parts),
        )
    )
    return found


def over_blocks(
    batch: PreferenceBatch, weights_N: torch.Tensor, out_BN: torch.Tensor, num_rounds: int
) -> list[Measured]:
    """The Triton kernel with tiles of each width, both ways to sum."""
    from tunesmith.kernels.preference import triton_impl

    shape = (len(out_BN), _WIDTH)
    votes = triton_impl.Votes(batch.choices_B, None)
    found: list[Measured] = []
    for block_n in _BLOCKS:
        for deterministic in (True, False):
            plan = triton_impl.launch(shape, block_n)

            def work(plan: triton_impl.LaunchPlan = plan, deterministic: bool = deterministic) -> None:
                outputs, out = (batch.outputs_a_BN, batch.outputs_b_BN), (out_BN, weights_N)
                triton_impl.select_into(outputs, votes, weights_N, 1e-6, out, deterministic=deterministic, plan=plan)

            name = f"block {block_n}{'' if deterministic else ', atomic'}"
            found.append(against_copy(name, work, out_BN, num_rounds))
    return found


def main() -> int:
    """Exit code 0; measures all batch sizes up to the largest asked for, in float32 and bfloat16."""
    parser = argparse.ArgumentParser(description="Measure selection by votes against a copy.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--most", type=int, default=100_000, help="largest batch; a million pairs take 8 GB")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "benchmarks" / "preference.json")
    options = parser.parse_args()
    found: list[Measured] = []
    for dtype in (torch.float32, torch.bfloat16):
        for num_pairs in _BATCH_SIZES:
            if num_pairs <= options.most:
                found += measure(num_pairs, dtype, torch.device(options.device), options.rounds)
    rows = [asdict(one) for one in found]
    facts = {"machine": machine_facts(), "device": options.device, "width": _WIDTH, "measured": rows}
    options.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(f"written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
