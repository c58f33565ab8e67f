"""The tables and pages of a profile and of two profiles, in the style of the other reports."""

from pathlib import Path

from tunesmith.base.core.errors import RunError
from tunesmith.observe.profiling import chrome, flame
from tunesmith.observe.profiling.profile import STACKS, Comparison, Profile
from tunesmith.observe.reports.chart import Table
from tunesmith.observe.reports.html import write_page
from tunesmith.observe.reports.profile_figures import (
    compared_cells,
    comparison_bars,
    flame_graph,
    milliseconds,
    timeline,
)
from tunesmith.observe.reports.text import UNKNOWN, duration, percent
from tunesmith.observe.reports.views import Tile

PAGE = "profile.html"

_LEAST_SHARE = 0.004
"""Narrower boxes of a flame graph are not drawn."""

_MAX_OPERATORS = 80
_MAX_FUNCTIONS = 40


def profile_tables(profile: Profile) -> dict[str, Table]:
    """The tables of a profile: stages, operators, functions, gaps, threads and counters."""
    launches = ["launches"] if any(row["launches"] for row in profile.stages) else []  # of a GPU
    stages = [
        (
            row["stage"],
            milliseconds(row["total_s"]),
            percent(row["total_s"] / profile.step_s) if row["is_main"] else "beside",
            *(milliseconds(row[name]) for name in ("self_s", "operator_s", "gap_s")),
            *(f"{row[name]:.0f}" for name in ("calls", "dispatches", *launches)),
        )
        for row in profile.stages
    ]
    operators = [
        (
            row["operator"],
            row["stage"],
            milliseconds(row["self_s"]),
            f"{row['self_s'] / profile.step_s:.1%}",
            milliseconds(row["total_s"]),
            f"{row['calls']:.0f}",
            f"{1e6 * row['self_s'] / row['calls']:.1f}",
            *(f"{row[name]:.0f}" for name in launches),
        )
        for row in profile.operators[:_MAX_OPERATORS]
    ]
    gaps = [
        (milliseconds(row["duration_s"]), row["stage"], milliseconds(row["start_s"]), row["function"] or UNKNOWN)
        for row in profile.gaps
    ]
    functions = [(name, f"{own:.1%}", f"{all_:.1%}") for name, own, all_ in profile.functions[:_MAX_FUNCTIONS]]
    counters = [(name, f"{row['mean']:.3g}", f"{row['max']:.3g}") for name, row in profile.counters.items()]
    busiest = sorted(profile.threads.items(), key=lambda item: -item[1]["mean"])
    threads = [(name, f"{row['mean']:.1%}", f"{row['max']:.1%}") for name, row in busiest]
    stage_columns = ("stage", "time", "share", "alone", "in operators", "in gaps", "times", "calls", *launches)
    operator_columns = ("operator", "stage", "own time", "of the step", "with inner ones", "calls", "µs a call")
    gap_columns = ("lasts", "in the stage", "begins at", "Python is mostly in")
    function_columns = ("function of Python", "itself", "with those it calls")
    return {
        "stages": Table("operators.json: stages", stage_columns, stages),
        "operators": Table("operators.json: operators", (*operator_columns, *launches), operators),
        "gaps": Table("operators.json: gaps", gap_columns, gaps),
        "functions": Table("Functions of the main thread", function_columns, functions),
        "counters": Table("Counters", ("counter", "mean", "largest"), counters),
        "threads": Table("Threads", ("thread", "mean use of a processor", "largest"), threads),
    }


def write_profile_page(profile: Profile) -> Path:
    """Write `profile.html` beside the profile's other files, and return its path.

    Raises:
        RunError: if the trace or the stacks cannot be read.
    """
    try:
        trace = chrome.read(profile.folder / chrome.TRACE)
        counts = flame.parse((profile.folder / STACKS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"the files in {profile.folder} cannot be read ({error}); record the profile again") from error
    drawn = [timeline(trace), flame_graph(flame.nodes(counts, _LEAST_SHARE), sum(counts.values()))]
    return write_page(
        profile.folder / PAGE,
        "profile.html",
        [chart for chart in drawn if chart],
        title=profile.run,
        profile=profile,
        tiles=_tiles(profile),
        timeline=drawn[0],
        flame=drawn[1],
        tables=profile_tables(profile),
    )


def _tiles(profile: Profile) -> tuple[Tile, ...]:
    main = [row for row in profile.stages if row["is_main"]]
    operator_s, gap_s = (sum(row[name] for row in main) for name in ("operator_s", "gap_s"))
    calls = sum(row["dispatches"] for row in main)
    mean_us = f"{1e6 * operator_s / calls:.0f} µs each" if calls else ""
    longest = max(main, key=lambda row: row["self_s"])
    tiles = [
        Tile("Step", duration(profile.step_s), f"mean of {len(profile.steps)}"),
        Tile("Longest stage", str(longest["stage"]), f"{percent(longest['self_s'] / profile.step_s)} of the step"),
        Tile("In operators", percent(operator_s / profile.step_s), f"{calls:.0f} calls, {mean_us}"),
        Tile("Outside of operators", percent(gap_s / profile.step_s), "Python, waiting, calls that torch does not see"),
    ]
    for name, note in (("GIL busy", "mean share of asks"), ("engine slots in use", "mean of the engine's steps")):
        if name in profile.counters:
            value = profile.counters[name]["mean"]
            tiles.append(Tile(name, percent(value) if name == "GIL busy" else f"{value:.1f}", note))
    if (memory := profile.counters.get("resident memory (GB)")) is not None:
        tiles.append(Tile("Resident memory", f"{memory['max']:.2f} GB", "largest sample"))
    return tuple(tiles)


def comparison_tables(found: Comparison) -> dict[str, Table]:
    """The tables of two profiles: the step with its stages, and operators."""
    stages = [compared_cells(row) for row in (found.step, *found.stages)]
    operators = [compared_cells(row) for row in found.operators[:_MAX_OPERATORS]]
    return {
        "stages": Table("Time in a step", ("stage", "A", "B", "A / B"), stages),
        "operators": Table("Operators", ("operator", "A", "B", "A / B"), operators),
    }


def write_profile_comparison(path: Path, found: Comparison) -> Path:
    """Write the page of two profiles to `path`, and return it.

    Raises:
        RunError: if it cannot be written.
    """
    bars, tables = comparison_bars(found), comparison_tables(found)
    try:
        return write_page(
            path, "profile_comparison.html", [bars], title="Two profiles", found=found, bars=bars, tables=tables
        )
    except OSError as error:
        raise RunError(f"{path} cannot be written ({error.strerror or error}); give another file by --html") from error
