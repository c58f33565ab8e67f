"""Liger's kernels beside ours, where Liger is installed and there is a GPU; it is imported by their first call.

Shapes: N rows, H hidden, V vocabulary, I intermediate size.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

Work = Callable[[], object]


def _functions(tensor: torch.Tensor) -> Callable[[], Any] | None:
    """What imports Liger's functions; None where it is not installed, or the tensor is not on a GPU."""
    if tensor.device.type != "cuda" or importlib.util.find_spec("liger_kernel") is None:
        return None
    return lambda: importlib.import_module("liger_kernel.transformers.functional")


def head_gradients(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, ids_N: torch.Tensor) -> Work | None:
    """The summed cross-entropy of the output layer and its gradients, without logits of all rows."""
    functions = _functions(hidden_NH)
    if functions is None:
        return None

    def work() -> object:
        loss = functions().liger_fused_linear_cross_entropy(hidden_NH, weight_VH, ids_N, reduction="sum")
        return torch.autograd.grad(loss, (hidden_NH, weight_VH))

    return work


def cross_entropy(logits_NV: torch.Tensor, ids_N: torch.Tensor) -> Work | None:
    """The cross-entropy of each row; of a copy, because Liger may write over the logits that it is given."""
    functions = _functions(logits_NV)
    if functions is None:
        return None
    own_NV = logits_NV.clone()
    return lambda: functions().liger_cross_entropy(own_NV, ids_N, reduction="none")


def add_rms_norm(x_NH: torch.Tensor, residual_NH: torch.Tensor, weight_H: torch.Tensor, epsilon: float) -> Work | None:
    """The sum by torch, and its norm by Liger."""
    functions = _functions(x_NH)
    return None if functions is None else lambda: functions().liger_rms_norm(x_NH + residual_NH, weight_H, epsilon)


def gated(gate_NI: torch.Tensor, up_NI: torch.Tensor) -> Work | None:
    """silu(gate) times up."""
    functions = _functions(gate_NI)
    return None if functions is None else lambda: functions().liger_swiglu(gate_NI, up_NI)
