"""The files of `python -m benchmarks.gpu`: one for each row, and `gpu.json` with all of them, each written at once."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunesmith.core.errors import InputError

FORMAT = 1
"""Of the records; another one cannot be gone on with."""

SUMMARY = "gpu.json"
DERIVED = ("shares", "is_correct")
"""What stands beside the figures of a setting in `gpu.json` alone: it follows from them and from the ceilings."""

_ROOT = Path(__file__).resolve().parents[1]


@dataclass(slots=True)
class RowRecord:
    """What is known of a row: figures of its settings, why others failed, and which are still to come, by name."""

    row: str
    made: Mapping[str, Any]
    settings: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    errors: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    left: list[str] = field(default_factory=list[str])
    wall_s: float = 0.0

    @property
    def status(self) -> str:
        """`failed` if any setting has, `partial` if some are still to come, else `done`."""
        return "failed" if self.errors else "partial" if self.left else "done"

    def as_json(self) -> dict[str, Any]:
        """The record as plain numbers and text."""
        return {
            "format": FORMAT,
            "row": self.row,
            "status": self.status,
            "made": dict(self.made),
            "wall_s": self.wall_s,
            "settings": self.settings,
            "errors": self.errors,
            "left": self.left,
        }


class Folder:
    """Records of rows in a folder, which is made if it is not there."""

    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_dir():
            raise InputError(f"--out {path} is no folder; give one, or a name that is still free")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--out {path} cannot be made: {error.strerror}; give another folder") from error
        self.path = path

    def records(self, names: Mapping[str, object]) -> dict[str, RowRecord]:
        """What earlier starts left, of the rows `names`, in their order: from `gpu.json`, and newer from the rows' own
        files.

        Raises:
            InputError: a file is damaged, or of another format.
        """
        summary = _read(self.path / SUMMARY)
        rows = dict(summary["rows"]) if summary else {}
        found: dict[str, RowRecord] = {}
        for name in names:
            record = _read(self.path / f"{name}.json") or rows.get(name)
            if record is not None:
                found[name] = _record(record, self.path)
        return found

    def write_row(self, record: RowRecord) -> None:
        """The record in a file of its own."""
        write_json(self.path / f"{record.row}.json", record.as_json())


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """`content` under the name `path`: whole or not at all, also if the process ends meanwhile.

    Raises:
        InputError: it cannot be written.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(aside, path)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror}; free some space, or give another --out"
        ) from error


def sources_digest() -> str:
    """A hash of all sources of the package and its benchmarks: figures of two digests are of two programs."""
    digest = hashlib.sha256()
    for path in sorted([*(_ROOT / "src").rglob("*"), *(_ROOT / "benchmarks").glob("*")]):
        if path.suffix in (".py", ".cpp", ".hpp"):
            digest.update(str(path.relative_to(_ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}; remove it, or give another --out") from error


def _record(content: Mapping[str, Any], path: Path) -> RowRecord:
    if content.get("format") != FORMAT:
        raise InputError(
            f"{path} holds records of format {content.get('format')!r}, and this release writes {FORMAT}; "
            "give another --out"
        )
    settings = {
        key: {name: value for name, value in setting.items() if name not in DERIVED}
        for key, setting in content["settings"].items()
    }
    parts = dict(content["made"]), settings, dict(content["errors"]), list(content["left"])
    return RowRecord(str(content["row"]), *parts, float(content["wall_s"]))
