"""Compiled kernels of the package, built once for all tests into a folder of their own."""

import pytest
import torch

from tunesmith.kernels.native import Kernels


@pytest.fixture(scope="session")
def native(require, tmp_path_factory) -> Kernels:
    """Kernels that run in C++ or raise; the operations are loaded when first asked for."""
    require("c++", "g++", "clang++")
    kernels = Kernels("native")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNESMITH_CACHE", str(tmp_path_factory.mktemp("cache")))
        for op in (
            *("sample", "rms_norm", "gated", "linear", "logprob"),
            *("attention", "attention_gradient", "adamw"),
        ):
            assert kernels.library(op, torch.device("cpu")) is not None
    return kernels
