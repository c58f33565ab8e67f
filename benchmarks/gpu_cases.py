"""A case of `bench kernels` measured on a GPU: ours, torch as it comes, torch.compile and Liger, in turns."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.gpu_clock import Clock, Work
from benchmarks.gpu_records import Floor, Measured
from benchmarks.kernel_case import Case, Setting
from benchmarks.memory import memory_facts

Unit = Callable[[Setting, Clock], Measured]
"""What measures one setting of a row."""

_OTHERS_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, ImportError)
"""What a compiler or a library of somebody else may raise; ours goes on without it."""

_NOTE_CHARACTERS = 300


def unit(build: Callable[[Setting], Case], *, compiles: bool = True) -> Unit:
    """Measures the case that `build` makes; without `compiles` torch.compile is left out, which saves its seconds."""

    def measure(setting: Setting, clock: Clock) -> Measured:
        case = build(setting)
        return measured_case(case if compiles else replace(case, compiles=False), clock)

    return measure


def measured_case(case: Case, clock: Clock) -> Measured:
    """Error first, then memory, then the times of all ways that can run."""
    error = case.max_error()
    memory = memory_facts(case.ours, case.plain, case.device) if case.measures_memory else {}
    works: dict[str, Work] = {"ours": case.ours, **case.variants, "eager": case.plain}
    for work in works.values():
        clock.warm_up(work)
    others, notes = _others(case, clock)
    timings = clock.measure(works | others, case.num_bytes, by_wall=case.by_wall)
    return Measured(
        size=case.size,
        picked=case.picked,
        against=case.against,
        floors=(Floor(case.num_bytes, case.num_flops),),
        timings=timings,
        max_error=error,
        tolerance=case.tolerance,
        notes=notes,
        facts=memory,
    )


def _others(case: Case, clock: Clock) -> tuple[dict[str, Work], dict[str, str]]:
    """torch.compile and Liger where they run, warm; and why not where they do not."""
    works: dict[str, Work] = {}
    notes: dict[str, str] = {}
    if case.compiles:
        works["compile"] = _compiled(case.plain, quick=clock.quick)
    if case.liger is not None:
        works["liger"] = case.liger
    elif importlib.util.find_spec("liger_kernel") is None:
        notes["liger"] = "not installed"
    for name, work in list(works.items()):
        try:
            clock.warm_up(work)
        except _OTHERS_ERRORS as error:
            notes[name] = f"{type(error).__name__}: {error}"[:_NOTE_CHARACTERS]
            del works[name]
    return works, notes


def _compiled(work: Work, *, quick: bool) -> Work:
    """`work` by torch.compile for its shapes alone; a quick run traces it, and compiles nothing."""
    torch.compiler.reset()  # the same lines with other tensors would be compiled again for any shape
    return torch.compile(work, dynamic=False, backend="eager" if quick else "inductor")
