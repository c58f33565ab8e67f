"""Output of a command: text on stdout, or with `--json` one object last on stdout and all else on stderr."""

import json
import logging
import math
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tunesmith.base.config.yaml_text import is_list, is_mapping
from tunesmith.base.core.errors import InputError
from tunesmith.base.core.log import get_logger, visible

if TYPE_CHECKING:
    from rich.console import Console


class Output:
    """The reports of one command."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._stdout = sys.stdout

    @property
    def console(self) -> "Console":
        """A rich console on stdout; it honours NO_COLOR and writes plain text into a pipe."""
        from rich.console import Console

        return Console(file=self._stdout, highlight=False, markup=False, emoji=False)

    def say(self, renderable: object) -> None:
        """Print text or a rich renderable; silent with `--json`."""
        if self.as_json:
            return
        if isinstance(renderable, str):
            self._stdout.write(renderable + "\n")
        else:
            self.console.print(renderable)

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """Print `rows`, the first of them a header, as aligned columns; those with numbers to the right."""
        columns = list(zip(*([visible(cell) for cell in row] for row in rows), strict=True))
        for index, column in enumerate(columns):
            align = ">" if index and any(cell[:1].isdigit() for cell in column[1:]) else "<"
            columns[index] = tuple(f"{cell:{align}{max(map(len, column))}}" for cell in column)
        for row in zip(*columns, strict=True):
            self.say("  ".join(row).rstrip())

    def finish(self, facts: Mapping[str, object]) -> None:
        """Write the JSON object, if one was asked for. NaN and infinities, which JSON does not have, become null."""
        if self.as_json:
            self._stdout.write(json.dumps(as_plain(facts), ensure_ascii=True, allow_nan=False) + "\n")
        self._stdout.flush()  # a reader may wait for the output of a server, which keeps running


@contextmanager
def reporting(*, as_json: bool) -> Generator[Output]:
    """An `Output`. With `as_json`, what anything else prints meanwhile, as a reward function may, goes to stderr."""
    output = Output(as_json=as_json)
    previous = sys.stdout
    if as_json:
        sys.stdout = sys.stderr
    try:
        yield output
    finally:
        sys.stdout = previous


def as_plain(value: object) -> object:
    """`value` as JSON knows it: paths and unknown things as text, non-finite numbers as null."""
    if is_mapping(value):
        return {str(key): as_plain(item) for key, item in value.items()}
    if is_list(value):
        return [as_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int | bool):
        return value
    return str(value) if isinstance(value, Path) else as_plain(_number(value))


def _number(value: object) -> object:
    """A scalar of another library as a Python number; text for anything else."""
    item = getattr(value, "item", None)
    return item() if callable(item) else str(value)


def write_new(file: Path, text: str) -> None:
    """Write `text` to a file that does not exist yet. Raises InputError if it does, or cannot be written."""
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror}") from error


def wants_progress() -> bool:
    """False with `--quiet`."""
    return get_logger("tunesmith").isEnabledFor(logging.INFO)


class LiveText:
    """Shows pieces of a text as they come, with what could steer the terminal escaped.

    With `strips`, white space at both ends is left out.
    """

    def __init__(self, stream: TextIO, *, strips: bool = False) -> None:
        self._stream = stream
        self._strips = strips
        self._begun = False
        self._spaces = ""

    def add(self, piece: str) -> None:
        """Show `piece`, but for white space that may turn out to be the end."""
        if self._strips:
            piece = self._spaces + piece
            kept = piece.rstrip()
            self._spaces = piece[len(kept) :]
            piece = kept if self._begun else kept.lstrip()
        if piece:
            self._begun = True
            self._stream.write(visible(piece))
            self._stream.flush()

    def end(self, text: str = "") -> None:
        """Show `text` and end the line."""
        self._stream.write(text + "\n")
        self._stream.flush()
