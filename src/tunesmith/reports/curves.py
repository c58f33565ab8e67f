"""Which metrics share a picture. Names are TRL's. A metric without a picture still stands in the table."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tunesmith.reports.chart import Chart
from tunesmith.reports.figures import line_chart, stage_chart
from tunesmith.reports.series import Row, numeric_keys, series
from tunesmith.reports.text import decimal


@dataclass(frozen=True, slots=True)
class Picture:
    """A line chart of every metric whose whole name matches `pattern`."""

    id: str
    title: str
    pattern: str
    unit: str = ""


PICTURES = (
    Picture(
        "reward",
        "Reward",
        r"(eval[/_])?reward|objective/scores|(eval[/_])?rewards/(?!acc|margin|chosen|rejected)[^/]+(/mean)?",
    ),
    Picture("accuracy", "Accuracy on votes", r"(eval[/_])?(rewards/)?accurac(y|ies)|heldout/accuracy"),
    Picture("tokens", "Share of learnt tokens that were the likeliest", r"(eval[/_])?mean_token_accuracy"),
    Picture("margins", "Reward of chosen and rejected", r"(eval[/_])?rewards/(margins|chosen|rejected)"),
    Picture("kl", "KL to the starting model", r"kl|objective/kl|kl_per_sequence", "nats"),
    Picture("entropy", "Entropy", r"(eval[/_])?entropy|objective/entropy|policy/entropy(_avg)?", "nats per token"),
    Picture("lengths", "Length of completions", r"completions/(mean|min|max)_(terminated_)?length", "tokens"),
    Picture("losses", "Losses", r"(eval[/_])?loss(/.+)?|.+[/_]loss"),
    Picture(
        "clipping", "Share of clipped tokens", r"clip_ratio(/.+)?|policy/clipfrac_avg|val(ue)?/clip(frac_avg|_ratio)"
    ),
    Picture(
        "update",
        "KL of each update to its rollout",
        r"approx_?kl(/.+)?|policy/approxkl_avg|update_kl",
        "nats per token",
    ),
    Picture("coefficient", "KL coefficient", r"kl_coef(ficient)?|objective/kl_coef"),
    Picture("gradient", "Gradient norm", r"grad_norm(/.+)?"),
    Picture("rate", "Learning rate", r"learning_rate(/.+)?|lr"),
    Picture("speed", "Tokens per second", r"(.+/)?tokens_per_s(econd)?(/.+)?"),
    Picture("memory", "Memory", r"memory/.+"),
)

MAIN = ("reward", "accuracy", "tokens", "margins", "kl", "entropy", "lengths", "losses")
"""Pictures that every report shows openly; the rest stand in a fold."""


@dataclass(frozen=True, slots=True)
class Curves:
    """The pictures of one run: `main` for all to see, `more` in a fold, `stages` if the steps were timed."""

    main: tuple[Chart, ...]
    more: tuple[Chart, ...]
    stages: Chart | None
    table: tuple[tuple[str, ...], ...]

    @property
    def all(self) -> tuple[Chart, ...]:
        """Every chart there is."""
        return (*self.main, *self.more, *((self.stages,) if self.stages else ()))


TABLE_COLUMNS = ("metric", "first", "last", "lowest", "highest", "not finite")


def curves(rows: Sequence[Row], prefix: str = "") -> Curves:
    """All charts of `rows`; `prefix` keeps the ids of two runs on one page apart."""
    keys = numeric_keys(rows)
    charts = {picture.id: _draw(picture, keys, rows, prefix) for picture in PICTURES}
    main = tuple(chart for id in MAIN if (chart := charts[id]) is not None)
    more = tuple(chart for id, chart in charts.items() if chart is not None and id not in MAIN)
    return Curves(main, more, stage_chart(f"{prefix}stages", rows), tuple(_summary(rows, key) for key in keys))


def _draw(picture: Picture, keys: Sequence[str], rows: Sequence[Row], prefix: str) -> Chart | None:
    found = [key for key in keys if re.fullmatch(picture.pattern, key)]
    return line_chart(f"{prefix}{picture.id}", picture.title, rows, labels(found), picture.unit)


def labels(keys: Sequence[str]) -> dict[str, str]:
    """`completions/mean_length` as `mean length`; the whole name where the last parts are the same."""
    short = [key.rsplit("/", 1)[-1].replace("_", " ") for key in keys]
    return {key: name if short.count(name) == 1 else key for key, name in zip(keys, short, strict=True)}


def _summary(rows: Sequence[Row], key: str) -> tuple[str, ...]:
    line = series(rows, key)
    values = [value for _, value in line.finite]
    shown = (values[0], values[-1], min(values), max(values))
    return (key, *(decimal(value, 4) for value in shown), str(line.num_dropped or ""))
