"""Figures of a run over its steps: lines of metrics, thinned to what a screen can show, and the time of each stage."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from tunesmith.base.runs.listing import number
from tunesmith.observe.reports.chart import LIGHT, STAGES, Chart, label, layout, scatter
from tunesmith.observe.reports.text import Facts, decimal, percent

MAX_POINTS = 1_000
"""Points drawn for one line; more than a screen has pixels only makes the page slow."""

TABLE_ROWS = 25
"""Rows of the table under a curve, evenly spaced; metrics.jsonl has them all."""

MAX_STAGES = 8
_FEW_POINTS = 40
_MANY_POINTS = 200
_NUM_MEANS = 100

REPLY, WAITING = "time/rollout/reply_s", "waiting for tools"
"""The seconds in which nothing is drawn because all trajectories wait for a reply, and what pages call them."""


@dataclass(frozen=True, slots=True)
class Series:
    """The values of one metric. `values[i]` is None where the run recorded something that is not finite."""

    key: str
    steps: tuple[float, ...]
    values: tuple[float | None, ...]

    @property
    def finite(self) -> list[tuple[float, float]]:
        """The (step, value) points that are finite."""
        return [(step, value) for step, value in zip(self.steps, self.values, strict=True) if value is not None]

    @property
    def num_dropped(self) -> int:
        """Number of recorded values that are not finite."""
        return len(self.values) - len(self.finite)


def series(rows: Sequence[Facts], key: str) -> Series:
    """The series of `key` over the rows that recorded it; None and NaN in the rows count as recorded but not finite.

    The step of a row without one is its position, from 1.
    """
    recorded = [(number(row.get("step")), position, row) for position, row in enumerate(rows, 1) if key in row]
    steps = tuple(position if step is None else step for step, position, _ in recorded)
    return Series(key, steps, tuple(number(row[key]) for _, _, row in recorded))


def numeric_keys(rows: Sequence[Facts]) -> list[str]:
    """Names with at least one finite value, in order of first appearance, `step` left out."""
    return list(dict.fromkeys(key for row in rows for key in row if key != "step" and number(row[key]) is not None))


def downsample(line: Series) -> Series:
    """At most `MAX_POINTS` points: first, last, and the lowest and highest of each bucket, so no spike is lost."""
    count = len(line.values)
    if count <= MAX_POINTS:
        return line
    size, kept = -(-2 * count // (MAX_POINTS - 2)), {0, count - 1}
    for start in range(0, count, size):
        bucket = enumerate(line.values[start : start + size], start)
        finite = [(value, place) for place, value in bucket if value is not None]
        kept |= {min(finite)[1], max(finite)[1]} if finite else {start}
    places = sorted(kept)
    return Series(line.key, tuple(line.steps[i] for i in places), tuple(line.values[i] for i in places))


def bucket_means(line: Series, limit: int) -> Series:
    """At most `limit` points, each the mean of a bucket: for stacked areas, whose lines must share their steps."""
    size = -(-len(line.values) // limit)
    buckets = (line.values[start : start + size] for start in range(0, len(line.values), size))
    finite = ([value for value in bucket if value is not None] for bucket in buckets)
    return Series(line.key, line.steps[::size], tuple(fmean(values) if values else None for values in finite))


def evenly(items: Sequence[Any], limit: int) -> list[Any]:
    """At most `limit` items, evenly spaced, the first and the last among them."""
    if len(items) <= limit:
        return list(items)
    return [items[round(index * (len(items) - 1) / (limit - 1))] for index in range(limit)]


def line_chart(id: str, title: str, rows: Sequence[Facts], labels: dict[str, str], unit: str = "") -> Chart | None:
    """Lines of the metrics named by the keys of `labels`, or None if no row has a finite value of any.

    More than 1,000 points a line are thinned so that the highest and lowest of each stretch stay.
    """
    lines = [line for key in labels if (line := series(rows, key)).finite]
    if not lines:
        return None
    traces = [
        trace for index, line in enumerate(lines) for trace in _line_traces(line, labels[line.key], index, len(lines))
    ]
    return Chart(
        id=id,
        title=title,
        description=f"{title}{f' in {unit}' if unit else ''}. "
        + " ".join(_in_words(line, labels[line.key]) for line in lines),
        figure={"data": traces, "layout": layout(x="step", y=unit, **(_legend(len(lines)) if len(lines) > 1 else {}))},
        columns=("step", *(labels[line.key] for line in lines)),
        rows=_curve_rows(lines),
        note=_note(lines),
    )


def _legend(num_lines: int) -> dict[str, Any]:
    return {"showlegend": True, "margin": {"t": 34 + 18 * ((num_lines - 1) // 4)}}


def _line_traces(line: Series, name: str, index: int, num_lines: int) -> list[dict[str, Any]]:
    """The line itself; of a long one also the mean of each hundredth, bold over the pale line."""
    thin = downsample(line)
    colour = LIGHT["after"] if num_lines == 1 else STAGES[index % len(STAGES)]
    line_style: dict[str, Any] = {"color": colour, "width": 1.8, "dash": ("solid", "dash", "dot", "dashdot")[index % 4]}
    trace = scatter(
        label(name),
        thin.steps,
        thin.values,
        "lines+markers" if len(thin.values) <= _FEW_POINTS else "lines",
        line=line_style,
        marker={"color": colour, "size": 4},
        hovertemplate=f"%{{y:.4~g}}<extra>{label(name)}</extra>",
    )
    if len(line.values) <= _MANY_POINTS:
        return [trace]
    means = bucket_means(line, _NUM_MEANS)
    pale = {**trace, "opacity": 0.35, "showlegend": False, "hoverinfo": "skip", "line": {"color": colour, "width": 1}}
    del pale["hovertemplate"]
    return [pale, {**trace, "x": list(means.steps), "y": list(means.values), "line": {**line_style, "width": 2.2}}]


def _note(lines: Sequence[Series]) -> str:
    num_dropped = sum(line.num_dropped for line in lines)
    notes = [f"{num_dropped} values were not finite; they are left out."] if num_dropped else []
    if any(len(line.values) > _MANY_POINTS for line in lines):
        notes.append("Bold: means over each 1 % of the run. Pale: the single steps.")
    return " ".join(notes)


def _in_words(line: Series, name: str) -> str:
    points = line.finite
    (first_step, first), (last_step, last) = points[0], points[-1]
    low_step, low = min(points, key=lambda point: point[1])
    high_step, high = max(points, key=lambda point: point[1])
    return (
        f"{name}: {decimal(first)} at step {first_step:g}, {decimal(last)} at step {last_step:g}; "
        f"lowest {decimal(low)} at step {low_step:g}, highest {decimal(high)} at step {high_step:g}."
    )


def _curve_rows(lines: Sequence[Series]) -> tuple[tuple[str, ...], ...]:
    values = [dict(zip(line.steps, line.values, strict=True)) for line in lines]
    steps = evenly(sorted({step for line in values for step in line}), TABLE_ROWS)
    return tuple((f"{step:g}", *(decimal(line.get(step), 4) for line in values)) for step in steps)


def stage_chart(id: str, rows: Sequence[Facts]) -> Chart | None:
    """Seconds of each top-level stage (`time/<stage>_s`), stacked per step: bars for few steps, areas for many.

    The part of a rollout in which all trajectories wait for their environment is a stage of its own.
    """
    rows = [_with_waiting(row) for row in rows]
    keys = [key for key in numeric_keys(rows) if _is_stage(key)]
    if not keys:
        return None
    timed = [row for row in rows if any(key in row for key in keys)]
    filled = [{**dict.fromkeys(keys, 0.0), **row} for row in timed]
    lines = sorted((series(filled, key) for key in keys), key=_total, reverse=True)
    total = sum(map(_total, lines)) or 1.0
    shown, merged = lines[:MAX_STAGES], lines[MAX_STAGES:]
    if merged:
        shown = [*lines[: MAX_STAGES - 1], _sum(lines[MAX_STAGES - 1 :])]
    traces = [_stage_trace(line, index, len(timed) > _FEW_POINTS) for index, line in enumerate(shown)]
    table = tuple(
        (_stage_name(line), decimal(_total(line) / len(timed)), decimal(_total(line), 1), percent(_total(line) / total))
        for line in lines
    )
    shares = ", ".join(f"{row[0]} {row[3]}" for row in table)
    return Chart(
        id=id,
        title="Time of each step",
        description=f"Seconds of each step by stage over {len(timed)} steps. Share of the time: {shares}.",
        figure={
            "data": traces,
            "layout": layout(x="step", y="seconds", barmode="stack", bargap=0.15, **_legend(len(shown))),
        },
        columns=("stage", "mean s", "total s", "share"),
        rows=table,
        height=300,
    )


def _with_waiting(row: Facts) -> Facts:
    waited_s, drawn_s = number(row.get(REPLY)), number(row.get("time/rollout_s"))
    if not waited_s or drawn_s is None:
        return row
    return {**row, "time/rollout_s": drawn_s - waited_s, f"time/{WAITING}_s": waited_s}


def _stage_name(line: Series) -> str:
    return line.key.removeprefix("time/").removesuffix("_s").replace("_", " ")


def _is_stage(key: str) -> bool:
    return key.startswith("time/") and key.count("/") == 1 and key not in ("time/step_s", "time/total_s", "time/wall_s")


def _total(line: Series) -> float:
    return sum(value for value in line.values if value is not None)


def _sum(lines: Sequence[Series]) -> Series:
    values = tuple(
        sum(value or 0.0 for value in column) for column in zip(*(line.values for line in lines), strict=True)
    )
    return Series("time/all the rest_s", lines[0].steps, values)


def _stage_trace(line: Series, index: int, as_area: bool) -> dict[str, Any]:
    thin = bucket_means(line, 500)
    colour = STAGES[index % len(STAGES)]
    name = label(_stage_name(line))
    area = scatter(name, thin.steps, thin.values, hovertemplate=f"%{{y:.3~g}} s<extra>{name}</extra>")
    if as_area:
        return {**area, "stackgroup": "time", "fillcolor": colour, "line": {"width": 0}}
    del area["mode"]
    return {**area, "type": "bar", "marker": {"color": colour, "line": {"width": 0}}}


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
        r"(eval[/_])?reward|objective/scores|(eval[/_])?rewards/(?!acc|margin|chosen|rejected|num_)[^/]+(/mean)?",
    ),
    Picture("accuracy", "Accuracy on votes", r"(eval[/_])?(rewards/)?accurac(y|ies)|heldout/accuracy"),
    Picture("tokens", "Share of learnt tokens that were the likeliest", r"(eval[/_])?mean_token_accuracy"),
    Picture("margins", "Reward of chosen and rejected", r"(eval[/_])?rewards/(margins|chosen|rejected)"),
    Picture("kl", "KL to the starting model", r"kl|objective/kl|kl_per_sequence", "nats"),
    Picture("entropy", "Entropy", r"(eval[/_])?entropy|policy/entropy(_avg)?", "nats per token"),
    Picture("completion_entropy", "Entropy of a completion", r"objective/entropy", "nats"),
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
    Picture("cores", "Cores in use", r"cpu/(process|others|stolen|cores)"),
    Picture("memory", "Memory", r"memory/.+_gb(/.+)?", "GB"),
)

MAIN = ("reward", "accuracy", "tokens", "margins", "kl", "entropy", "lengths", "losses")
"""Pictures that are always visible; the others are in a collapsible section."""


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


def curves(rows: Sequence[Facts], prefix: str = "") -> Curves:
    """All charts of `rows`; `prefix` keeps the ids of two runs on one page apart."""
    keys = numeric_keys(rows)
    charts = {picture.id: _draw(picture, keys, rows, prefix) for picture in PICTURES}
    main = tuple(chart for id in MAIN if (chart := charts[id]) is not None)
    more = tuple(chart for id, chart in charts.items() if chart is not None and id not in MAIN)
    return Curves(main, more, stage_chart(f"{prefix}stages", rows), tuple(_summary(rows, key) for key in keys))


def _draw(picture: Picture, keys: Sequence[str], rows: Sequence[Facts], prefix: str) -> Chart | None:
    found = [key for key in keys if re.fullmatch(picture.pattern, key)]
    return line_chart(f"{prefix}{picture.id}", picture.title, rows, labels(found), picture.unit)


def labels(keys: Sequence[str]) -> dict[str, str]:
    """`completions/mean_length` as `mean length`, `rewards/helpful/mean` as `helpful`; the whole name where these parts
    are the same.
    """
    short = [key.removesuffix("/mean").rsplit("/", 1)[-1].replace("_", " ") for key in keys]
    return {key: name if short.count(name) == 1 else key for key, name in zip(keys, short, strict=True)}


def _summary(rows: Sequence[Facts], key: str) -> tuple[str, ...]:
    line = series(rows, key)
    values = [value for _, value in line.finite]
    shown = (values[0], values[-1], min(values), max(values))
    return (key, *(decimal(value, 4) for value in shown), str(line.num_dropped or ""))
