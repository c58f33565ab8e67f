"""The folder of a run. `metrics.jsonl` is the record of the run; reports and summaries are derived from it.

runs/<date>-<name>-<id>/
  recipe.yaml       resolved configuration        provenance.json   where each value came from
  environment.json  versions and machine          metrics.jsonl     one object per step
  samples.jsonl     prompts, completions, scores  findings.jsonl    alarms and notes
  resumes.jsonl     one object per resume         refused/          batches whose update was refused
  data.json         rows read, dropped, leaked    setup.json        how the run computes
  profile/          what `tunesmith profile` recorded
  places.jsonl      lines at which the time went
  stage.bin         stage of a run that trains    hang.txt          reports of hangs; stacks.txt, their stacks
  checkpoints/      see base/runs/checkpoint.py run.lock          held while a process trains
  final/            the model, Hugging Face layout  result.json     the summary   report.html
"""

import datetime
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from tunesmith.base.core import faults
from tunesmith.base.core.errors import RunError, TrainingError
from tunesmith.base.core.system import fsync
from tunesmith.base.runs.environment import environment

PLACES = "places.jsonl"
"""File with the lines at which the seconds of the steps went."""

TRIAL = "trial.json"
"""File of a live folder with the version that is tried on a share of the conversations, if one is."""

LOGS = ("metrics.jsonl", "samples.jsonl", "findings.jsonl", PLACES)
"""Files that grow with the steps; a resumed run cuts them back to its checkpoint."""

RUN_ID = "TUNESMITH_RUN_ID"
"""Environment variable with the end of the name of a new run's folder, by which whoever started it finds it."""

MEASURED = (
    *("time/", "cpu/", "gil/", "memory/", "faults/", "io/", "gc/", "gpu/"),
    *("samples_per_s", "tokens_per_s", "flop_per_s", "mfu", "evaluate/"),
    *("rollout/slots_used", "rollout/tail_s", "rollout/starved_s"),
    *("rollout/decode_steps", "rollout/prefill_tokens", "rollout/shared_tokens"),
    *("environment/reply_", "rollout/wait_s", "rollout/worker", "rollout/stolen_leases"),
    *("check/computed_tokens", "reference/computed_tokens"),
)
"""Beginnings of the names of metrics that are measured on the machine, or depend on what the process did before, such
as prompts in a cache; all others follow from recipe and seed."""


_NAME_TRIES = 20
"""Names that are tried where others begin runs in the same second."""


class RunFolder:
    """A run's folder and its append-only files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(
        cls,
        parent: Path,
        name: str,
        recipe: Mapping[str, object],
        provenance: Mapping[str, str] | None = None,
        from_python: Sequence[str] = (),
    ) -> "RunFolder":
        """A fresh folder below `parent` with the resolved recipe, its provenance and the environment written.

        `from_python` names the inputs given as Python objects; `environment.json` records them as `given_in_python`.

        Raises:
            RunError: if `parent` cannot be written, or another run has this id since this very second.
        """
        path = _make_folder(parent, re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "run")
        run = cls(path)
        try:
            (path / "recipe.yaml").write_text(
                yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True), encoding="utf-8"
            )
            run.write_json("provenance.json", dict(provenance or {}))
            run.write_json("environment.json", {**environment(), "given_in_python": list(from_python)})
        except (OSError, TrainingError) as error:
            shutil.rmtree(path, ignore_errors=True)
            raise _cannot_make(path, error) from error
        return run

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def final(self) -> Path:
        """Folder of the trained model."""
        return self.path / "final"

    def write_json(self, name: str, value: object) -> None:
        """Write `value` as the JSON file `name`, all of it or nothing; numbers that are not finite become null.

        Raises:
            TrainingError: if it cannot be written.
        """
        text, aside = json.dumps(finite(value), indent=1, ensure_ascii=False) + "\n", self.path / f".{name}-new"
        try:
            aside.write_text(text, encoding="utf-8")
            os.replace(aside, self.path / name)
        except OSError as error:
            raise TrainingError(
                f"cannot write {self.path / name} ({error.strerror or error}); free disk space"
            ) from error

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one line to `metrics.jsonl`."""
        self.append("metrics.jsonl", [{"step": step, **metrics}])

    def append(self, name: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Add one line to the file `name` for each row.

        Raises:
            TrainingError: if the file cannot be written, as on a full disk.
        """
        text = "".join(json.dumps(finite(row), ensure_ascii=False) + "\n" for row in rows)
        try:
            faults.reach(f"log/{name.removesuffix('.jsonl')}")
            with (self.path / name).open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise TrainingError(
                f"cannot write {self.path / name} ({error.strerror or error}); free space or repair the folder, then "
                f"`tunesmith resume {self.path}` continues the run"
            ) from error

    def write_rows(self, name: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Write `rows` as the JSONL file `name`, whose folder is made if need be.

        Raises:
            TrainingError: if it cannot be written.
        """
        try:
            (self.path / name).parent.mkdir(exist_ok=True)
            (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise TrainingError(
                f"cannot write {self.path / name} ({error.strerror or error}); free disk space"
            ) from error
        self.append(name, rows)

    def read_metrics(self) -> list[dict[str, float]]:
        """All rows of `metrics.jsonl`, with NaN where a number was not finite."""
        rows = read_jsonl(self.path / "metrics.jsonl")
        return [{name: math.nan if value is None else value for name, value in row.items()} for row in rows]  # type: ignore[misc]

    def log_sizes(self) -> dict[str, int]:
        """Sync each log to disk and return its size in bytes by name, for a checkpoint."""
        sizes: dict[str, int] = {}
        for name in LOGS:
            if (self.path / name).exists():
                with (self.path / name).open("rb") as file:
                    fsync(file.fileno())
                    sizes[name] = os.fstat(file.fileno()).st_size
        return sizes

    def cut_logs(self, sizes: Mapping[str, int]) -> None:
        """Truncate each log to its size in `sizes`; a log that is not named there is removed.

        Raises:
            RunError: if a log is shorter than that, so that lines of it are lost.
        """
        for name in LOGS:
            path, size = self.path / name, sizes.get(name, 0)
            found = path.stat().st_size if path.exists() else 0
            if found < size:
                raise RunError(
                    f"{path} has {found} bytes, but the checkpoint was written when it had {size}; put the file back, "
                    "or start a new run"
                )
            if size == 0:
                path.unlink(missing_ok=True)
            else:
                os.truncate(path, size)


def _make_folder(parent: Path, name: str) -> Path:
    """A new folder below `parent`, which nobody had before: whoever comes second does not get it, and leaves it alone.

    Raises:
        RunError: it cannot be made, or another start with the same id has made it.
    """
    given, tries = os.environ.get(RUN_ID), _NAME_TRIES
    while True:
        path = parent / f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{name}-{given or secrets.token_hex(2)}"
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError as error:
            tries -= 1
            if given:
                raise RunError(
                    f"{path} exists: another process has started a run with the id {given} in the same second; wait "
                    "for it, or give this run another id"
                ) from error
            if not tries:
                raise _cannot_make(path, error) from error
        except OSError as error:
            raise _cannot_make(path, error) from error


def _cannot_make(path: Path, error: Exception) -> RunError:
    return RunError(f"cannot make the run folder {path} ({error}); choose another with --run.dir")


def read_jsonl(path: Path) -> list[dict[str, object]]:
    """The objects of a JSONL file that Tunesmith wrote; empty if there is no such file."""
    if not path.exists():
        return []
    # Not splitlines: a text may hold other line ends, such as U+2028, which JSON leaves as they are.
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def add_row(path: Path, row: Mapping[str, object]) -> None:
    """Add one line to a JSONL file, which is made if there is none. A line before it that a kill has cut off stays one
    of its own. Raises OSError.
    """
    line = json.dumps(finite(row), ensure_ascii=False) + "\n"
    with path.open("a+b") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        file.write(("" if file.read(1) in (b"", b"\n") else "\n").encode() + line.encode())


def finite(value: object) -> object:
    """`value` with numbers that JSON cannot hold replaced by None, also inside of containers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, Path) else value
