"""Every process that a run starts is killed, at random moments: the run goes on, with the same samples and weights."""

import contextlib
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from jobs import outcome, the_run
from recipes import PROMPTS, grpo_recipe, ppo_recipe

from tunesmith.base.core import child
from tunesmith.base.core.errors import ServerError
from tunesmith.engine.rollout.workers.local import Launcher
from tunesmith.learn.trainers.api import Inputs
from tunesmith.learn.trainers.run import run

Processes = Callable[[], list[psutil.Process]]

REWARD = """
def few_low(completion_ids, **kwargs):
    return [sum(token < 130 for token in ids) / len(ids) for ids in completion_ids]
"""


def children(module: str) -> list[psutil.Process]:
    """The processes that this one has started with this program."""
    found: list[psutil.Process] = []
    for one in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # also one that nobody has waited for yet
            if module in one.cmdline():
                found.append(one)
    return found


def workers() -> list[psutil.Process]:
    return [one for launcher in children(LAUNCHER) for one in launcher.children()]


def tracker() -> list[psutil.Process]:
    pid = multiprocessing.resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    return [] if pid is None else [psutil.Process(pid)]


def fork_server() -> list[psutil.Process]:
    pid = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return [] if pid is None else [psutil.Process(pid)]


LAUNCHER, CRITIC = "tunesmith.engine.rollout.workers.process", "tunesmith.learn.trainers.critic"
KINDS: dict[str, Processes] = {
    "launcher": lambda: children(LAUNCHER),
    "worker": workers,
    "reward": lambda: children("tunesmith.learn.rewards.process"),
    "critic": lambda: children(CRITIC),
}


@contextlib.contextmanager
def killing(victims: Processes, folder: Path, seed: int) -> Iterator[list[int]]:
    """A block in which one of `victims` is killed: when it begins, or a random time after a random step."""
    chance, ended, killed = random.Random(seed), threading.Event(), list[int]()
    num_rows, delay_s = (0, 0.0) if seed == 0 else (chance.randrange(3), 0.4 * chance.random())

    def kill() -> None:
        while not ended.is_set() and not killed:
            rows = sum(file.read_bytes().count(b"\n") for file in folder.glob("*/metrics.jsonl"))
            if rows >= num_rows and (found := victims()):
                time.sleep(delay_s)
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim = chance.choice(found)
                    victim.kill()
                    killed.append(victim.pid)
            time.sleep(0.01)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        ended.set()
        thread.join()


def trained(folder: Path, reward: Path) -> object:
    """The outcome of a run that starts every kind of process."""
    source = {"source": f"{reward}:few_low", "workers": 1}
    cfg = ppo_recipe(
        folder,
        run={"dir": str(folder), "steps": 4, "num_threads": 1, "sample_every": 1},
        scale={"workers": 2, "lease": 2},
        ppo={"critic": "separate", "critic_process": True},
        optimizer={"learning_rate": 1e-2},
        reward=[source],
    )
    run(cfg, Inputs(prompts=PROMPTS), progress=False)
    return outcome(the_run(folder))


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reward") / "functions.py"
    path.write_text(REWARD)
    return path


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, reward: Path) -> object:
    """The outcome of the run to which nothing happened."""
    return trained(tmp_path_factory.mktemp("whole"), reward)


# By day each kind is killed twice: here, and together with the others.
@pytest.mark.parametrize(
    "seed", [pytest.param(0, marks=pytest.mark.nightly), 1, pytest.param(2, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_process_that_is_killed_changes_nothing(
    kind: str, seed: int, expected: object, reward: Path, tmp_path: Path
) -> None:
    with killing(KINDS[kind], tmp_path, seed) as killed:
        assert trained(tmp_path, reward) == expected
    assert killed


def test_all_of_them_are_killed_in_one_run(expected: object, reward: Path, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(killing(one, tmp_path, 7 + n)) for n, one in enumerate(KINDS.values())]
        assert trained(tmp_path, reward) == expected
    assert all(found)


def on_ranks(folder: Path) -> object:
    section = {"dir": str(folder), "steps": 4, "num_threads": 1, "sample_every": 1}
    cfg = grpo_recipe(folder, run=section, scale={"ranks": 2}, reward=[{"source": "unique_chars"}])
    run(cfg, Inputs(prompts=PROMPTS), progress=False)
    return outcome(the_run(folder))


@pytest.mark.parametrize("victims", [fork_server, pytest.param(tracker, marks=pytest.mark.nightly)])
def test_the_processes_behind_the_ranks_may_be_killed(victims: Processes, tmp_path: Path) -> None:
    expected = on_ranks(tmp_path / "whole")
    with killing(victims, tmp_path / "killed", seed=3) as killed:
        assert on_ranks(tmp_path / "killed") == expected
    assert killed
    assert on_ranks(tmp_path / "after") == expected  # in a process that has lost its fork server


def test_a_launcher_that_can_never_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    start = child.start
    monkeypatch.setattr(child, "start", lambda module: start("tunesmith.no_such_module"))
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs, pytest.raises(ServerError, match="ended with exit code 1, 3 times"):
        Launcher().fork(theirs)


def test_a_child_names_how_it_ended() -> None:
    one = child.Child("tunesmith.learn.trainers.critic", None)  # which is no set-up
    with pytest.raises((EOFError, OSError)):
        one.send(None)
        one.receive(60)
    assert one.end() == "ended with exit code 1"
    assert one.end() == "has not begun"
    assert child.how_it_ended(-signal.SIGSEGV) == "was ended by SIGSEGV"
