"""Compiled kernels of the package, from the user's cache: what is in it was compiled from these very sources.

Products of parameters are not run whole by `make test`, but so that each two values of two parameters meet once; the
other cases are marked `nightly`.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path

import pytest
import torch

from tunesmith.engine.kernels.native import Kernels, shared

HERE = Path(__file__).parent
IN_TRITON = HERE / "triton"


def covering(cases: Sequence[frozenset[object]]) -> list[int]:
    """Indices of few cases that together have every part of all cases: each time the one that adds most, the first."""
    left, kept = frozenset().union(*cases), []
    while left:
        best = max(range(len(cases)), key=lambda index: len(cases[index] & left))
        kept.append(best)
        left -= cases[best]
    return kept


def parts(item: pytest.Function) -> frozenset[object]:
    """The pairs of values of a case; in Triton's interpreter, which takes seconds for a case, its type of numbers."""
    given = item.callspec.params
    if IN_TRITON in item.path.parents:
        return frozenset({str(given.get("dtype"))})
    values = [(name, id(given[name])) for name in sorted(given)]
    return frozenset(combinations(values, 2)) or frozenset(values)


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases = defaultdict(list)
    for item in items:
        if HERE in item.path.parents and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            cases[item.path, item.originalname].append(item)
    for same in cases.values():
        kept = covering([parts(item) for item in same])
        for index, item in enumerate(same):
            if index not in kept:
                item.add_marker(pytest.mark.nightly)


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
        *("sample", "rms_norm", "gated", "linear", "logprob"),
        *("attention", "attention_gradient", "adamw", "preference", "masked_softmax"),
    )
