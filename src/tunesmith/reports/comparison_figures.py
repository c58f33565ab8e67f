"""Figures of a comparison: scores before and after, by prompt and as a distribution, and calibration."""

from collections.abc import Sequence
from typing import Any

from tunesmith.reports.chart import LIGHT, Chart, label, layout, scatter
from tunesmith.reports.series import Row, number
from tunesmith.reports.text import decimal, percent, prompt_text, short, signed

_NUM_BINS = 20


def histogram(
    id: str, title: str, before: Sequence[object], after: Sequence[object], unit: str = "score"
) -> Chart | None:
    """Counts of the values before and after in the same 20 bins, or None without a finite value."""
    sides = [[value for item in items if (value := number(item)) is not None] for items in (before, after)]
    if not sides[0] + sides[1]:
        return None
    low, width = _bins(sides[0] + sides[1])
    counts = [_count(values, low, width) for values in sides]
    traces = _histogram_traces(counts, low, width)
    means = [sum(values) / len(values) if values else None for values in sides]
    return Chart(
        id=id,
        title=title,
        description=f"{title}. {len(sides[0])} completions before with mean {decimal(means[0])}, "
        f"{len(sides[1])} after with mean {decimal(means[1])}.",
        figure={
            "data": traces,
            "layout": layout(
                x=unit,
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


def _bins(values: Sequence[float]) -> tuple[float, float]:
    """Lower edge and width of the bins: -1 to 1 for scores of that kind, else the range of the values."""
    low, high = min(values), max(values)
    if -1 <= low < 0 and high <= 1:
        low, high = -1.0, 1.0
    return low, (high - low) / _NUM_BINS or 1.0


def _count(values: Sequence[float], low: float, width: float) -> list[int]:
    counts = [0] * _NUM_BINS
    for value in values:
        counts[min(_NUM_BINS - 1, int((value - low) / width))] += 1
    return counts


def dumbbell(id: str, title: str, prompts: Sequence[Row], unit: str = "mean score") -> Chart | None:
    """One line per prompt from its score before (hollow) to its score after (filled), the largest gain on top."""
    known = [row for row in prompts if _has_means(row)]
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
                x=unit,
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


def _has_means(row: Row) -> bool:
    return number(row.get("mean_before")) is not None and number(row.get("mean_after")) is not None


def _bar(row: Row, y: int) -> dict[str, Any]:
    side = "after" if row["mean_after"] >= row["mean_before"] else "before"
    ends = {"x0": row["mean_before"], "x1": row["mean_after"], "y0": y, "y1": y}
    return {**ends, "type": "line", "layer": "between", "opacity": 0.35, "line": {"width": 3, "color": LIGHT[side]}}


def _name_above(name: str, y: int) -> dict[str, Any]:
    """The prompt above its line instead of next to the axis, so that it fits a narrow screen."""
    place = {"x": 0, "xref": "paper", "y": y + 0.4, "xanchor": "left", "yanchor": "middle"}
    return {**place, "showarrow": False, "text": name}


def _dots(rows: Sequence[Row], names: Sequence[str], side: str) -> dict[str, Any]:
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


def calibration_chart(id: str, points: Sequence[Row]) -> Chart | None:
    """Observed against predicted share of votes for the first completion, from rows `predicted`, `observed`, `num`."""
    known = [
        row for row in points if number(row.get("predicted")) is not None and number(row.get("observed")) is not None
    ]
    if not known:
        return None
    dotted = {"color": LIGHT["muted"], "dash": "dot", "width": 1.2}
    diagonal = scatter("perfect", [0, 1], [0, 1], hoverinfo="skip", line=dotted)
    dots = scatter(
        "reward model",
        [row["predicted"] for row in known],
        [row["observed"] for row in known],
        "lines+markers",
        text=[f"{decimal(row.get('num'), 0)} votes" for row in known],
        line={"color": LIGHT["after"], "width": 1.8},
        marker={"color": LIGHT["after"], "size": 8},
        hovertemplate="predicted %{x:.0%}, observed %{y:.0%}, %{text}<extra></extra>",
    )
    axes = {"range": [-0.03, 1.03], "tickformat": ".0%"}
    return Chart(
        id=id,
        title="Does its confidence match the votes?",
        description="Observed against predicted share of votes: "
        + "; ".join(f"predicted {percent(row['predicted'])}, observed {percent(row['observed'])}" for row in known),
        figure={
            "data": [diagonal, dots],
            "layout": layout(x="predicted", y="observed", hovermode="closest", xaxis=axes, yaxis=axes),
        },
        columns=("predicted", "observed", "votes"),
        rows=tuple((percent(row["predicted"]), percent(row["observed"]), decimal(row.get("num"), 0)) for row in known),
    )
