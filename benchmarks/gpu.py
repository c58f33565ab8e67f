"""The whole table of a GPU: kernels, engine and update, beside torch, torch.compile and Liger, and their ceilings.

A process of its own measures. If a row ends it, by an error, a fault of the device or its time limit, that setting is
noted as failed with the last lines of what was written, and a fresh process takes the next. Rows are written to --out
one by one, and a second start goes on where the first ended. A row that fails is listed, with its error in the file,
and tried again by the next start. Needs the GPU for itself.
"""

import hashlib
import json
import math
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.common import ROOT, Say, benchmark, machine_facts, run
from benchmarks.gpu_rows import ROWS, WorkerSettings
from benchmarks.gpu_table import facts_of, show
from benchmarks.process import Process
from tunesmith.base.core.errors import InputError, TrainingError
from tunesmith.base.runs.environment import cpu_model, usable_cores
from tunesmith.base.runs.folder import RunFolder, finite

SUMMARY = "gpu.json"
DERIVED = ("shares", "is_correct")
"""Keys of a setting in `gpu.json` alone: they follow from its figures and from the ceilings."""

_FORMAT = 1
_ERROR_LINES = 12
_START_S = 20.0
"""Time for a process to start, import and make the device ready, however little is left."""


def measure(options: Namespace, say: Say = lambda _: None) -> dict[str, Any]:
    """All figures that the folder now holds, as in its `gpu.json`; `say` gets a line for each setting.

    Raises:
        InputError: an unknown row or device, or the folder cannot be used, or holds figures of another device.
    """
    names = options.row or tuple(ROWS)
    _check(options, names)
    deadline_s = time.monotonic() + 60 * options.minutes
    records = _read_records(options.out)
    made = _made(options)
    for record in records.values():
        for name in ("device", "quick", "seed"):  # figures of two machines do not belong into one table
            if record["made"][name] != made[name]:
                raise InputError(
                    f"{options.out} holds figures with {name} {record['made'][name]!r} and this start has "
                    f"{made[name]!r}; give another --out"
                )
    with _Workers(options, deadline_s) as workers:
        for name in names:
            kept = {} if options.again or name not in records else records[name]["settings"]
            wanted = [key for key in ROWS[name].units if key not in kept]
            if not wanted:
                continue
            if time.monotonic() + ROWS[name].expected_s > deadline_s:
                say(f"{name}: left for another start, too little time remains")
                continue
            records[name] = {
                "format": _FORMAT,
                "row": name,
                "status": "partial",
                "made": made,
                "wall_s": 0.0,
                "settings": dict(kept),
                "errors": {},
                "left": wanted,
            }
            _measure_row(records[name], wanted, options.out, workers, say)
            RunFolder(options.out).write_json(SUMMARY, facts_of(records, made))
    facts = facts_of(records, made)
    RunFolder(options.out).write_json(SUMMARY, facts)
    return facts


def _check(options: Namespace, names: Sequence[str]) -> None:
    for name in names:
        if name not in ROWS:
            raise InputError(f"there is no row {name!r}; give {', '.join(ROWS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("device is cuda and torch sees no CUDA device; give --device cpu --quick to try the command")
    if options.device == "cpu" and not options.quick:
        raise InputError("device is cpu and its sizes are those of a GPU; give --quick, or use benchmarks.kernels")
    if not 0 < options.minutes < math.inf:
        raise InputError(f"minutes is {options.minutes}; give a positive number")
    if options.out.exists() and not options.out.is_dir():
        raise InputError(f"--out {options.out} is no folder; give one, or a name that is still free")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {options.out} cannot be made: {error.strerror}; give another folder") from error


def _made(options: Namespace) -> dict[str, Any]:
    """Device, sources and versions of a row."""
    machine = machine_facts(("torch", "transformers", "triton", "liger_kernel"))
    digest = hashlib.sha256()  # figures of two digests are of two programs
    for path in sorted([*(ROOT / "src").rglob("*"), *(ROOT / "benchmarks").glob("*")]):
        if path.suffix in (".py", ".cpp", ".hpp"):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else cpu_model(),
        "quick": options.quick,
        "seed": options.seed,
        "sources": digest.hexdigest()[:16],
        "commit": machine["commit"],
        "packages": {**cast(dict[str, object], machine["packages"]), "cuda": torch.version.cuda},
    }


def _read_records(folder: Path) -> dict[str, dict[str, Any]]:
    """Records of earlier starts: from `gpu.json`, and newer from the rows' own files."""

    def read(path: Path) -> dict[str, Any] | None:
        try:
            return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read: {error}; remove it, or give another --out") from error

    rows = (read(folder / SUMMARY) or {"rows": {}})["rows"]
    found: dict[str, dict[str, Any]] = {}
    for name in ROWS:
        record = read(folder / f"{name}.json") or rows.get(name)
        if record is None:
            continue
        if record.get("format") != _FORMAT:
            raise InputError(
                f"{folder} holds records of format {record.get('format')!r}, and this release writes {_FORMAT}; "
                "give another --out"
            )
        for setting in record["settings"].values():
            for key in DERIVED:
                setting.pop(key, None)
        found[name] = record
    return found


def _measure_row(record: dict[str, Any], wanted: list[str], folder: Path, workers: "_Workers", say: Say) -> None:
    """Measure the `wanted` settings of the record's row, which is written when each has ended."""
    start_s, name, settings = time.monotonic(), record["row"], record["settings"]
    for index, key in enumerate(wanted):
        if workers.is_late():
            break
        try:
            answer = workers.measure(name, key)
            settings[key] = {**cast(dict[str, Any], finite(asdict(answer))), "sources": record["made"]["sources"]}
            times = ", ".join(f"{way} {1e3 * timing.median_s:.3g} ms" for way, timing in answer.timings.items())
            say(f"{name}: {key} {times}")
        except (InputError, TrainingError) as error:
            lines = str(error).splitlines()
            record["errors"][key] = [*lines[:1], *lines[1:][-_ERROR_LINES:]]
            say(f"{name}: {key} failed: {lines[-1]}")
        record["left"] = wanted[index + 1 :]
        record["wall_s"] = time.monotonic() - start_s
        record["status"] = "failed" if record["errors"] else "partial" if record["left"] else "done"
        record["settings"] = {key: settings[key] for key in ROWS[name].units if key in settings}
        RunFolder(folder).write_json(f"{name}.json", record)


class _Workers:
    """One process that measures at a time; a new one where the last one has ended."""

    def __init__(self, options: Namespace, deadline_s: float) -> None:
        threads = 1 if options.quick else usable_cores()
        self._settings = WorkerSettings(options.device, options.seed, options.quick, threads)
        self._deadline_s = deadline_s
        self._process: Process | None = None

    def is_late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self._deadline_s

    def measure(self, row: str, setting: str) -> Any:
        """The answer of a process that is alive; after an error that process is not used again."""
        if self._process is None:
            target, settings = "benchmarks.gpu_rows:Rows", self._settings
            self._process = Process(target, settings, num_threads=settings.num_threads)
        left_s = max(_START_S, self._deadline_s - time.monotonic())
        try:
            return self._process.call("measure", row, setting, timeout_s=min(ROWS[row].most_s, left_s))
        except (InputError, TrainingError):
            self.__exit__()
            raise

    def __enter__(self) -> "_Workers":
        return self

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()


main = benchmark(
    measure,
    show,
    *("seed", "quick"),
    writes=False,
    out={"required": True, "metavar": "DIR", "help": "folder for gpu.json and a file for each row"},
    row={"action": "append", "metavar": "ROW", "help": "one row; repeatable. All if left out"},
    device={"default": "cuda", "help": "cpu only with --quick"},
    minutes={"type": float, "default": 8.0, "metavar": "N", "help": "no row begins that would end later"},
    again={"action": "store_true", "help": "measure rows that are finished once more"},
)


if __name__ == "__main__":
    run("gpu")
