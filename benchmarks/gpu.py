"""`python -m benchmarks.gpu`: the whole table of a GPU, row by row, in one command that can be started again.

A process of its own measures. If a row ends it, by an error, a fault of the device or its time limit, that setting is
noted as failed with the last lines of what was written, and a fresh process takes the next. Each row is on disk before
the next begins.
"""

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.gpu_files import SUMMARY, Folder, RowRecord, sources_digest, write_json
from benchmarks.gpu_rows import CEILINGS, ROWS
from benchmarks.gpu_table import Ceilings, bars, failures, rows_facts, unmeasured
from benchmarks.gpu_worker import TARGET, MeasureUnit, WorkerSettings
from benchmarks.machine import machine_facts
from benchmarks.process import Process
from benchmarks.rounds import Say
from tunesmith.core.errors import InputError, TrainingError
from tunesmith.runs.environment import cpu_model, usable_cores

_ERROR_LINES = 12
_START_S = 20.0
"""A process that starts, imports and makes the device ready may take so long of the time that is left."""


@dataclass(frozen=True, slots=True)
class GpuBench:
    """What to measure: `rows` of ROWS, in the folder `out`, within `minutes`.

    Rows that are finished there are kept, unless `again`. `quick` takes tiny sizes, and its figures say nothing.
    """

    out: Path
    rows: tuple[str, ...] = tuple(ROWS)
    device: str = "cuda"
    minutes: float = 8.0
    seed: int = 0
    again: bool = False
    quick: bool = False


def run_gpu_bench(options: GpuBench, say: Say = lambda _: None) -> dict[str, Any]:
    """All figures that the folder now holds, as in its `gpu.json`; `say` gets a line for each setting.

    Raises:
        InputError: an unknown row or device, or the folder cannot be used, or holds figures of another device.
    """
    _check(options)
    start_s = time.monotonic()
    folder = Folder(options.out)
    records = folder.records(ROWS)
    made = _made(options)
    _check_same(records, made, options.out)
    deadline_s = start_s + 60 * options.minutes
    with _Workers(options, deadline_s) as workers:
        for name in options.rows:
            wanted = _wanted(name, records.get(name), again=options.again)
            if not wanted:
                continue
            if time.monotonic() + ROWS[name].expected_s > deadline_s:
                say(f"{name}: left for another start, too little time remains")
                continue
            kept = {} if name not in records else records[name].settings
            records[name] = RowRecord(name, made, {key: kept[key] for key in kept if key not in wanted})
            _measured(records[name], wanted, folder, workers, say)
            folder.write_row(records[name])
            write_json(folder.path / SUMMARY, _facts(records, made))
    facts = _facts(records, made)
    write_json(folder.path / SUMMARY, facts)
    return facts


def _check(options: GpuBench) -> None:
    for name in options.rows:
        if name not in ROWS:
            raise InputError(f"there is no row {name!r}; give {', '.join(ROWS)}")
    if options.device not in ("cpu", "cuda"):
        raise InputError(f"device is {options.device!r}; give cpu or cuda")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("device is cuda and torch sees no CUDA device; give --device cpu --quick to try the command")
    if options.device == "cpu" and not options.quick:
        raise InputError("device is cpu and its sizes are those of a GPU; give --quick, or use `bench kernels`")
    if not 0 < options.minutes < math.inf:
        raise InputError(f"minutes is {options.minutes}; give a positive number")


def _made(options: GpuBench) -> dict[str, Any]:
    """By whom and with what a row is measured."""
    device = torch.cuda.get_device_name() if options.device == "cuda" else cpu_model()
    machine = machine_facts(("torch", "transformers", "triton", "liger_kernel"))
    return {
        "device": device,
        "quick": options.quick,
        "seed": options.seed,
        "sources": sources_digest(),
        "commit": machine["commit"],
        "packages": {**cast(dict[str, object], machine["packages"]), "cuda": torch.version.cuda},
    }


def _check_same(records: Mapping[str, RowRecord], made: Mapping[str, Any], out: Path) -> None:
    """Figures of two machines, or of a quick run and a whole one, do not belong into one table."""
    for record in records.values():
        for name in ("device", "quick", "seed"):
            if record.made[name] != made[name]:
                raise InputError(
                    f"{out} holds figures with {name} {record.made[name]!r} and this start has {made[name]!r}; "
                    "give another --out"
                )


def _wanted(name: str, record: RowRecord | None, *, again: bool) -> list[str]:
    """Settings of a row that are not finished."""
    finished = {} if record is None or again else record.settings
    return [key for key in ROWS[name].units if key not in finished]


def _measured(record: RowRecord, wanted: list[str], folder: Folder, workers: "_Workers", say: Say) -> None:
    """Measure the `wanted` settings of the record's row, which is written when one has ended."""
    start_s = time.monotonic()
    name, made = record.row, record.made
    for index, key in enumerate(wanted):
        record.left = wanted[index:]
        if workers.is_late():
            break
        try:
            answer = workers.ask(MeasureUnit(name, key), ROWS[name].most_s)
            record.settings[key] = {**plain(asdict(answer)), "sources": made["sources"]}
            say(f"{name}: {key} {_seconds_of(answer.timings)}")
        except (InputError, TrainingError) as error:
            lines = str(error).splitlines()
            record.errors[key] = [*lines[:1], *lines[1:][-_ERROR_LINES:]]
            say(f"{name}: {key} failed: {record.errors[key][-1]}")
        record.left = wanted[index + 1 :]
        record.wall_s = time.monotonic() - start_s
        folder.write_row(record)
    record.settings = {key: record.settings[key] for key in ROWS[name].units if key in record.settings}


def _seconds_of(timings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {1e3 * timing.median_s:.3g} ms" for name, timing in timings.items())


class _Workers:
    """One process that measures at a time; a new one where the last one has ended."""

    def __init__(self, options: GpuBench, deadline_s: float) -> None:
        threads = 1 if options.quick else usable_cores()
        self._settings = WorkerSettings(options.device, options.seed, options.quick, threads)
        self._deadline_s = deadline_s
        self._process: Process | None = None

    def is_late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self._deadline_s

    def ask(self, request: MeasureUnit, most_s: float) -> Any:
        """The answer of a process that is alive; after an error it is not asked again."""
        if self._process is None:
            self._process = Process(TARGET, self._settings, num_threads=self._settings.num_threads)
        left_s = max(_START_S, self._deadline_s - time.monotonic())
        try:
            return self._process.ask(request, timeout_s=min(most_s, left_s))
        except (InputError, TrainingError):
            process, self._process = self._process, None
            process.close()
            raise

    def __enter__(self) -> "_Workers":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.close()


def _facts(records: Mapping[str, RowRecord], made: Mapping[str, Any]) -> dict[str, Any]:
    ceilings = Ceilings.of(records.get(CEILINGS))
    sources = {str(setting["sources"]) for record in records.values() for setting in record.settings.values()}
    return {
        "bench": "gpu",
        **made,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "ceilings": ceilings.facts(),
        "rows": rows_facts(records, ceilings),
        "bars": bars(records, ceilings),
        "failed": failures(records),
        "unmeasured": unmeasured(records),
        "has_one_source": len(sources) <= 1,
        "seconds": sum(record.wall_s for record in records.values()),
    }


def plain(value: Any) -> Any:
    """`value` as JSON has it: infinities and what is not a number become None."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    from benchmarks.cli import main  # imports this module under its own name: a worker unpickles what is sent to it

    sys.exit(main(["gpu", *sys.argv[1:]]))
