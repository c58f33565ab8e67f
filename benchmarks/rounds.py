"""What the benchmarks against another trainer share: its fastest setting, rounds in alternation, the load meanwhile."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from benchmarks.figures import Spread
from benchmarks.machine import Load, measure_load
from benchmarks.process import Process

BUSY_CORES = 0.25
"""From this many cores' worth of others' work on, two threads are slowed unevenly and a ratio means little."""

Say = Callable[[str], None]


class Timed(Protocol):
    """What a side answers when it has worked."""

    @property
    def seconds(self) -> float:
        """Time of the work."""
        ...


TimedT = TypeVar("TimedT", bound=Timed)


@dataclass(frozen=True, slots=True)
class Rounds(Generic[TimedT]):
    """What both sides did in each round, and the load before it."""

    ours: list[TimedT]
    theirs: list[TimedT]
    loads: list[Load]


def alternate(us: Process, them: Process, request: object, num_rounds: int, say: Say) -> Rounds[Any]:
    """Both sides answer `request` once in each round; who begins changes from round to round."""
    done: Rounds[Any] = Rounds([], [], [])
    for index in range(num_rounds):
        done.loads.append(noted_load(say))
        sides = [(us, done.ours), (them, done.theirs)]
        for process, answers in sides if index % 2 == 0 else reversed(sides):
            answers.append(process.ask(request))
        seconds = f"{done.ours[-1].seconds:.2f} s against {done.theirs[-1].seconds:.2f} s"
        say(f"  round {index + 1} of {num_rounds}: {seconds}")
    return done


def noted_load(say: Say) -> Load:
    """The load now; `say` hears of one that makes a round worthless."""
    load = measure_load()
    if load.other_busy_cores > BUSY_CORES:
        say(f"  another program keeps {load.other_busy_cores:.1f} cores busy: this round means little")
    return load


def load_facts(loads: Sequence[Load]) -> dict[str, object]:
    """The loads of all rounds, for JSON."""
    return {
        "load_average": max(load.load_average for load in loads),
        "other_busy_cores": Spread.of([load.other_busy_cores for load in loads]).facts("cores"),
    }


SettingT = TypeVar("SettingT", bound=Any)


def fastest_setting(
    first: SettingT, micro_batches: Iterable[int], seconds_of: Callable[[SettingT], float], *, tries_eager: bool
) -> tuple[SettingT, Mapping[str, float]]:
    """The fastest variant of `first`, and the seconds of each that was tried: every micro-batch, then, with the best of
    these, eager attention. Settings have `attention` and `micro_batch_size`.
    """
    seconds: dict[SettingT, float] = {}
    for size in micro_batches:
        setting = replace(first, micro_batch_size=size)
        seconds[setting] = seconds_of(setting)
    if tries_eager:
        eager = replace(min(seconds, key=seconds.__getitem__), attention="eager")
        seconds[eager] = seconds_of(eager)
    named = {f"{setting.attention}@{setting.micro_batch_size}": value for setting, value in seconds.items()}
    return min(seconds, key=seconds.__getitem__), named
