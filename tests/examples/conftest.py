"""Examples as people run them: scripts in a process of their own."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def output_of(tmp_path: Path) -> Callable[..., str]:
    """A function that runs an example in an empty folder and returns its stdout."""

    def run(script: str, *options: str) -> str:
        words = [sys.executable, str(EXAMPLES / script), *options]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
