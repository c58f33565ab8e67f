"""The process that measures rows of `python -m benchmarks.gpu`. It may die of a row: what follows gets a fresh one."""

import gc
from dataclasses import dataclass

import torch

from benchmarks.gpu_clock import Clock
from benchmarks.gpu_records import Measured
from benchmarks.gpu_rows import ROWS
from benchmarks.kernel_case import Setting
from benchmarks.process import Server, serve
from tunesmith.core.trace import span, trace

_MUCH_BYTES = 1 << 30
TARGET = "benchmarks.gpu_worker:serve_rows"


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """On which device, with which seed, and whether sizes are tiny."""

    device: str
    seed: int
    quick: bool
    num_threads: int


@dataclass(frozen=True, slots=True)
class MeasureUnit:
    """Measure one setting of a row."""

    row: str
    setting: str


class RowContender:
    """Measures what it is asked for."""

    def __init__(self, settings: WorkerSettings) -> None:
        torch.set_num_threads(settings.num_threads)
        device = torch.device(settings.device)
        self._setting = Setting(device, settings.seed, settings.quick, large=device.type == "cuda")
        self._clock = Clock(device, settings.quick)

    def handle(self, request: MeasureUnit) -> Measured:
        """The figures of one setting. The span is a place for `core.faults`: `<row>/<setting>`."""
        with trace(), span(f"{request.row}/{request.setting}"):
            measured = ROWS[request.row].units[request.setting](self._setting, self._clock)
        self._free()
        return measured

    def _free(self) -> None:
        """Give the device's memory back; what refers to itself is looked for only if much is held, which takes long."""
        if self._setting.device.type != "cuda":
            return
        if torch.cuda.memory_allocated(self._setting.device) > _MUCH_BYTES:
            gc.collect()
        torch.cuda.empty_cache()


def serve_rows(settings: WorkerSettings, server: Server) -> None:
    """Rows on one device."""
    serve(RowContender, settings, server)
