"""Facts of a run, read from its files: what `diagnosis` works on.

Light, and robust: a figure that a file lacks, or a damaged line, costs that figure alone. Works while the run trains,
and on runs of older releases.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tunesmith.base.config.schema import RECIPES
from tunesmith.base.config.yaml_text import is_mapping
from tunesmith.base.runs.listing import find_runs, is_run, number, read_object, read_recipe, read_rows
from tunesmith.observe.profiling.places import Window, read_places, summed, within
from tunesmith.observe.profiling.tail import Tail, tails
from tunesmith.observe.profiling.waits import Kind

_FILES = {"recipe": "recipe.yaml", "setup": "setup.json"}

_OF_SOME_STEPS = ("time/checkpoint_s", "time/evaluate_s", "time/log_s", "time/callback_s")
_NOW_AND_THEN = (
    *(*_OF_SOME_STEPS, "time/evaluate/", "time/callback/", "io/", "faults/", "gil/", "gc/"),
    *("cpu/run_delay_s", "cpu/throttled_s"),
)
"""Metrics of work that some steps have and others do not, or that are counted by a few samples of a step: their mean
over all steps counts, not their median."""

_COMPUTED = (
    *("rollout", "frozen", "old_policy", "reference", "teachers", "kl"),
    *("forward", "backward", "optimizer", "evaluate"),
)
"""Stages whose time goes into computing with a model."""


class MissingError(LookupError):
    """A fact that the run's files do not hold; the argument is its name."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Values by name. A metric has its own name (`time/rollout_s`); other names begin with their file
    (`recipe.rollout.num_slots`, `setup.engine`).

    A metric is its median over `num_steps` steps, the first left out; of work that only some steps have, the mean; of
    the growth of memory, the least of the second half: caches and pools grow at first, a leak never stops. `unfamiliar`
    is the largest `rewards/<name>/unfamiliar`.

    `run_s` is the time of all `num_timed` steps that are looked at for slow ones, `warm_up_s` that of the first step of
    each process, which compiles and allocates, and is left out. `tails` is what slow steps lose, `rows` their metrics;
    `windows` are the lines at which the time went. All are empty in facts that are not read from a run.
    """

    path: Path
    values: Mapping[str, object]
    num_steps: int
    last_step: int = 0
    run_s: float = 0.0
    num_timed: int = 0
    warm_up_s: float = 0.0
    tails: Sequence[Tail] = ()
    rows: Sequence[Mapping[str, object]] = ()
    windows: Sequence[Window] = ()

    @property
    def algorithm(self) -> str:
        """Name of the trainer; empty if the recipe cannot be read."""
        return str(self.values.get("recipe.algorithm") or "")

    @property
    def section(self) -> str:
        """Section of the recipe with the settings of the algorithm."""
        recipe = RECIPES.get(self.algorithm)
        return (recipe.OWN if recipe else "") or self.algorithm

    @property
    def step_s(self) -> float:
        """Seconds of a step; 0 if none is recorded."""
        return self.number("time/step_s", 0.0)

    @property
    def mean_step_s(self) -> float:
        """Mean seconds of a step, with the slow ones."""
        return self.run_s / self.num_timed if self.num_timed else self.step_s

    def number(self, name: str, default: float | None = None) -> float:
        """The number `name`. Raises MissingError if there is none and no default."""
        value = number(self.values.get(name))
        if value is None and default is None:
            raise MissingError(name)
        return cast(float, default if value is None else value)

    def text(self, name: str) -> str:
        """The value `name` as text. Raises MissingError if there is none."""
        value = self.values.get(name)
        if value is None:
            raise MissingError(name)
        return str(value)

    def setting(self, key: str) -> float:
        """The number at `key` of the algorithm's section. Raises MissingError if there is none."""
        return self.number(f"recipe.{self.section}.{key}")

    def stage_s(self, *names: str) -> float:
        """Seconds of the stages `names` together; 0 for one that the step does not have.

        `forward`, `backward` and `optimizer` are those of the update, which some algorithms have inside of `update`.
        """
        return sum(self.number(f"time/{n}_s", self.number(f"time/update/{n}_s", 0.0)) for n in names)

    @property
    def computing_s(self) -> float:
        """Seconds of the stages that compute with the model."""
        return min(self.step_s, self.stage_s(*_COMPUTED))

    @property
    def reward_s(self) -> float:
        """Seconds in which the step waits for rewards, in evaluations too."""
        names = [name.removeprefix("time/reward/") for name in self.values if name.startswith("time/reward/")]
        return self.stage_s("reward") + sum(self.number(f"time/evaluate/{name}", 0.0) for name in names)

    @property
    def slow_steps(self) -> set[int]:
        """Numbers of the steps that take far longer than the others."""
        return {step for tail in self.tails for step in tail.steps}

    def usual_windows(self) -> Sequence[Window]:
        """The lines at which the time of usual steps went; of all steps, if each row has a slow one among them."""
        known = [window for window in self.windows if not window.is_new]
        return [window for window in known if not window.has(self.slow_steps)] or known

    @property
    def reward_kind(self) -> Kind | None:
        """The main activity of the thread that trains while it scores, at usual steps; None if it was not looked at."""
        seconds: dict[Kind, float] = {}
        for seen in summed(self.usual_windows()):
            if within(seen.stage, "reward"):
                seconds[seen.kind] = seconds.get(seen.kind, 0.0) + seen.seconds
        return max(seconds, key=lambda kind: seconds[kind], default=None)

    def origin(self, name: str) -> str:
        """The file that `name` was read from."""
        return _FILES.get(name.partition(".")[0], "metrics.jsonl")


def runs_at(path: Path) -> list[Path]:
    """The run at `path`, or, if that holds no steps of its own, as a demo's folder, the runs below it."""
    inside = [run for run in find_runs(path) if (run / "metrics.jsonl").is_file()]
    return [path] if path in inside or not inside else inside if is_run(path) else [path]


def read_facts(path: Path) -> Facts:
    """The facts of the run in the folder `path`."""
    rows = [row for row in read_rows(path / "metrics.jsonl") if (number(row.get("time/step_s")) or 0) > 0]
    settings = _nested("recipe", read_recipe(path)) | _nested("setup", read_object(path / _FILES["setup"]))
    windows = read_places(path)
    firsts = {window.first for window in windows if window.is_new}
    warm_ups = [row for index, row in enumerate(rows) if index == 0 or row.get("step") in firsts]
    timed = [row for index, row in enumerate(rows) if index and row.get("step") not in firsts] or rows
    counted = timed
    if (path / "result.json").is_file():  # every run evaluates at its last step, whatever its settings
        counted, timed = timed[:-1] or timed, [*timed[:-1], _without_evaluation(timed[-1])] if timed else timed
    slow = tails(timed, settings)
    return Facts(
        path=path,
        values={**settings, **_metrics(counted, slow)},
        num_steps=len(counted),
        last_step=int(number(rows[-1].get("step")) or 0) if rows else 0,
        run_s=sum(number(row.get("time/step_s")) or 0.0 for row in timed),
        num_timed=len(timed),
        warm_up_s=sum(number(row.get("time/step_s")) or 0.0 for row in warm_ups) if timed is not rows else 0.0,
        tails=slow,
        rows=timed,
        windows=windows,
    )


def _without_evaluation(row: Mapping[str, object]) -> Mapping[str, object]:
    rest_s = (number(row.get("time/step_s")) or 0.0) - (number(row.get("time/evaluate_s")) or 0.0)
    kept = {name: value for name, value in row.items() if not name.startswith("time/evaluate")}
    return {**kept, "time/step_s": max(0.0, rest_s)}


def _metrics(rows: Sequence[Mapping[str, object]], slow: Sequence[Tail]) -> dict[str, float]:
    """The value of each metric that is a number in any of `rows`. What slow steps lose counts in `tails` alone."""
    values: dict[str, float] = {}
    steps = {step for tail in slow for step in tail.steps}
    usual = [row for row in rows if row.get("step") not in steps] or rows
    for name in dict.fromkeys(name for row in rows for name in row):
        counted = usual if name.startswith(_NOW_AND_THEN) and not name.startswith("time/") else rows
        found = [x for row in counted if (x := number(row.get(name))) is not None]
        if name == "memory/growth_mb" and found:
            values[name] = min(found[len(found) // 2 :])
        elif found:
            values[name] = sum(found) / len(counted) if name.startswith(_NOW_AND_THEN) else statistics.median(found)
    if unfamiliar := [value for name, value in values.items() if name.endswith("/unfamiliar")]:
        values["unfamiliar"] = max(unfamiliar)
    for tail in slow:
        name = f"time/{tail.path.partition('/')[0]}_s"
        if name in _OF_SOME_STEPS and name in values:
            values[name] = max(0.0, values[name] - tail.lost_s / len(rows))
    if rows:
        values["time/step_s"] = _typical_step(rows, sum(values.get(name, 0.0) for name in _OF_SOME_STEPS))
    return values


def _typical_step(rows: Sequence[Mapping[str, object]], some_s: float) -> float:
    """Seconds of a step: the median without the work that only some steps have, and `some_s`, the mean of that work."""
    extra = [sum(number(row.get(name)) or 0.0 for name in _OF_SOME_STEPS) for row in rows]
    rest = [(number(row["time/step_s"]) or 0.0) - more for row, more in zip(rows, extra, strict=True)]
    return statistics.median(rest) + some_s


def _nested(prefix: str, tree: Mapping[str, object]) -> dict[str, object]:
    """The leaves of `tree` by dotted path."""
    leaves: dict[str, object] = {}
    for key, value in tree.items():
        path = f"{prefix}.{key}"
        leaves |= _nested(path, value) if is_mapping(value) else {path: value}
    return leaves
