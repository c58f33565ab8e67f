"""Figures of a comparison: scores before and after, by prompt and as a distribution."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tunesmith.base.runs.listing import number
from tunesmith.observe.reports.chart import LIGHT, Chart, label, layout, scatter
from tunesmith.observe.reports.text import Facts, decimal, prompt_text, short, signed

_NUM_BINS = 20


def histogram(id: str, title: str, before: Sequence[object], after: Sequence[object]) -> Chart | None:
    """Counts of the scores before and after in the same 20 bins, or None without a finite score.

    The bins span -1 to 1 for scores of that kind, else the range of the scores.
    """
    sides = [[value for item in items if (value := number(item)) is not None] for items in (before, after)]
    if not any(sides):
        return None
    low, high = min(map(min, filter(None, sides))), max(map(max, filter(None, sides)))
    if -1 <= low < 0 and high <= 1:
        low, high = -1.0, 1.0
    width = (high - low) / _NUM_BINS or 1.0
    binned = [Counter(min(_NUM_BINS - 1, int((value - low) / width)) for value in values) for values in sides]
    counts = [[side[index] for index in range(_NUM_BINS)] for side in binned]
    means = [sum(values) / len(values) if values else None for values in sides]
    return Chart(
        id=id,
        title=title,
        description=f"{title}. {len(sides[0])} completions before with mean {decimal(means[0])}, "
        f"{len(sides[1])} after with mean {decimal(means[1])}.",
        figure={
            "data": _histogram_traces(counts, low, width),
            "layout": layout(
                x="score",
                y="completions",
                showlegend=True,
                margin={"t": 34},
                legend={"traceorder": "reversed"},
                xaxis={"range": [low - width, low + (_NUM_BINS + 1) * width]},
            ),
        },
        columns=("from", "to", "before", "after"),
        rows=tuple(
            (decimal(low + index * width, 2), decimal(low + (index + 1) * width, 2), str(old), str(new))
            for index, (old, new) in enumerate(zip(*counts, strict=True))
        ),
    )


def _histogram_traces(counts: Sequence[Sequence[int]], low: float, width: float) -> list[dict[str, Any]]:
    """After as filled bars, before as an outline over them: hollow, as in every picture."""
    centres = [low + (index + 0.5) * width for index in range(_NUM_BINS)]
    bars: dict[str, Any] = {
        "type": "bar",
        "name": "after",
        "x": centres,
        "y": list(counts[1]),
        "width": width * 0.92,
        "opacity": 0.55,
        "marker": {"color": LIGHT["after"]},
        "hovertemplate": "%{y} completions<extra>after</extra>",
    }
    outline = scatter(
        "before",
        [low - width / 2, *centres, low + (_NUM_BINS + 0.5) * width],
        [0, *counts[0], 0],
        line={"shape": "hvh", "color": LIGHT["before"], "width": 2.2},
        hovertemplate="%{y} completions<extra>before</extra>",
    )
    return [bars, outline]


def dumbbell(id: str, title: str, prompts: Sequence[Facts]) -> Chart | None:
    """One line per prompt from its score before (hollow) to its score after (filled), the largest gain on top."""
    known = [row for row in prompts if None not in (number(row.get("mean_before")), number(row.get("mean_after")))]
    if not known:
        return None
    rows = sorted(known, key=lambda row: row["mean_after"] - row["mean_before"])
    names = [label(row.get("prompt"), 44) for row in rows]
    return Chart(
        id=id,
        title=title,
        description=f"{title}: "
        + "; ".join(
            f"{short(r.get('prompt'), 44)} {decimal(r['mean_before'])} to {decimal(r['mean_after'])}"
            for r in rows[::-1]
        ),
        figure={
            "data": [_dots(rows, names, side) for side in ("before", "after")],
            "layout": layout(
                x="mean score",
                shapes=[_bar(row, y) for y, row in enumerate(rows)],
                annotations=[_name_above(name, y) for y, name in enumerate(names)],
                showlegend=True,
                hovermode="closest",
                margin={"l": 8, "t": 34},
                xaxis={"showgrid": True},
                yaxis={"showticklabels": False, "showgrid": False, "zeroline": False, "range": [-0.5, len(rows) - 0.3]},
            ),
        },
        columns=("prompt", "before", "after", "difference"),
        rows=tuple(
            (
                prompt_text(row.get("prompt")),
                decimal(row["mean_before"]),
                decimal(row["mean_after"]),
                signed(row["mean_after"] - row["mean_before"]),
            )
            for row in rows[::-1]
        ),
        height=90 + 42 * len(rows),
    )


def _bar(row: Facts, y: int) -> dict[str, Any]:
    side = "after" if row["mean_after"] >= row["mean_before"] else "before"
    ends = {"x0": row["mean_before"], "x1": row["mean_after"], "y0": y, "y1": y}
    return {**ends, "type": "line", "layer": "between", "opacity": 0.35, "line": {"width": 3, "color": LIGHT[side]}}


def _name_above(name: str, y: int) -> dict[str, Any]:
    """The prompt above its line instead of next to the axis, so that it fits a narrow screen."""
    place = {"x": 0, "xref": "paper", "y": y + 0.4, "xanchor": "left", "yanchor": "middle"}
    return {**place, "showarrow": False, "text": name}


def _dots(rows: Sequence[Facts], names: Sequence[str], side: str) -> dict[str, Any]:
    hollow = side == "before"
    return scatter(
        side,
        [row[f"mean_{side}"] for row in rows],
        range(len(rows)),
        "markers",
        text=list(names),
        marker={
            "size": 11,
            "color": LIGHT["card"] if hollow else LIGHT["after"],
            "line": {"width": 2.2, "color": LIGHT[side]},
        },
        hovertemplate=f"%{{text}}<br>{side} %{{x:.3f}}<extra></extra>",
    )
