"""The lock of a run folder: one process trains in it at a time.

`run.lock` carries an flock of the kernel, which ends with the process that holds it, however it ends. A lock file that
nobody holds means nothing, so a killed run never has to be unlocked by hand. Opening the lock file may empty it; the
holder is recorded in `lock.json` next to it.
"""

import datetime
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from tunesmith.base.core.errors import RunError

LOCK_FILE = "run.lock"
HOLDER_FILE = "lock.json"

# `is_locked` holds a shared lock for an instant, which `RunLock` must not mistake for another owner.
_TIMEOUT_S = 0.5
_POLL_S = 0.02
_HELD_ELSEWHERE = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES)
_NOT_SUPPORTED = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class Holder:
    """Holder of a lock: process id, host name, and the time (ISO 8601, local) when the lock was taken."""

    pid: int
    host: str
    started: str

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host} since {self.started.replace('T', ' ')}"


class RunLock:
    """Exclusive lock on a run folder while the block of `with RunLock(folder)` runs; a dead process holds none.

    A process that was forked inside of the block does not own it: there, the end of the block does nothing.

    Raises:
        RunError: if another process, or another object of this one, holds it; or if the folder is missing, cannot be
            written, or is on a file system without locks.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = FileLock(folder / LOCK_FILE, thread_local=False)
        self._pid = 0

    def __enter__(self) -> "RunLock":
        try:
            _require_flock(self.folder / LOCK_FILE)
            self._lock.acquire(timeout=_TIMEOUT_S, poll_interval=_POLL_S)
        except Timeout:
            holder = holder_of(self.folder) or "another process"
            raise RunError(f"{self.folder} is in use by {holder}; wait, or stop it") from None
        except OSError as error:
            raise RunError(_why_not(self.folder, error)) from error
        self._pid = os.getpid()
        try:
            self._write_holder()
        except OSError as error:
            self.__exit__()
            raise RunError(_why_not(self.folder, error)) from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._pid != os.getpid():
            return
        with suppress(OSError):  # the folder may be gone or read-only by now; without the lock the file means nothing
            (self.folder / HOLDER_FILE).unlink(missing_ok=True)
        self._lock.release()

    def _write_holder(self) -> None:
        started = datetime.datetime.now().isoformat(timespec="seconds")
        facts = asdict(Holder(os.getpid(), socket.gethostname(), started))
        aside = self.folder / f".{HOLDER_FILE}-{os.getpid()}"
        try:
            aside.write_text(json.dumps(facts) + "\n", encoding="utf-8")
            os.replace(aside, self.folder / HOLDER_FILE)
        finally:
            aside.unlink(missing_ok=True)


@contextmanager
def only_start(parent: Path, run_id: str) -> Iterator[None]:
    """A block that one process at a time may be in, for the runs below `parent` whose names end in `run_id`: a folder
    that another process is about to make, or has not locked yet, cannot be found.

    Raises:
        RunError: if another process is in it, or `parent` cannot be written, or is on a file system without locks.
    """
    file = parent / f".{run_id}.lock"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(file)
    except OSError as error:
        if error.errno not in _HELD_ELSEWHERE:
            raise RunError(f"cannot write to {parent} ({error}); choose another folder with --run.dir") from error
        raise RunError(
            f"another process is at work on the run {run_id} in {parent}; wait for it, stop it, or give this run "
            "another id"
        ) from None
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink()  # before others can lock it
        os.close(descriptor)


def _locked(file: Path) -> int:
    """A descriptor of `file`, locked. Raises OSError: EWOULDBLOCK if another process has it."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(file.stat(), os.fstat(descriptor)):
            return descriptor
        raise FileNotFoundError
    except FileNotFoundError as error:  # whoever had it has just removed it
        os.close(descriptor)
        raise OSError(errno.EWOULDBLOCK, "it was removed") from error
    except OSError:
        os.close(descriptor)
        raise


def is_locked(folder: Path) -> bool:
    """True if a living process holds the lock of the run folder; a lock that may not be looked at counts as held."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except PermissionError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _HELD_ELSEWHERE
    finally:
        os.close(descriptor)
    return False


def holder_of(folder: Path) -> Holder | None:
    """The holder recorded in `lock.json`, None if it is missing or unreadable. Check `is_locked` first."""
    try:
        facts = json.loads((folder / HOLDER_FILE).read_text(encoding="utf-8"))
        return Holder(int(facts["pid"]), str(facts["host"]), str(facts["started"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _require_flock(file: Path) -> None:
    """Raise OSError if `file` cannot be made or locked at all.

    Releases of filelock differ where flock is missing: some fall back, with a warning, to a file that a killed process
    leaves behind. Here that is an error.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _HELD_ELSEWHERE:
            raise
    finally:
        os.close(descriptor)


def _why_not(folder: Path, error: OSError) -> str:
    if error.errno in _NOT_SUPPORTED:
        return (
            f"the file system of {folder} has no file locks ({error.strerror}), so two processes could write one run; "
            "choose a folder on another file system with --run.dir"
        )
    if error.errno == errno.ENOENT:
        return f"{folder} does not exist; give a run folder"
    return f"{folder} cannot be locked ({error.strerror or error}); make it a writable folder with free space"
