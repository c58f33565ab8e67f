"""Shared parts of the benchmarks: command line, rounds in alternation, ratios with their spread, peak memory, machine.

A measured figure depends on processor, threads, versions, commit, memory and who else uses the cores.
"""

import argparse
import contextlib
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import psutil
import torch

from tunesmith.base.core.errors import InputError, TunesmithError
from tunesmith.base.runs.environment import (
    core_numbers,
    cpu_model,
    package_version,
    peak_rss_since_reset_gb,
    reset_peak_rss,
    usable_cores,
)
from tunesmith.base.runs.folder import finite

ROOT = Path(__file__).resolve().parent.parent

BUSY_CORES = 0.25
"""From this many cores' worth of other programs on, two threads are slowed unevenly and a ratio means little."""

_PACKAGES = ("torch", "transformers", "numpy")

Say = Callable[[str], None]
Work = Callable[[], object]

_FLAGS: Mapping[str, Mapping[str, Any]] = {
    "model": {"default": "smollm2", "metavar": "ID", "help": "Hub id, folder, GGUF file, smollm2, tiny:<family>"},
    "workload": {"action": "append", "metavar": "W", "help": "one workload; repeatable. All if left out"},
    "micro_batch_size": {"type": int, "metavar": "N", "help": "of our side; the recipe's default if left out"},
    "threads": {"type": int, "default": usable_cores(), "metavar": "N", "help": "threads of each process"},
    "rounds": {"type": int, "default": 5, "metavar": "N", "help": "rounds in which every contender works once"},
    "dtype": {"choices": ("auto", "float32", "bfloat16"), "default": "auto", "help": "precision of all sides"},
    "seed": {"type": int, "default": 0, "metavar": "N", "help": "seed of the random numbers"},
    "device": {"choices": ("cpu", "cuda"), "default": "cpu", "help": "device of the tensors"},
    "quick": {"action": "store_true", "help": "smoke run on small sizes; its figures say nothing"},
    "out": {"type": Path, "metavar": "FILE", "help": "write the figures to a file, such as benchmarks/rollout.json"},
    "json": {"action": "store_true", "help": "print one JSON object at the end"},
    "quiet": {"action": "store_true", "help": "no progress on stderr"},
}


def benchmark(
    measure: Callable[[argparse.Namespace, Say], Mapping[str, object]],
    show: Callable[[Mapping[str, Any]], None],
    *names: str,
    writes: bool = True,
    **changed: Mapping[str, Any],
) -> Callable[[Sequence[str]], int]:
    """The program of a benchmark: a function from the words of the command line to the exit code.

    `measure(options, say)` returns the figures; its module has the text for --help. `show(figures)` prints them. The
    flags are the shared ones `names`, those of `changed`, whose settings add to the shared ones, and those for the
    output; `threads` are set here. With `writes` the figures go to the file `--out`. The exit code is 2 for bad input,
    1 for other errors.
    """
    made = argparse.ArgumentParser(
        prog=f"python -m {measure.__module__}",
        description=sys.modules[measure.__module__].__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for flag in dict.fromkeys((*names, *changed, "out", "json", "quiet")):
        settings = {**_FLAGS.get(flag, {}), **changed.get(flag, {})}
        if settings.get("default") is not None:
            settings["help"] += " (default: %(default)s)"
        made.add_argument(f"--{flag.replace('_', '-')}", **settings)

    def main(words: Sequence[str]) -> int:
        num_threads = torch.get_num_threads()
        try:
            options = made.parse_args(words)
            _check(options, writes)
            torch.set_num_threads(getattr(options, "threads", num_threads))
            with contextlib.redirect_stdout(sys.stderr):
                facts = cast(dict[str, Any], finite(measure(options, _silent if options.quiet else _progress)))
            if writes and options.out:
                options.out.write_text(json.dumps(facts, indent=1, default=str) + "\n", encoding="utf-8")
            if options.json:
                print(json.dumps(facts, default=str))
            else:
                show(facts)
            return 0
        except TunesmithError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        except SystemExit as exit_:  # argparse has printed help, or what is wrong with a flag
            return exit_.code if isinstance(exit_.code, int) else 0
        finally:
            torch.set_num_threads(num_threads)

    return main


def run(name: str) -> None:
    """Run `main` of `benchmarks.<name>` on the command line.

    The module is imported under its own name, not `__main__`, because workers unpickle its records.
    """
    sys.exit(importlib.import_module(f"benchmarks.{name}").main(sys.argv[1:]))


def _check(options: argparse.Namespace, writes: bool) -> None:
    """Refuse before measuring for an hour what cannot be measured, or written afterwards."""
    if writes and options.out and (options.out.is_dir() or not options.out.parent.is_dir()):
        raise InputError(f"{options.out} cannot be written: give a file in a folder that exists to --out")
    for key in ("rounds", "threads", "slots", "micro_batch_size"):
        value = getattr(options, key, None)
        if value is not None and value < 1:
            raise InputError(f"{key} is {value}; give at least 1")


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _silent(_: str) -> None:
    pass


def head(
    options: argparse.Namespace, bench: str, *names: str, packages: Sequence[str] = _PACKAGES
) -> dict[str, object]:
    """Facts with which those of a benchmark begin: its name, the options `names`, and the machine."""
    return {"bench": bench, **{name: getattr(options, name) for name in names}, "machine": machine_facts(packages)}


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns of equal width, the first one to the left."""
    lines = [headings, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    for line in lines:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        print("  ".join(cells).rstrip())


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, smallest and largest of a figure over rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """The spread of `values`, at least one."""
        return cls(statistics.median(values), min(values), max(values))

    def facts(self, name: str) -> dict[str, float]:
        """`<name>_median`, `<name>_min` and `<name>_max`, for JSON."""
        return {f"{name}_median": self.median, f"{name}_min": self.least, f"{name}_max": self.most}


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Ratios `ours / theirs` round by round: neighbours in time share the state of the machine."""
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])


def spread_text(figures: Mapping[str, float]) -> str:
    """`2.00x (1.90-2.10)`."""
    return f"{figures['ratio_median']:.2f}x ({figures['ratio_min']:.2f}-{figures['ratio_max']:.2f})"


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the machine was: its load average over a minute, and cores that this program did not use itself."""

    load_average: float
    other_busy_cores: float


def in_turns(
    sides: Mapping[str, Callable[[int], Any]],
    num_rounds: int,
    say: Say,
    line: Callable[[Mapping[str, list[Any]]], str] | None = None,
    *,
    measures_load: bool = True,
) -> tuple[dict[str, list[Any]], dict[str, object]]:
    """Answers of each side, and facts on the load before each round, which takes a third of a second to measure.

    Every side works once in each round, called with the number of the round; who begins changes from round to round.
    `line` makes a line for `say` of the answers so far.
    """
    answers: dict[str, list[Any]] = {name: [] for name in sides}
    loads: list[Load] = []
    for index in range(num_rounds):
        if measures_load:
            loads.append(measure_load())
            if loads[-1].other_busy_cores > BUSY_CORES:
                say(f"  another program keeps {loads[-1].other_busy_cores:.1f} cores busy: this round means little")
        names, first = list(sides), index % len(sides)
        for name in names[first:] + names[:first]:
            answers[name].append(sides[name](index))
        if line:
            say(f"  round {index + 1} of {num_rounds}: {line(answers)}")
    return answers, load_facts(loads) if loads else {}


def load_facts(loads: Sequence[Load]) -> dict[str, object]:
    """Loads of all rounds, for JSON."""
    return {
        "load_average": max(load.load_average for load in loads),
        "other_busy_cores": Spread.of([load.other_busy_cores for load in loads]).facts("cores"),
    }


def load_warning(figures: Mapping[str, Any]) -> str:
    """A line of its own where other programs disturbed the rounds, else nothing."""
    busy = cast(float, figures["load"]["other_busy_cores"]["cores_max"])
    return "" if busy <= BUSY_CORES else f"\nnot to be trusted: other programs kept up to {busy:.1f} cores busy"


def seconds_of(work: Work) -> float:
    """Seconds that one call takes."""
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def wait(device: torch.device) -> None:
    """Return when the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def repeated(work: Work, device: torch.device, least_s: float = 0.0) -> Callable[[int], float]:
    """A side of `in_turns`: seconds of one call, each time from as many calls in a row as take `least_s`.

    The work is called twice before, so that what is slow once does not count: compiling, and memory that is new.
    """

    def seconds(num_calls: int) -> float:
        wait(device)
        start_s = time.perf_counter()
        for _ in range(num_calls):
            work()
        wait(device)
        return (time.perf_counter() - start_s) / num_calls

    seconds(1)
    num_calls = max(1, round(least_s / max(seconds(1), 1e-7)))
    return lambda _: seconds(num_calls)


def peak_gb(work: Work, device: torch.device) -> float:
    """Peak memory of one call above what was there before, in GB; on a CPU of resident memory, 0 if unknown.

    The work is called once before.
    """
    work()
    if device.type == "cuda":
        wait(device)
        torch.cuda.reset_peak_memory_stats(device)
        rest = torch.cuda.memory_allocated(device)
        work()
        wait(device)
        return (torch.cuda.max_memory_allocated(device) - rest) / 1e9
    if not reset_peak_rss():
        return 0.0
    rest_gb = peak_rss_since_reset_gb()
    work()
    return max(0.0, peak_rss_since_reset_gb() - rest_gb)


def memory_facts(ours: Work, plain_way: Work, device: torch.device) -> dict[str, object]:
    """Peak memory of both in GB, and ours over the plain one's."""
    ours_gb, plain_gb = peak_gb(ours, device), peak_gb(plain_way, device)
    return {
        "memory_gb": ours_gb,
        "plain_memory_gb": plain_gb,
        "memory_ratio": ours_gb / plain_gb if plain_gb else None,
    }


def machine_facts(packages: Sequence[str] = _PACKAGES) -> dict[str, object]:
    """Processor, threads, versions of `packages`, and the commit of this package's sources if they are in a repository.

    `uncommitted_changes` is of `src` and `benchmarks`: with it the commit alone does not say what was measured.
    """
    return {
        "device": cpu_model(),
        "num_cores": usable_cores(),
        "num_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in packages},
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(git("status", "--porcelain", "--", "src", "benchmarks")),
    }


def git(*arguments: str) -> str:
    """What `git <arguments>` prints in the repository of this package's sources; empty where they are in none."""
    if not (ROOT / ".git").exists():  # an installed copy may lie inside a repository of something else
        return ""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    except OSError:  # no git on this machine
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def measure_load(interval_s: float = 0.3) -> Load:
    """The load while this process sleeps for `interval_s`: whatever is busy then is somebody else."""
    psutil.cpu_percent(percpu=True)
    time.sleep(interval_s)
    percent = psutil.cpu_percent(percpu=True)
    busy = sum(percent[core] for core in core_numbers() if core < len(percent)) / 100
    return Load(load_average=round(os.getloadavg()[0], 2), other_busy_cores=round(busy, 2))
