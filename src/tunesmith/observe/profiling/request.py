"""Files by which one process asks a training in another one to profile its next steps, and by which that one answers.

The training looks for the request between two steps, which takes microseconds. `recorded.json` is its answer, written
last: the profile's samples, or the `problem` that kept it from recording.
"""

import json
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tunesmith.base.core.errors import RunError
from tunesmith.base.runs.lock import HOLDER_FILE, is_locked

FOLDER = "profile"
"""The folder of a run's profile."""

_REQUEST = "profile-request.json"
_ANSWER = "recorded.json"
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Request:
    """A wish to profile `num_steps` steps; the answer carries its `id`."""

    id: str
    num_steps: int


def ask(run_dir: Path, num_steps: int) -> Request:
    """Ask the process that trains `run_dir` to profile its next `num_steps` steps.

    Raises:
        RunError: if no process trains there, another profile was asked for, or the folder cannot be written.
    """
    if not is_locked(run_dir):
        raise RunError(
            f"{run_dir} does not run, so there is nothing to attach to; profile a new run of its recipe with "
            f"`tunesmith profile ALGORITHM --config {run_dir / 'recipe.yaml'}`"
        )
    request, path = Request(secrets.token_hex(8), num_steps), run_dir / _REQUEST
    try:
        aside = path.with_name(f".{_REQUEST}-{request.id}")
        aside.write_text(json.dumps(asdict(request)), encoding="utf-8")
        try:
            os.link(aside, path)  # unlike a rename, this fails if the file exists
        finally:
            aside.unlink()
    except FileExistsError:
        raise RunError(f"a profile of {run_dir} was asked for already; wait for it, or remove {path}") from None
    except OSError as error:
        raise RunError(f"{path} cannot be written ({error.strerror or error}); be the user who trains") from error
    return request


def take(run_dir: Path) -> Request | None:
    """The request that waits in `run_dir`, which is removed; None if there is none or it cannot be read."""
    path = run_dir / _REQUEST
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
        return Request(str(facts["id"]), max(1, int(facts["num_steps"])))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def drop_old(run_dir: Path) -> None:
    """Remove a request from before this process took the lock of the run: its author waited for an earlier one."""
    with suppress(OSError):
        if (run_dir / _REQUEST).stat().st_mtime < (run_dir / HOLDER_FILE).stat().st_mtime:
            (run_dir / _REQUEST).unlink()


def withdraw(run_dir: Path, request: Request) -> None:
    """Remove `request` if nobody took it. Another's, which may have come after it was taken, stays."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        if json.loads((run_dir / _REQUEST).read_text(encoding="utf-8"))["id"] == request.id:
            (run_dir / _REQUEST).unlink()


def answer(run_dir: Path, request: Request, facts: Mapping[str, Any]) -> None:
    """Write the answer to `request`, whole or not at all."""
    path = run_dir / FOLDER / _ANSWER
    path.parent.mkdir(exist_ok=True)
    aside = path.with_name(f".{_ANSWER}-new")
    aside.write_text(json.dumps({"id": request.id, **facts}), encoding="utf-8")
    os.replace(aside, path)


def read_answer(run_dir: Path, request_id: str | None = None) -> dict[str, Any] | None:
    """The answer to the request of this id, or to any; None if there is none yet."""
    try:
        facts = json.loads((run_dir / FOLDER / _ANSWER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return facts if request_id in (None, facts.get("id")) else None


def drop_answer(run_dir: Path) -> None:
    """Remove the answer, once it is read."""
    (run_dir / FOLDER / _ANSWER).unlink(missing_ok=True)


def wait(run_dir: Path, request: Request, timeout_s: float) -> None:
    """Return once `request` is answered.

    Raises:
        RunError: if the run ends first or takes longer than `timeout_s`.
    """
    end_s = time.monotonic() + timeout_s
    try:
        while True:
            runs = is_locked(run_dir)  # asked before the answer, which may be the last thing that the run writes
            facts = read_answer(run_dir, request.id)
            if facts is not None:
                return
            if not runs:
                raise RunError(f"{run_dir} ended before {request.num_steps} more steps were recorded; see its log")
            if time.monotonic() > end_s:
                raise RunError(
                    f"{run_dir} recorded no {request.num_steps} steps within {timeout_s:g} s; wait longer with "
                    "--timeout-s, or see where it hangs with `tunesmith diagnose --hang`"
                )
            time.sleep(_POLL_S)
    finally:
        withdraw(run_dir, request)
