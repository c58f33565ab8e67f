"""The user's cache: what can be made again, such as converted models and compiled kernels."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """The user's cache: `TUNESMITH_CACHE`, else `tunesmith` under `XDG_CACHE_HOME`, else `~/.cache/tunesmith`."""
    if named := os.environ.get("TUNESMITH_CACHE"):
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "tunesmith"
