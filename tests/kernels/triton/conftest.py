"""Kernels in Triton: on the GPU in `make test-gpu`, else in Triton's interpreter, on the CPU."""

import pytest

pytest.importorskip("triton", reason="needs Triton, which comes with torch's builds for CUDA")

from tunesmith.engine.kernels.native import Kernels


@pytest.fixture(scope="module", autouse=True)
def all_on_one_device(kernel_device: str) -> None:
    """Every test here makes its tensors on the device of the kernels."""


@pytest.fixture
def interpreted() -> Kernels:
    """Kernels that run in Triton or raise."""
    return Kernels("triton")
