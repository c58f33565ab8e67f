"""Kernels in Triton's interpreter, on the CPU; `tests/conftest.py` switches it on."""

import pytest

pytest.importorskip("triton", reason="needs Triton, which comes with torch's builds for CUDA")

from tunesmith.kernels.native import Kernels


@pytest.fixture
def interpreted() -> Kernels:
    """Kernels that run in Triton or raise."""
    return Kernels("triton")
