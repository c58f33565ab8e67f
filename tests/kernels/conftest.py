"""Compiled kernels of the package, built once for all tests into a folder of their own."""

from collections.abc import Callable

import pytest
import torch

from tunesmith.kernels.native import Kernels, shared


@pytest.fixture(scope="session")
def native(require, tmp_path_factory) -> Kernels:
    """Kernels that run in C++ or raise; the operations are loaded when first asked for."""
    require("c++", "g++", "clang++")
    kernels = shared("native")  # so custom operators, which ask for it, find the libraries loaded
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNESMITH_CACHE", str(tmp_path_factory.mktemp("cache")))
        for op in (
            *("sample", "rms_norm", "gated", "linear", "logprob"),
            *("attention", "attention_gradient", "adamw", "preference", "masked_softmax"),
        ):
            assert kernels.library(op, torch.device("cpu")) is not None
    return kernels


@pytest.fixture(scope="session")
def built(require, tmp_path_factory) -> Callable[[str], Kernels]:
    """A function: kernels that run the named operation in C++ or raise, for those that are operators of torch.

    Such an operator takes its library from the process's own kernels, which are loaded here from a folder of the tests.
    """
    require("c++", "g++", "clang++")
    cache = str(tmp_path_factory.mktemp("operators"))

    def build(op: str) -> Kernels:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TUNESMITH_CACHE", cache)
            assert shared("native").library(op, torch.device("cpu")) is not None
        return shared("native")

    return build
