"""The writer of a GGUF file that appears when it is complete."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import gguf

from tunesmith.base.core.errors import ModelError
from tunesmith.base.core.system import sync

_SPARE_BYTES = 64 << 20
"""Of the header, most of which are the tokens and merges."""


class _Writer(gguf.GGUFWriter):
    """The package's writer, which refuses empty lists: llama.cpp wants the merges of a vocabulary that has none."""

    def _pack_val(self, val: Any, vtype: Any, add_vtype: bool, sub_type: Any = None) -> bytes:
        if vtype == gguf.GGUFValueType.ARRAY and not val and sub_type is not None:
            start = self._pack("I", vtype) if add_vtype else b""
            return start + self._pack("I", sub_type) + self._pack("Q", 0)
        return super()._pack_val(val, vtype, add_vtype, sub_type)


@contextmanager
def writing(file: Path, arch: str, num_bytes: int, *, replaces: bool) -> Iterator[gguf.GGUFWriter]:
    """A writer of a file of `num_bytes` of weights beside `file`, which takes its place when the block has ended.

    Raises:
        ModelError: the file exists and is not to be replaced, the disk is full, or the place cannot be written.
    """
    if file.exists() and not replaces:
        raise ModelError(f"{file} exists; give another place, or --overwrite")
    with _replacing(file) as path:
        _require_space(file, num_bytes + _SPARE_BYTES)
        with closing(_Writer(path, arch)) as writer:
            yield writer


def write_beside(file: Path, text: str) -> None:
    """Write a text file, which appears when it is complete and takes the place of another.

    Raises:
        ModelError: it cannot be written.
    """
    with _replacing(file) as path:
        path.write_text(text, encoding="utf-8")


@contextmanager
def _replacing(file: Path) -> Iterator[Path]:
    """The path of a file to be written, which takes the place of `file` when the block has ended.

    Raises:
        ModelError: it cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{file.name}-", dir=file.parent) as aside:
            path = Path(aside) / file.name
            yield path
            sync(path)
            os.replace(path, file)
    except OSError as error:
        reason = error.strerror or error
        raise ModelError(f"cannot write {file} ({reason}); free some space, or give another place") from error


def begin_data(writer: gguf.GGUFWriter) -> None:
    """Write all but the weights, which come next, one by one."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


def _require_space(file: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(file.parent).free
    if num_bytes > free:
        raise ModelError(
            f"{file} needs {num_bytes / 1e6:.0f} MB, and {free / 1e6:.0f} MB are free; free some space, or take a "
            "smaller --type"
        )
