"""Random numbers of the tests of kernels."""

import torch


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """The same numbers for the same seed and shape."""
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)
