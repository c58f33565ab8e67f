"""Figures of the ladder: how many times as fast as the baseline each level is, and optimal without each technique."""

from collections.abc import Sequence
from typing import Any

from tunesmith.observe.reports.chart import LIGHT, Chart, layout
from tunesmith.observe.reports.text import Facts, decimal, duration, percent


def levels_chart(facts: Facts) -> Chart:
    """A bar for each level, from the ratio of its step time to that of the baseline."""
    levels: Facts = facts["levels"]
    ratios = [level["ratio"] for level in levels.values()]
    return Chart(
        id="levels",
        title="Times as fast as the baseline",
        description="; ".join(f"{name} {decimal(ratio, 2)} times" for name, ratio in zip(levels, ratios, strict=True)),
        figure=_bars(list(levels), ratios, [LIGHT["before"], *[LIGHT["after"]] * (len(levels) - 1)]),
        columns=("level", "ratio", "step", "PPO", "GRPO", "tokens/s", "cores", "GIL wait", "memory"),
        rows=tuple(
            (
                name,
                decimal(level["ratio"], 2),
                *(duration(level[key]) for key in ("step_s", "ppo_s", "grpo_s")),
                decimal(level["tokens_per_s"], 0),
                percent(level["cpu_util"]),
                duration(level.get("gil_wait") and level["gil_wait"] / 1000),
                f"{decimal(level['peak_memory_gb'], 2)} GB",
            )
            for name, level in levels.items()
        ),
        height=300,
    )


def techniques_chart(facts: Facts) -> Chart:
    """A bar for optimal and one for optimal without each technique, the most valuable technique first."""
    optimal = facts["levels"]["optimal"]["ratio"]
    rows = sorted(facts["techniques"], key=lambda row: row["ratio_without"])
    names = ["optimal", *(f"without {row['name']}" for row in rows)]
    ratios = [optimal, *(row["ratio_without"] for row in rows)]
    return Chart(
        id="techniques",
        title="Optimal without each technique",
        description="; ".join(f"{name} {decimal(ratio, 2)} times" for name, ratio in zip(names, ratios, strict=True)),
        figure=_bars(names, ratios, [LIGHT["after"], *[LIGHT["stage_2"]] * len(rows)]),
        columns=("technique", "level", "ratio without", "PPO slowdown", "GRPO slowdown"),
        rows=tuple(
            (
                row["name"],
                row["level"],
                *(decimal(row[key], 2) for key in ("ratio_without", "ppo_slowdown", "grpo_slowdown")),
            )
            for row in rows
        ),
        note="One at a time; techniques that need each other are not worth the sum of their bars.",
        height=80 + 32 * len(names),
    )


def _bars(names: Sequence[str], ratios: Sequence[float], colours: Sequence[str]) -> dict[str, Any]:
    """Horizontal bars, the first on top."""
    bars = {
        "type": "bar",
        "orientation": "h",
        "x": list(ratios),
        "y": list(names),
        "text": [f"{decimal(ratio, 2)}x" for ratio in ratios],
        "textposition": "auto",
        "marker": {"color": list(colours)},
        "hovertemplate": "%{y}: %{x:.2f} times<extra></extra>",
    }
    drawn = layout(
        x="times as fast as the baseline",
        hovermode="closest",
        xaxis={"showgrid": True, "rangemode": "tozero"},
        yaxis={"autorange": "reversed"},
    )
    return {"data": [bars], "layout": drawn}
