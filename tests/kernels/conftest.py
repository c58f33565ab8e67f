"""Compiled kernels of the package, from the user's cache: what is in it was compiled from these very sources."""

from collections.abc import Callable

import pytest
import torch

from tunesmith.engine.kernels.native import Kernels, shared


@pytest.fixture(scope="session")
def built(require) -> Callable[..., Kernels]:
    """A function: the process's kernels that run in C++ or raise, with the named operations loaded.

    Custom operators of torch take their libraries from them.
    """
    require("c++", "g++", "clang++")

    def build(*ops: str) -> Kernels:
        kernels = shared("native")
        for op in ops:
            assert kernels.library(op, torch.device("cpu")) is not None
        return kernels

    return build


@pytest.fixture(scope="session")
def native(built) -> Kernels:
    """Kernels that run in C++ or raise, with all operations loaded."""
    return built(
        *("sample", "rms_norm", "gated", "linear", "linear_int8", "logprob"),
        *("attention", "attention_gradient", "adamw", "preference", "masked_softmax"),
    )
