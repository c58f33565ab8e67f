"""Figures of a profile: the timeline of a step, the flame graph of Python, and two profiles beside each other."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tunesmith.observe.profiling.chrome import CORES, STAGE, STEP, Event, thread_of
from tunesmith.observe.profiling.flame import Node
from tunesmith.observe.profiling.profile import Compared, Comparison
from tunesmith.observe.reports.chart import LIGHT, STAGES, Chart, label, layout, scatter
from tunesmith.observe.reports.text import UNKNOWN, duration, percent

MAX_BARS = 1_500
"""Bars of one row of a timeline; shorter stages that follow each other are drawn as one."""

_NUM_BINS = 200
_MAX_THREADS = 12
_IDLE = 0.02
"""Threads that never use more of a processor are not drawn."""

_ROW_PX = 30
_PANEL_PX = 104
_GAP_PX = 34
_TABLE_ROWS = 60
_BEFORE = {"color": LIGHT["before"], "width": 1.5}
_TEXT = {"minsize": 9, "mode": "hide"}
"""Text that does not fit into its box is left out, and shown when pointed at."""


@dataclass(slots=True)
class Bar:
    """A stage, or several short ones in a row; times in seconds since the step began."""

    depth: int
    start_s: float
    end_s: float
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """Time of each stage in it."""

    @property
    def stage(self) -> str:
        """The stage with the most time."""
        return max(self.seconds, key=lambda name: self.seconds[name])

    @property
    def name(self) -> str:
        """The stage, or all of them with their shares."""
        total = sum(self.seconds.values())
        parts = sorted(self.seconds.items(), key=lambda item: -item[1])
        return parts[0][0] if len(parts) == 1 else ", ".join(f"{name} {percent(s / total)}" for name, s in parts)


def timeline(trace: Mapping[str, Any]) -> Chart | None:
    """The last step of the trace: stages, threads, and all counters. None without steps."""
    events: Sequence[Event] = trace["traceEvents"]
    main = trace["otherData"]["main_thread"]
    mine = [e for e in events if e["ph"] == "X" and e["cat"] in (STAGE, STEP) and thread_of(e) == main]
    steps = [event for event in mine if event["cat"] == STEP]
    if not steps:
        return None
    start_us, step_us = steps[-1]["ts"], steps[-1]["dur"]
    inside = [e for e in mine if e["cat"] == STAGE and start_us <= e["ts"] < start_us + step_us]
    bars = list(_bars(inside, start_us, step_us / MAX_BARS / 1e6))
    counters = _counters(events, start_us, start_us + step_us)
    cores = {name.removeprefix(CORES): points for name, points in counters.items() if name.startswith(CORES)}
    others = {name: points for name, points in counters.items() if not name.startswith(CORES)}
    panels = [_stage_panel(bars), *_thread_panel(cores, step_us / 1e6)]
    panels += [_line_panel(name, points) for name, points in others.items()]
    height, figure = _stacked(panels, step_us / 1e6)
    name = steps[-1]["name"]
    shown = ", ".join(["stages", *(["threads"] if cores else []), *others])
    return Chart(
        "timeline",
        f"Timeline of {name}",
        f"{name} took {duration(step_us / 1e6)}. Above each other, on one axis of time: {shown}.",
        figure,
        ("stage", "begins at", "lasts"),
        tuple((bar.name, milliseconds(bar.start_s), milliseconds(bar.end_s - bar.start_s)) for bar in _longest(bars)),
        "Drag to zoom, double-click to go back. Processor time of a thread is its mean over some 20 ms.",
        height,
    )


def _longest(bars: Sequence[Bar]) -> list[Bar]:
    chosen = sorted(bars, key=lambda bar: bar.start_s - bar.end_s)[:_TABLE_ROWS]
    return sorted(chosen, key=lambda bar: bar.start_s)


def _bars(stages: Sequence[Event], start_us: float, least_s: float) -> Iterator[Bar]:
    """Bars by depth; runs of stages shorter than `least_s`, with less than that between them, become one."""
    ends: list[float] = []
    runs: dict[int, Bar] = {}
    for event in stages:
        begin_s, seconds = (event["ts"] - start_us) / 1e6, event["dur"] / 1e6
        while ends and begin_s >= ends[-1]:
            ends.pop()
        depth = len(ends)
        ends.append(begin_s + seconds)
        run = runs.get(depth)
        if seconds >= least_s or run is None or begin_s - run.end_s > least_s:
            run = Bar(depth, begin_s, begin_s + seconds)
            yield run
            if seconds < least_s:
                runs[depth] = run
            else:
                runs.pop(depth, None)
        run.end_s = begin_s + seconds
        run.seconds[event["name"]] = run.seconds.get(event["name"], 0.0) + seconds


def _counters(events: Sequence[Event], start_us: float, end_us: float) -> dict[str, list[tuple[float, float]]]:
    """(seconds since the step began, value) of each counter; the last value before the step counts at its begin."""
    found: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] != "C" or event["ts"] >= end_us:
            continue
        points = found.setdefault(event["name"], [])
        if event["ts"] < start_us:
            points.clear()
        points.append((max(0.0, (event["ts"] - start_us) / 1e6), event["args"]["value"]))
    return found


@dataclass(frozen=True, slots=True)
class _Panel:
    """A part of the timeline: Plotly's traces, the settings of its y axis, and its height."""

    traces: Sequence[dict[str, Any]]
    axis: dict[str, Any]
    height_px: int


def _stage_panel(bars: Sequence[Bar]) -> _Panel:
    seconds: dict[str, float] = {}
    for bar in bars:
        seconds[bar.stage] = seconds.get(bar.stage, 0.0) + bar.end_s - bar.start_s
    stages = sorted(seconds, key=lambda stage: -seconds[stage])  # the longest have colours of their own
    depths = 1 + max((bar.depth for bar in bars), default=0)
    trace = {
        "type": "bar",
        "orientation": "h",
        "base": [bar.start_s for bar in bars],
        "x": [bar.end_s - bar.start_s for bar in bars],
        "y": [bar.depth for bar in bars],
        "width": 0.9,
        "text": [label(bar.name, 40) for bar in bars],
        "textposition": "inside",
        "insidetextanchor": "start",
        "textangle": 0,
        "hovertext": [f"{label(bar.name, 120)}: {milliseconds(bar.end_s - bar.start_s)}" for bar in bars],
        "hoverinfo": "text",
        "marker": {
            "color": [STAGES[stages.index(bar.stage) % len(STAGES)] for bar in bars],
            "line": {"width": 0.5, "color": LIGHT["card"]},
        },
    }
    axis = {"range": [depths - 0.5, -0.5], "tickvals": [0], "ticktext": ["stages"], "showgrid": False}
    return _Panel([trace], axis, depths * _ROW_PX)


def _thread_panel(cores: Mapping[str, Sequence[tuple[float, float]]], step_s: float) -> list[_Panel]:
    """A row for each thread that worked, darker where it used more of a processor."""
    busy = {name: points for name, points in cores.items() if max(value for _, value in points) > _IDLE}
    shown = sorted(busy, key=lambda name: -sum(value for _, value in busy[name]))[:_MAX_THREADS]
    if not shown:
        return []
    bins = max(1, min(_NUM_BINS, max(map(len, busy.values()))))
    trace = {
        "type": "heatmap",
        "x0": step_s / bins / 2,
        "dx": step_s / bins,
        "y": list(range(len(shown))),
        "z": [_binned(busy[name], bins, step_s) for name in shown],
        "zmin": 0,
        "zmax": 1,
        "colorscale": [[0, LIGHT["grid"]], [1, LIGHT["after"]]],
        "showscale": False,
        "hovertemplate": "%{y}: %{z:.0%} of a processor<extra></extra>",
    }
    names = [label(name, 22) for name in shown]
    axis = {"range": [len(shown) - 0.5, -0.5], "tickvals": trace["y"], "ticktext": names, "showgrid": False}
    return [_Panel([trace], axis, max(2, len(shown)) * _ROW_PX * 2 // 3)]


def _binned(points: Sequence[tuple[float, float]], bins: int, step_s: float) -> list[float | None]:
    """The mean of the points in each bin; a bin without points has the value of the next point, which covers it."""
    sums, counts = [0.0] * bins, [0] * bins
    for time_s, value in points:
        place = min(bins - 1, int(time_s / step_s * bins))
        sums[place] += value
        counts[place] += 1
    filled: list[float | None] = []
    following = None
    for total, count in zip(reversed(sums), reversed(counts), strict=True):
        following = total / count if count else following
        filled.append(following)
    return filled[::-1]


def _line_panel(name: str, points: Sequence[tuple[float, float]]) -> _Panel:
    times, values = zip(*points, strict=True)
    trace = scatter(
        label(name), times, values, line={"color": LIGHT["after"], "width": 1.5, "shape": "hv"}, hoverinfo="y+name"
    )
    axis = {"title": {"text": label(name, 24), "standoff": 4, "font": {"size": 10.5}}, "rangemode": "tozero"}
    return _Panel([trace], axis, _PANEL_PX)


def _stacked(panels: Sequence[_Panel], step_s: float) -> tuple[int, dict[str, Any]]:
    """(height in CSS pixels, the figure with `panels` from top to bottom on one axis of time)."""
    inner = sum(panel.height_px for panel in panels) + _GAP_PX * (len(panels) - 1)
    traces: list[dict[str, Any]] = []
    base = layout(x="seconds", y="", hovermode="closest", dragmode="zoom", bargap=0, uniformtext=_TEXT)
    axis, top = base.pop("yaxis"), inner
    for number, panel in enumerate(panels, 1):
        suffix = "" if number == 1 else str(number)
        domain = [max(0.0, (top - panel.height_px) / inner), top / inner]
        base[f"yaxis{suffix}"] = {**axis, "domain": domain, "zeroline": False, **panel.axis}
        traces += [{**trace, "xaxis": "x", "yaxis": f"y{suffix}"} for trace in panel.traces]
        top -= panel.height_px + _GAP_PX
    last = "" if len(panels) == 1 else str(len(panels))
    base["xaxis"] |= {"range": [0, step_s], "fixedrange": False, "anchor": f"y{last}"}
    base["margin"] |= {"l": 150, "t": 12}
    return inner + 60, {"data": traces, "layout": base}


def flame_graph(nodes: Sequence[Node], num_samples: int) -> Chart | None:
    """Python's stacks, callers below those they call; None without samples."""
    if not nodes:
        return None
    ids = {node.stack: str(number) for number, node in enumerate(nodes, 1)}
    kept = [node for node in nodes if len(node.stack) == 1 or node.stack[:-1] in ids]
    shown = [_shown(node.stack[-1]) for node in kept]
    trace = {
        "type": "icicle",
        "ids": ["0", *(ids[node.stack] for node in kept)],
        "parents": ["", *(ids.get(node.stack[:-1], "0") for node in kept)],
        "labels": [f"all {num_samples} samples", *(label(name, 80) for name in shown)],
        "values": [1.0, *(node.share for node in kept)],
        "branchvalues": "total",
        "sort": False,
        "tiling": {"orientation": "v", "flip": "y"},
        "marker": {"colors": [LIGHT["grid"], *(_colour(node.stack[-1]) for node in kept)]},
        "hovertemplate": "%{label}<br>%{value:.1%} of the samples<extra></extra>",
        "pathbar": {"visible": True},
        "maxdepth": -1,
    }
    depth = max(len(node.stack) for node in kept)
    return Chart(
        "flame",
        "Flame graph of Python",
        "Functions of the main thread, as wide as the share of samples in which they ran, above those that call them.",
        {"data": [trace], "layout": layout(x="", margin={"l": 4, "r": 4, "b": 8}, uniformtext=_TEXT)},
        ("function", "depth", "share", "itself"),
        tuple(
            (name, str(len(node.stack)), f"{node.share:.1%}", f"{node.self_share:.1%}")
            for name, node in zip(shown, kept, strict=True)
            if node.share >= 0.02
        ),
        "Click a function to see it alone. stacks.txt has all samples; speedscope.app and flamegraph.pl read it.",
        max(240, 22 * (depth + 2)),
    )


def _shown(function: str) -> str:
    """`file:function` with the function first, as a narrow box shows the begin."""
    file, _, name = function.rpartition(":")
    return f"{name} ({file})"


def _colour(function: str) -> str:
    """The same colour for all functions of a file."""
    return STAGES[zlib.crc32(function.rpartition(":")[0].encode()) % (len(STAGES) - 1)]


def comparison_bars(found: Comparison) -> Chart:
    """The stages of both profiles, A hollow and B filled."""
    rows = [row for row in found.stages if (row.before_s or 0) + (row.after_s or 0) > 0]
    names = [label(row.name, 40) for row in rows]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "x": values,
            "y": names,
            "marker": marker,
            "hovertemplate": "%{y}: %{x:.3f} s<extra>" + name + "</extra>",
        }
        for name, values, marker in (
            ("A", [row.before_s for row in rows], {"color": LIGHT["card"], "line": _BEFORE}),
            ("B", [row.after_s for row in rows], {"color": LIGHT["after"]}),
        )
    ]
    figure = layout(x="seconds of a step", barmode="group", hovermode="closest", showlegend=True)
    figure["yaxis"] |= {"autorange": "reversed"}
    return Chart(
        "stages",
        "Stages",
        "Time of each stage in a step of A and of B.",
        {"data": traces, "layout": figure},
        ("stage", "A", "B", "A / B"),
        tuple(map(compared_cells, rows)),
        height=90 + 44 * len(rows),
    )


def compared_cells(row: Compared) -> tuple[str, ...]:
    """A row of a table: name, both times, and their ratio."""
    ratio = UNKNOWN if row.ratio is None else f"{row.ratio:.2f}"
    return row.name, milliseconds(row.before_s), milliseconds(row.after_s), ratio


def milliseconds(seconds: float | None) -> str:
    """A short time with a decimal, a longer one as elsewhere."""
    return f"{1e3 * seconds:.1f} ms" if seconds is not None and seconds < 0.01 else duration(seconds)
