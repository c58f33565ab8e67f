"""How often a work asks a device for something, counted by torch's profiler."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

_LAUNCHES = (
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cudaLaunchCooperativeKernel",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
)
_GRAPHS = ("cudaGraphLaunch",)


@dataclass(frozen=True, slots=True)
class Launches:
    """Counts of one work.

    `operators`: calls of torch's operators by the processor. `launches`: kernels that the processor launched one by
    one, and `graphs` that it launched as a whole. `kernels` ran on the device, `copies` are copies and fills there.
    """

    operators: int
    launches: int
    graphs: int
    kernels: int
    copies: int

    def per(self, earlier: "Launches", count: int) -> dict[str, float]:
        """What this has more than `earlier`, over `count`: of each step, where both differ by so many steps."""
        return {name: (getattr(self, name) - getattr(earlier, name)) / count for name in self.__slots__}

    def facts(self) -> dict[str, float]:
        """The counts, for JSON."""
        return {name: float(getattr(self, name)) for name in self.__slots__}


def count_launches(work: Callable[[], object], device: torch.device) -> Launches:
    """The counts of one call of `work`, which is warm. Operators that other operators call are counted too."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
    with profile(activities=activities) as profiler:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    operators = launches = graphs = kernels = copies = 0
    for event in profiler.events() or ():
        name = event.name
        if getattr(event, "is_user_annotation", False):  # a named span, shown on the device's line as well
            continue
        if event.device_type.name == "CUDA":
            is_copy = name.startswith(("Memcpy", "Memset"))
            copies, kernels = copies + is_copy, kernels + (not is_copy)
            continue
        operators += name.startswith(("aten::", "tunesmith::"))
        launches += name in _LAUNCHES
        graphs += name in _GRAPHS
    return Launches(operators, launches, graphs, kernels, copies)
