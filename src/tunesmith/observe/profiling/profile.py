"""The profile of a run: its files, the figures in them, and the comparison of two.

RUN/profile/
  trace.json.gz   opens in Perfetto and chrome://tracing    operators.json  steps, stages, operators, gaps
  stacks.txt      Python's stacks, collapsed                profile.html    the page, by reports/profile_page.py
"""

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tunesmith.base.core.errors import RunError
from tunesmith.observe.profiling import chrome, flame
from tunesmith.observe.profiling.operators import Gap, OperatorUse, StageUse, analyse
from tunesmith.observe.profiling.request import FOLDER, drop_answer, read_answer

FIGURES = "operators.json"
STACKS = "stacks.txt"

Row = dict[str, Any]

_Look = tuple[float, list[str]]
"""(seconds since the first profiled step began, Python's stack)."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Figures of a recorded profile, means of one step; `folder` has its files.

    `stages`, `operators` and `gaps` are rows as in `profiling.operators`, `functions` are (function, own share, share)
    of Python's main thread, `counters` and `threads` the mean and the maximum of each series. `steps` are (name, s).
    """

    folder: Path
    run: str
    device: str
    num_threads: int
    steps: Sequence[tuple[str, float]]
    stages: Sequence[Row]
    operators: Sequence[Row]
    gaps: Sequence[Row]
    functions: Sequence[tuple[str, float, float]]
    counters: Mapping[str, Mapping[str, float]]
    threads: Mapping[str, Mapping[str, float]]

    @property
    def step_s(self) -> float:
        """Mean time of a profiled step."""
        return sum(seconds for _, seconds in self.steps) / len(self.steps)

    def to_json(self) -> dict[str, Any]:
        """All figures, as `operators.json` has them."""
        facts = {**asdict(self), "step_s": self.step_s}
        del facts["folder"]
        return facts


def finish(run_dir: Path) -> Profile:
    """Make the files of the profile that was recorded in `run_dir`, and remove the recorder's own.

    Raises:
        RunError: if nothing was recorded, or the recording cannot be read.
    """
    folder = run_dir / FOLDER
    samples = read_answer(run_dir)
    if samples is None or "problem" in samples:
        raise RunError(f"{run_dir} could not be profiled: {(samples or {}).get('problem', 'nothing was recorded')}")
    try:
        trace = chrome.build(json.loads((folder / chrome.RAW_TRACE).read_text(encoding="utf-8")), samples)
        looks = _looks(samples, trace)
        counts = flame.counted(stack for _, stack in looks)
        profile = _figures(folder, samples, trace["traceEvents"], looks)
        chrome.write(folder / chrome.TRACE, trace)
        (folder / STACKS).write_text(flame.collapsed(counts), encoding="utf-8")
        (folder / FIGURES).write_text(json.dumps(profile.to_json(), indent=1) + "\n", encoding="utf-8")
        (folder / chrome.RAW_TRACE).unlink()
        drop_answer(run_dir)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"the profile in {folder} cannot be finished ({error}); record it again") from error
    return profile


def _looks(samples: Mapping[str, Any], trace: Mapping[str, Any]) -> list[_Look]:
    """The samples of the profiled steps."""
    start_ns = trace["otherData"]["start_ns"]
    end_s = max(event["ts"] + event.get("dur", 0.0) for event in trace["traceEvents"]) / 1e6
    looks = [((time_ns - start_ns) / 1e9, samples["stacks"][index]) for time_ns, index in samples["looks"]]
    return [look for look in looks if 0 <= look[0] < end_s]


def _function_in(gap: Gap, looks: Sequence[_Look]) -> str:
    """The function that was seen most in the gap; empty if it was shorter than the time between two looks."""
    ends = (gap.start_s, gap.start_s + gap.duration_s)
    first, last = (bisect_left(looks, time_s, key=lambda look: look[0]) for time_s in ends)
    seen = Counter(stack[-1] for _, stack in looks[first:last] if stack)
    return seen.most_common(1)[0][0] if seen else ""


def _figures(
    folder: Path, samples: Mapping[str, Any], events: Sequence[chrome.Event], looks: Sequence[_Look]
) -> Profile:
    uses = analyse(events, int(samples["main_thread"]))
    num_steps = len(uses.steps)
    series: dict[str, list[float]] = {}
    for event in events:
        if event["ph"] == "C":
            series.setdefault(event["name"], []).append(event["args"]["value"])
    ranges = {name: {"mean": sum(values) / len(values), "max": max(values)} for name, values in series.items()}
    return Profile(
        folder,
        samples["run"],
        samples["device"],
        samples["num_threads"],
        uses.steps,
        [_per_step(stage, num_steps) for stage in uses.stages],
        [_per_step(operator, num_steps) for operator in uses.operators],
        [{**asdict(gap), "function": _function_in(gap, looks)} for gap in uses.gaps],
        flame.functions(flame.counted(stack for _, stack in looks)),
        {name: range_ for name, range_ in ranges.items() if not name.startswith(chrome.CORES)},
        {n.removeprefix(chrome.CORES): range_ for n, range_ in ranges.items() if n.startswith(chrome.CORES)},
    )


def _per_step(use: StageUse | OperatorUse, num_steps: int) -> Row:
    """The fields of `use`, numbers divided by the number of steps."""
    return {name: x if isinstance(x, str | bool) else x / num_steps for name, x in asdict(use).items()}


def read_profile(path: Path) -> Profile:
    """The profile in the run folder `path`, or in the profile's folder itself.

    Raises:
        RunError: if there is none, or it cannot be read.
    """
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    if not (folder / FIGURES).is_file():
        raise RunError(f"{path} has no profile; record one with `tunesmith profile --attach {path}` while it trains")
    try:
        facts = json.loads((folder / FIGURES).read_text(encoding="utf-8"))
        del facts["step_s"]
        return Profile(folder, **facts)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder / FIGURES} cannot be read ({error}); record the profile again") from error


@dataclass(frozen=True, slots=True)
class Compared:
    """A quantity in two profiles, s of a step, and their ratio; None where one of them does not have it."""

    name: str
    before_s: float | None
    after_s: float | None
    ratio: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two profiles side by side: the step, its stages, and operators summed over the stages."""

    before: Profile
    after: Profile
    step: Compared
    stages: Sequence[Compared]
    operators: Sequence[Compared]

    def to_json(self) -> dict[str, Any]:
        """All rows, and which profiles they are of."""
        return {**asdict(self), "before": str(self.before.folder), "after": str(self.after.folder)}


def compare(before: Profile, after: Profile) -> Comparison:
    """Stages in the order of their begin; operators by the difference of their times, largest first."""
    (step,) = _paired({"step": before.step_s}, {"step": after.step_s})
    stages = _paired(_sums(before.stages, "stage", "total_s"), _sums(after.stages, "stage", "total_s"))
    operators = _paired(_sums(before.operators, "operator", "self_s"), _sums(after.operators, "operator", "self_s"))
    operators.sort(key=lambda row: -abs((row.before_s or 0.0) - (row.after_s or 0.0)))
    return Comparison(before, after, step, stages, operators)


def _sums(rows: Sequence[Row], name: str, figure: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for row in rows:
        sums[row[name]] = sums.get(row[name], 0.0) + row[figure]
    return sums


def _paired(before: Mapping[str, float], after: Mapping[str, float]) -> list[Compared]:
    rows = [(name, before.get(name), after.get(name)) for name in dict.fromkeys((*before, *after))]
    return [Compared(*row, ratio=row[1] / row[2] if row[1] and row[2] else None) for row in rows]
