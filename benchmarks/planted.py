"""Plant causes of slow training in real runs, and hold `tunesmith diagnose` to what it says of them.

Each cause is planted strongly, mildly, and together with another (`benchmarks.plants`), in a run of its own process.
The run is diagnosed, the advice for the cause is followed as it is printed, and the run is made again: the saving is
the difference of the seconds of a step. Where the advice names no setting, the run without the plant takes its place.
What is planted mildly is small beside the noise of a run, so such runs are longer, and made twice in turns. Healthy
runs are diagnosed too. With `--out` a finished case is written at once and not measured again, unless `--cause`
names it.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common import Say, benchmark, machine_facts, measure_load, print_table, run
from benchmarks.plants.causes import CAUSES, HEALTHY, NOT_RUN, SEEN, Cause, Setup
from benchmarks.plants.files import write_files
from benchmarks.process import free_port, tunesmith
from tunesmith.base.core.errors import InputError, TrainingError
from tunesmith.base.runs.folder import RunFolder

VARIANTS = ("strong", "mild", "together")
_STEPS, _QUICK_STEPS = {"strong": 10, "mild": 30, "together": 10}, 4
_ROUNDS = {"strong": 1, "mild": 2, "together": 1}
_TIMEOUT_S = 600
_PLANTS = Path(__file__).resolve().parent / "plants"
_FACTOR = 1.5
_SECONDS = ("predicted_saving_s", "measured_saving_s", "step_s")
_FALSE_SHARE = 0.05
_TRADES = ("int8_drawing",)
"""Causes whose remedy has a price that a healthy run may decline."""

_BARS = {"strong_first": 0.9, "mild_first": 0.75, "together_in_first_two": 0.9, "predicted_within_factor": 0.8}


@dataclass(frozen=True, slots=True)
class Site:
    """The folder of the runs and of the files that they read; `is_quick` runs have few steps."""

    folder: Path
    is_quick: bool

    def train(self, setup: Setup, variant: str = "strong") -> Path:
        """The folder of a finished run of `setup`, as long as the variant needs.

        Raises:
            TrainingError: the run failed, or took too long.
        """
        place = Path(tempfile.mkdtemp(dir=self.folder))
        settings = {
            **setup.settings,
            "run.dir": str(place),
            "run.steps": _QUICK_STEPS if self.is_quick else _STEPS[variant],
        }
        if setup.rewards:
            settings["reward"] = [{"source": f"{_PLANTS}/rewards.py:{name}"} for name in setup.rewards]
        recipe, environment = json.loads(self._filled(_nested(settings))), json.loads(self._filled(setup.environment))
        (place / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")  # every JSON text is YAML
        environment["PLANTED_PORT"] = str(free_port())
        with _beside(setup.programs, environment):
            answer = tunesmith(
                *("train", recipe["algorithm"], "--config", place / "recipe.yaml"),
                environment=environment,
                timeout_s=_TIMEOUT_S,
            )
        return Path(answer["run_dir"])

    def _filled(self, value: object) -> str:
        """`value` as JSON, with the names of folders filled in."""
        return json.dumps(value).replace("{files}", str(self.folder / "files")).replace("{plants}", str(_PLANTS))


def step_s(run_dir: Path) -> float:
    """Seconds of a step, with what was done between steps.

    The first step is left out, which allocates, and the last, at which every run evaluates whatever its settings.
    """
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return statistics.mean(row["time/step_s"] for row in rows[1:-1])


@dataclass(slots=True)
class Results:
    """Rows of all cases so far, and of the healthy runs, by name; `write` keeps them in a file."""

    file: Path | None
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    healthy: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path | None) -> "Results":
        """What the file has, without cases that failed; empty if there is none."""
        results = cls(file)
        if file is not None and file.is_file():
            found = json.loads(file.read_text(encoding="utf-8"))
            results.rows = {f"{row['cause']}/{row['variant']}": row for row in found["rows"] if "error" not in row}
            results.healthy = {row["run"]: row for row in found["healthy"]}
        return results

    def facts(self) -> dict[str, object]:
        """Everything, with the summary, for JSON."""
        rows, healthy = list(self.rows.values()), list(self.healthy.values())
        return {
            "machine": machine_facts(),
            "summary": summary(rows, healthy),
            "rows": rows,
            "healthy": healthy,
            "not_run": dict(NOT_RUN),
        }

    def write(self) -> None:
        """Write the file, all of it or nothing."""
        if self.file is not None:
            RunFolder(self.file.parent).write_json(self.file.name, self.facts())


def measure(options: Namespace, say: Say) -> dict[str, object]:
    """All cases that are asked for and not yet in the file, then the healthy runs."""
    known = {cause.name: cause for cause in (*CAUSES, *SEEN)}
    for name in options.cause or ():
        if name not in known and name != "healthy":
            raise InputError(f"there is no planted cause {name!r}; give healthy, {', '.join(known)}")
    chosen = options.cause or (*known, "healthy")
    named = [known[name] for name in chosen if name in known]
    healthy = list(HEALTHY)[: 1 if options.quick else None] if "healthy" in chosen else []
    variants = options.variant or (VARIANTS[:1] if options.quick else VARIANTS)
    results = Results.read(options.out)
    with tempfile.TemporaryDirectory(prefix="tunesmith-planted-") as folder:
        site = Site(Path(folder), options.quick)
        write_files(site.folder / "files")
        for cause, variant in product(named, variants):
            key = f"{cause.name}/{variant}"
            if key not in results.rows or options.cause:
                results.rows[key] = row = planted_row(site, cause, variant)
                say(f"{key:<32} {_said(row)}")
                results.write()
        for name in healthy:
            if name not in results.healthy or options.cause:
                results.healthy[name] = row = healthy_row(site, name)
                say(f"healthy, {name:<23} {row['causes'] or 'nothing'}")
                results.write()
    return results.facts()


def planted_row(site: Site, cause: Cause, variant: str) -> dict[str, Any]:
    """The figures of one case: what the diagnosis of a run with the plant says, and what following it saves."""
    row: dict[str, Any] = {
        "cause": cause.name,
        "variant": variant,
        "with": cause.other if variant == "together" else None,
        "named": [],
        "named_first": False,
        "named_in_first_two": False,
        "step_s": None,
        "predicted_saving_s": None,
        "measured_saving_s": None,
        "other_busy_cores": measure_load().other_busy_cores,
    }
    try:
        return row | judged(site, cause, variant)
    except TrainingError as error:  # the other cases are measured all the same
        return row | {"error": str(error)}


def judged(site: Site, cause: Cause, variant: str) -> dict[str, Any]:
    """The figures of `planted_row` that are measured."""
    around = cause.around(variant)
    planted = around.plus(cause.plant(variant))
    run_dir = site.train(planted, variant)
    found = tunesmith("diagnose", run_dir)
    names = [one["name"] for one in found["causes"]]
    row: dict[str, Any] = {
        "named": names,
        "named_first": names[:1] == [cause.name],
        "named_in_first_two": cause.name in names[:2],
        "step_s": step_s(run_dir),
    }
    named = next((one for one in found["causes"] if one["name"] == cause.name), None)
    if named is None:
        return row | {"missing": found["missing"].get(cause.name)}
    if named["settings"]:
        followed, how = planted.plus(Setup(named["settings"])), named["settings"]
    else:
        followed, how = around.plus(cause.followed(variant)), named["advice"]
    followed_s = [step_s(site.train(followed, variant))]
    planted_s = [row["step_s"]]
    for _ in range(1, 1 if site.is_quick else _ROUNDS[variant]):
        planted_s.append(step_s(site.train(planted, variant)))
        followed_s.append(step_s(site.train(followed, variant)))
    return row | {
        "share": named["share"],
        "predicted_saving_s": named["predicted_saving_s"],
        "low": named["low"],
        "high": named["high"],
        "followed": how,
        "evidence": named["evidence"],
        "measured_saving_s": statistics.mean(planted_s) - statistics.mean(followed_s),
    }


def healthy_row(site: Site, name: str) -> dict[str, Any]:
    """The causes that the diagnosis of a healthy run names, with their shares of the step."""
    load = measure_load().other_busy_cores
    run_dir = site.train(HEALTHY[name])
    found = tunesmith("diagnose", run_dir)
    return {
        "run": name,
        "step_s": step_s(run_dir),
        "coverage": found["coverage"],
        "causes": {one["name"]: one["share"] for one in found["causes"]},
        "evidence": {one["name"]: one["evidence"] for one in found["causes"]},
        "other_busy_cores": load,
    }


def summary(rows: Sequence[Mapping[str, Any]], healthy: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Shares of the cases in which the diagnosis is right, and which of the bars they reach."""
    by_variant = {variant: [row for row in rows if row["variant"] == variant] for variant in VARIANTS}
    shares = {
        "strong_first": _share([row["named_first"] for row in by_variant["strong"]]),
        "mild_first": _share([row["named_first"] for row in by_variant["mild"]]),
        "together_in_first_two": _share([row["named_in_first_two"] for row in by_variant["together"]]),
        "predicted_within_factor": _share([is_right(row) for row in rows]),
    }
    false = {
        row["run"]: names
        for row in healthy
        if (
            names := {
                name: share for name, share in row["causes"].items() if share > _FALSE_SHARE and name not in _TRADES
            }
        )
    }
    num_causes = len({row["cause"] for row in rows})
    passed: dict[str, bool] = {name: share is not None and share >= _BARS[name] for name, share in shares.items()}
    passed |= {"causes": num_causes >= 24, "healthy": len(healthy) >= 10 and not false}
    return {"num_causes": num_causes, **shares, "false_causes": false, "bars": _BARS, "passed": passed}


def is_right(row: Mapping[str, Any]) -> bool:
    """True if the predicted saving is within a factor of 1.5 of the measured one."""
    predicted, measured = row["predicted_saving_s"], row["measured_saving_s"]
    return predicted is not None and measured > 0 and 1 / _FACTOR <= predicted / measured <= _FACTOR


def _share(found: Sequence[bool]) -> float | None:
    return sum(found) / len(found) if found else None


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted key as the sections of a recipe."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[name] = value
    return tree


@contextmanager
def _beside(programs: Sequence[str], environment: Mapping[str, str]) -> Iterator[None]:
    """The programs of `benchmarks.plants`, which run while the block does."""
    variables = {**os.environ, **environment}
    running = [subprocess.Popen([sys.executable, _PLANTS / f"{name}.py"], env=variables) for name in programs]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def _said(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return row["error"]
    if row["predicted_saving_s"] is None:
        return f"not named; named were {', '.join(row['named']) or 'none'}"
    place = row["named"].index(row["cause"]) + 1
    seconds = f"predicted {row['predicted_saving_s']:.3g} s, measured {row['measured_saving_s']:.3g} s"
    return f"named at place {place}; {seconds} of {row['step_s']:.3g} s"


def _show(facts: Mapping[str, Any]) -> None:
    rows = [
        [
            f"{row['cause']}, {row['variant']}",
            ", ".join(row["named"][:2]) or "none",
            *("-" if row[name] is None else f"{row[name]:.3f}" for name in _SECONDS),
        ]
        for row in facts["rows"]
    ]
    print_table(["planted", "named first", "predicted s", "measured s", "step s"], rows)
    for row in facts["healthy"]:
        print(f"healthy, {row['run']}: {', '.join(f'{n} {s:.0%}' for n, s in row['causes'].items()) or 'nothing'}")
    for name, reason in facts["not_run"].items():
        print(f"not run: {name}: {reason}")
    for name, passed in facts["summary"]["passed"].items():
        print(f"{name}: {facts['summary'].get(name, '')} {'passed' if passed else 'NOT PASSED'}")


main = benchmark(
    measure,
    _show,
    "quick",
    cause={"action": "append", "metavar": "NAME", "help": "one cause, or healthy; repeatable. All if left out"},
    variant={"action": "append", "choices": VARIANTS, "help": "one variant; repeatable. All if left out"},
)


if __name__ == "__main__":
    run("planted")
