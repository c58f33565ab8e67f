"""The commands of docs/environments.md that need a package of others, as people run them: what an extra brings, by pip,
in an environment that holds the package without extras beside it.

    python -m pytest tests/environments/test_commands.py -m nightly
"""

import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_install import required

from pages import ROOT, blocks
from tunesmith.base.core.extras import EXTRA_OF
from tunesmith.learn.environments.packages import KINDS

pytestmark = pytest.mark.nightly

PAGE = ROOT / "docs" / "environments.md"
QUICK = {"model": "scratch", "steps": 3, "run.dir": "run"}
PIP_S = 500
DRAWN = {"max-new-tokens": 12, "prompts-per-step": 2, "completions-per-prompt": 2}


def printed() -> dict[str, list[str]]:
    """Source of an environment -> the training command with it, for all that are printed and not run."""
    lines = [words for block in blocks(PAGE) if block.kind == "not run" for words in block.commands()]
    return {words[words.index("--environment") + 1]: words for words in lines if words[:2] == ["tunesmith", "train"]}


def extra_of(source: str) -> str:
    return "openenv" if source.startswith("./") else EXTRA_OF[source.partition(":")[0]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the distributions that `pip install tunesmith` without extras brings, and no others."""
    folder = tmp_path_factory.mktemp("plain")
    for name in set(required("tunesmith", (), set())) - {"tunesmith"}:
        found = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(found.locate_file(top))
    return folder


@pytest.fixture(scope="module")
def python_of(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the interpreter of an environment with an extra; skips the test if pip cannot bring it."""
    made: dict[str, Path | str] = {}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def python(extra: str) -> Path:
        if extra not in made:
            folder = tmp_path_factory.mktemp(extra)
            venv.create(folder, with_pip=False)
            (site,) = folder.glob("lib/python*/site-packages")
            (site / "base.pth").write_text(f"{plain}\n")
            interpreter = folder / "bin" / "python"
            pip = [sys.executable, "-m", "pip", "--python", interpreter, "install", "--quiet", *extras[extra]]
            try:
                done = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=PIP_S)
            except subprocess.TimeoutExpired:
                made[extra] = f"pip took longer than {PIP_S} s"
            else:
                lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
                made[extra] = "; ".join(lines) or "pip failed" if done.returncode else interpreter
        found = made[extra]
        if isinstance(found, str):
            pytest.skip(f"pip cannot bring the extra {extra}: {found}")
        return found

    return python


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of the page."""
    for block in blocks(PAGE):
        if block.kind == "file":
            (tmp_path / block.value).write_text(block.text)
    return tmp_path


@pytest.fixture
def port(python_of: Callable[[str], Path], folder: Path) -> Iterator[int]:
    """The port of the page's OpenEnv server, a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = free.getsockname()[1]
    words = [python_of("openenv"), "-m", "uvicorn", "secret:app", "--port", str(number), "--log-level", "error"]
    server = subprocess.Popen(words, cwd=folder)
    try:
        end = time.monotonic() + 120
        while socket.socket().connect_ex(("127.0.0.1", number)):
            assert server.poll() is None and time.monotonic() < end, "the server does not start"
            time.sleep(0.1)
        yield number
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize("source", printed())
def test_a_printed_command_trains_with_the_package_that_its_extra_brings(
    source: str, python_of: Callable[[str], Path], folder: Path, request: pytest.FixtureRequest
) -> None:
    python, words = python_of(extra_of(source)), printed()[source]
    if "localhost:8000" in source:
        number = request.getfixturevalue("port")
        words = [word.replace("localhost:8000", f"127.0.0.1:{number}") for word in words]
    given = {**QUICK, **{f"rollout.{name}": value for name, value in DRAWN.items()}}
    flags = [f"--{name}={value}" for name, value in given.items()]
    at = words.index("--model")
    command = [python, "-m", *words[:at], *words[at + 2 :], *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (run,) = (folder / "run").iterdir()
    rows = [row for line in (run / "metrics.jsonl").read_text().splitlines() if "reward" in (row := json.loads(line))]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["environment/errors"] == 0 and row["environment/turns"] >= 1 for row in rows)
    samples = (run / "samples.jsonl").read_text()
    assert '"Task ' not in samples, "a placeholder was not replaced by what the environment says"


def test_every_kind_of_source_has_a_printed_command() -> None:
    kinds = {source.partition(":")[0] for source in printed()}
    assert kinds == {*KINDS, "./secret.py"}
