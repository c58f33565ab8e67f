"""Named fault points at which a test can make the process fail, by an environment variable.

`TUNESMITH_FAULT="checkpoint/renamed:kill:2"` kills the process at the second visit of `checkpoint/renamed`.
Several faults are separated by commas; the count is 1 where it is left out. Without the variable `reach` returns at
once. Every `core.trace.span` inside of an open trace is a fault point named by its path.
"""

import errno
import os
import signal
from dataclasses import dataclass, field
from functools import cache

VARIABLE = "TUNESMITH_FAULT"

ACTIONS = ("kill", "term", "interrupt", "disk_full", "memory", "raise")
"""End by SIGKILL; send SIGTERM or SIGINT to this process; raise ENOSPC, MemoryError or RuntimeError."""


@dataclass(slots=True)
class _Plan:
    """Actions by place and visit, and how often each place was visited."""

    actions: dict[tuple[str, int], str] = field(default_factory=dict[tuple[str, int], str])
    visits: dict[str, int] = field(default_factory=dict[str, int])


def reach(place: str) -> None:
    """Count a visit of the fault point `place`, and fail there if the environment says so."""
    plan = _plan()
    if not plan.actions:
        return
    visit = plan.visits[place] = plan.visits.get(place, 0) + 1
    action = plan.actions.get((place, visit))
    if action is not None:
        _fail(action, place)


@cache
def _plan() -> _Plan:
    """The plan of this process, parsed at the first fault point."""
    plan = _Plan()
    for text in filter(None, os.environ.get(VARIABLE, "").split(",")):
        place, action, *count = text.split(":")
        if action not in ACTIONS:
            raise ValueError(f"{VARIABLE} names the action {action!r}; allowed are {', '.join(ACTIONS)}")
        plan.actions[place, int(count[0]) if count else 1] = action
    return plan


def _fail(action: str, place: str) -> None:
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "term":
            os.kill(os.getpid(), signal.SIGTERM)
        case "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        case "disk_full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place)
        case "memory":
            raise MemoryError(f"fault at {place}")
        case _:
            raise RuntimeError(f"fault at {place}")
