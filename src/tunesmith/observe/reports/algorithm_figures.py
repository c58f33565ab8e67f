"""Figures of an algorithm comparison: score against KL, and the scores at equal KL with their intervals."""

from typing import Any

from tunesmith.observe.reports.chart import LIGHT, Chart, layout, scatter
from tunesmith.observe.reports.text import UNKNOWN, Facts, decimal

_COLOURS = ("after", "before", "stage_3", "stage_6")


def frontier_chart(facts: Facts) -> Chart:
    """A line for each training, in the colour of its algorithm: the rater's score against the KL to the base model."""
    traces: list[dict[str, Any]] = []
    rows: list[tuple[str, ...]] = []
    for algorithm, colour in zip(facts["algorithms"].values(), _COLOURS, strict=True):
        for seed, curve in enumerate(algorithm["curves"]):
            traces.append(
                scatter(
                    algorithm["title"],
                    [point["kl"] for point in curve],
                    [point["score"] for point in curve],
                    "lines+markers",
                    line={"color": LIGHT[colour], "width": 1.6},
                    marker={"size": 5, "color": LIGHT[colour]},
                    legendgroup=algorithm["title"],
                    showlegend=seed == 0,
                    hovertemplate=f"seed {seed}, KL %{{x:.2f}}, score %{{y:.3f}}",
                )
            )
            name = f"{algorithm['title']}, seed {seed}"
            rows += [(name, str(row["step"]), decimal(row["kl"], 2), decimal(row["score"])) for row in curve]
    mark = {"type": "line", "y0": 0, "y1": 1, "yref": "paper", "line": {"color": LIGHT["line"], "dash": "dot"}}
    return Chart(
        id="frontier",
        title="Score against KL",
        description="The rater's mean score over the KL to the base model, a line for each training. "
        + " ".join(f"{row['title']} ends at {_ends(row)}." for row in facts["algorithms"].values()),
        figure={
            "data": traces,
            "layout": _layout(
                shapes=[{**mark, "x0": kl, "x1": kl} for kl in facts["targets"]],
                xaxis={"showgrid": True, "rangemode": "tozero"},
            ),
        },
        columns=("training", "step", "KL", "score"),
        rows=tuple(rows),
        height=380,
    )


def _layout(**changes: Any) -> dict[str, Any]:
    """The layout of both figures."""
    x = "KL to the base model, nats per completion"
    return layout(x=x, y="score", showlegend=True, hovermode="closest", margin={"t": 34}, **changes)


def _ends(algorithm: Facts) -> str:
    return ", ".join(
        f"{decimal(curve[-1]['score'], 2)} at {decimal(curve[-1]['kl'], 1)} nats" for curve in algorithm["curves"]
    )


def equal_kl_chart(facts: Facts) -> Chart:
    """The mean score of each algorithm at each target, with its interval over the seeds."""
    targets, algorithms = facts["targets"], list(facts["algorithms"].values())
    traces: list[dict[str, Any]] = []
    for place, (algorithm, colour) in enumerate(zip(algorithms, _COLOURS, strict=True)):
        known = [at for at in algorithm["at"] if at["mean"] is not None]
        half = [0.0 if at["high"] is None else at["high"] - at["mean"] for at in known]
        traces.append(
            scatter(
                algorithm["title"],
                [at["kl"] + 0.22 * (place - (len(algorithms) - 1) / 2) for at in known],
                [at["mean"] for at in known],
                "markers",
                marker={"size": 10, "color": LIGHT[colour]},
                error_y={"type": "data", "array": half, "color": LIGHT[colour], "thickness": 1.8},
                hovertemplate="score %{y:.3f}",
            )
        )
    return Chart(
        id="equal-kl",
        title="Score at equal KL",
        description="; ".join(
            f"{row['title']} " + ", ".join(f"{interval_text(at)} at {at['kl']:g} nats" for at in row["at"])
            for row in algorithms
        ),
        figure={"data": traces, "layout": _layout(xaxis={"tickvals": list(targets)})},
        columns=("algorithm", *(f"{kl:g} nats" for kl in targets)),
        rows=tuple((row["title"], *(interval_text(at) for at in row["at"])) for row in algorithms),
        height=320,
    )


def interval_text(at: Facts) -> str:
    """A mean with its interval, and the number of seeds that reached the KL if not all did."""
    if at["mean"] is None:
        return UNKNOWN
    interval = "" if at["low"] is None else f" ({decimal(at['low'], 2)} to {decimal(at['high'], 2)})"
    few = "" if at["num_reached"] == len(at["scores"]) else f", {at['num_reached']} of {len(at['scores'])} seeds"
    return f"{decimal(at['mean'], 2)}{interval}{few}"
