"""Sources of the form `data:preference/pairs.jsonl.gz`: files below the folder that `TUNESMITH_DATA` names.

A shipped recipe names its data so, and runs wherever the folder is; without it, the error says which data set on the
hub holds the same rows.
"""

import difflib
import os
import re
from pathlib import Path

from tunesmith.core.errors import DataError

VARIABLE = "TUNESMITH_DATA"
"""Environment variable that names the data folder."""

PREFIX = "data:"
"""What a source below the data folder begins with."""

_ON_THE_HUB = (
    ("instruction/oasst1.", "timdettmers/openassistant-guanaco:test", "the best replies of OASST1, in a `text` column"),
    ("preference/hh-rlhf.", "Anthropic/hh-rlhf:test", "helpful and harmless pairs together"),
    ("sentiment/imdb", "stanfordnlp/imdb:train", "25,000 rows instead of 5,000"),
    ("math/gsm8k.", "openai/gsm8k/main:train", "the same rows"),
)
"""Beginning of a file's name, the hub id to take instead, and what is different there."""


def is_data_source(source: str) -> bool:
    """True for `data:` with a path behind it; `data:train` is a split of the folder `data`."""
    name = source.removeprefix(PREFIX)
    return source.startswith(PREFIX) and re.fullmatch(r"[\w-]*", name) is None


def data_path(source: str) -> Path:
    """The file or folder that `source`, such as `data:math/gsm8k.train.jsonl.gz`, names.

    Raises DataError if the variable is not set, names no folder, or if there is nothing of that name below it.
    """
    name = source.removeprefix(PREFIX)
    named = os.environ.get(VARIABLE, "")
    if not named:
        raise DataError(f"{source} stands below the folder that {VARIABLE} names, but it is not set; set it{_or(name)}")
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise DataError(f"{source}: {VARIABLE} names {folder}, which is no folder; correct it{_or(name)}")
    path = Path(os.path.normpath(folder / name))  # links inside of the folder may lead anywhere
    if not path.is_relative_to(os.path.normpath(folder)):
        raise DataError(f"{source} leads out of the folder {folder}; give the path of the file itself")
    if not path.exists():
        names = [str(file.relative_to(folder)) for file in folder.glob("*/*")]
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {PREFIX}{close[0]}?" if close else f"; put it there{_or(name)}"
        raise DataError(f"{source}: the folder {folder}, which {VARIABLE} names, has no {name}{hint}")
    return path


def _or(name: str) -> str:
    for beginning, hub_id, difference in _ON_THE_HUB:
        if name.startswith(beginning):
            return f", or take {hub_id} from the hub ({difference})"
    return ", or give a file, a folder or a hub id"
