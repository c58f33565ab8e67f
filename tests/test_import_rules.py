"""Import rules: the layers hold, and what is called light loads nothing heavy."""

import configparser
import pkgutil
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tunesmith
from tunesmith.base.core.extras import EXTRA_OF
from tunesmith.learn.environments.packages import KINDS

ROOT = Path(__file__).parent.parent
HEAVY = {"torch", "transformers", "numpy", "safetensors", "datasets", "trl", "plotly"}
WINGS = ("apps", "learn", "collect", "observe", "engine", "base")
LIGHT_FOLDERS = (
    "apps.cli",
    "base.config",
    "base.core",
    "base.schema",
    "collect.store",
    "collect.web",
    "observe.planning",
    "observe.reports",
)
LIGHT_MODULES = (
    "observe.profiling.facts",
    "observe.profiling.savings.waiting",
    "observe.profiling.rules",
    "observe.profiling.diagnosis",
    "observe.profiling.hang",
    "integrations.trl_check",
)
"""`tunesmith diagnose` and `trl-check` work from files, also where torch is not installed."""


def modules_of(folder: str) -> list[str]:
    path = Path(tunesmith.__path__[0], *folder.split("."))
    found = pkgutil.walk_packages([str(path)], prefix=f"tunesmith.{folder}.")
    return [f"tunesmith.{folder}", *(module.name for module in found)]


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

    def layers(contract: str) -> list[set[str]]:
        lines = rules[f"importlinter:contract:{contract}"]["layers"].split("\n")
        return [names for line in lines if (names := set(re.findall(r"\w+", line))) and names != {"__main__"}]

    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("\n## Layers\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*)\|$", section, re.MULTILINE)
    assert [set(re.findall(r"`(\w+)`", wing)) for wing, _ in rows] == layers("layers")
    for wing, folders in rows:
        if (name := wing.strip("`")) in WINGS:
            assert [set(re.findall(r"`(\w+)`", layer)) for layer in folders.split(", ")] == layers(name)


IMPORTED_BY_NAME = {"accelerate", "datasets", "pyarrow", "tensorboard", "psycopg", *KINDS}
"""Modules that no import statement names, so that the linter sees none; tests/outside/test_install.py does without."""


def test_each_package_of_an_extra_has_an_owner_and_is_named_where_it_is_missing():
    """`make lint` has deptry, which takes all extras for installed; here is what says whose they are."""
    rules = configparser.ConfigParser()
    rules.read(ROOT / ".importlinter")
    protected = {module for name in rules.sections() for module in rules[name].get("protected_modules", "").split()}
    assert set(EXTRA_OF) - IMPORTED_BY_NAME <= protected
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {
        (canonicalize_name(Requirement(line).name), extra)
        for extra, lines in project["optional-dependencies"].items()
        for line in lines
        if extra not in ("docs", "dev")
    }
    not_in_dev = {**{kind: [kind] for kind in KINDS}, "gem": ["gem-llm"], "lm_eval": ["lm-eval"]}
    owners = {**not_in_dev, **packages_distributions()}
    assert {(canonicalize_name(owners[module][0]), extra) for module, extra in EXTRA_OF.items()} == declared


def test_the_package_and_what_is_light_load_nothing_heavy():
    modules = ["tunesmith", *(name for folder in LIGHT_FOLDERS for name in modules_of(folder))]
    modules += [f"tunesmith.{name}" for name in LIGHT_MODULES]
    code = f"""
import importlib, sys
for module in {modules!r}:
    importlib.import_module(module)
    if loaded := {HEAVY!r} & set(sys.modules):
        sys.exit(f"{{module}} loads {{loaded}}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
