"""TRL's own tests of its trainers, on TRL's classes and on ours, one after the other in processes of their own.

They are fetched by the developer and never committed. Ours take the place of TRL's before a test file imports them.
There is no Hub: `benchmarks.trl_standins` makes the data sets and tiny models that the tests name. `runnable` are the
tests that are neither skipped nor in need of something without a stand-in; `lost` are those that TRL's class passes
and ours does not. With --work a second start goes on where the first ended. All suites take hours on two cores; with
--minutes `not_run` says how many tests of each side had no time. TRL's class begins with those that ours did not pass,
so that `lost` is whole early. --only takes the tests that match an expression of pytest's `-k`.
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, Say, benchmark, git, machine_facts, print_table, run
from benchmarks.trl_plugin import read_log, started, write_log
from tunesmith.base.core.errors import InputError, TrainingError
from tunesmith.base.runs.environment import package_version

SUITES = {name: f"{name.upper()}Trainer" for name in ("grpo", "rloo", "dpo", "sft", "kto")} | {
    "reward": "RewardTrainer"
}
OURS = "tunesmith.integrations.trl"

_QUICK_TESTS = 6
_ENDED_WELL = (0, 1, 5)  # of pytest: all passed, some failed, none left to run
_LOST = ("failed", "skipped", "missing", "died")
_TAIL = 15


@dataclass(frozen=True, slots=True)
class Place:
    """TRL's sources, and a folder for stand-ins and outcomes."""

    source: Path
    folder: Path

    def test_file(self, suite: str) -> Path:
        """The tests of a trainer."""
        return self.source / "tests" / f"test_{suite}_trainer.py"

    def version(self) -> str | None:
        """The version of TRL whose tests they are, which may be another than the installed one."""
        file = self.source / "VERSION"
        return file.read_text().strip() if file.exists() else None

    def environment(self, num_threads: int) -> dict[str, str]:
        """Of the processes: the stand-ins as the cache of the Hub, which is out of reach."""
        threads = {name: str(num_threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        hub = {"HF_HUB_CACHE": str(self.folder / "hub"), "HF_HUB_OFFLINE": "1", "HF_HOME": str(self.folder / "home")}
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        installed = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}  # the TRL that is installed, not that of the checkout
        return {**os.environ, **threads, **hub, **installed, "TOKENIZERS_PARALLELISM": "false"}


def measure(options: Namespace, say: Say) -> dict[str, object]:
    """Counts of each suite; those that are in the file `--out` and are not run again stay.

    Raises:
        InputError: no sources of TRL, no such suite, or a test file cannot be collected.
    """
    chosen = options.suite or list(SUITES)
    if unknown := set(chosen) - set(SUITES):
        raise InputError(f"there is no suite {', '.join(sorted(unknown))}; give {', '.join(SUITES)}")
    source = _checked(options.source, chosen)
    options.until = time.time() + 60 * options.minutes
    with nullcontext(options.work) if options.work else tempfile.TemporaryDirectory() as folder:
        place = Place(source, Path(folder).resolve())
        _make_standins(place, options, say)
        kept = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
        return {**kept, **{suite: _row(place, suite, options, say) for suite in chosen}}


def _checked(source: Path | None, suites: Sequence[str]) -> Path:
    wanted = [f"tests/test_{suite}_trainer.py" for suite in suites]
    lacking = wanted if source is None else [name for name in wanted if not (source / name).exists()]
    if source is None or lacking:
        raise InputError(
            f"{source or 'no folder'} has no {lacking[0]}; TRL's tests are neither here nor in its wheel. "
            f"Fetch them: git clone --depth 1 --branch v{package_version('trl')} https://github.com/huggingface/trl "
            "FOLDER, and give --source FOLDER"
        )
    return source.resolve()


def _make_standins(place: Place, options: Namespace, say: Say) -> None:
    done = place.folder / "standins.json"
    if done.exists():
        return
    place.folder.mkdir(parents=True, exist_ok=True)
    files = [str(file) for suite in SUITES if (file := place.test_file(suite)).exists()]
    words = [sys.executable, "-m", "benchmarks.trl_standins", str(place.source), str(place.folder), *files]
    made = subprocess.run(words, env=place.environment(options.threads), capture_output=True, text=True, check=False)
    if made.returncode:
        raise TrainingError(f"the stand-ins could not be made:\n{_end_of(made.stderr)}")
    say(f"stand-ins made; scripts of TRL that failed: {made.stdout.strip()}")
    done.write_text(made.stdout)


def _row(place: Place, suite: str, options: Namespace, say: Say) -> dict[str, object]:
    """The figures of a suite."""
    commit = git("rev-parse", "--short", "HEAD")
    keys = {"ours": f"{options.ours}-{commit}", "trl": package_version("trl")}  # ours first, which may be refused
    found: dict[str, dict[str, str]] = {}
    plugin: dict[str, object] = {"trainer": SUITES[suite], "standins": place.folder, "until": options.until}
    for side, key in keys.items():
        plugin["ours"] = "trl" if side == "trl" else options.ours
        part = re.sub(r"\W+", "-", f"{'-quick' if options.quick else ''}-{options.only}").rstrip("-")
        plugin["log"] = place.folder / f"{suite}-{side}-{key}{part}.jsonl"
        found[side] = _outcomes(place, suite, plugin, options)
        plugin["last"] = plugin["log"]
        say(f"{suite}, {side}: {dict(Counter(found[side].values()))}")
    counts = {side: Counter(tests.values()) for side, tests in found.items()}
    lost = [test for test, outcome in found["trl"].items() if outcome == "passed" and found["ours"].get(test) in _LOST]
    whole = counts["ours" if counts["trl"]["waiting"] else "trl"]  # a side that ran all tests, if there is one
    return {
        "trl_passed": counts["trl"]["passed"],
        "ours_passed": counts["ours"]["passed"],
        "runnable": whole["passed"] + whole["failed"] + whole["died"],
        "lost": sorted(test.partition("::")[2] for test in lost),
        "not_run": {side: count["waiting"] for side, count in counts.items()},
        "skipped": whole["skipped"],
        "without_standin": whole["missing"],
        "quick": options.quick,
        "only": options.only,
        "tests_of": place.version(),
        "machine": machine_facts(("torch", "transformers", "trl")),
    }


def _outcomes(place: Place, suite: str, plugin: Mapping[str, Any], options: Namespace) -> dict[str, str]:
    """Outcome of each test; a test that ends the process is noted, and another process takes the rest."""
    log: Path = plugin["log"]
    for test in started(log):
        write_log(log, test, "waiting")
    while True:
        done = subprocess.run(
            _pytest(place, suite, plugin, options),
            cwd=place.source,
            env=place.environment(options.threads),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode in _ENDED_WELL:
            return read_log(log)
        if not started(log):
            told = _end_of(done.stdout + done.stderr)
            raise InputError(f"{place.test_file(suite)} cannot be run on {plugin['ours']}:\n{told}")
        for test in started(log):
            write_log(log, test, "died", reason=f"exit code {done.returncode}")


def _pytest(place: Place, suite: str, plugin: Mapping[str, object], options: Namespace) -> list[str]:
    first = {"first": _QUICK_TESTS} if options.quick else {}
    return [
        *(sys.executable, "-m", "pytest", str(place.test_file(suite)), "-q", "-p", "benchmarks.trl_plugin"),
        *("-c", os.devnull, f"--rootdir={place.source}", "-p", "no:cacheprovider", "-m", "not slow"),
        *(f"--basetemp={place.folder / 'tmp'}", "-o", "tmp_path_retention_policy=none"),
        *(f"--timeout={options.limit_s}", "--timeout-method=signal", "-k", options.only),
        *(f"--trl-{name}={value}" for name, value in {**plugin, **first}.items()),
    ]


def _end_of(text: str) -> str:
    return "\n".join(text.splitlines()[-_TAIL:])


def show(facts: Mapping[str, Any]) -> None:
    """Print a line for each suite, and what was lost."""
    columns = ("trl_passed", "ours_passed", "runnable", "skipped", "without_standin", "not_run")
    rows = [[suite, *(str(row[name]) for name in columns)] for suite, row in facts.items()]
    print_table(("suite", *columns), rows)
    for suite, row in facts.items():
        for test in row["lost"]:
            print(f"lost: {suite} {test}")


main = benchmark(
    measure,
    show,
    *("threads", "quick"),
    source={"type": Path, "metavar": "FOLDER", "help": "a checkout of TRL"},
    suite={"action": "append", "metavar": "S", "help": f"one of {', '.join(SUITES)}; repeatable. All if left out"},
    ours={"default": OURS, "metavar": "MODULE", "help": "whose trainers take the place of TRL's"},
    work={"type": Path, "metavar": "FOLDER", "help": "keeps stand-ins and outcomes for another start"},
    only={"default": "", "metavar": "EXPRESSION", "help": "of pytest's -k, such as 'tools or environment'"},
    minutes={"type": float, "default": math.inf, "metavar": "N", "help": "no test begins after so many minutes"},
    limit_s={"type": int, "default": 300, "metavar": "N", "help": "seconds for one test"},
)


if __name__ == "__main__":
    run("trl_suite")
