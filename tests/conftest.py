"""What all tests share: no hub, modest threads, the optional data folder, and tools that may be missing.

A test that needs something absent skips with a reason. Under CI (`CI=true`) a missing tool is a failure, because CI
installs what the tests use; the data folder stays optional there too.
"""

import ctypes
import gc
import importlib.util
import logging
import os
import shutil
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
# `make test-gpu` sets it: Triton's kernels run on the GPU, and so do engine and trainers.
ON_GPU = os.environ.get("TUNESMITH_TEST_GPU") == "1"
# Elsewhere they run in Triton's interpreter. Triton reads this when it is imported, which torch, TRL and others do too.
# The check that compiles the kernels runs in a process of its own without it.
if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Some tests send Ctrl-C, and a shell that starts them in the background has it ignored, in what they start too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# An example of a property may take as long as it takes, on a machine that does other work too.
settings.register_profile("tunesmith", deadline=None)
settings.load_profile("tunesmith")

Require = Callable[..., str]


KERNELS = Path(__file__).parent / "kernels"


def covering(cases: Sequence[frozenset[object]]) -> list[int]:
    """Indices of few cases that together have every part of all cases: each time the one that adds most, the first."""
    left, kept = frozenset().union(*cases), []
    while left:
        best = max(range(len(cases)), key=lambda index: len(cases[index] & left))
        kept.append(best)
        left -= cases[best]
    return kept


def pairs_of(item: Any) -> frozenset[object]:
    """The pairs of values of a case."""
    given = item.callspec.params
    values = [(name, id(given[name])) for name in sorted(given)]
    return frozenset(combinations(values, 2)) or frozenset(values)


def parts_in_triton(item: Any) -> frozenset[object]:
    """Test and type of numbers: a case takes seconds in Triton's interpreter, so that each of both has to do once."""
    return frozenset({item.originalname, ("dtype", str(item.callspec.params.get("dtype")))})


def leave_to_the_night(items: Sequence[Any]) -> None:
    """Marks as `nightly` what `make test` needs not of products of parameters: those of kernels, and marked ones."""
    products = defaultdict(list)
    for item in items:
        in_triton = KERNELS / "triton" in item.path.parents
        if item.get_closest_marker("slow") or not (KERNELS in item.path.parents or item.get_closest_marker("pairs")):
            continue
        if not hasattr(item, "callspec"):
            if in_triton and hasattr(item.function, "hypothesis"):
                item.add_marker(pytest.mark.nightly)
        elif in_triton:
            products[item.path, ""].append((item, parts_in_triton(item)))
        else:
            products[item.path, item.originalname].append((item, pairs_of(item)))
    for cases in products.values():
        kept = covering([parts for _, parts in cases])
        for index, (item, _) in enumerate(cases):
            if index not in kept:
                item.add_marker(pytest.mark.nightly)


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts whole workflows first: at the end one of them would keep one worker busy while the others idle."""
    leave_to_the_night(items)
    items.sort(key=lambda item: "tests/workflows/" not in item.nodeid)


@pytest.fixture(scope="module", autouse=True)
def returned_memory() -> Iterator[None]:
    """Gives freed memory back to the system after each file: glibc keeps it in fragments, which add up to gigabytes."""
    yield
    gc.collect()
    gc.freeze()  # modules and what else is left are not searched again
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if trim is not None:
        trim(0)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder with optional test data, named by `TUNESMITH_DATA`."""
    named = os.environ.get("TUNESMITH_DATA", "")
    if not named:
        pytest.skip("TUNESMITH_DATA is not set; it names the folder with optional test data")
    folder = Path(named)
    if not folder.is_dir():
        pytest.skip(f"TUNESMITH_DATA names {folder}, which is no folder")
    return folder


@pytest.fixture(scope="module")
def kernel_device() -> Iterator[str]:
    """The device of all tensors that a test makes: the GPU in `make test-gpu`, else the CPU.

    Random numbers are drawn on the CPU, so they are the same on both.
    """
    if not ON_GPU:
        yield "cpu"
        return
    import torch  # which most tests need, and the collection of the others does not

    def moved(draw: Callable[..., Any], *args: Any, **options: Any) -> Any:
        drawn = draw(*args, **{"device": "cpu", **options})
        return drawn if "device" in options else drawn.cuda()

    with pytest.MonkeyPatch.context() as patch, torch.device("cuda"):
        for name in ("rand", "randn", "randint", "randperm"):
            patch.setattr(torch, name, partial(moved, getattr(torch, name)))
        yield "cuda"


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Undoes what `core.log.configure`, and so every command run in this process, does to the logger."""
    logger = logging.getLogger("tunesmith")
    level, handlers, propagate = logger.level, list(logger.handlers), logger.propagate
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers
    logger.propagate = propagate


@pytest.fixture(scope="session")
def require() -> Require:
    """A function: `require("g++", "clang++")` is the path of the first of these tools that is installed; `path` has the
    folders to look in, in place of PATH.
    """

    def find(*tools: str, path: str | None = None) -> str:
        for tool in tools:
            found = shutil.which(tool, path=path)
            if found:
                return found
        reason = f"needs {' or '.join(tools)}, which is not installed"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{reason}, though CI installs what the tests use")
        pytest.skip(reason)

    return find


@pytest.fixture(scope="session")
def postgres(require: Require) -> Iterator[Any]:
    """A running server of PostgreSQL, see `tests/web/postgres_parts.py`."""
    from postgres_parts import PATH, Postgres  # which needs the store

    require("initdb", path=PATH)
    if importlib.util.find_spec("psycopg") is None:
        require("psycopg")
    server = Postgres().make()
    yield server
    server.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    """Where votes are: a file that is not there yet, and a database with empty tables."""
    if request.param == "sqlite":
        return tmp_path / "votes.db"
    return request.getfixturevalue("postgres").emptied()


@pytest.fixture(scope="session")
def chromium(require: Require) -> str:
    """Path of a Chromium browser, for Playwright's `executable_path`."""
    return require("chromium", "chromium-browser", "google-chrome")
