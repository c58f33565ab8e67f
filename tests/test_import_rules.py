"""Import rules: the layers hold, and what is called light loads nothing heavy."""

import configparser
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tunesmith
from tunesmith.cli.main import COMMANDS

ROOT = Path(__file__).parent.parent
HEAVY = {"torch", "transformers", "numpy", "safetensors", "datasets", "trl", "plotly"}
LIGHT_FOLDERS = ("cli", "config", "core", "planning", "reports", "schema", "store", "web")
LIGHT_MODULES = (
    "profiling.facts",
    "profiling.savings.waiting",
    "profiling.rules",
    "profiling.diagnosis",
    "profiling.hang",
    "integrations.trl_check",
)
"""`tunesmith diagnose` and `trl-check` work from files, also where torch is not installed."""


def modules_of(folder: str) -> list[str]:
    path = Path(tunesmith.__path__[0]) / folder
    found = pkgutil.walk_packages([str(path)], prefix=f"tunesmith.{folder}.")
    return [f"tunesmith.{folder}", *(module.name for module in found)]


def heavy_after(code: str) -> set[str]:
    """Which heavy libraries are loaded after a fresh interpreter ran `code`."""
    report = f"{code}\nimport sys; print('LOADED', *sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split("LOADED")[-1].split()) & HEAVY


def test_layers_and_owners_hold():
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_table_of_layers_in_contributing_is_what_the_linter_checks():
    rules = configparser.ConfigParser()
    rules.read(ROOT / ".importlinter")
    checked = [set(re.findall(r"\w+", line)) for line in rules["importlinter:contract:layers"]["layers"].split("\n")]
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("\n## Layers\n")[1].split("\n## ")[0]
    shown = [set(re.findall(r"`(\w+)`", row)) for row in re.findall(r"^\| \d+ \|(.*)\|$", section, re.MULTILINE)]
    assert shown == [layer for layer in checked if layer and layer != {"__main__"}]


def test_importing_the_package_loads_nothing_heavy():
    assert heavy_after("import tunesmith") == set()


@pytest.mark.parametrize("folder", LIGHT_FOLDERS)
def test_a_light_folder_loads_nothing_heavy(folder: str):
    assert heavy_after("\n".join(f"import {name}" for name in modules_of(folder))) == set()


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_a_light_module_loads_nothing_heavy(module: str):
    assert heavy_after(f"import tunesmith.{module}") == set()


@pytest.mark.parametrize("words", ["--help", "train --help", "recipes ls", *(f"{name} --help" for name in COMMANDS)])
def test_help_and_recipes_load_nothing_heavy(words: str):
    code = f"""
import sys
sys.argv = ["tunesmith", *{words.split()!r}]
from tunesmith.cli.main import main
try:
    code = main()
except SystemExit as stop:
    code = stop.code
assert not code, code
"""
    assert heavy_after(code) == set()


def test_python_m_tunesmith_is_the_command_line():
    done = subprocess.run([sys.executable, "-m", "tunesmith", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout
