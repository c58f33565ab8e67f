"""Environments that were installed without the extra `dev`.

`make test-install` installs the wheel into an environment of its own. Here the same question is asked of every command
in a second: a process finds no package that the named extras do not bring.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

GUARD = """
import json, sys
from importlib.machinery import PathFinder

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in absent else super().find_spec(name, path, target)

absent = frozenset(json.loads(sys.argv.pop(1)))
sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
from tunesmith.apps.cli.main import main
for words in json.loads(sys.argv[1]):
    if code := main(words):
        sys.exit(code)
"""


def required(name: str, extras: Sequence[str], seen: set[tuple[str, str]]) -> Iterator[str]:
    """Names of the distributions that `name[extras]` brings into an environment, itself first."""
    yield canonicalize_name(name)
    for line in distribution(name).requires or ():
        need = Requirement(line)
        wanted = [extra for extra in ("", *extras) if need.marker is None or need.marker.evaluate({"extra": extra})]
        for extra in wanted:
            if (need.name, extra) not in seen:
                seen.add((need.name, extra))
                yield from required(need.name, sorted(need.extras), seen)


def absent_modules(extras: Sequence[str]) -> list[str]:
    """Top-level modules of this environment that would be missing with `extras` alone."""
    brought = set(required("tunesmith", extras, set()))
    by_module = packages_distributions()
    return [module for module, owners in by_module.items() if not brought & {canonicalize_name(o) for o in owners}]


def run(folder: Path, extras: Sequence[str], *commands: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Each command `tunesmith words`, until one fails, as an environment with `extras` would run it."""
    command = [sys.executable, "-c", GUARD, json.dumps(absent_modules(extras)), json.dumps(commands)]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, "COLUMNS": "120"}, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data set of each kind."""
    folder = tmp_path_factory.mktemp("plain")
    told = [{"prompt": f"Say {word}.", "completion": f" {word}"} for word in ("one", "two", "three", "four")]
    pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": " no"} for row in told]
    for name, rows in (("told.jsonl", told), ("pairs.jsonl", pairs)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


TRAININGS = {
    "sft": ["--demonstrations", "told.jsonl"],
    "reward": ["--pairs", "pairs.jsonl", "--pairs.heldout-fraction", "0.25"],
    "dpo": ["--pairs", "pairs.jsonl", "--pairs.heldout-fraction", "0.25"],
    "grpo": ["--prompts", "told.jsonl", "--reward", "unique_chars", "--rollout.max-new-tokens", "4"],
    "ppo": ["--prompts", "told.jsonl", "--reward", "unique_chars", "--rollout.max-new-tokens", "4"],
}


def test_training_needs_no_extra(folder: Path) -> None:
    """People install the package without extras, or in a container, and train. Reported: issue 45.28."""
    words = ("--model", "tiny:llama", "--steps", "1")
    done = run(folder, (), *(["train", algorithm, *words, *data] for algorithm, data in TRAININGS.items()))
    assert done.returncode == 0, done.stderr[-3000:]


def test_commands_start_without_extras(folder: Path) -> None:
    """People look at what a command can do before they install its extra. Reported: issue 45.28."""
    done = run(folder, (), ["--help"], ["doctor"], ["recipes", "ls"], ["eval", "--help"], ["votes", "--help"])
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_guard_refuses_what_no_extra_brings(folder: Path) -> None:
    """Parquet needs the extra `data`; the message names it. Reported: issue 45.28."""
    (folder / "told.parquet").write_bytes(b"PAR1")
    done = run(folder, (), ["train", "sft", "--model", "tiny:llama", "--demonstrations", "told.parquet"])
    assert done.returncode == 2
    assert "tunesmith[data]" in done.stderr
