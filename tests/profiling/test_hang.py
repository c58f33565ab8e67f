"""Trainings that hang, for real, in processes of their own: who reads their report is told where."""

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from jobs import start, the_run

from tunesmith.apps.cli.main import main
from tunesmith.base.core.errors import RunError
from tunesmith.base.runs.folder import read_jsonl
from tunesmith.observe.profiling.hang import HangReport, parse_stacks, report
from tunesmith.observe.profiling.processes import catches
from tunesmith.observe.profiling.stage import Record, read
from tunesmith.observe.profiling.watchdog import HANG_FILE, watched

WORDS = ["--model", "tiny:llama", "--steps", "2", "--rollout.max_new_tokens", "4", "--rollout.prompts_per_step", "2"]
LIMIT_S = 120.0

SLEEPS = """
import time
def frozen(completions, **kwargs):
    time.sleep(1000)  # here
"""
LOOPS = """
def frozen(completions, **kwargs):
    while True:  # here
        pass  # here
"""
HOLDS_THE_LOCK = """
import re
def frozen(completions, **kwargs):
    re.match("(a+)+$", "a" * 60 + "b")  # here
"""
HOLDS_THE_LOCK_FOR_A_WHILE = """
import ctypes, pathlib
def frozen(completions, **kwargs):
    if not pathlib.Path("{done}").exists():
        ctypes.PyDLL(None).usleep(6_000_000)
    pathlib.Path("{done}").touch()
    return [float(len(completion)) for completion in completions]
"""
ASKS = """
import urllib.request
def frozen(completions, **kwargs):
    return urllib.request.urlopen("http://127.0.0.1:{port}").read()  # here
"""
ASKS_ASYNC = """
import asyncio
async def frozen(completions, **kwargs):
    reader, writer = await asyncio.open_connection("127.0.0.1", {port})
    return await reader.read()
"""
WAITS = """
import os, time
def frozen(completions, **kwargs):
    while not os.path.exists("{gate}"):
        time.sleep(0.01)  # here
    return [float(len(completion)) for completion in completions]
"""


@contextmanager
def training(folder: Path, code: str, *words: str) -> Iterator[tuple[BaseProcess, Path]]:
    """A GRPO run whose reward is `frozen` in `code`, and its folder, once that reward was called."""
    (folder / "rewards.py").write_text(code)
    given = [*WORDS, "--reward", f"{folder}/rewards.py:frozen", "--run.dir", str(folder / "runs"), "--quiet", *words]
    process = start(main, ["train", "grpo", *given])
    try:
        until(lambda: (found := record_of(folder)) is not None and "reward" in found.threads[0].path)
        yield process, the_run(folder / "runs")
    finally:
        process.kill()
        process.join()


def record_of(folder: Path) -> Record | None:
    return next((read(run) for run in (folder / "runs").glob("*")), None)


def until(holds: Callable[[], Any], limit_s: float = LIMIT_S) -> None:
    end_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end_s, "it does not happen"
        time.sleep(0.02)


def asked(run_dir: Path) -> HangReport:
    """A report with stacks: the reward has been called once its frame is on a stack."""
    found: list[HangReport] = []
    until(lambda: found.append(report(run_dir, is_hung=True)) or (found[-1].reward and found[-1].reward.function))
    return found[-1]


def lines_here(folder: Path) -> list[int]:
    text = (folder / "rewards.py").read_text().splitlines()
    return [number for number, line in enumerate(text, 1) if line.endswith("# here")]


@contextmanager
def dead_server() -> Iterator[int]:
    """The port of a server that takes connections and requests and never answers."""
    kept: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                kept.append(listening.accept()[0])
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
    for one in kept:
        one.close()


@pytest.mark.parametrize("code", [SLEEPS, LOOPS], ids=["a call in C", "a loop in Python"])
def test_a_frozen_reward_is_named_with_its_function_and_line(code: str, tmp_path: Path) -> None:
    with training(tmp_path, code) as (process, run_dir):
        found = asked(run_dir)
    assert found.is_hung
    assert (found.pid, found.step, found.stage) == (process.pid, 1, "reward/frozen")
    assert found.reward is not None
    assert found.reward.name == "frozen"
    assert found.reward.function is not None
    assert found.reward.function.file == str(tmp_path / "rewards.py")
    assert found.reward.function.function == "frozen"
    assert found.reward.function.line in lines_here(tmp_path)
    assert found.threads[0].tid == process.pid
    assert found.threads[0].stack
    assert "the reward `frozen` has not returned: frozen (" in found.summary
    assert "rewards.py:" in "\n".join(found.lines())


@pytest.mark.parametrize("words", [["--reward.0.timeout_s", "900"], ["--rollout.score_while_drawing", "true"]])
def test_a_reward_that_is_frozen_in_another_thread_is_named_too(words: list[str], tmp_path: Path) -> None:
    with training(tmp_path, SLEEPS, *words) as (_, run_dir):
        found = asked(run_dir)
    assert found.reward is not None
    assert found.reward.name == "frozen"
    assert found.reward.function is not None
    assert found.reward.function.line in lines_here(tmp_path)


def test_a_hang_is_noticed_from_outside_after_a_while_and_shown_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with training(tmp_path, LOOPS) as (_, run_dir):
        early = report(run_dir)
        assert not early.is_hung or early.silent_s is None or early.silent_s > 10
        until(lambda: report(run_dir).is_hung)
        assert report(run_dir.parent.parent).run == run_dir, "a folder with runs in it, as that of a demo"
        assert main(["diagnose", str(run_dir), "--hang", "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert main(["diagnose", str(run_dir), "--hang"]) == 0
        shown = capsys.readouterr().out
    assert facts["is_hung"]
    assert facts["reward"]["function"]["line"] in lines_here(tmp_path)
    assert facts["silent_s"] > 10
    assert "the reward `frozen` has not returned" in shown


def test_c_code_that_holds_the_interpreters_lock_is_named_from_outside_and_by_the_timer(tmp_path: Path) -> None:
    with training(tmp_path, HOLDS_THE_LOCK, "--run.hang_after_s", "1") as (_, run_dir):
        until(lambda: "Timeout" in (run_dir / "stacks.txt").read_text())
        until(lambda: "holds the interpreter's lock" in report(run_dir, is_hung=True).summary)
        found = asked(run_dir)
    assert found.reward is not None
    assert found.reward.function is not None
    assert found.reward.function.line in lines_here(tmp_path)
    by_timer = parse_stacks((run_dir / "stacks.txt").read_text().split("Timeout")[1])
    assert any(frame.function == "frozen" for stack in by_timer.values() for frame in stack)


def test_a_lock_that_was_held_and_is_free_again_is_a_finding(tmp_path: Path) -> None:
    code = HOLDS_THE_LOCK_FOR_A_WHILE.format(done=tmp_path / "done")
    with training(tmp_path, code, "--run.hang_after_s", "2") as (process, run_dir):
        process.join(LIMIT_S)
        assert process.exitcode == 0
    messages = [str(row["message"]) for row in read_jsonl(run_dir / "findings.jsonl") if row["name"] == "hang"]
    assert any("no thread of Python ran for" in message for message in messages)
    assert "frozen" in (run_dir / "stacks.txt").read_text()
    assert "no thread of Python ran for" in (run_dir / HANG_FILE).read_text()


@pytest.mark.parametrize("code", [ASKS, ASKS_ASYNC], ids=["sync", "async"])
def test_a_dead_remote_reward_is_named_with_its_address(code: str, tmp_path: Path) -> None:
    with dead_server() as port, training(tmp_path, code.format(port=port)) as (_, run_dir):
        until(lambda: report(run_dir).connections)
        found = report(run_dir, is_hung=True)
    assert found.connections == (f"127.0.0.1:{port} (ESTABLISHED)",)
    assert f"connected to 127.0.0.1:{port}" in found.summary
    assert found.reward is not None
    assert found.reward.name == "frozen"
    assert found.stage == ("reward/async/frozen" if code == ASKS_ASYNC else "reward/frozen")


def test_a_stopped_process_is_named_with_how_to_continue_it_and_goes_on(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with training(tmp_path, WAITS.format(gate=gate)) as (process, run_dir):
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: report(run_dir).state == "stopped")
        found = report(run_dir)
        os.kill(process.pid, signal.SIGCONT)
        gate.touch()
        process.join(LIMIT_S)
        assert process.exitcode == 0
    assert found.is_hung
    assert found.summary.startswith(f"process {process.pid} is stopped, in step 1, stage reward/frozen")
    assert f"kill -CONT {process.pid}" in found.advice
    assert "cannot write its stacks" in found.note
    assert {thread.state for thread in found.threads} == {"stopped"}
    with pytest.raises(RunError, match="nothing trains"):
        report(run_dir)
    assert not (run_dir / "stacks.txt").exists()


def test_a_killed_process_is_gone_and_its_last_stage_is_known(tmp_path: Path) -> None:
    with training(tmp_path, SLEEPS) as (process, run_dir):
        process.kill()
        process.join()
        found = report(run_dir)
    assert found.state == "gone"
    assert found.is_hung
    assert "it ended in step 1, stage reward/frozen" in found.summary
    assert f"tunesmith resume {run_dir}" in found.advice


def test_a_training_reports_its_own_hang_once_and_goes_on(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with training(tmp_path, WAITS.format(gate=gate), "--run.hang_after_s", "1") as (process, run_dir):
        until((run_dir / HANG_FILE).exists)
        until((run_dir / "findings.jsonl").exists)
        time.sleep(1)  # time for a second report, which must not come
        gate.touch()
        process.join(LIMIT_S)
        assert process.exitcode == 0
    found = [row for row in read_jsonl(run_dir / "findings.jsonl") if "has not returned" in str(row["message"])]
    assert [(row["step"], row["name"], row["severity"]) for row in found] == [(1, "hang", "warning")]
    assert "stage reward/frozen" in str(found[0]["message"])
    assert re.search(rf"frozen \({tmp_path}/rewards.py:\d+\)", (run_dir / HANG_FILE).read_text())
    assert not (run_dir / "stage.bin").exists()
    assert json.loads((run_dir / "result.json").read_text())["findings"] >= 1


def test_children_of_a_reward_are_listed(tmp_path: Path) -> None:
    code = f"""
import subprocess
def frozen(completions, **kwargs):
    subprocess.run([{sys.executable!r}, "-c", "import time; time.sleep(60)"], check=True)
"""
    with training(tmp_path, code) as (_, run_dir):
        until(lambda: report(run_dir).children)
        (child,) = report(run_dir).children
        os.kill(int(child.split()[0]), signal.SIGKILL)
    assert "time.sleep(60)" in child


def test_a_handler_of_the_users_stays_and_is_never_called(tmp_path: Path) -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: calls.append(number))
    try:
        with watched(tmp_path, 0, lambda _: None) as record:
            record.beat(1, "working")
            found = read(tmp_path)
            assert found is not None
            assert found.signal == 0
            assert report(tmp_path, is_hung=True).stage == "working"
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert calls == [signal.SIGUSR1]


def test_the_handler_is_that_of_the_first_training_of_a_process_and_ends_with_it(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    assert not catches(os.getpid(), signal.SIGUSR1)
    with watched(first, 0, lambda _: None), watched(second, 0, lambda _: None):
        records = [read(first), read(second)]
        os.kill(os.getpid(), signal.SIGUSR1)
        until(lambda: "test_hang.py" in (first / "stacks.txt").read_text())
    assert [record and record.signal for record in records] == [signal.SIGUSR1, 0]
    assert not catches(os.getpid(), signal.SIGUSR1)
    assert not list(second.iterdir())


def test_a_folder_that_cannot_be_written_costs_the_record_alone(tmp_path: Path) -> None:
    with watched(tmp_path / "missing", 1.0, lambda _: None) as record:
        record.beat(1, "working")
    assert not (tmp_path / "missing").exists()


def test_a_folder_in_which_nothing_trains_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="nothing trains in"):
        report(tmp_path)


def test_stacks_are_read_as_faulthandler_of_several_releases_writes_them() -> None:
    text = (
        "Thread 0x00007f01 (most recent call first):\n"
        '  File "/a b.py", line 3 in wait\n  File "/c.py", line 4 in run\n\n'
        'Current thread 0x00007f02 [MainThread] (most recent call first):\n  File "/d.py", line 5 in <module>\n'
    )
    stacks = parse_stacks(text)
    assert [str(frame) for frame in stacks[0x7F01]] == ["wait (/a b.py:3)", "run (/c.py:4)"]
    assert [str(frame) for frame in stacks[0x7F02]] == ["<module> (/d.py:5)"]
