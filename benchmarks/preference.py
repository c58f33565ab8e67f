"""Selection by votes against a copy of as many bytes: batch sizes, block sizes, one batch and ten, both ways to sum.

One batch (`process_user_preference`) and an epoch over ten (`iterative_tuning`), with outputs of 512 numbers in float32
and bfloat16. Bytes are those of the selected rows, read and written. A block is rows in C++ and columns in Triton; on a
GPU each is measured deterministic and atomic. Ours and the copy alternate in one process; the share is the median of
their ratios. A million pairs take 6 GB.
"""

import statistics
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.cases import preference_part, preference_ways
from benchmarks.common import ROOT, Say, benchmark, in_turns, machine_facts, repeated, run
from tunesmith.base.core.system import keep_freed_memory
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.kernels.preference.torch_impl import PreferenceBatch

_WIDTH, _NUM_BATCHES, _PATTERN_ROWS = 512, 10, 10_000
_ROUNDS = {1_000: 101, 10_000: 31, 100_000: 15, 1_000_000: 7}
_FUNCTIONS = {"process": "process_user_preference", "tuning": "iterative_tuning"}


def votes(num_pairs: int, dtype: torch.dtype, device: torch.device) -> PreferenceBatch:
    """Random outputs, in which some rows occur several times, and choices, of which one in 41 is a tie."""
    rows_B = torch.arange(num_pairs, device=device) % _PATTERN_ROWS
    size = min(num_pairs, _PATTERN_ROWS)
    a_BN, b_BN = (torch.randn(size, _WIDTH, device=device).to(dtype)[rows_B] for _ in range(2))
    drawn_B = torch.randint(0, 41, (num_pairs,), device=device)
    return PreferenceBatch(a_BN, b_BN, torch.where(drawn_B == 40, 0.5, (drawn_B < 20).float()))


def measure(options: Namespace, say: Say) -> dict[str, object]:
    """Both functions at each batch size, dtype and size of a block, and with atomic additions where there are any."""
    device, kernels = torch.device(options.device), Kernels()
    found: list[dict[str, object]] = []
    for dtype, num_pairs in product((torch.float32, torch.bfloat16), (n for n in _ROUNDS if n <= options.most)):
        batch = votes(num_pairs, dtype, device)
        out_BN, size = torch.zeros_like(batch.outputs_a_BN), max(1, num_pairs // _NUM_BATCHES)
        tenths = [preference_part(batch, slice(start, start + size)) for start in range(0, num_pairs, size)]
        copies = {"process": partial(_copies, [batch], out_BN), "tuning": partial(_copies, tenths, out_BN)}
        num_bytes = 2 * out_BN.numel() * out_BN.element_size()
        ways = preference_ways(batch, torch.zeros(_WIDTH, device=device), out_BN, kernels)
        for label, way in ways.items():
            function, *how = label.split(", ")
            sides = {"ours": repeated(way, device), "copy": repeated(copies[function], device)}
            seconds, _ = in_turns(sides, options.rounds or _ROUNDS[num_pairs], say, measures_load=False)
            ours_s, copy_s = (statistics.median(seconds[name]) for name in ("ours", "copy"))
            shares = [copy / ours for ours, copy in zip(seconds["ours"], seconds["copy"], strict=True)]
            lower, median, upper = statistics.quantiles(shares, n=4)
            found.append(
                {
                    "function": _FUNCTIONS[function],
                    "num_pairs": num_pairs,
                    "dtype": str(dtype).removeprefix("torch."),
                    "block": next((int(word.split()[1]) for word in how if word.startswith("block")), None),
                    "deterministic": "atomic" not in how,
                    "ms": 1e3 * ours_s,
                    "gb_per_s": num_bytes / ours_s / 1e9,
                    "copy_gb_per_s": num_bytes / copy_s / 1e9,
                    "copy_share": median,
                    "copy_share_quartiles": (lower, upper),
                }
            )
            say(_line(found[-1]))
    return {
        "machine": machine_facts(),
        "device": options.device,
        "num_threads": options.threads,
        "picked": kernels.picked("preference", torch.zeros(1, device=device)),
        "width": _WIDTH,
        "batches_of_an_epoch": _NUM_BATCHES,
        "measured": found,
    }


def _copies(parts: Sequence[PreferenceBatch], out_BN: torch.Tensor) -> None:
    """A copy for each batch, into the same memory."""
    for part in parts:
        out_BN[: len(part.choices_B)].copy_(part.outputs_a_BN)


def _line(one: Mapping[str, Any]) -> str:
    lower, upper = one["copy_share_quartiles"]
    how = f"block {one['block'] or 'default'}{'' if one['deterministic'] else ', atomic'}"
    return (
        f"{one['function']:<24} {one['dtype']:<9} {one['num_pairs']:>9} pairs {how:<21} {one['ms']:>9.3f} ms "
        f"{one['gb_per_s']:>7.1f} GB/s {one['copy_share']:>5.0%} of a copy ({lower:.0%}-{upper:.0%})"
    )


main = benchmark(
    measure,
    lambda facts: print("\n".join(map(_line, facts["measured"]))),
    device={"default": "cuda" if torch.cuda.is_available() else "cpu"},
    threads={"default": torch.get_num_threads(), "help": "threads"},
    rounds={"default": None, "help": "by default 101 for a thousand pairs to 7 for a million"},
    most={"type": int, "default": max(_ROUNDS), "help": "largest batch; a million pairs take 6 GB"},
    out={"default": ROOT / "benchmarks" / "preference.json"},
)


if __name__ == "__main__":
    # As trainings do: each call of `iterative_tuning` takes memory for what is selected.
    keep_freed_memory()
    run("preference")
