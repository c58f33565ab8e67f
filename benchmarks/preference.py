"""Selection by votes against a copy of as many bytes: batch sizes, block sizes, both functions, both ways to sum.

    python -m benchmarks.preference [--device cuda] [--threads 1] [--most 1000000] [--out FILE]

One batch (`process_user_preference`) and an epoch over ten (`iterative_tuning`), with outputs of 512 numbers in float32
and bfloat16. Bytes are those of the selected rows, read and written. A block is rows in C++ and columns in Triton; on a
GPU each is measured deterministic and atomic. Ours and the copy alternate in one process; the share is the median of
their ratios. A million pairs take 6 GB. Written to benchmarks/preference.json, or to FILE.

Shape legend: B pairs, N numbers of an output.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch

from benchmarks.machine import machine_facts
from benchmarks.measure import ROOT, ratio
from tunesmith.core.system import keep_freed_memory
from tunesmith.kernels.native import Kernels
from tunesmith.kernels.preference.records import PreferenceBatch
from tunesmith.kernels.preference.tuning import iterative_tuning, process_user_preference

_WIDTH = 512
_NUM_BATCHES = 10
_ROUNDS = {1_000: 101, 10_000: 31, 100_000: 15, 1_000_000: 7}
_BLOCKS = (None, 64, 128, 256, 512)
_DTYPES = (torch.float32, torch.bfloat16)
_RATE = 1e-6
_PATTERN_ROWS = 10_000

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Measured:
    """One setting: median milliseconds, GB/s of it and of a copy, and how its speed stands to the copy's.

    `block` None is what the kernel takes by itself.
    """

    function: str
    num_pairs: int
    dtype: str
    block: int | None
    deterministic: bool
    ms: float
    gb_per_s: float
    copy_gb_per_s: float
    copy_share: float
    copy_share_quartiles: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Votes:
    """A batch, its tenths, weights, and memory for what is selected."""

    batch: PreferenceBatch
    parts: tuple[PreferenceBatch, ...]
    weights_N: torch.Tensor
    out_BN: torch.Tensor

    @classmethod
    def of(cls, num_pairs: int, dtype: torch.dtype, device: torch.device) -> "Votes":
        """Random outputs, of which some rows stand several times, and choices, of which one in 41 is a tie."""
        rows_B = torch.arange(num_pairs, device=device) % _PATTERN_ROWS
        size = min(num_pairs, _PATTERN_ROWS)
        a_BN, b_BN = (torch.randn(size, _WIDTH, device=device).to(dtype)[rows_B] for _ in range(2))
        drawn_B = torch.randint(0, 41, (num_pairs,), device=device)
        batch = PreferenceBatch(a_BN, b_BN, torch.where(drawn_B == 40, 0.5, (drawn_B < 20).float()))
        step = max(1, num_pairs // _NUM_BATCHES)
        parts = (slice(start, start + step) for start in range(0, num_pairs, step))
        tenths = tuple(PreferenceBatch(a_BN[part], b_BN[part], batch.choices_B[part]) for part in parts)
        return cls(batch, tenths, torch.zeros(_WIDTH, device=device), torch.zeros_like(a_BN))


def measure(votes: Votes, num_rounds: int, kernels: Kernels) -> Iterator[Measured]:
    """Both functions at each size of a block, and with atomic additions where there are any."""
    is_gpu = votes.out_BN.device.type == "cuda"
    for block in _BLOCKS:
        for deterministic in (True, False) if is_gpu else (True,):
            how = {"learning_rate": _RATE, "deterministic": deterministic, "block": block, "kernels": kernels}
            one = partial(process_user_preference, votes.batch, votes.weights_N, out_BN=votes.out_BN, **how)
            epoch = partial(iterative_tuning, votes.parts, votes.weights_N, **how)
            for ours, copy, function in (
                (one, partial(_copy_of, [votes.batch], votes.out_BN), "process_user_preference"),
                (epoch, partial(_copy_of, votes.parts, votes.out_BN), "iterative_tuning"),
            ):
                found = ratio(function, _ended(ours, is_gpu), _ended(copy, is_gpu), num_rounds)
                num_bytes = 2 * votes.out_BN.numel() * votes.out_BN.element_size()
                yield Measured(
                    function,
                    len(votes.out_BN),
                    str(votes.out_BN.dtype).removeprefix("torch."),
                    block,
                    deterministic,
                    found.fast_ms,
                    num_bytes / found.fast_ms / 1e6,
                    num_bytes / found.slow_ms / 1e6,
                    found.median,
                    (found.lower_quartile, found.upper_quartile),
                )


def _copy_of(parts: Sequence[PreferenceBatch], out_BN: torch.Tensor) -> None:
    """A copy for each batch, into the same memory."""
    for part in parts:
        out_BN[: len(part.choices_B)].copy_(part.outputs_a_BN)


def _ended(work: Work, is_gpu: bool) -> Work:
    """The work, until the device has ended it."""

    def whole() -> None:
        work()
        torch.cuda.synchronize()

    return whole if is_gpu else work


def _line(one: Measured) -> str:
    lower, upper = one.copy_share_quartiles
    how = f"block {one.block or 'default'}{'' if one.deterministic else ', atomic'}"
    return (
        f"{one.function:<24} {one.dtype:<9} {one.num_pairs:>9} pairs {how:<21} {one.ms:>9.3f} ms "
        f"{one.gb_per_s:>7.1f} GB/s {one.copy_share:>5.0%} of a copy ({lower:.0%}-{upper:.0%})"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; measures all batch sizes up to the largest asked for and writes the file."""
    parser = argparse.ArgumentParser(description="Measure selection by votes against a copy.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, help="by default 101 for a thousand pairs to 7 for a million")
    parser.add_argument("--most", type=int, default=max(_ROUNDS), help="largest batch; a million pairs take 6 GB")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "preference.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    device, kernels = torch.device(options.device), Kernels()
    found: list[Measured] = []
    for dtype, num_pairs in product(_DTYPES, (size for size in _ROUNDS if size <= options.most)):
        for one in measure(Votes.of(num_pairs, dtype, device), options.rounds or _ROUNDS[num_pairs], kernels):
            found.append(one)
            print(_line(one), flush=True)
    facts = {
        "machine": machine_facts(),
        "device": options.device,
        "num_threads": options.threads,
        "picked": kernels.picked("preference", torch.zeros(1, device=device)),
        "width": _WIDTH,
        "batches_of_an_epoch": _NUM_BATCHES,
        "measured": [asdict(one) for one in found],
    }
    options.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(f"written to {options.out}")
    return 0


if __name__ == "__main__":
    keep_freed_memory()  # as trainings do: each call of `iterative_tuning` takes memory for what is selected
    sys.exit(main())
