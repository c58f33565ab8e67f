"""Jobs whose runs are small: a process that makes the folder of its run, says so, and waits for a signal."""

import os
import signal
import sys
import time
from pathlib import Path

from tunesmith.base.core import faults
from tunesmith.base.runs.lock import is_locked
from tunesmith.collect.web import jobs
from tunesmith.collect.web.allowed import Allowed
from tunesmith.collect.web.wanted import Wanted

RUN = """
import fcntl, json, os, pathlib, signal, sys
words = sys.argv[1:]
root = pathlib.Path(words[1] if words[0] == "resume" else words[-1].partition("=")[2])
run = root if words[0] == "resume" else root / f"x-{os.environ['TUNESMITH_RUN_ID']}"
signals = open(root.parent / "signals", "a", buffering=1)
def leave(*_):
    signals.write(run.name + "\\n")
    os.unlink(run / "go_on") if (run / "go_on").exists() else sys.exit(143)
signal.signal(signal.SIGTERM, leave)
with open(root.parent / "began", "a", buffering=1) as file:
    file.write(run.name + "\\n")
print("this run has begun")
(run / "checkpoints" / "step-000001").mkdir(parents=True, exist_ok=True)
(run / "recipe.yaml").write_text("algorithm: grpo\\nmodel: {name: tiny:llama}\\n")
lock = open(run / "run.lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
while not (run / "end").exists():
    signal.sigtimedwait([], 0.02)
"""

WANTED = Wanted("grpo", settings=(("model.name", "tiny:llama"),))


def open_jobs(folder: Path, max_runs: int = 1, words: tuple[str, ...] = ()) -> jobs.Jobs:
    """The jobs in `folder`, with the runs below `runs`."""
    (folder / "runs").mkdir(exist_ok=True)
    jobs.command = lambda words: [sys.executable, "-S", "-c", RUN, *words]
    return jobs.Jobs(folder / "jobs", Allowed(folder / "runs", folder / "private", words), max_runs)


def add_until_killed(folder: Path, fault: str) -> None:
    """Ask for a run in a process that is killed at a fault point."""
    os.environ[faults.VARIABLE] = fault
    faults._plan.cache_clear()
    open_jobs(folder).add(WANTED, "key")
    wait_for(lambda: False)


def running(jobs: Path) -> list[int]:
    """Ids of the processes of the jobs in the folder `jobs`."""
    return [int(text) for lock in jobs.glob("*/run.lock") if is_locked(lock.parent) and (text := lock.read_bytes())]


def kill_runs(jobs: Path) -> None:
    """Kill the processes of the jobs in the folder `jobs`."""
    for process in running(jobs):
        os.killpg(process, signal.SIGKILL)


def wait_for(holds, seconds: float = 30.0):
    """The first true result of `holds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := holds():
            return found
        time.sleep(0.01)
    raise AssertionError("it does not come")


def num_steps(run: Path) -> int:
    """Steps that a run has recorded."""
    return len(lines(run, "metrics.jsonl"))


def lines(folder: Path, name: str) -> list[str]:
    """The lines of a file; none if there is no such file."""
    file = folder / name
    return file.read_text().splitlines() if file.exists() else []
