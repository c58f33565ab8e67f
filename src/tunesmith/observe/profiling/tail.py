"""Steps that take far longer than the others: which ones, the stage they lose the time in, how much of the run it is.

A stage is compared with its usual seconds in the same run: the median, or, of work that is due at some steps alone, the
median of as many of its longest times as the recipe has occasions for. So a checkpoint at every tenth step is no tail,
and one checkpoint in ten that takes a hundred times as long is.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tunesmith.base.runs.listing import number

_EVERY = {
    "checkpoint": "recipe.run.checkpoint_every",
    "evaluate": "recipe.run.eval_every",
    "log": "recipe.run.sample_every",
}
"""Stages that are due at some steps alone, and the setting that says at which."""

_SLOW = 0.3
"""A step is slow if it loses so many times the usual seconds of a step, or more."""

_INSIDE = 0.8
"""Share of what a stage loses from which on the stage inside of it is named instead."""

_MOST = 0.5
"""Share of what slow steps lose below which no stage is named: whatever stops the process hits all of them."""

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Tail:
    """Time that slow steps lose in one stage, `path`, or `step` where all stages are slow together: `lost_s` in all.

    `usual_s` is the stage at a usual step, `longest_s` at the slowest one. `steps` are their numbers, in order.
    """

    path: str
    steps: Sequence[int]
    lost_s: float
    usual_s: float
    longest_s: float


def tails(rows: Sequence[Row], settings: Mapping[str, object]) -> list[Tail]:
    """The time that slow ones of `rows` lose, by stage, the costliest first. `settings` are the recipe's by path."""
    if len(rows) < 3:
        return []
    usual_step_s = statistics.median(_seconds(rows, "step"))
    stages = sorted({path for row in rows for path in _paths(row) if "/" not in path and path != "step"})
    lost = {path: _lost(rows, path, settings) for path in stages}
    slow = [
        index
        for index in range(len(rows))
        if sum(lost[path][index] for path in stages) > max(1e-3, _SLOW * usual_step_s)
    ]
    found = [_tail(rows, slow, path, lost[path], settings) for path in stages]
    ranked = sorted((one for one in found if one.lost_s > 0), key=lambda one: -one.lost_s)
    if len(ranked) > 1 and ranked[0].lost_s < _MOST * sum(one.lost_s for one in ranked):
        return [
            _tail(rows, slow, "step", [sum(lost[path][index] for path in stages) for index in range(len(rows))], {})
        ]
    return ranked


def _tail(rows: Sequence[Row], slow: Sequence[int], path: str, lost: Sequence[float], settings: Row) -> Tail:
    """The tail in the stage `path`, or in the innermost stage inside of it that has nearly all of it."""
    total_s = sum(lost[index] for index in slow)
    inside = {name for row in rows for name in _paths(row) if name.startswith(f"{path}/")}
    for name in sorted(inside):
        if name.count("/") == path.count("/") + 1 and total_s > 0:
            deeper = _lost(rows, name, settings)
            if sum(deeper[index] for index in slow) > _INSIDE * total_s:
                return _tail(rows, slow, name, deeper, settings)
    seconds = _seconds(rows, path)
    concerned = [index for index in slow if lost[index] > 0.1 * total_s / len(slow)]
    return Tail(
        path=path,
        steps=tuple(int(number(rows[index].get("step")) or 0) for index in concerned),
        lost_s=total_s,
        usual_s=_usual(seconds, path, settings),
        longest_s=max((seconds[index] for index in concerned), default=0.0),
    )


def _lost(rows: Sequence[Row], path: str, settings: Row) -> list[float]:
    """Seconds of the stage at each step beyond the usual ones, if it took more than twice as long."""
    seconds = _seconds(rows, path)
    usual_s = _usual(seconds, path, settings)
    return [one - usual_s if one > 2 * usual_s else 0.0 for one in seconds]


def _usual(seconds: Sequence[float], path: str, settings: Row) -> float:
    every = number(settings.get(_EVERY.get(path.partition("/")[0], ""))) or 1.0
    num_due = max(1, round(len(seconds) / max(1.0, every)))
    return statistics.median(sorted(seconds, reverse=True)[:num_due])


def _seconds(rows: Sequence[Row], path: str) -> list[float]:
    return [number(row.get(f"time/{path}_s")) or 0.0 for row in rows]


def _paths(row: Row) -> list[str]:
    return [name[5:-2] for name in row if name.startswith("time/") and name.endswith("_s")]
