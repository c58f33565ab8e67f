"""What README and docs print works: Python blocks run, commands exist with their flags, dry runs succeed."""

import glob
import io
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from functools import lru_cache
from pathlib import Path

import pytest
from foreign_rows import FILES

from pages import PAGES, ROOT, Block, all_blocks, blocks
from server_parts import Client, Server
from tunesmith.apps.cli.main import commands, main
from tunesmith.base.config.keys import leaves
from tunesmith.base.config.schema import RECIPES

SERVED = [ROOT / "docs" / name for name in ("api.md", "your_app.md")]
"""Pages whose blocks ask the API."""
IMPORT = ROOT / "docs" / "open_webui.md"
"""A page whose commands are one sequence: each reads what the ones before it wrote."""
_NODE = ("node", "--input-type=module")
PROGRAMS = {"sh": ("bash", "-euo", "pipefail"), "javascript": _NODE, "typescript": _NODE}
"""What runs a block from its stdin. The TypeScript of the pages has no types of its own, so it is JavaScript too."""

NESTED = {"train", "recipes", "runs", "judge", "votes", "users", "convert"}
"""Words that are no command by themselves, as `eval` is."""
COMMANDS = [(block.where, words) for block in all_blocks("console") for words in block.commands()]
TUNESMITH = [(where, words[1:]) for where, words in COMMANDS if words[0] == "tunesmith"]
UNINSTALLED = {block.where for block in all_blocks("console") if block.value.startswith("needs a package")}
TRAIN = [
    (where, words)
    for where, words in TUNESMITH
    if words[0] == "train"
    and "--help" not in words
    and where not in UNINSTALLED
    and not where.startswith(str(IMPORT.relative_to(ROOT)))
]


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def write_files(page: Path, folder: Path) -> None:
    for block in blocks(page):
        if block.kind == "file":
            (folder / block.value).write_text(block.text)


def execute(blocks_to_run: list[Block]) -> None:
    namespace: dict[str, object] = {"__name__": "example"}
    for block in blocks_to_run:
        code = "\n" * (block.line - 1) + block.text
        exec(compile(code, str(block.page), "exec"), namespace)


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def runnable(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python" and block.kind not in ("file", "not run")]


@contextmanager
def serving(page: Path, folder: Path, model: str) -> Iterator[None]:
    """With a server of the API, in the variables that blocks of its pages read; nothing for another page."""
    if page not in SERVED:
        yield
        return
    server = Server(folder / "app", ("--openai", model)).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_BASE_URL", server.facts["api"])
        patch.setenv("OPENAI_API_KEY", server.facts["key"])
        try:
            yield
        finally:
            server.kill()


@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=page_id)
def test_python_blocks_run_in_the_order_of_their_page(page: Path, in_folder: Path):
    write_files(page, in_folder)
    with serving(page, in_folder, "tiny:llama"):
        execute([block.replaced() for block in runnable(page)])


@pytest.mark.parametrize("page", SERVED, ids=page_id)
def test_the_api_answers_the_shell_and_scripts_of_its_pages(page: Path, in_folder: Path):
    found = [block for block in blocks(page) if block.language in PROGRAMS]
    assert {"sh", "javascript" if page.stem == "your_app" else "typescript"} == {block.language for block in found}
    with serving(page, in_folder, "tiny:llama"):
        for block in found:
            program = PROGRAMS[block.language]
            needed = [program[0], *(["curl"] if block.language == "sh" else [])]
            if not all(map(shutil.which, needed)) and "CI" not in os.environ:
                continue
            done = subprocess.run(program, input=block.text, capture_output=True, text=True, timeout=500, check=False)
            assert done.returncode == 0, f"{block.where}: {done.stderr}"
            assert done.stdout.strip()


def feedback_of_open_webui() -> list[dict[str, object]]:
    """An export by Open WebUI's documented schema, of 24 votes in its arena and 24 thumbs."""
    rows: list[dict[str, object]] = []
    for number in range(24):
        for row in FILES["open-webui"]:
            text = json.dumps(row).replace("Name a colour.", f"Name colour {number}")
            rows.append({**json.loads(text), "id": f"{row['id']} {number}"})
    return rows


@pytest.mark.usefixtures("own_logging")
def test_the_commands_from_open_webui_to_a_better_model_run_in_their_order(
    in_folder: Path, capsys: pytest.CaptureFixture[str]
):
    write_files(IMPORT, in_folder)
    (in_folder / "feedback.json").write_text(json.dumps(feedback_of_open_webui()))
    *commands, serve = (words for where, words in TUNESMITH if where.startswith(str(IMPORT.relative_to(ROOT))))
    for words in commands:
        assert main([name for word in words for name in glob.glob(word) or [word]]) == 0, words
    printed = capsys.readouterr().out
    for block in blocks(IMPORT):
        if block.language == "console":
            assert all(line in printed for line in block.text.splitlines() if not line.startswith("$ ")), block.where
    assert main([*commands[1], "--json"]) == 0  # the same file again
    again = json.loads(capsys.readouterr().out)
    assert (again["num_new"], again["num_feedback"]) == (0, 0)
    (run,) = glob.glob(serve[2])
    assert serve == ["serve", "--openai", serve[2], "--dir", "app"]
    server = Server(in_folder / "app", ("--openai", run)).start()
    try:
        key = Client(server.url, server.facts["key"])
        assert key.send("GET", "/v1/models").json["data"][0]["id"] == Path(run).name
        asked = {"messages": [{"role": "user", "content": "Name an animal."}], "max_tokens": 4}
        assert key.send("POST", "/v1/chat/completions", asked).json["usage"]["completion_tokens"]
    finally:
        server.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(b.kind == "run with" for b in runnable(page))], ids=page_id
)
def test_python_blocks_run_exactly_as_printed(page: Path, in_folder: Path):
    write_files(page, in_folder)
    with serving(page, in_folder, "smollm2"):
        execute(runnable(page))


@lru_cache
def cached_help(*command: str) -> str:
    """What `--help` of a command prints; in this process, because a new one takes seconds to import everything."""
    printed = io.StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        main([*command, "--help"])
    return printed.getvalue()


def is_recipe_key(algorithm: str, key: str) -> bool:
    recipes = [RECIPES[algorithm]] if algorithm in RECIPES else RECIPES.values()  # `resume` takes keys of any
    paths = {leaf.path for recipe in recipes for leaf in leaves(recipe)}
    plain = key.replace("-", "_")
    return plain in paths or any(path.startswith(f"{plain}.") for path in paths)


@pytest.mark.parametrize(("where", "words"), TUNESMITH, ids=[where for where, _ in TUNESMITH])
def test_a_printed_command_and_its_flags_exist(where: str, words: list[str]):
    if words[0].startswith("-"):
        pytest.skip("a flag of the program itself")
    command = words[: 2 if words[0] in NESTED or " ".join(words[:2]) in commands() else 1]
    text = cached_help(*command)
    if words[0] == "profile" and words[1] in RECIPES:  # which takes the flags of that training too
        text += cached_help("train", words[1])
    for word in words[len(command) :]:
        flag = word.split("=")[0]
        if not re.match(r"--?[a-z]", flag) or flag == "--help":
            continue
        if "." in flag:
            assert is_recipe_key(command[-1], flag.removeprefix("--")), f"{where}: {flag} is no key of a recipe"
        else:
            assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text), f"{where}: {flag} is not in --help"


@pytest.mark.usefixtures("own_logging")
@pytest.mark.parametrize(("where", "words"), TRAIN, ids=[where for where, _ in TRAIN])
def test_a_printed_training_command_passes_a_dry_run(where: str, words: list[str], in_folder: Path):
    """With a tiny model in place of the printed one: the files are those of the page."""
    page = ROOT / where.rsplit(":", 1)[0]
    write_files(page, in_folder)
    before = sorted(in_folder.iterdir())
    words = list(words)
    tiny = "scratch" if {"--tools", "--environment"} & {*words} else "tiny:llama"  # descriptions of tools are long
    if "--model" in words:
        words[words.index("--model") + 1] = tiny
    else:
        words += ["--model", tiny]
    assert main([*words, *([] if "--dry-run" in words else ["--dry-run"])]) == 0, where
    assert [path for path in sorted(in_folder.iterdir()) if path.name != "__pycache__"] == before, (
        "a dry run writes nothing"
    )


@pytest.mark.parametrize("target", sorted({words[1] for _, words in COMMANDS if words[0] == "make" and len(words) > 1}))
def test_a_printed_make_target_exists(target: str):
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE)


def test_every_python_block_that_is_not_run_says_why():
    for block in all_blocks("python"):
        assert block.kind != "not run" or len(block.value.split()) >= 2, block.where
