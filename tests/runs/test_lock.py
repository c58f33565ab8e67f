"""The lock of a run folder, against real second processes."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tunesmith.base.core.errors import RunError
from tunesmith.base.runs.lock import HOLDER_FILE, LOCK_FILE, RunLock, holder_of, is_locked

HOLD = """
import sys
from pathlib import Path
from tunesmith.base.runs.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.__enter__()
print("held", flush=True)
sys.stdin.read()
"""

TRY = """
import sys
from pathlib import Path
from tunesmith.base.core.errors import RunError
from tunesmith.base.runs.lock import RunLock
try:
    with RunLock(Path(sys.argv[1])):
        print("acquired")
except RunError as error:
    print(error)
"""


@contextmanager
def another_holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A second process that holds the lock until its stdin is closed or it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def try_in_another_process(folder: Path) -> str:
    command = [sys.executable, "-c", TRY, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def wait_for_exit(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_second_process_is_refused_and_told_who_holds_the_folder(tmp_path: Path) -> None:
    with another_holder(tmp_path) as process:
        assert is_locked(tmp_path)
        expected = rf"is in use by process {process.pid} on host {socket.gethostname()} since 20.*; wait, or stop it"
        with pytest.raises(RunError, match=expected):
            RunLock(tmp_path).__enter__()
        holder = holder_of(tmp_path)
        assert holder is not None
        assert holder.pid == process.pid


def test_the_holder_refuses_the_others_until_it_lets_go(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        assert f"in use by process {os.getpid()}" in try_in_another_process(tmp_path)
    assert not is_locked(tmp_path)
    assert not (tmp_path / HOLDER_FILE).exists()
    assert try_in_another_process(tmp_path) == "acquired"


def test_a_second_lock_of_the_same_process_is_refused_too(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        with pytest.raises(RunError, match=f"process {os.getpid()}"):
            RunLock(tmp_path).__enter__()
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)


def test_the_lock_of_a_killed_process_is_reclaimed(tmp_path: Path) -> None:
    with another_holder(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert json.loads((tmp_path / HOLDER_FILE).read_text())["pid"] == process.pid
    assert not is_locked(tmp_path)
    with RunLock(tmp_path):
        holder = holder_of(tmp_path)
        assert holder is not None
        assert holder.pid == os.getpid()


def test_a_process_that_ends_without_release_leaves_no_lock(tmp_path: Path) -> None:
    with another_holder(tmp_path) as process:
        process.communicate("")
        assert process.returncode == 0
    assert not is_locked(tmp_path)


def test_a_forked_child_neither_owns_nor_releases_the_lock_of_its_parent(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    lock.__enter__()
    pid = os.fork()
    if pid == 0:
        lock.__exit__()
        refused = False
        try:
            RunLock(tmp_path).__enter__()
        except RunError:
            refused = True
        os._exit(0 if refused else 1)
    assert wait_for_exit(pid) == 0
    assert is_locked(tmp_path)
    assert "in use by process" in try_in_another_process(tmp_path)
    lock.__exit__()
    assert not is_locked(tmp_path)


def test_a_forked_child_may_lock_another_folder(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    with RunLock(first):
        pid = os.fork()
        if pid == 0:
            with RunLock(second):
                os._exit(0 if is_locked(second) else 1)
        assert wait_for_exit(pid) == 0
        assert not is_locked(second)


def test_a_child_that_outlives_its_killed_parent_does_not_keep_the_lock(tmp_path: Path) -> None:
    code = HOLD.replace('print("held", flush=True)', 'import os; os.write(1, b"held\\n" if os.fork() else b"child\\n")')
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert {process.stdout.readline(), process.stdout.readline()} == {"held\n", "child\n"}
    process.kill()
    process.wait()
    # The child still runs: it waits for this stdin to close.
    assert not is_locked(tmp_path)
    process.communicate()


def test_a_lock_file_without_a_holder_means_nothing(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    (tmp_path / LOCK_FILE).write_text("left behind")
    (tmp_path / HOLDER_FILE).write_text("{ damaged")
    assert not is_locked(tmp_path)
    assert holder_of(tmp_path) is None
    with RunLock(tmp_path):
        assert is_locked(tmp_path)


def test_a_look_at_the_lock_never_makes_its_owner_fail(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom tunesmith.base.runs.lock import is_locked\n"
        "print('go', flush=True)\nwhile True:\n    is_locked(Path(sys.argv[1]))\n"
    )
    looker = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert looker.stdout is not None
        looker.stdout.readline()
        for _ in range(20):
            with RunLock(tmp_path):
                time.sleep(0.005)
    finally:
        looker.kill()
        looker.communicate()


def test_folders_that_cannot_be_locked_say_why(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="does not exist; give a run folder"):
        RunLock(tmp_path / "none").__enter__()
    (tmp_path / LOCK_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="cannot be locked"):
        RunLock(tmp_path).__enter__()
    assert not (tmp_path / "elsewhere").exists()
    assert not is_locked(tmp_path)


def test_a_file_system_without_locks_is_an_error_that_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No file system at hand lacks flock, so the system call is made to answer as one would.
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(RunError, match=r"has no file locks .*choose a folder on another file system with --run\.dir"):
        RunLock(tmp_path).__enter__()
    assert not is_locked(tmp_path)


def test_if_the_holder_cannot_be_written_down_the_lock_is_given_back(tmp_path: Path) -> None:
    (tmp_path / HOLDER_FILE).mkdir()
    with pytest.raises(RunError, match="cannot be locked"):
        RunLock(tmp_path).__enter__()
    assert not is_locked(tmp_path)
