"""`torch.ops.tunesmith.gated`, `softcap` and their gradients: the Triton kernels as operators that torch.compile knows.

They record no gradient by themselves: `api` does, for all kernels in one way. Nothing waits for the device or reads
numbers of it, so they can stand in a CUDA graph. Triton is imported by the first call, not here.

Shape legend: R rows, I intermediate size, V vocabulary.
"""

import torch

from tunesmith.kernels.arguments import empty_as, with_dense_rows


@torch.library.custom_op("tunesmith::gated", mutates_args=())
def gated(gate_RI: torch.Tensor, up_RI: torch.Tensor | None, activation: str) -> torch.Tensor:
    """activation(gate) * up, as `torch_impl.gated`, or activation(gate) where `up_RI` is None."""
    from tunesmith.kernels.gated.triton_impl import forward

    return forward(with_dense_rows(gate_RI), None if up_RI is None else with_dense_rows(up_RI), activation)


@torch.library.custom_op("tunesmith::gated_gradient", mutates_args=())
def gated_gradient(
    gate_RI: torch.Tensor, up_RI: torch.Tensor | None, d_out_RI: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of gate, gradient of up); the latter is empty where `up_RI` is None."""
    from tunesmith.kernels.gated.triton_impl import backward

    up_RI = None if up_RI is None else with_dense_rows(up_RI)
    d_gate_RI, d_up_RI = backward(with_dense_rows(gate_RI), up_RI, d_out_RI.contiguous(), activation)
    return d_gate_RI, gate_RI.new_empty(0) if d_up_RI is None else d_up_RI


@torch.library.custom_op("tunesmith::softcap", mutates_args=())
def softcap(x_RV: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap), as `torch_impl.softcap`."""
    from tunesmith.kernels.gated.triton_impl import cap_forward

    return cap_forward(with_dense_rows(x_RV), cap)


@torch.library.custom_op("tunesmith::softcap_gradient", mutates_args=())
def softcap_gradient(x_RV: torch.Tensor, d_out_RV: torch.Tensor, cap: float) -> torch.Tensor:
    """The gradient of x."""
    from tunesmith.kernels.gated.triton_impl import cap_backward

    return cap_backward(with_dense_rows(x_RV), d_out_RV.contiguous(), cap)


@gated.register_fake
def _(gate_RI: torch.Tensor, *_: object) -> torch.Tensor:
    return empty_as(gate_RI)


@gated_gradient.register_fake
def _(gate_RI: torch.Tensor, up_RI: torch.Tensor | None, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_as(gate_RI), gate_RI.new_empty(0) if up_RI is None else empty_as(gate_RI)


@softcap.register_fake
def _(x_RV: torch.Tensor, cap: float) -> torch.Tensor:
    return empty_as(x_RV)


@softcap_gradient.register_fake
def _(x_RV: torch.Tensor, *_: object) -> torch.Tensor:
    return empty_as(x_RV)
