"""Each kernel against plain torch, and against the bandwidth of a copy, in alternation.

Correctness comes first: an operation that is further from its definition in float64 than it may be ends the benchmark.
`copy` is the share of the bandwidth of a copy: the time to copy the bytes that the operation must move over the time
that it takes. Leave the machine alone meanwhile; it takes some minutes.
"""

import statistics
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks import cases, layer_cases
from benchmarks.common import (
    Say,
    Work,
    benchmark,
    head,
    in_turns,
    load_warning,
    memory_facts,
    paired,
    print_table,
    repeated,
    run,
    spread_text,
)
from tunesmith.base.core.errors import InputError, TrainingError

CASES: Mapping[str, Callable[[cases.Setting], cases.Case]] = {
    "preference": cases.preference_case,
    "logprob": cases.head_case,
    "logprob_gradient": partial(cases.head_case, with_gradients=True),
    "logprob_logits": cases.logits_case,
    "logprob_logits_gradient": partial(cases.logits_case, with_gradients=True),
    "sampling": cases.sampling_case,
    "masked_softmax": layer_cases.masked_softmax_case,
    "gae": layer_cases.gae_case,
    "digest": layer_cases.digest_case,
    "upload": layer_cases.upload_case,
    "rms_norm": partial(layer_cases.rms_norm_case, with_gradients=True),
    "gated": partial(layer_cases.gated_case, with_gradients=True),
    "attention": layer_cases.attention_case,
    "adamw": layer_cases.adamw_case,
}

_LEAST_S = 5e-3
"""Shorter work is repeated until a measurement takes this long."""


def measure(options: Namespace, say: Say) -> dict[str, object]:
    """All figures.

    `kernels.<op>` has `ratio_median`, `ratio_min` and `ratio_max`, how many times longer plain torch takes; and
    `copy_share`, the time of a copy of the bytes that the operation must move over the time that it takes.

    Raises:
        InputError: an unknown operation or device; before anything is measured.
        TrainingError: an operation is further from its definition than it may be.
    """
    names = options.op or tuple(CASES)
    for op in names:
        if op not in CASES:
            raise InputError(f"there is no operation {op!r}; give {', '.join(CASES)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("device is cuda and torch sees no CUDA device; give cpu")
    setting = cases.Setting(torch.device(options.device), options.seed, options.quick)
    found = {op: _measured(CASES[op](setting), op, options, say) for op in names}
    return {
        **head(options, "kernels", "device", "quick", packages=("torch", "numpy", "triton")),
        "num_threads": options.threads,
        "kernels": found,
    }


def _measured(case: cases.Case, op: str, options: Namespace, say: Say) -> dict[str, object]:
    """Error, memory and times of one operation."""
    error, device = case.max_error(), torch.device(options.device)
    if not error <= case.tolerance:
        raise TrainingError(f"{op} is {error:g} off its definition, more than {case.tolerance:g}; nothing was measured")
    memory = memory_facts(case.ours, case.plain, device) if case.measures_memory else {}
    # The copy reads half of the bytes of the operation and writes the other half, into memory in use.
    source = torch.ones(max(1, case.num_bytes // 2), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    works: dict[str, Work] = {"ours": case.ours, "plain": case.plain, "copy": lambda: target.copy_(source)}
    least_s = _LEAST_S / 10 if options.quick else _LEAST_S
    sides = {name: repeated(work, device, least_s) for name, work in works.items()}
    seconds, load = in_turns(sides, options.rounds, say)
    ratio, share = (paired(seconds[name], seconds["ours"]) for name in ("plain", "copy"))
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
        "rounds": options.rounds,
        "load": load,
    }


def show(facts: Mapping[str, Any]) -> None:
    """Print a row for each operation, and then its sizes."""
    rows: list[Sequence[str]] = []
    for op, one in facts["kernels"].items():
        memory = "" if one.get("memory_ratio") is None else f"{one['memory_ratio']:.2f}"
        times = f"{one['ours_ms']:.3g}", f"{one['copy_share']:.0%}"
        rows.append((op, spread_text(one), *times, memory, f"{one['max_error']:.1e}"))
    print_table(("", "ratio (min-max)", "ms", "copy", "memory", "error"), rows)
    for op, one in facts["kernels"].items():
        print(f"{op} ({one['picked']}): {one['size']}; against {one['against']}{load_warning(one)}")


main = benchmark(
    measure,
    show,
    *("device", "threads", "rounds", "seed", "quick"),
    op={"action": "append", "metavar": "OP", "help": "one operation; repeatable. All if left out"},
    rounds={"default": 7},
)


if __name__ == "__main__":
    run("kernels")
