"""Named fault points at which a test can make the process fail, by an environment variable.

`TUNESMITH_FAULT="checkpoint/renamed:kill:2"` kills the process at the second visit of `checkpoint/renamed`.
`"fsync:slow:200"` makes every visit of `fsync` take 200 milliseconds longer, as on a slow disk. Several faults are
separated by commas; the count is 1 where it is left out. Without the variable `reach` returns at once. Every
`core.trace.span` inside of an open trace is a fault point named by its path.
"""

import errno
import os
import signal
import time
from dataclasses import dataclass, field
from functools import cache

VARIABLE = "TUNESMITH_FAULT"

ACTIONS = ("kill", "term", "interrupt", "disk_full", "memory", "raise", "slow")
"""End by SIGKILL; send SIGTERM or SIGINT to this process; raise ENOSPC, MemoryError or RuntimeError; sleep at every
visit, for as many milliseconds as the number says."""


@dataclass(slots=True)
class _Plan:
    """Actions by place and visit, seconds to sleep by place, and how often each place was visited."""

    actions: dict[tuple[str, int], str] = field(default_factory=dict[tuple[str, int], str])
    delays_s: dict[str, float] = field(default_factory=dict[str, float])
    visits: dict[str, int] = field(default_factory=dict[str, int])


def reach(place: str) -> None:
    """Count a visit of the fault point `place`, and fail there if the environment says so."""
    plan = _plan()
    if place in plan.delays_s:
        time.sleep(plan.delays_s[place])
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
        number = int(count[0]) if count else 1
        if action == "slow":
            plan.delays_s[place] = number / 1000
        else:
            plan.actions[place, number] = action
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
