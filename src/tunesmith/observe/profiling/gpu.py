"""Figures of an NVIDIA GPU: by NVML, if the package nvidia-ml-py is installed, and by CUDA events at the stages.

Written from the documentation of NVML and torch; it has never been run on a GPU. Without a GPU, or without the
package, the figures are absent.
"""

import contextlib
import importlib
import time
from typing import Any

import torch

from tunesmith.engine.batch.upload import copy_s

Metrics = dict[str, float]

_LIMITS = ("SwPowerCap", "HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
"""Reasons for a lower clock that are limits; others, such as an idle GPU, are not."""


class GPU:
    """A CUDA device. `nvml` is the module pynvml, None if it is not installed; `handle` is NVML's of the device."""

    def __init__(self, device: torch.device, nvml: Any | None = None, handle: Any = None) -> None:
        self._device = device
        self._nvml = nvml
        self._handle = handle
        self._stage = ""
        self._began: torch.cuda.Event | None = None
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._last_sample_us = 0
        self._last_s = time.perf_counter()

    def enter(self, stage: str) -> None:
        """An outermost stage begins: mark the place in the device's queue."""
        self._stage, self._began = stage, self._mark()

    def leave(self) -> None:
        """The stage ends."""
        ended = self._mark()
        if self._began is not None and ended is not None:
            self._spans.append((self._stage, self._began, ended))
        self._began = None

    def step(self) -> Metrics:
        """The figures since the last call. Waits for what the stages have queued."""
        spans, self._spans = self._spans, []
        metrics: Metrics = {}
        try:
            metrics["gpu/memory_gb"] = torch.cuda.max_memory_allocated(self._device) / 1e9
            torch.cuda.reset_peak_memory_stats(self._device)
            for stage, began, ended in spans:
                ended.synchronize()
                name = f"gpu/stage/{stage}"
                metrics[name] = metrics.get(name, 0.0) + began.elapsed_time(ended) / 1e3
            metrics["gpu/copy_s"] = copy_s()
        except RuntimeError:  # an error of the device: the training's next call meets it too
            return metrics
        return metrics if self._nvml is None else metrics | self._nvml_metrics(self._nvml)

    def close(self) -> None:
        """Let go of NVML."""
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _mark(self) -> torch.cuda.Event | None:
        try:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
        except RuntimeError:
            return None
        return event

    def _nvml_metrics(self, nvml: Any) -> Metrics:
        wall_s, self._last_s = time.perf_counter() - self._last_s, time.perf_counter()
        metrics: Metrics = {}
        with contextlib.suppress(nvml.NVMLError):
            metrics["gpu/power_w"] = nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3
            metrics["gpu/clock_mhz"] = float(nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM))
            reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
            limits = (getattr(nvml, f"nvmlClocksThrottleReason{name}", 0) for name in _LIMITS)
            metrics["gpu/throttled"] = float(any(reasons & bits for bits in limits))
            # The driver keeps a sample of each sixth of a second or so.
            kind, since_us = nvml.NVML_GPU_UTILIZATION_SAMPLES, self._last_sample_us
            _, samples = nvml.nvmlDeviceGetSamples(self._handle, kind, since_us)
            busy = [sample.sampleValue.uiVal / 100 for sample in samples if sample.timeStamp > since_us]
            if busy:
                self._last_sample_us = max(sample.timeStamp for sample in samples)
                metrics["gpu/busy"] = sum(busy) / len(busy)
                metrics["gpu/kernel_s"] = metrics["gpu/busy"] * wall_s
        return metrics


def open_gpu() -> GPU | None:
    """The current CUDA device, None without one."""
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return GPU(device)
    try:
        nvml.nvmlInit()
        # By its identifier: CUDA_VISIBLE_DEVICES renumbers the devices for torch, and not for NVML.
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except (nvml.NVMLError, AttributeError):
        return GPU(device)
    return GPU(device, nvml, handle)
