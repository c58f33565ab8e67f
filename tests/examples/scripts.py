"""Examples in processes of their own, forked from one that has their modules loaded."""

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from server_parts import context

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed(script: str, options: Sequence[str], folder: Path) -> str:
    """What the example `script` prints with `folder` as working directory; it must end well."""
    shown = [folder / name for name in ("stdout", "stderr")]
    process = context().Process(target=_run, args=([str(EXAMPLES / script), *options], folder, shown))
    process.start()
    process.join()
    assert process.exitcode == 0, shown[1].read_text()
    return shown[0].read_text()


def _run(words: list[str], folder: Path, shown: Sequence[Path]) -> None:
    os.chdir(folder)
    for number, file in enumerate(shown, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
