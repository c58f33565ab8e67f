"""The figure of a reward model's calibration, how often it is right by how sure it is, and its table of sources."""

from collections.abc import Sequence

from tunesmith.base.config.yaml_text import is_list, is_mapping
from tunesmith.base.runs.listing import number
from tunesmith.observe.reports.chart import LIGHT, Chart, Table, layout, scatter
from tunesmith.observe.reports.text import UNKNOWN, Facts, decimal, short


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
    if plain := quality.get("uncorrected"):
        note += (
            f" Rewards are corrected for length; without that the model is right on {_percent(plain['accuracy'])} of "
            f"the pairs, and on {_percent(plain['accuracy_shorter'])} where the better one is shorter (with it: "
            f"{_percent(quality.get('accuracy'))} and {_percent(quality.get('accuracy_shorter'))})."
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


def sources_table(quality: Facts) -> Table | None:
    """Accuracy on each source, beside "longer wins" and TF-IDF, and where the longer answer lost; None without sources.
    `quality` is reward_quality.json.
    """
    found: object = quality.get("sources")
    rows = [row for row in found if is_mapping(row)] if is_list(found) else []
    if not rows:
        return None
    return Table(
        "reward_quality.json",
        (
            "source",
            "trained on",
            "pairs",
            "accuracy",
            "95\u202f% interval",
            "longer wins",
            "TF-IDF",
            "pairs where the longer lost",
            "accuracy there",
            "95\u202f% interval there",
        ),
        [
            (
                short(row.get("name"), 60),
                "yes, other pairs" if row.get("is_trained") else "no",
                decimal(row.get("num_pairs")),
                decimal(row.get("accuracy")),
                _interval(row, "accuracy"),
                decimal(row.get("longer_wins")),
                decimal(row.get("tfidf")),
                decimal(row.get("num_shorter")),
                decimal(row.get("accuracy_shorter")),
                _interval(row, "shorter"),
            )
            for row in rows
        ],
    )


def _interval(row: Facts, name: str) -> str:
    low, high = number(row.get(f"{name}_low")), number(row.get(f"{name}_high"))
    return UNKNOWN if low is None or high is None else f"{low:.3f} to {high:.3f}"


def _percent(value: object) -> str:
    known = number(value)
    return "none" if known is None else f"{known:.0%}"
