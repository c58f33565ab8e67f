"""The figure of a reward model's calibration: how often it is right, by how sure it is."""

from collections.abc import Sequence

from tunesmith.base.runs.listing import number
from tunesmith.observe.reports.chart import LIGHT, Chart, layout, scatter
from tunesmith.observe.reports.text import Facts, decimal


def calibration_chart(quality: Facts) -> Chart | None:
    """Accuracy on held-out pairs over the confidence of the reward model, a point for each bin with pairs; None without
    any. `quality` is reward_quality.json.
    """
    given: Sequence[Facts] = quality.get("bins") or ()
    bins = [row for row in given if None not in (number(row.get("confidence")), number(row.get("accuracy")))]
    if not bins:
        return None
    most = max(row["num_pairs"] for row in bins)
    heads: Facts = quality.get("heads") or {}
    note = f"{quality.get('num_pairs')} held-out pairs; expected calibration error {decimal(quality.get('ece'))}."
    if heads:
        note += (
            f" On {heads['num_agreed']} of the pairs all {heads['num_heads']} heads prefer the same side: right on "
            f"{_percent(heads['accuracy_agreed'])}. On the other {heads['num_split']} the model is right on "
            f"{_percent(heads['accuracy_split'])}."
        )
    diagonal = scatter("as sure as right", [0.5, 1], [0.5, 1], line={"color": LIGHT["line"], "dash": "dot"})
    points = scatter(
        "held-out pairs",
        [row["confidence"] for row in bins],
        [row["accuracy"] for row in bins],
        "lines+markers",
        line={"color": LIGHT["after"], "width": 1.6},
        marker={"size": [6 + 12 * (row["num_pairs"] / most) ** 0.5 for row in bins], "color": LIGHT["after"]},
        customdata=[row["num_pairs"] for row in bins],
        hovertemplate="%{customdata} pairs, right on %{y:.0%}",
    )
    return Chart(
        id="calibration",
        title="How sure it is, and how often right",
        description="The share of pairs on which the reward model is right over the probability that it gives its "
        "choice: "
        + "; ".join(f"{_percent(row['accuracy'])} at {_percent(row['confidence'])}" for row in bins)
        + ". Points below the diagonal are pairs of which it is too sure.",
        figure={
            "data": [diagonal, points],
            "layout": layout(x="probability of its choice", y="accuracy", showlegend=True, margin={"t": 34}),
        },
        columns=("from", "to", "pairs", "confidence", "accuracy"),
        rows=tuple(
            (
                decimal(row["low"], 2),
                decimal(row["high"], 2),
                str(row["num_pairs"]),
                decimal(row["confidence"]),
                decimal(row["accuracy"]),
            )
            for row in bins
        ),
        note=note,
    )


def _percent(value: object) -> str:
    known = number(value)
    return "none" if known is None else f"{known:.0%}"
