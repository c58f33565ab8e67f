"""The implementation that each operation would use on this machine, and why, without compiling or running any."""

from dataclasses import dataclass
from pathlib import Path

import torch

from tunesmith.core.errors import NativeUnavailableError
from tunesmith.kernels.native import LEAST_CAPABILITY, Backend, find_compiler, has_native, has_triton, why_not_on

_KERNELS = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Pick:
    """The choice of `Kernels("auto")` for an operation on `cpu` or `cuda`; `why` says why it is not faster."""

    op: str
    device: str
    backend: Backend
    why: str = ""


def operations() -> list[str]:
    """The names of all operations, sorted."""
    return sorted(path.parent.name for path in _KERNELS.glob("*/api.py"))


def survey() -> list[Pick]:
    """One pick for each operation on the CPU, and one on the GPU if torch sees one, in the order of their names."""
    compiler = _why_no_compiler()
    picks: list[Pick] = []
    for op in operations():
        picks.append(_pick_for_cpu(op, compiler))
        if torch.cuda.is_available():
            picks.append(_pick_for_gpu(op))
    return picks


def _pick_for_cpu(op: str, why_no_compiler: str) -> Pick:
    if not has_native(op):
        return Pick(op, "cpu", "torch", "has no C++")
    if why_no_compiler:
        return Pick(op, "cpu", "torch", why_no_compiler)
    return Pick(op, "cpu", "native")


def _pick_for_gpu(op: str) -> Pick:
    if not has_triton(op):
        return Pick(op, "cuda", "torch", "has no Triton kernel")
    why = why_not_on(torch.device("cuda"), LEAST_CAPABILITY)
    return Pick(op, "cuda", "torch" if why else "triton", why)


def _why_no_compiler() -> str:
    try:
        find_compiler()
    except NativeUnavailableError as error:
        return str(error)
    return ""
