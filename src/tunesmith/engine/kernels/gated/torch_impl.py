"""The definition of gated activations and soft-capping, in torch alone; its gradients are those of autograd.

Shape legend: R rows, I intermediate size, V vocabulary.
"""

from typing import Literal

import torch

from tunesmith.engine.kernels.masking import widened

Activation = Literal["silu", "gelu_tanh", "gelu"]
"""`silu`: x sigmoid(x), of Llama and Qwen. `gelu_tanh`: the tanh form of GELU, gelu_new of GPT-2 and
gelu_pytorch_tanh of Gemma. `gelu`: x times the normal distribution function, of GPT-NeoX."""


def gated(gate_RI: torch.Tensor, up_RI: torch.Tensor, activation: Activation) -> torch.Tensor:
    """activation(gate) * up, in float32 (float64 for float64), rounded once. Shazeer, GLU variants (2020)."""
    return (_activated(gate_RI, activation) * widened(up_RI)).to(gate_RI.dtype)


def activate(x_RI: torch.Tensor, activation: Activation) -> torch.Tensor:
    """activation(x), in float32 (float64 for float64), rounded once. Hendrycks and Gimpel, GELUs (2016)."""
    return _activated(x_RI, activation).to(x_RI.dtype)


def softcap(x_RV: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap), in float32 (float64 for float64), rounded once. Gemma Team, Gemma 2 (2024), section 2."""
    return (cap * torch.tanh(widened(x_RV) / cap)).to(x_RV.dtype)


def _activated(x_RI: torch.Tensor, activation: Activation) -> torch.Tensor:
    wide_RI = widened(x_RI)
    if activation == "silu":
        return torch.nn.functional.silu(wide_RI)
    return torch.nn.functional.gelu(wide_RI, approximate="tanh" if activation == "gelu_tanh" else "none")
