"""The definition of uploading: each tensor by a copy of its own."""

from collections.abc import Sequence

import torch


def upload(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The tensors on `device`, each in memory of its own, even where it is there already."""
    return [tensor.to(device, copy=True) for tensor in tensors]
