"""Runs that the pages start: requests on disk, a queue, and processes that outlive the server.

A job is a folder. No file holds its state, which follows from what is there:

- `request.json`, written before the page is answered: the run is wanted.
- `run.lock`, which the process has locked as long as it lives, because it inherits the lock. It writes its id there
  before anything else: with an id, the job was started, and is never started again.
- `stop`: a waiting job will not start, a running one was told to stop.
- `output.txt`: what the process printed.
- `run`: the name of its run's folder, once that was seen.

So it does not matter at which moment a server or a run is killed. The folder of a run is found by its name, which ends
with the id of its job.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from tunesmith.base.core import faults
from tunesmith.base.core.errors import InputError, RunError, StoreError
from tunesmith.base.core.log import Once, get_logger
from tunesmith.base.core.system import fsync, sync
from tunesmith.base.runs.folder import RUN_ID
from tunesmith.base.runs.listing import read_object, read_run
from tunesmith.base.runs.lock import LOCK_FILE, is_locked
from tunesmith.collect.store.database import Closeable
from tunesmith.collect.web.allowed import Allowed
from tunesmith.collect.web.wanted import Wanted, check, command

POLL_S = 0.5
"""Seconds between looks at the processes."""

MAX_WAITING = 100
"""Most jobs that wait."""

REQUEST_FILE, STOP_FILE, OUTPUT_FILE, RUN_FILE = "request.json", "stop", "output.txt", "run"

# The lock comes as standard input. The process that writes its id there becomes the run.
_SHELL = ("/bin/sh", "-c", 'echo $$ >&0 && exec "$@" 3<&0 </dev/null', "sh")
_MAX_OUTPUT = 4_000


@dataclass(frozen=True, slots=True)
class Job:
    """A run that was asked for; jobs are started in the order of `number`."""

    id: str
    number: int
    created: float
    wanted: Wanted


class Jobs(Closeable):
    """The jobs in `folder`, of which at most `max_runs` run at a time. Safe to call from any number of threads.

    One server has the folder at a time. `close` leaves the processes alone.
    """

    def __init__(self, folder: Path, allowed: Allowed, max_runs: int) -> None:
        self.root = allowed.root
        self.allowed = allowed
        self.max_runs = max_runs
        self._folder = folder
        self._lock = threading.RLock()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._over: set[str] = set()
        folder.mkdir(parents=True, exist_ok=True)
        self._jobs = self._read()
        self._paths: dict[str, Path | None] = {}
        self._asked, self._ending = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="jobs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ending.set()
        self._asked.set()
        self._thread.join()

    def add(self, wanted: Wanted, key: str) -> Job:
        """The job of `wanted`, on disk; a request with the `key` of an earlier one gets that one's job.

        Raises:
            ConfigError: for a recipe that cannot be used.
            RunError: if the run that shall go on is in use, too many jobs wait, or the key was that of another request.
            StoreError: if it cannot be written.
        """
        id = hashlib.sha256(key.encode()).hexdigest()[:12]
        with self._lock:
            if (known := self._jobs.get(id)) is not None:
                if known.wanted != wanted:
                    raise RunError("this Idempotency-Key was that of another run; send a new one")
                return known
            check(wanted, self.allowed)
            self._check_room(wanted)
            job = Job(id, max((one.number for one in self._jobs.values()), default=0) + 1, time.time(), wanted)
            try:
                self._store(job)
            except OSError as error:
                raise StoreError(f"{self._folder} cannot be written ({error.strerror}); free some space") from error
            self._jobs[id] = job
        self._asked.set()
        return job

    def _store(self, job: Job) -> None:
        """Have the request on disk, all of it or nothing."""
        aside = self._folder / f".{job.id}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(mode=0o700)
        _write(aside / REQUEST_FILE, json.dumps(asdict(job)))
        aside.rename(self._folder / job.id)
        sync(self._folder)

    def _check_room(self, wanted: Wanted) -> None:
        open_jobs = [job for job in self._jobs.values() if not self._is_over(job)]
        if sum(not self._pid(job) for job in open_jobs) >= MAX_WAITING:
            raise RunError(f"{MAX_WAITING} runs are waiting already; stop some of them")
        path = self.root / wanted.resume
        if wanted.resume and (is_locked(path) or any(self.path(job) == path for job in open_jobs)):
            raise RunError(f"{wanted.resume} is in use, or waits for its turn")

    def get(self, id: str) -> Job | None:
        """The job with this id; None if there is none."""
        return self._jobs.get(id)

    def of(self, run: Path) -> Job | None:
        """The newest job of the run in the folder `run`; None if there is none."""
        with self._lock:
            return next((job for job in self._newest() if self.path(job) == run), None)

    def shown(self) -> list[Job]:
        """The jobs that are not seen in a list of runs, the newest first: those that wait, that have no folder yet, and
        those that failed without one, until they are forgotten.
        """
        with self._lock:
            return [job for job in self._newest() if self._is_shown(job)]

    def _is_shown(self, job: Job) -> bool:
        if self._is_over(job):
            return self.path(job) is None and (not self._has_stop(job) or bool(self.output(job)))
        return not self._pid(job) or self.path(job) is None

    def _newest(self) -> list[Job]:
        return sorted(self._jobs.values(), key=lambda job: -job.number)

    def path(self, job: Job) -> Path | None:
        """The folder of a job's run; None as long as there is none."""
        with self._lock:
            if job.id not in self._paths:
                is_over = self._is_over(job)  # before the search: no folder comes after this
                resumed = self.root / job.wanted.resume if job.wanted.resume else None
                found = resumed or self._known_path(job) or next(self.root.glob(f"*-{job.id}"), None)
                if found is None and not is_over:
                    return None
                if found is not None and not resumed:
                    self._note_path(job, found)
                self._paths[job.id] = found
            return self._paths[job.id]

    def _known_path(self, job: Job) -> Path | None:
        """The folder that was found earlier: it may have been deleted since, which is no failure."""
        with contextlib.suppress(OSError):
            return self.root / (self._folder / job.id / RUN_FILE).read_text(encoding="utf-8", errors="surrogateescape")
        return None

    def _note_path(self, job: Job, path: Path) -> None:
        with contextlib.suppress(OSError):  # it is found again
            text = os.fsencode(path.relative_to(self.root))
            (self._folder / job.id / RUN_FILE).write_bytes(text)

    def check_unused(self, run: Path) -> None:
        """Raise RunError if a job works in the folder `run`, or waits to."""
        with self._lock:
            if any(self.path(job) == run for job in self._jobs.values() if not self._is_over(job)):
                raise RunError(f"{run.name} is in use, or waits for its turn; stop it first")

    def forget_run(self, run: Path) -> None:
        """Forget the jobs of a run that was deleted."""
        with self._lock:
            for job in [job for job in self._jobs.values() if self.path(job) == run]:
                self.forget(job)

    def forget(self, job: Job) -> None:
        """Remove the request and the output of a job for which nothing works any more. Raises RunError otherwise."""
        with self._lock:
            if not self._is_over(job):
                raise RunError("this run is in use, or waits for its turn; stop it first")
            shutil.rmtree(self._folder / job.id, ignore_errors=True)
            self._jobs.pop(job.id, None)
            self._paths.pop(job.id, None)

    def state(self, job: Job) -> str:
        """`queued`, `starting`, `running`, `stopping`, `cancelled`, or its end: `finished`, `stopped`, `failed`."""
        with self._lock:
            path, pid, is_alive = self.path(job), self._pid(job), self._is_alive(job)
        if is_alive and self._has_stop(job):
            return "stopping"
        if is_alive:
            return "running" if path is not None and is_locked(path) else "starting"
        if pid and path is not None:
            return read_run(path).status
        return "cancelled" if self._has_stop(job) else "failed" if pid else "queued"

    def output(self, job: Job) -> str:
        """The end of what the process printed, or why it was not started."""
        with contextlib.suppress(OSError), (self._folder / job.id / OUTPUT_FILE).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _MAX_OUTPUT))
            return file.read().decode("utf-8", "replace")
        return ""

    def num_before(self, job: Job) -> int:
        """Jobs that wait and will be started before this one."""
        with self._lock:
            return sum(
                other.number < job.number and not self._is_over(other) and not self._pid(other)
                for other in self._jobs.values()
            )

    def stop(self, job: Job) -> None:
        """Let a waiting job never start; tell a running one to finish its step, save and end, once.

        A second signal would end it without saving, so a repeated request sends none.

        Raises:
            RunError: if its process is not to be found.
        """
        with self._lock:
            if self._is_over(job) or self._has_stop(job):
                return
            if self._is_alive(job):
                if not self._is_run(job):
                    raise RunError("the process of this run is not to be found; stop it from a terminal")
                os.kill(self._pid(job), signal.SIGTERM)
            _write(self._folder / job.id / STOP_FILE, "")
            sync(self._folder / job.id)

    def _is_run(self, job: Job) -> bool:
        """True if the process with the id that was written has the job's command line: an id may be used again."""
        words = job.wanted.words(self.root)
        try:
            return psutil.Process(self._pid(job)).cmdline()[-len(words) :] == words
        except psutil.Error:
            return False

    def _has_stop(self, job: Job) -> bool:
        return (self._folder / job.id / STOP_FILE).exists()

    def _is_alive(self, job: Job) -> bool:
        with self._lock:  # a look holds the lock of the file for an instant, which a start would mistake for a run
            return is_locked(self._folder / job.id)

    def _pid(self, job: Job) -> int:
        """The id of the process that was started for a job, 0 if none was."""
        try:
            return int((self._folder / job.id / LOCK_FILE).read_bytes() or 0)
        except (OSError, ValueError):
            return 0

    def _is_over(self, job: Job) -> bool:
        """True if nothing will work for a job any more."""
        with self._lock:
            if job.id not in self._over and not self._is_alive(job) and (self._pid(job) or self._has_stop(job)):
                self._over.add(job.id)
            return job.id in self._over

    def _read(self) -> dict[str, Job]:
        """The jobs of earlier servers."""
        found: dict[str, Job] = {}
        for folder in self._folder.iterdir():
            if folder.name.startswith("."):  # of a request that nobody was answered
                shutil.rmtree(folder, ignore_errors=True)
            elif (job := _job_of(read_object(folder / REQUEST_FILE))) is not None and job.id == folder.name:
                found[job.id] = job
            else:
                get_logger(__name__).warning("%s is no request of a run; it is passed over", folder)
        return found

    def _work(self) -> None:
        once = Once(get_logger(__name__))
        while not self._ending.is_set():
            self._asked.wait(POLL_S)
            self._asked.clear()
            try:
                self._start_next()
            except OSError as error:
                once.warning(f"no run can be started ({error}); trying again")

    def _start_next(self) -> None:
        """Start the oldest jobs that wait, as long as there is room, and take note of those that have ended."""
        with self._lock:
            for id, process in list(self._processes.items()):
                if process.poll() is not None:
                    del self._processes[id]
            waiting = [job for job in reversed(self._newest()) if not self._is_over(job)]
            num_running = sum(map(self._is_alive, waiting))
            for job in waiting:
                if num_running >= self.max_runs or self._ending.is_set():
                    return
                if not self._is_alive(job):
                    num_running += self._start(job)

    def _start(self, job: Job) -> bool:
        """Start the process of a job; False if it may not run with what is allowed now."""
        folder = self._folder / job.id
        try:
            check(job.wanted, self.allowed)
        except InputError as error:
            _write(folder / OUTPUT_FILE, f"error: {error}\n")
            _write(folder / STOP_FILE, "")
            return False
        lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            faults.reach("job/claimed")
            with (folder / OUTPUT_FILE).open("wb") as output:
                process = subprocess.Popen(
                    [*_SHELL, *command(job.wanted.words(self.root))],
                    stdin=lock,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**os.environ, RUN_ID: job.id, "PYTHONUNBUFFERED": "1"},
                )
            faults.reach("job/started")
            while not self._pid(job) and process.poll() is None:
                time.sleep(0.001)  # it writes its id at once
            fsync(lock)
        finally:
            os.close(lock)
        if not self._pid(job):
            raise OSError(f"the process could not write {folder / LOCK_FILE}")
        self._processes[job.id] = process
        return True


def _job_of(row: Mapping[str, Any]) -> Job | None:
    """The job in the content of its file; None if it is damaged."""
    try:
        wanted = row["wanted"]
        settings = tuple((str(key), str(value)) for key, value in wanted["settings"])
        wanted = Wanted(str(wanted["algorithm"]), str(wanted["recipe"]), settings, str(wanted["resume"]))
        return Job(str(row["id"]), int(row["number"]), float(row["created"]), wanted)
    except (KeyError, TypeError, ValueError):
        return None


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        fsync(file.fileno())
