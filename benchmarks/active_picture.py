"""The curves of `benchmarks.active --pool`, as `python -m benchmarks.active_picture FIGURES.json OUT.svg` draws them.

A panel for each pool: the accuracy on held-out pairs over the labels that were asked for, a line for each selection,
the mean over the seeds; random pairs are dashed, and "longer wins" is a grey line.
"""

import html
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.svg import opening, path, program
from tunesmith.base.core.errors import InputError
from tunesmith.observe.reports.chart import LIGHT

_COLOURS = {
    "random": LIGHT["muted"],
    "drts": LIGHT["after"],
    "delta_ucb": LIGHT["before"],
    "infomax": LIGHT["stage_3"],
    "d_optimal": LIGHT["stage_6"],
}
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _GAP = 300, 250, 46, 62, 40, 24
_KEY = 110
_STEP = 0.05


def picture(facts: Mapping[str, Any]) -> str:
    """The curves of all pools of the figures as SVG. Raises InputError if there are none."""
    pools: Mapping[str, Any] = facts.get("pools") or {}
    if not pools:
        raise InputError(
            "the figures hold no pools; give those of `python -m benchmarks.active --pool NAME --out FILE`"
        )
    methods = [name for name in _COLOURS if any(name in pool for pool in pools.values())]
    width = _LEFT + max(len(pools) * (_WIDTH + _GAP), len(methods) * _KEY)
    height = _TOP + _HEIGHT + _BOTTOM
    num_seeds = len(next(iter(pools.values()))["random"]["curves"])
    means = {name: {method: _mean(pool[method]["curves"]) for method in methods} for name, pool in pools.items()}
    every = [y for of in means.values() for curve in of.values() for _, y in curve]
    every += [pool["longer_wins"] for pool in pools.values()]
    low, high = int(min(every) / _STEP) * _STEP, (int(max(every) / _STEP) + 1) * _STEP
    parts = opening(width, height, f"Accuracy on held-out pairs over labels, mean of {num_seeds} seeds")
    for place, method in enumerate(methods):
        x = _LEFT + _KEY * place
        parts += [_line([(x, 18.0), (x + 24, 18.0)], method), f"<text x='{x + 30}' y='22'>{method}</text>"]
    for place, (name, pool) in enumerate(pools.items()):
        left = _LEFT + place * (_WIDTH + _GAP)
        most = max(x for curve in means[name].values() for x, _ in curve)
        at = lambda x, y, left=left, most=most: (  # noqa: E731
            left + _WIDTH * x / most,
            _TOP + _HEIGHT * (high - y) / (high - low),
        )
        parts.append(f"<text x='{left}' y='{_TOP - 10}' font-weight='bold'>{html.escape(name)}</text>")
        for number in range(round((high - low) / _STEP) + 1):
            y = low + number * _STEP
            parts.append(path([at(0, y), at(most, y)], f"stroke='{LIGHT['grid']}'"))
            if place == 0:
                parts.append(f"<text x='{left - 6}' y='{at(0, y)[1] + 4:.1f}' text-anchor='end'>{y:.2f}</text>")
        for anchor, number in (("start", 0), ("middle", most // 2), ("end", most)):
            x, y = at(number, low)
            parts.append(f"<text x='{x:.1f}' y='{y + 16:.1f}' text-anchor='{anchor}'>{number}</text>")
        longer = pool["longer_wins"]
        parts.append(path([at(0, longer), at(most, longer)], f"stroke='{LIGHT['stage_8']}' stroke-width='2'"))
        parts += [_line([at(x, y) for x, y in means[name][method]], method) for method in methods]
    parts.append(f"<text x='{_LEFT}' y='{height - 6}'>labels asked for; grey: the longer answer wins</text></svg>")
    return "".join(parts) + "\n"


def _mean(curves: Sequence[Sequence[Sequence[float]]]) -> list[tuple[int, float]]:
    """The mean accuracy of the seeds at each number of labels that all have."""
    return [(int(points[0][0]), fmean(y for _, y in points)) for points in zip(*curves, strict=False)]


def _line(points: Sequence[tuple[float, float]], method: str) -> str:
    dash = " stroke-dasharray='5 3'" if method == "random" else ""
    return path(points, f"stroke='{_COLOURS[method]}' stroke-width='2'{dash}")


main = program("benchmarks.active --pool", picture)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
