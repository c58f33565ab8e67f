"""`python -m benchmarks.kernels`: each kernel against the plain way in torch, and against the bandwidth of a copy.

Correctness comes first: an operation that is further from its definition in float64 than it may be ends the benchmark.
Then ours, the plain way and a copy of as many bytes as the operation must move work in turns; who begins changes from
round to round, and each round gives one ratio.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.figures import paired
from benchmarks.kernel_batches import gae_case, upload_case
from benchmarks.kernel_case import Case, Setting
from benchmarks.kernel_layers import attention_case, gated_case, rms_norm_case
from benchmarks.kernel_logits import (
    logprob_case,
    logprob_gradient_case,
    logprob_logits_case,
    logprob_logits_gradient_case,
    sampling_case,
)
from benchmarks.kernel_optimizer import adamw_case
from benchmarks.kernel_outputs import masked_softmax_case, preference_case
from benchmarks.machine import machine_facts
from benchmarks.memory import memory_facts
from benchmarks.rounds import Say, load_facts, noted_load
from tunesmith.core.errors import InputError, TrainingError
from tunesmith.runs.environment import usable_cores

CASES: Mapping[str, Callable[[Setting], Case]] = {
    "preference": preference_case,
    "logprob": logprob_case,
    "logprob_gradient": logprob_gradient_case,
    "logprob_logits": logprob_logits_case,
    "logprob_logits_gradient": logprob_logits_gradient_case,
    "sampling": sampling_case,
    "masked_softmax": masked_softmax_case,
    "gae": gae_case,
    "upload": upload_case,
    "rms_norm": partial(rms_norm_case, with_gradients=True),
    "gated": partial(gated_case, with_gradients=True),
    "attention": attention_case,
    "adamw": adamw_case,
}

_LEAST_S = 5e-3
"""Shorter work is repeated until a measurement takes this long."""


@dataclass(frozen=True, slots=True)
class KernelBench:
    """What to measure: `ops` of CASES. `quick` is a smoke run on small tensors that says nothing."""

    ops: tuple[str, ...] = tuple(CASES)
    num_threads: int | None = None
    num_rounds: int = 7
    seed: int = 0
    device: str = "cpu"
    quick: bool = False


def run_kernel_bench(options: KernelBench, say: Say = lambda _: None) -> dict[str, object]:
    """All figures as plain numbers and text; `say` gets a line for each operation.

    `kernels.<op>` has `ratio_median`, `ratio_min` and `ratio_max`, how many times longer the plain way takes; and
    `copy_share`, the time of a copy of the bytes that the operation must move over the time that it takes.

    Raises:
        InputError: an unknown operation, device or number; before anything is measured.
        TrainingError: an operation is further from its definition than it may be.
    """
    _check(options)
    num_threads = options.num_threads or usable_cores()
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        setting = Setting(torch.device(options.device), options.seed, options.quick)
        kernels = {op: _measured(CASES[op](setting), op, options, say) for op in options.ops}
    finally:
        torch.set_num_threads(before)
    return {
        "bench": "kernels",
        "device": options.device,
        "quick": options.quick,
        "num_threads": num_threads,
        "kernels": kernels,
        "machine": machine_facts(("torch", "numpy", "triton")),
    }


def _check(options: KernelBench) -> None:
    for op in options.ops:
        if op not in CASES:
            raise InputError(f"there is no operation {op!r}; give {', '.join(CASES)}")
    for name, value in (("rounds", options.num_rounds), ("threads", options.num_threads)):
        if value is not None and value < 1:
            raise InputError(f"{name} is {value}; give at least 1")
    if options.device not in ("cpu", "cuda"):
        raise InputError(f"device is {options.device!r}; give cpu or cuda")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("device is cuda and torch sees no CUDA device; give cpu")


def _measured(case: Case, op: str, options: KernelBench, say: Say) -> dict[str, object]:
    """Error, memory and times of one operation."""
    error = case.max_error()
    if not error <= case.tolerance:
        raise TrainingError(f"{op} is {error:g} off its definition, more than {case.tolerance:g}; nothing was measured")
    memory = memory_facts(case.ours, case.plain, case.device) if case.measures_memory else {}
    works = {"ours": case.ours, "plain": case.plain, "copy": _copy(case)}
    least_s = _LEAST_S / 10 if options.quick else _LEAST_S
    repeats = {name: _repeats(work, case.device, least_s) for name, work in works.items()}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    loads = []
    for index in range(options.num_rounds):
        loads.append(noted_load(say))
        names = list(works)[index % len(works) :] + list(works)[: index % len(works)]
        for name in names:
            seconds[name].append(_seconds(works[name], repeats[name], case.device))
    ratio = paired(seconds["plain"], seconds["ours"])
    share = paired(seconds["copy"], seconds["ours"])
    say(f"{op}: {ratio.median:.2f} times {case.against} ({ratio.least:.2f}-{ratio.most:.2f}), error {error:.1e}")
    return {
        **ratio.facts("ratio"),
        "copy_share": share.median,
        "copy_share_min": share.least,
        "max_error": error,
        "tolerance": case.tolerance,
        **{f"{name}_ms": 1e3 * statistics.median(values) for name, values in seconds.items()},
        **memory,
        "bytes": case.num_bytes,
        "size": case.size,
        "against": case.against,
        "picked": case.picked,
        "rounds": options.num_rounds,
        "load": load_facts(loads),
    }


def _copy(case: Case) -> Callable[[], object]:
    """A copy that reads half of the bytes of the operation and writes the other half, into memory in use."""
    source = torch.ones(max(1, case.num_bytes // 2), dtype=torch.uint8, device=case.device)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def _repeats(work: Callable[[], object], device: torch.device, least_s: float) -> int:
    _seconds(work, 1, device)  # what is slow once: compiling, and memory that is new
    return max(1, round(least_s / max(_seconds(work, 1, device), 1e-7)))


def _seconds(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Seconds of one call, from `repeats` of them in a row."""
    _wait(device)
    start_s = time.perf_counter()
    for _ in range(repeats):
        work()
    _wait(device)
    return (time.perf_counter() - start_s) / repeats


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    from benchmarks.cli import main  # imports this module under its own name: a worker unpickles what is sent to it

    sys.exit(main(["kernels", *sys.argv[1:]]))
