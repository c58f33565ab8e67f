"""The case of `python -m benchmarks.kernels` from the optimizer."""

import torch

from benchmarks.kernel_case import Case, Setting, error_of
from tunesmith.kernels.adamw import torch_impl
from tunesmith.kernels.adamw.api import adamw
from tunesmith.kernels.adamw.records import AdamWSettings, FloatMoments, ParameterUpdate
from tunesmith.kernels.native import Kernels

_SETTINGS = AdamWSettings(0.9, 0.95, 1e-8)


def adamw_case(setting: Setting) -> Case:
    """A step over 28 million bfloat16 weights with float32 masters, against torch's fused AdamW and copies around it.

    The bytes: the gradient read, two moments and the master read and written, the weight written.
    """
    shape = (setting.sized(49152, 64), setting.sized(576, 33))
    gradient = setting.normal(*shape, dtype=torch.bfloat16)
    kernels, fused = Kernels(setting.choice), Kernels("torch")

    def update(dtype: torch.dtype = torch.float32) -> ParameterUpdate:
        master = setting.normal(*shape, stream=1).to(dtype)
        moments = FloatMoments(torch.zeros_like(master), torch.zeros_like(master))
        return ParameterUpdate(gradient, master, master.bfloat16(), moments, 10, 1e-3, 0.1)

    def error() -> float:
        found, exact = update(), update(torch.float64)
        adamw([found], _SETTINGS, 0.5, kernels=kernels)
        torch_impl.adamw(exact, _SETTINGS, 0.5)
        return error_of([(found.master, exact.master), (found.moments.exp_avg_sq, exact.moments.exp_avg_sq)])

    own, plain = update(), update()
    return Case(
        ours=lambda: adamw([own], _SETTINGS, 0.5, kernels=kernels),
        plain=lambda: adamw([plain], _SETTINGS, 0.5, kernels=fused),
        max_error=error,
        tolerance=1e-6,
        num_bytes=(2 + 3 * 8 + 2) * gradient.numel(),
        device=setting.device,
        size=f"{gradient.numel()} weights, bfloat16 with float32 masters",
        against="torch's fused AdamW",
        picked=kernels.picked("adamw", gradient),
        compiles=False,
    )
