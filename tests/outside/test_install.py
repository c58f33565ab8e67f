"""Environments that were installed without the extra `dev`.

`make test-install` installs the wheel into an environment of its own. Here the same question is asked of every command
in a second: a process finds no package that the named extras do not bring.
"""

import json
import os
import re
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
"""
COMMANDS = """
from tunesmith.apps.cli.main import main
for words in json.loads(sys.argv[1]):
    print("<<<", main(words), file=sys.stderr)  # behind what the command wrote
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


def run(folder: Path, *commands: Sequence[str], **settings: str) -> list[tuple[int, str]]:
    """(Exit code, stderr) of each command `tunesmith words`, one after another in an environment without extras."""
    done = run_python(folder, (), COMMANDS, json.dumps(commands), **settings)
    found = [(int(code), text) for text, code in re.findall(r"(.*?)<<< (\d+)\n", done.stderr, re.DOTALL)]
    assert len(found) == len(commands), done.stderr[-3000:]
    return found


def run_python(
    folder: Path, extras: Sequence[str], code: str, *words: str, **settings: str
) -> subprocess.CompletedProcess[str]:
    """`code` in an environment with `extras`; `settings` are environment variables."""
    command = [sys.executable, "-c", GUARD + code, json.dumps(absent_modules(extras)), *words]
    environment = {**os.environ, "COLUMNS": "120", **settings}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data set of each kind."""
    folder = tmp_path_factory.mktemp("plain")
    told = [{"prompt": f"Say {word}.", "completion": f" {word}"} for word in ("one", "two", "three", "four")]
    pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": " no"} for row in told]
    for name, rows in (("told.jsonl", told), ("pairs.jsonl", pairs)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "told.parquet").write_bytes(b"PAR1")
    (folder / "small.gguf").write_bytes(b"GGUF")
    for name in (
        "saved/state.json",
        "saved/dataset_info.json",
        "run/recipe.yaml",
        "run/metrics.jsonl",
        "campaign/votes.db",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}" if name.endswith("json") else "")
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
    for code, text in run(folder, *(["train", algorithm, *words, *data] for algorithm, data in TRAININGS.items())):
        assert code == 0, text[-3000:]


def test_commands_start_without_extras(folder: Path) -> None:
    """People look at what a command can do before they install its extra. Reported: issue 45.28."""
    for code, text in run(folder, ["--help"], ["doctor"], ["recipes", "ls"], ["serve", "--help"], ["votes", "--help"]):
        assert code == 0, text[-3000:]


TINY = ["--model", "tiny:llama", "--steps", "1"]
TOLD = ["train", "sft", *TINY, "--demonstrations"]
DRAWN = ["train", "grpo", *TINY, *TRAININGS["grpo"]]
PLAYED = ["train", "grpo", *TINY, "--prompts", "told.jsonl", "--environment"]
NEEDING = [
    ("web", ["serve", "--port", "0"]),
    ("web", ["studio", "--port", "0"]),
    ("web", ["watch", "run"]),
    ("web", ["votes", "import", "pairs.jsonl", "--dir", "campaign"]),
    ("web", ["votes", "export", "out.jsonl", "--dir", "campaign"]),
    ("web", ["votes", "stats", "--dir", "campaign"]),
    ("web", ["live", "--model", "tiny:llama", "--dir", "campaign"]),
    ("web", ["live", "--simulate", "1", "--dir", "campaign"]),
    ("web", ["demo", "--live"]),
    ("lora", [*TOLD, "told.jsonl", "--model.lora.rank", "2"]),
    ("trackers", [*TOLD, "told.jsonl", "--report-to", "tensorboard"]),
    ("data", [*TOLD, "told.parquet"]),
    ("data", [*TOLD, "saved"]),
    ("data", [*TOLD, "owner/name"]),
    ("smollm2", ["train", "sft", "--model", "small.gguf", "--demonstrations", "told.jsonl"]),
    ("smollm2", ["generate", "--model", "smollm2", "--prompt", "The film"]),
    ("environments", [*PLAYED, "textarena:GuessTheNumber-v0"]),
    ("gem", [*PLAYED, "gem:game:GuessTheNumber-v0-easy"]),
    ("openenv", [*PLAYED, "openenv:http://localhost:1"]),
    ("verifiers", [*PLAYED, "verifiers:sums"]),
    ("ray", [*DRAWN, "--scale.workers", "1", "--scale.address", "auto"]),
]


def test_a_missing_extra_is_named(folder: Path) -> None:
    """People call a command whose extra they lack. `votes`, `live` and `demo` had a traceback about sqlalchemy, and
    `smollm2` loaded 93 MB first. Reported: earthobservations/wetterdienst#1938."""
    found = run(folder, *(words for _, words in NEEDING), TUNESMITH_CACHE=str(folder / "cache"))
    for (extra, words), (code, text) in zip(NEEDING, found, strict=True):
        assert code == 2, (words, text[-3000:])
        assert f"pip install 'tunesmith[{extra}]'" in " ".join(text.split()), words
        assert "downloading" not in text


@pytest.mark.parametrize(
    ("extra", "code"), [("trl", "import tunesmith.integrations.trl"), ("web", "tunesmith.VoteStore")]
)
def test_a_missing_extra_is_named_in_python(folder: Path, extra: str, code: str) -> None:
    """People import what an extra brings. Reported: microsoft/autogen#7520."""
    done = run_python(folder, (), f"import tunesmith; {code}")
    assert "MissingDependencyError: " in done.stderr and f"'tunesmith[{extra}]'" in done.stderr


def test_the_demo_and_files_of_votes_need_no_pages(folder: Path) -> None:
    """People run the demo at a terminal; its imports took the extra `web` along. Reported: issue 45.28."""
    done = run_python(folder, (), "import tunesmith.apps.workflows.demo, tunesmith.collect.data.vote_files")
    assert done.returncode == 0, done.stderr[-3000:]
