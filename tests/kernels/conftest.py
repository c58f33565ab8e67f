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
    """The pairs of values of a case."""
    given = item.callspec.params
    values = [(name, id(given[name])) for name in sorted(given)]
    return frozenset(combinations(values, 2)) or frozenset(values)


def parts_in_triton(item: pytest.Function) -> frozenset[object]:
    """Test and type of numbers: a case takes seconds in Triton's interpreter, so that each of both has to do once."""
    return frozenset({item.originalname, ("dtype", str(item.callspec.params.get("dtype")))})


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases = defaultdict(list)
    for item in items:
        if HERE not in item.path.parents or item.get_closest_marker("slow"):
            continue
        in_triton = IN_TRITON in item.path.parents
        if hasattr(item, "callspec"):
            test = "" if in_triton else item.originalname
            cases[item.path, test].append((item, (parts_in_triton if in_triton else parts)(item)))
        elif in_triton and hasattr(item.function, "hypothesis"):
            item.add_marker(pytest.mark.nightly)
    for same in cases.values():
        kept = covering([found for _, found in same])
        for index, (item, _) in enumerate(same):
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
