"""Speed over sequences at a time, as `python -m benchmarks.batches_picture FIGURES.json OUT.svg` draws it.

The figures are those of `python -m benchmarks.rollout --workload batch1 --workload batch4 ...`: tokens per second of
decoding, a line for each contender, both axes logarithmic.
"""

import html
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.rollout import ATTENTIONS, NATIVE, OURS
from benchmarks.svg import opening, path, program
from benchmarks.workloads import BATCHES
from tunesmith.base.core.errors import InputError
from tunesmith.observe.reports.chart import LIGHT

_COLOURS = ("after", "before", "stage_3", "stage_6", "stage_8", "muted")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _NAMES = 460, 300, 52, 30, 44, 190

Curves = Mapping[str, Sequence[tuple[int, float]]]


def curves_of(facts: Mapping[str, Any]) -> Curves:
    """Decoded tokens per second of each contender at each number of sequences; the faster attention of transformers.
    Raises InputError if there are none.
    """
    found: dict[str, dict[int, float]] = {}
    weights = facts.get("weights", "model")
    for workload, size in BATCHES.items():
        one = facts.get("workloads", {}).get(workload)
        if one is None:
            continue
        for name, figures in {OURS if weights == "model" else f"{OURS}, {weights}": one, **one["contenders"]}.items():
            of_generate = any(name.startswith(f"transformers-{attention}") for attention in ATTENTIONS)
            shown = OURS if name == NATIVE else "transformers" if of_generate else name
            speeds = found.setdefault(shown, {})
            speeds[size] = max(speeds.get(size, 0.0), figures["decode_tokens_per_s"])
    if not found:
        raise InputError("the figures hold no batches; give those of `benchmarks.rollout --workload batch1 ...`")
    return {name: list(speeds.items()) for name, speeds in found.items()}


def picture(facts: Mapping[str, Any]) -> str:
    """The curves of the figures as SVG. Raises InputError if there are none."""
    curves = curves_of(facts)
    sizes = sorted({size for curve in curves.values() for size, _ in curve})
    speeds = [speed for curve in curves.values() for _, speed in curve]
    low, high = math.floor(math.log10(min(speeds))), math.ceil(math.log10(max(speeds)))
    widest, height = math.log2(max(sizes)) or 1.0, _TOP + _HEIGHT + _BOTTOM

    def at(size: float, speed: float) -> tuple[float, float]:
        up = (math.log10(speed) - low) / (high - low)
        return _LEFT + _WIDTH * math.log2(size) / widest, _TOP + _HEIGHT * (1 - up)

    title = f"Tokens per second over sequences at a time, {facts['model']}"
    parts = opening(_LEFT + _WIDTH + _NAMES, height, title)
    parts.append(f"<text x='{_LEFT}' y='{_TOP - 12}'>tokens per second, decoding</text>")
    for power in range(low, high + 1):
        for digit in (1, 2, 5) if power < high else (1,):
            x, y = at(sizes[0], digit * 10.0**power)
            parts.append(path([(x, y), (x + _WIDTH, y)], f"stroke='{LIGHT['grid']}'"))
            parts.append(f"<text x='{x - 6:.1f}' y='{y + 4:.1f}' text-anchor='end'>{digit * 10**power:,}</text>")
    for size in sizes:
        x, y = at(size, 10.0**low)
        parts.append(f"<text x='{x:.1f}' y='{y + 16:.1f}' text-anchor='middle'>{size}</text>")
    # Names stand beside the ends of their lines, a line of text apart.
    below = float("-inf")
    for place, (name, curve) in enumerate(sorted(curves.items(), key=lambda one: -one[1][-1][1])):
        style = f"stroke='{LIGHT[_COLOURS[place % len(_COLOURS)]]}' stroke-width='{3 if name.startswith(OURS) else 2}'"
        parts.append(path([at(*point) for point in curve], style))
        x, y = at(*curve[-1])
        below = max(below + 15, y + 4)
        parts.append(path([(x + 4, below - 4), (x + 16, below - 4)], style))
        parts.append(f"<text x='{x + 20:.1f}' y='{below:.1f}'>{html.escape(name)}</text>")
    parts.append(f"<text x='{_LEFT}' y='{height - 8}'>sequences at a time</text></svg>")
    return "".join(parts) + "\n"


main = program("benchmarks.rollout", picture)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
