"""A fault strikes at its place and its visit, and nowhere without the variable."""

import errno
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tunesmith.base.core.faults import ACTIONS, VARIABLE

PROGRAM = """
import signal
import sys
from tunesmith.base.core.faults import reach

for name in ("SIGTERM", "SIGINT"):
    signal.signal(getattr(signal, name), lambda number, frame: print("signal", number, flush=True))
for place in sys.argv[1:]:
    try:
        reach(place)
        print("passed", place, flush=True)
    except (OSError, MemoryError, RuntimeError) as error:
        print(type(error).__name__, getattr(error, "errno", ""), error, flush=True)
"""


def run(fault: str | None, *places: str) -> tuple[int, list[str]]:
    """Exit code and printed lines of a process that comes to `places`, one after the other."""
    environment = {"PYTHONPATH": ":".join(sys.path), **({} if fault is None else {VARIABLE: fault})}
    command = [sys.executable, "-c", PROGRAM, *places]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout.splitlines() or done.stderr.splitlines()[-1:]


@pytest.mark.parametrize("fault", [None, ""])
def test_without_a_plan_every_place_is_passed(fault: str | None) -> None:
    assert run(fault, "a", "a", "b") == (0, ["passed a", "passed a", "passed b"])


def test_a_kill_ends_the_process_at_its_place_and_no_other() -> None:
    code, lines = run("save/renamed:kill", "save", "save/renamed/x", "save/renamed", "after")
    assert code == -signal.SIGKILL
    assert lines == ["passed save", "passed save/renamed/x"]


def test_the_number_is_the_visit_at_which_it_strikes_once() -> None:
    code, lines = run("a:raise:2", "a", "b", "a", "a")
    assert code == 0
    assert lines == ["passed a", "passed b", "RuntimeError  fault at a", "passed a"]


@pytest.mark.parametrize(
    ("action", "line"),
    [
        ("term", f"signal {int(signal.SIGTERM)}"),
        ("interrupt", f"signal {int(signal.SIGINT)}"),
        ("disk_full", f"OSError {errno.ENOSPC} "),
        ("memory", "MemoryError  fault at a"),
        ("raise", "RuntimeError  fault at a"),
    ],
)
def test_each_action_does_what_its_name_says(action: str, line: str) -> None:
    code, lines = run(f"a:{action}", "a")
    assert code == 0
    assert lines[0].startswith(line)
    # After a signal the process goes on where it was.
    assert lines[1:] == (["passed a"] if action in ("term", "interrupt") else [])


def test_several_faults_are_planned_at_once() -> None:
    code, lines = run("a:raise:1,b:memory:2,a:kill:3", "a", "b", "b", "a", "a", "b")
    assert code == -signal.SIGKILL
    assert lines == ["RuntimeError  fault at a", "passed b", "MemoryError  fault at b", "passed a"]


def test_a_slow_place_sleeps_at_every_visit_and_goes_on() -> None:
    start_s = time.monotonic()
    assert run("a:slow:200,b:raise:2", "a", "a", "b", "b") == (
        0,
        ["passed a", "passed a", "passed b", "RuntimeError  fault at b"],
    )
    assert time.monotonic() - start_s >= 0.4


def test_an_unknown_action_is_named_with_those_that_exist() -> None:
    code, lines = run("a:explode", "a")
    assert code == 1
    assert "'explode'" in lines[0]
    assert all(action in lines[0] for action in ACTIONS)


def test_a_span_is_a_place_under_its_path(tmp_path: Path) -> None:
    program = (
        "from tunesmith.base.core.trace import span, trace\n"
        "with trace():\n"
        "    with span('update'):\n"
        "        print('inside', flush=True)\n"
        "        with span('forward'):\n"
        "            print('never')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(sys.path), VARIABLE: "update/forward:kill"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == "inside\n"
