"""The quality of a reward model as text for the terminal."""

from rich.console import Group, RenderableType
from rich.table import Table

from tunesmith.evaluation.reward_quality import RewardQuality


def reward_table(quality: RewardQuality) -> RenderableType:
    """A rich renderable: the figures with what they are measured by, and the bins of the calibration."""
    return Group(_figures(quality), "", _bins(quality))


def _figures(quality: RewardQuality) -> Table:
    q = quality
    table = Table.grid(padding=(0, 2))
    interval = f"{q.accuracy_low:.3f} to {q.accuracy_high:.3f}"
    table.add_row("accuracy", f"{q.accuracy:.3f}", f"95 % interval {interval}, {q.num_pairs:,} pairs")
    table.add_row("longer wins", f"{q.longer_wins:.3f}", "the rule that the longer one was preferred")
    if q.tfidf is not None:
        p_value = "" if q.p_value_tfidf is None else f", p = {q.p_value_tfidf:.2g} (McNemar)"
        table.add_row(
            "TF-IDF", f"{q.tfidf:.3f}", f"Bradley-Terry, fitted on {q.num_tfidf_pairs:,} other pairs{p_value}"
        )
    table.add_row("Brier score", f"{q.brier:.3f}", "0.25 is a coin's")
    table.add_row("log loss", f"{q.log_loss:.3f}", "0.693 is a coin's")
    table.add_row("ECE", f"{q.ece:.3f}", "mean distance of confidence and accuracy")
    table.add_row("margin", f"{q.mean_margin:.3f}", "mean reward of the better minus that of the worse one")
    table.add_row("length", _or_none(q.length_correlation), "correlation of margin and difference in tokens")
    table.add_row("", _or_none(q.accuracy_longer), f"accuracy on the {q.num_longer:,} pairs whose better one is longer")
    table.add_row("", _or_none(q.accuracy_shorter), f"on the {q.num_shorter:,} pairs whose better one is shorter")
    return table


def _bins(quality: RewardQuality) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    for name in ("confidence", "pairs", "mean", "accuracy"):
        table.add_column(name, justify="right")
    for one in quality.bins:
        table.add_row(
            f"{one.low:.2f} to {one.high:.2f}", f"{one.num_pairs:,}", _or_none(one.confidence), _or_none(one.accuracy)
        )
    return table


def _or_none(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
