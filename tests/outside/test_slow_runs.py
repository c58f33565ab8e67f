"""Runs that are slow for reasons that people report: rare slow steps, locks, disks, services, and advice about them.

Each wait is a real one of half a second or so, and what is asked is whether it is named, with its line; never seconds.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import gc
import json
import logging
import multiprocessing
import os
import queue
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tunesmith import train
from tunesmith.base.config.schema import RECIPES
from tunesmith.base.core.trace import span, trace
from tunesmith.learn.trainers.api import Listener, Wishes
from tunesmith.learn.trainers.run import run
from tunesmith.observe.profiling.diagnosis import Diagnosis, diagnose
from tunesmith.observe.profiling.facts import read_facts
from tunesmith.observe.profiling.meter import metering
from tunesmith.observe.profiling.stacks import Stacks
from tunesmith.observe.profiling.waits import (
    DEVICE,
    FAULT,
    FILE,
    FOLDER,
    FUTEX,
    LOCK,
    POLLS,
    RUNS,
    SLEEPS,
    UNKNOWN,
    Call,
    kind_of,
)

WAIT_S = 0.6
SMALL = {"rollout.max_new_tokens": 4, "rollout.prompts_per_step": 2, "run.checkpoint_every": 0}

Place = Mapping[str, Any]


@pytest.fixture(autouse=True)
def _tools(require: Callable[..., str]) -> None:
    """Stacks are looked at by a thread written in C++."""
    require("c++", "g++", "clang++")
    if not Path("/proc/self/syscall").is_file():
        pytest.skip("this kernel does not say in which call a thread waits")


def places_of(work: Callable[[], object]) -> list[Place]:
    """The places at which the time of `work` went, that of most of it first."""
    with metering() as meter, trace():
        with span("reward"):
            work()
        (row,) = meter.places(1, is_last=True)
    places = row["places"]
    assert isinstance(places, list)
    return [place for place in places if place["stage"] == "reward"]


def place_of(work: Callable[[], object]) -> Place:
    """The place at which most of the time of `work` went."""
    return places_of(work)[0]


def wait_of(work: Callable[[], object]) -> Place:
    """The longest wait of `work`. A thread that is ready and has no core "computes", on a busy machine for longer than
    these waits take.
    """
    return next(place for place in places_of(work) if place["kind"] != "computes")


def line_of(place: Place) -> str:
    """The source of the line that was named."""
    assert place["file"] == __file__
    return Path(__file__).read_text(encoding="utf-8").splitlines()[place["line"] - 1].strip()


def late(what: Callable[[], object]) -> threading.Thread:
    """A thread that does `what` after a while."""

    def run() -> None:
        time.sleep(WAIT_S)
        what()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_a_sleep_has_its_line() -> None:
    """A reward sleeps between attempts. Reported: issue 45.27."""
    place = wait_of(lambda: time.sleep(WAIT_S))
    assert (place["kind"], place["text"]) == ("sleep", "time.sleep(WAIT_S)")


def test_threads_that_queue_for_a_lock_wait_for_the_lock_and_not_for_a_service() -> None:
    """A pool of a reward guards its client by a lock, so that its threads take turns. Reported: issue 45.27."""
    lock = threading.Lock()

    def ask(_: int) -> None:
        with lock:
            time.sleep(0.1)  # much longer than a lock takes to change hands on a busy machine

    def score() -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, range(24)))

    place = wait_of(score)
    assert (place["kind"], line_of(place)) == ("lock", "with lock:")
    assert place["threads"] > 4
    assert place["others"]["kind"] == "sleep" and place["others"]["text"].startswith("time.sleep(0.1)")


def test_a_pool_whose_threads_all_wait_for_a_service_does_not_wait_for_a_lock() -> None:
    """A reward asks a service from a pool of threads; the training thread waits for futures. Reported: issue 45.27."""
    listener = socket.create_server(("127.0.0.1", 0))

    def ask(_: int) -> None:
        address = listener.getsockname()
        with socket.create_connection(address, timeout=WAIT_S) as connection, contextlib.suppress(TimeoutError):
            connection.recv(1)

    def score() -> None:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(ask, range(4)))

    place = wait_of(score)
    listener.close()
    assert (place["kind"], place["text"]) == ("network", "connection.recv(1)")


def test_a_lock_that_another_part_of_the_program_holds_names_who_does() -> None:
    """A cache is guarded by a lock that another thread holds while it sleeps. Reported: issue 45.27."""
    lock, is_held = threading.Lock(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            time.sleep(WAIT_S)

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    place = wait_of(lambda: lock.acquire())
    thread.join()
    assert (place["kind"], place["others"]["text"]) == ("lock", "time.sleep(WAIT_S)")


def test_syncing_each_character_is_the_disk_and_not_computing(tmp_path: Path) -> None:
    """A reward writes a log and syncs it for each character. Reported: issue 45.27."""

    def score() -> None:
        with (tmp_path / "log").open("wb") as file:
            end_s = time.monotonic() + WAIT_S
            while time.monotonic() < end_s:
                file.write(b"x")
                file.flush()
                os.fsync(file.fileno())

    place = place_of(score)
    assert (place["kind"], place["text"]) == ("disk", "os.fsync(file.fileno())")


def test_a_queue_that_is_filled_late_is_a_queue() -> None:
    """A reward waits for a queue that a thread of its own fills. Reported: issue 45.27."""
    results: queue.Queue[int] = queue.Queue()

    def slow() -> None:
        time.sleep(WAIT_S)
        results.put(1)

    threading.Thread(target=slow).start()
    place = wait_of(lambda: results.get())
    assert place["kind"] in ("queue", "sleep"), "the thread that fills it sleeps"
    assert place["text"] in ("results.get()", "time.sleep(WAIT_S)")
    alone = wait_of(lambda: contextlib.suppress(queue.Empty).__exit__(*caught(lambda: results.get(timeout=WAIT_S))))
    assert (alone["kind"], alone["text"]) == ("queue", "results.get(timeout=WAIT_S)")


def caught(what: Callable[[], object]) -> tuple[Any, Any, Any]:
    """The error that `what` raises."""
    try:
        what()
    except queue.Empty:
        return sys.exc_info()
    raise AssertionError


def test_a_child_process_is_one_and_not_a_service() -> None:
    """A reward starts a checker for each completion. Reported: issue 45.27."""
    command = [sys.executable, "-c", f"import time; time.sleep({WAIT_S})"]
    place = wait_of(lambda: subprocess.run(command, check=True, capture_output=True))
    assert place["kind"] == "process"
    assert line_of(place) == "place = wait_of(lambda: subprocess.run(command, check=True, capture_output=True))"


def test_a_process_of_multiprocessing_is_one() -> None:
    """A reward waits for a process of a pool of its own. Reported: issue 45.27."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=time.sleep, args=(WAIT_S,))
    process.start()
    assert wait_of(process.join)["kind"] == "process"


def test_a_pipe_that_nobody_reads_is_a_pipe() -> None:
    """A reward prints, and what reads the output of the training is slow. Reported: issue 45.27."""
    read_end, write_end = os.pipe()
    late(lambda: os.read(read_end, 1 << 20))
    place = wait_of(lambda: os.write(write_end, b"x" * 100_000))
    os.close(read_end)
    os.close(write_end)
    assert (place["kind"], place["text"]) == ("pipe", 'os.write(write_end, b"x" * 100_000)')


def test_a_database_that_is_locked_is_no_sleep(tmp_path: Path) -> None:
    """A reward keeps its cache in SQLite, which another connection writes to. Reported: issue 45.27."""
    holder = sqlite3.connect(tmp_path / "cache.db", isolation_level=None, check_same_thread=False)
    holder.execute("CREATE TABLE seen (text)")
    holder.execute("BEGIN IMMEDIATE")
    late(lambda: holder.execute("COMMIT"))
    writer = sqlite3.connect(tmp_path / "cache.db", isolation_level=None, timeout=30)
    place = wait_of(lambda: writer.execute("INSERT INTO seen VALUES ('a')"))
    assert (place["kind"], place["text"]) == ("database", "writer.execute(\"INSERT INTO seen VALUES ('a')\")")


def test_a_locked_file_is_one(tmp_path: Path) -> None:
    """Runs on one machine share a cache guarded by flock. Reported: issue 45.27."""
    first, second = ((tmp_path / "lock").open("w") for _ in range(2))
    fcntl.flock(first, fcntl.LOCK_EX)
    late(lambda: fcntl.flock(first, fcntl.LOCK_UN))
    place = wait_of(lambda: fcntl.flock(second, fcntl.LOCK_EX))
    assert (place["kind"], place["text"]) == ("file_lock", "fcntl.flock(second, fcntl.LOCK_EX)")
    for file in (first, second):
        file.close()


def test_a_handler_of_logging_that_waits_is_named_where_it_does() -> None:
    """A handler sends each record to a service, and threads queue for its lock. Reported: issue 45.27."""

    class Slow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            time.sleep(0.03)

    log = logging.getLogger("test_slow_runs")
    log.addHandler(Slow())
    log.propagate = False
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(lambda: [log.warning("other") for _ in range(20)])
        place = wait_of(lambda: [log.warning("own") for _ in range(20)])
        others.result()
    log.handlers.clear()
    assert place["kind"] in ("lock", "sleep")
    assert place["text"] in ('log.warning("own")', "time.sleep(0.03)")


def test_coroutines_that_sleep_have_their_line() -> None:
    """An asynchronous reward paces its requests. Reported: issue 45.27."""

    async def ask() -> None:
        await asyncio.sleep(WAIT_S)

    async def score() -> None:
        await asyncio.gather(*(ask() for _ in range(4)))

    place = wait_of(lambda: asyncio.run(score()))
    assert (place["kind"], line_of(place)) == ("sleep", "await asyncio.sleep(WAIT_S)")


def test_c_code_that_keeps_the_interpreters_lock_is_named_by_the_line_that_calls_it() -> None:
    """A library of a reward computes in another thread without giving the lock away. Reported: issue 45.27."""
    library = ctypes.PyDLL(None)
    thread = threading.Thread(target=lambda: [library.usleep(300_000) for _ in range(5)])

    def score() -> None:
        thread.start()
        while thread.is_alive():
            time.sleep(0.001)

    place = wait_of(score)
    assert place["kind"] == "gil"
    assert place["others"]["text"] == "library.usleep(300_000)"


def test_a_thread_of_python_that_never_rests_is_named_as_the_one_with_the_lock() -> None:
    """A thread of a callback computes in pure Python beside the training. Reported: issue 45.27."""
    is_over = threading.Event()

    def spin() -> None:
        while not is_over.is_set():
            sum(range(20_000))

    thread = threading.Thread(target=spin)
    thread.start()

    def score() -> None:
        end_s = time.monotonic() + 2 * WAIT_S
        while time.monotonic() < end_s:
            time.sleep(0)

    place = place_of(score)
    is_over.set()
    thread.join()
    assert place["kind"] in ("gil", "computes")
    if place["kind"] == "gil":
        assert place["others"]["function"].endswith("spin")


def diagnosed(result: train.RunResult) -> tuple[Diagnosis, list[str]]:
    """The diagnosis of a run, and the names of its causes."""
    found = diagnose(read_facts(result.run_dir))
    return found, [cause.name for cause in found.causes]


def counted(every: int, wait: Callable[[], object]) -> Callable[..., list[float]]:
    """A reward that waits in one call of `every`."""
    calls = iter(range(1, 1_000))

    def rare(completions: list[str], **_: object) -> list[float]:
        if next(calls) % every == 0:
            wait()
        return [float(len(set(text))) for text in completions]

    return rare


def test_a_reward_that_sleeps_in_one_call_of_five_is_the_cause_with_its_share_of_the_run(tmp_path: Path) -> None:
    """A reward waits for seconds now and then; the median step is quick. Reported: issue 45.27."""
    reward = counted(5, lambda: time.sleep(6.0))
    result = train.grpo(
        model="tiny:llama", reward=reward, steps=12, progress=False, **SMALL, **{"run.dir": str(tmp_path)}
    )
    found, names = diagnosed(result)
    cause = found.causes[names.index("slow_steps")]
    assert cause.figures["steps"] == [5, 10]
    assert cause.figures["stage"] == "reward/rare"
    assert (cause.figures["kind"], cause.figures["text"]) == ("sleep", "time.sleep(6.0)")
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()][1:]
    share = 12.0 / (sum(row["time/step_s"] for row in rows) - rows[-1].get("time/evaluate_s", 0.0))
    assert cause.share == pytest.approx(share, abs=0.03)
    assert "remote_reward_serial" not in names


def test_computing_is_no_wait() -> None:
    """A reward computes in Python. Reported: issue 45.27."""

    def score() -> None:
        end_s = time.monotonic() + WAIT_S
        while time.monotonic() < end_s:
            sum(range(20_000))

    place = place_of(score)
    assert place["kind"] == "computes"
    assert place["function"].endswith("score")


class Sleeper(Listener):
    """A callback that waits after some steps."""

    def step_ended(self, step: int, metrics: Mapping[str, float]) -> Wishes:
        if step in (4, 8):
            time.sleep(5.0)
        return Wishes()


def test_a_callback_that_waits_after_some_steps_is_named_with_its_line(tmp_path: Path) -> None:
    """A callback uploads a sample now and then. Reported: issue 45.27."""
    sections = {
        "model": {"name": "tiny:llama"},
        "rollout": {"max_new_tokens": 4, "prompts_per_step": 2},
        "reward": [{"source": "length"}],
        "run": {"dir": str(tmp_path), "steps": 11, "checkpoint_every": 0},
    }
    found, names = diagnosed(run(RECIPES["grpo"].model_validate(sections), listener=Sleeper(), progress=False))
    cause = found.causes[names.index("slow_steps")]
    assert (cause.figures["stage"], cause.figures["steps"]) == ("callback", [5, 9])
    assert (cause.figures["kind"], cause.figures["text"]) == ("sleep", "time.sleep(5.0)")
    assert cause.share > 0.3


def test_a_reward_that_gives_the_same_number_to_all_is_what_to_look_at(tmp_path: Path) -> None:
    """The parser of a reward matches nothing, so all groups are equal. Reported: issue 45.23."""

    def constant(completions: list[str], **_: object) -> list[float]:
        return [0.0] * len(completions)

    settings = {**SMALL, "run.dir": str(tmp_path)}
    result = train.grpo(model="tiny:llama", reward=constant, steps=5, progress=False, **settings)
    cause = diagnosed(result)[0].causes[0]
    assert (cause.name, dict(cause.settings)) == ("no_signal_groups", {})
    assert "the reward gives all completions the same number" in cause.advice


def test_a_slow_first_call_is_no_cause_for_the_rest_of_the_run(tmp_path: Path) -> None:
    """A reward loads its model at the first call. Reported: issue 45.27."""
    calls = iter(range(1, 1_000))

    def loads(completions: list[str], **_: object) -> list[float]:
        if next(calls) == 1:
            time.sleep(6.0)
        return [float(len(set(text))) for text in completions]

    settings = {**SMALL, "run.dir": str(tmp_path)}
    result = train.grpo(model="tiny:llama", reward=loads, steps=6, progress=False, **settings)
    found, names = diagnosed(result)
    assert "sleep" not in names
    assert not any(cause.figures.get("kind") == "sleep" for cause in found.causes)
    assert found.warm_up_s > 6.0


@pytest.mark.parametrize(
    ("does", "target", "calls", "kind"),
    [
        (POLLS, "socket:[1]", [("socket.py", "getaddrinfo", "_socket.getaddrinfo(host, port)")], "name_lookup"),
        (FAULT, "", [], "memory"),
        (FILE, "/mnt/data/rows.jsonl", [], "disk"),
        (FILE, "socket:[7]", [("ssl.py", "read", "self._sslobj.read(len, buffer)")], "network"),
        (FILE, "/dev/pts/3", [], "pipe"),
        (FOLDER, "", [], "disk"),
        (FUTEX, "", [("queue.py", "get", "self.not_empty.wait()")], "queue"),
        (FUTEX, "", [("threading.py", "_wait_for_tstate_lock", "lock.acquire(block, timeout)")], "threads"),
        (SLEEPS, "", [("filelock/_api.py", "acquire", "time.sleep(poll_interval)")], "file_lock"),
        (LOCK, "", [], "gil"),
        (UNKNOWN, "", [], "other"),
        (DEVICE, "/dev/nvidia0", [], "gpu"),
        (RUNS, "", [], "computes"),
    ],
)
def test_what_cannot_be_planted_here_is_judged_by_call_and_stack(
    does: int, target: str, calls: list[tuple[str, str, str]], kind: str
) -> None:
    """Name servers, swap, network disks and GPUs make runs wait, too. Reported: issue 45.27."""
    library = [Call(f"/usr/lib/python3/{file}", 1, function, text) for file, function, text in calls]
    assert kind_of(does, target, [*library, Call("/home/ann/grpc/requests/reward.py", 3, "score", "f(x)")]) == kind


COLLECTS = """
import gc, threading
from tunesmith.observe.profiling.stacks import current_frames

ended = threading.Event()
threads = [threading.Thread(target=ended.wait, daemon=True) for _ in range(50)]
for thread in threads:
    thread.start()
gc.collect()
gc.set_threshold(40)  # the frames of these threads begin a collection
row = [threading.local()]
row[0].value = 1
row.append(row)
del row
print(len(current_frames()))
ended.set()
"""


def test_stacks_are_read_while_garbage_with_thread_locals_is_left() -> None:
    """A training stopped for ever where its stacks were read: `sys._current_frames` waits for itself if a collection
    frees a `threading.local` meanwhile. Reported: python/cpython#106883.
    """
    done = subprocess.run([sys.executable, "-c", COLLECTS], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) == 50


def test_what_a_step_computed_with_is_freed_where_stacks_were_read() -> None:
    """Frames that were read keep the tensors of the training thread until the next collection, and crashed it.
    Reported: issue 45.27.
    """
    stacks = Stacks()

    def step() -> "weakref.ref[object]":
        activations = {1, 2, 3}
        looks = threading.Thread(target=stacks.look, args=(RUNS, -1, 1_000_000))
        looks.start()
        looks.join()
        return weakref.ref(activations)

    gc.disable()
    try:
        assert step()() is None
    finally:
        gc.enable()
