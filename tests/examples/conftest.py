"""Examples as people run them: scripts in a process of their own."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def output_of(tmp_path: Path) -> Callable[..., str]:
    """A function that runs an example and returns its stdout."""
    from scripts import printed

    return lambda script, *options: printed(script, options, tmp_path)
