"""Labels that people give a run: a name, a note and tags, in a file of its folder. The folder keeps its own name."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tunesmith.base.config.yaml_text import is_list, is_mapping
from tunesmith.base.core.errors import RunError
from tunesmith.base.core.system import fsync

LABELS_FILE = "labels.json"
MAX_TITLE, MAX_NOTE, MAX_TAG, MAX_TAGS = 200, 10_000, 50, 20

_MAX_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class Labels:
    """Name, note and tags of a run; all may be empty."""

    title: str = ""
    note: str = ""
    tags: tuple[str, ...] = ()


def read_labels(run: Path) -> Labels:
    """The labels of the run in the folder `run`; what is damaged counts as empty."""
    try:
        with (run / LABELS_FILE).open("rb") as file:
            data: object = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return Labels()
    title, note, tags = (data.get(name) if is_mapping(data) else None for name in ("title", "note", "tags"))
    return Labels(
        title[:MAX_TITLE] if isinstance(title, str) else "",
        note[:MAX_NOTE] if isinstance(note, str) else "",
        tuple(str(tag)[:MAX_TAG] for tag in tags[:MAX_TAGS]) if is_list(tags) else (),
    )


def write_labels(run: Path, labels: Labels) -> None:
    """Write the labels; a reader sees the old ones or the new ones. A process may train in the folder meanwhile.

    Raises:
        RunError: if the file cannot be written.
    """
    aside = run / f".{LABELS_FILE}-{os.getpid()}"
    try:
        with aside.open("w", encoding="utf-8") as file:
            json.dump(asdict(labels), file, ensure_ascii=False)
            file.flush()
            fsync(file.fileno())
        os.replace(aside, run / LABELS_FILE)
    except OSError as error:
        raise RunError(f"{run / LABELS_FILE} cannot be written: {error.strerror or error}") from error
    finally:
        aside.unlink(missing_ok=True)


def clean_tags(tags: Iterable[str]) -> tuple[str, ...]:
    """Each tag once, without blanks around it and without empty ones, in the order given."""
    return tuple(dict.fromkeys(tag.strip() for tag in tags if tag.strip()))
