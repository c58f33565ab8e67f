"""A pytest plugin for TRL's own tests: stand-ins instead of the Hub, another module's trainers, outcomes in a file.

Outcomes: passed, failed, skipped, missing (it needs something of the Hub for which there is no stand-in). Before they
run all tests are written as waiting, and each as started before it runs; one that ended the process stays so.
"""

import importlib
import json
import math
import re
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import trl

_FINAL = ("passed", "failed", "skipped", "missing", "died")
_MISSING = re.compile(r"no stand-in for|couldn't connect to|LocalEntryNotFoundError|OfflineModeIsEnabled")
_WORST = ("passed", "skipped", "failed", "missing")


def read_log(path: Path) -> dict[str, str]:
    """The last outcome of each test in the file."""
    lines = path.read_text().splitlines() if path.is_file() else ()
    return {line["test"]: line["outcome"] for line in map(json.loads, lines)}


def started(path: Path) -> list[str]:
    """Tests that were started and not finished."""
    return [test for test, outcome in read_log(path).items() if outcome == "started"]


def write_log(path: Path, test: str, outcome: str, **facts: object) -> None:
    """Add an outcome to the file."""
    with path.open("a") as log:
        log.write(json.dumps({"test": test, "outcome": outcome, **facts}) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the plugin."""
    parser.addoption("--trl-ours", help="the module whose trainers are tested; trl for its own")
    parser.addoption("--trl-trainer", help="name of the trainer that it must have")
    parser.addoption("--trl-standins", type=Path, help="folder of stand-ins")
    parser.addoption("--trl-log", type=Path, help="file of outcomes")
    parser.addoption("--trl-first", type=int, help="how many tests of the file to run")
    parser.addoption("--trl-until", type=float, default=math.inf, help="no test begins after this Unix time")
    parser.addoption("--trl-last", type=Path, default=Path(), help="a file of outcomes; what passed there is run last")


def pytest_configure(config: pytest.Config) -> None:
    """Replace what test modules import, before they do."""
    given = config.option
    utilities: Any = importlib.import_module("trl.import_utils")
    utilities.__getattr__ = _not_available  # the tests may be of another version, which knew more libraries
    utilities.is_jmespath_available = lambda: True  # tests of tools ask for it; transformers needs it no more
    suite = given.trl_trainer.removesuffix("Trainer").lower()
    tested: Any = importlib.import_module(f"trl.trainer.{suite}_trainer")
    tested.__getattr__ = _removed  # one name that is gone would keep all tests of a file from being collected
    datasets.load_dataset = lambda *names, **options: _load(given.trl_standins / "datasets", *names, **options)
    if given.trl_ours != "trl":
        module = importlib.import_module(given.trl_ours)
        if not hasattr(module, given.trl_trainer):
            raise pytest.UsageError(f"{given.trl_ours} has no {given.trl_trainer}")
        for name in filter(lambda name: name.endswith("Trainer"), dir(module)):
            setattr(trl, name, getattr(module, name))
    config.pluginmanager.register(_Outcomes(given))


def _not_available(name: str) -> Any:
    if name.startswith("is_"):
        return lambda *_, **__: False
    raise AttributeError(f"trl.import_utils has no {name}")


def _removed(name: str) -> Callable[..., None]:
    """A stand-in for a function that the installed TRL lacks: a test that calls it fails."""
    if name.startswith("__"):
        raise AttributeError(name)

    def call(*_: object, **__: object) -> None:
        raise NotImplementedError(f"TRL {trl.__version__} has no {name}")

    return call


@pytest.fixture
def lazy_shared_datadir(request: pytest.FixtureRequest) -> Path:
    """The folder `data` beside the tests, as pytest-datadir names it; they only read it."""
    return request.path.parent / "data"


def _load(folder: Path, repo: str, name: str = "default", *, split: str = "", streaming: bool = False) -> Any:
    path = folder / repo.rpartition("/")[2] / name
    if not path.exists():
        raise FileNotFoundError(f"no stand-in for the data set {repo}, {name}")
    parts: Any = datasets.load_from_disk(str(path))
    if split:
        whole, _, end = split.partition("[:")
        parts = parts[whole].select(range(int(end[:-1]))) if end else parts[whole]
    if not streaming:
        return parts
    if split:
        return parts.to_iterable_dataset()
    return datasets.IterableDatasetDict({key: part.to_iterable_dataset() for key, part in parts.items()})


class _Outcomes:
    def __init__(self, given: Namespace) -> None:
        self._path, self._given = given.trl_log, given
        self._found: dict[str, tuple[str, str]] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        known, last = read_log(self._path), read_log(self._given.trl_last)
        items[:] = [item for item in items[: self._given.trl_first] if known.get(item.nodeid) not in _FINAL]
        items.sort(key=lambda item: last.get(item.nodeid) == "passed")
        for item in items:
            write_log(self._path, item.nodeid, "waiting")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        return True if time.time() > self._given.trl_until else None

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._found[nodeid] = ("passed", "")
        write_log(self._path, nodeid, "started")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome, text = report.outcome, report.longreprtext
        if outcome == "failed" and _MISSING.search(text):
            outcome = "missing"
        if _WORST.index(outcome) > _WORST.index(self._found[report.nodeid][0]):
            reasons = [line for line in text.splitlines() if line.startswith("E ")] or text.splitlines()
            self._found[report.nodeid] = (outcome, "\n".join(reasons[:4]))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        outcome, reason = self._found.pop(nodeid)
        write_log(self._path, nodeid, outcome, reason=reason)
