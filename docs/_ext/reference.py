"""Directives that generate reference pages from the code.

`{config-reference}` lists every key of a recipe from the schema; `{command-help} train ppo` shows what `--help` prints;
`{api-reference}` documents the names in `tunesmith.__all__`.
"""

import inspect
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

import tunesmith
from tunesmith.base.config.keys import Key
from tunesmith.base.config.levels import shown_keys
from tunesmith.base.config.recipe import Recipe
from tunesmith.base.config.schema import RECIPES


def config_markdown() -> str:
    """All keys of all recipes as Markdown tables: those that every recipe has, then those of each algorithm."""
    every = {algorithm: shown_keys(schema) for algorithm, schema in RECIPES.items()}
    shared = [key for key in shown_keys(Recipe) if all(key in keys for keys in every.values())]
    parts = [table("In every recipe", shared)]
    for algorithm, keys in every.items():
        own = [key for key in keys if key not in shared]
        command = algorithm if algorithm == "live" else f"train {algorithm}"
        parts.append(table(f"In recipes of `tunesmith {command}`", own))
    return "\n".join(parts)


def table(title: str, keys: Iterable[Key]) -> str:
    """A heading and one row for each key."""
    rows = [f"| `{key.path}` | {code(key.type)} | {code(key.default)} | {escaped(key.description)} |" for key in keys]
    return "\n".join([f"### {title}", "", "| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows, ""])


def code(text: str) -> str:
    """`text` as code inside a table cell."""
    return f"`{escaped(text)}`"


def escaped(text: str) -> str:
    """`text` with the bars that would end a table cell escaped."""
    return text.replace("|", "\\|")


def help_text(arguments: list[str]) -> str:
    """What `tunesmith <arguments> --help` prints, at a fixed width and without colour."""
    environment = {**os.environ, "COLUMNS": "84", "NO_COLOR": "1", "TERM": "dumb", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "tunesmith", *arguments, "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ExtensionError(f"{' '.join(command)} exits with {done.returncode}: {done.stderr}")
    return done.stdout


def public_names() -> Iterator[tuple[str, object]]:
    """Dotted name and object of each name in `tunesmith.__all__`; modules are replaced by their own `__all__`."""
    for name in tunesmith.__all__:
        value = getattr(tunesmith, name)
        if inspect.ismodule(value):
            yield from ((f"{value.__name__}.{part}", getattr(value, part)) for part in value.__all__)
        elif not name.startswith("__"):
            yield f"tunesmith.{name}", value


def api_markdown() -> str:
    """One autodoc directive for each public name."""
    lines: list[str] = []
    for name, value in public_names():
        kind = "class" if inspect.isclass(value) else "function" if callable(value) else "data"
        lines += [f".. auto{kind}:: {name}", *(["   :members:"] if kind == "class" else []), ""]
    return "\n".join(["```{eval-rst}", *lines, "```", ""])


class ConfigReference(SphinxDirective):
    """`{config-reference}`."""

    def run(self) -> list[nodes.Node]:
        """The tables of `config_markdown`."""
        return self.parse_text_to_nodes(config_markdown(), allow_section_headings=True)


class ApiReference(SphinxDirective):
    """`{api-reference}`."""

    def run(self) -> list[nodes.Node]:
        """Signatures and docstrings of the public names."""
        return self.parse_text_to_nodes(api_markdown())


class CommandHelp(SphinxDirective):
    """`{command-help} train ppo`."""

    required_arguments = 0
    optional_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """A literal block with the help of the command named in the argument."""
        text = help_text(self.arguments[0].split() if self.arguments else [])
        return [nodes.literal_block(text, text, language="text")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directives."""
    app.add_directive("api-reference", ApiReference)
    app.add_directive("config-reference", ConfigReference)
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
