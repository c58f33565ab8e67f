"""The flags of a command: a frozen dataclass, read by tyro. Wrong flags become an InputError with a suggestion."""

import io
import math
import re
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro
from tyro.conf import Positional, UseAppendAction, arg

from tunesmith.base.config.keys import did_you_mean
from tunesmith.base.core.errors import InputError
from tunesmith.base.schema.weights import Weights

__all__ = [
    "DATABASE",
    "WEIGHTS",
    "EnvironmentFlags",
    "Positional",
    "SamplingFlags",
    "UseAppendAction",
    "check_ranges",
    "checked_database",
    "environment_of",
    "flag",
    "parse",
    "parse_known",
    "parse_with_environment",
]

if TYPE_CHECKING:
    from tunesmith.base.config.load import Overrides
    from tunesmith.base.config.sections import EnvironmentSection
    from tunesmith.engine.batch.rollout import SamplingParams
    from tunesmith.engine.rollout.native_engine import Native

Options = TypeVar("Options")
EnvironmentOptions = TypeVar("EnvironmentOptions", bound="EnvironmentFlags")

_SETTINGS = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone, tyro.conf.HelptextFromCommentsOff)
_RULE = re.compile(r"^[\s─╭╮╰╯│-]*$")


def flag(help: str, metavar: str | None = None, *aliases: str) -> Any:
    """The help of a flag; `metavar` is the placeholder of its value, `aliases` are short forms such as `-n`.

    The help ends with the default, if the flag has one besides nothing and false.
    """
    return arg(help=help, aliases=aliases or None, metavar=metavar, help_behavior_hint=_default_hint)


def _default_hint(value: str) -> str:
    return "" if value in ("", "''", "None", "False") else f"(default: {value})"


DATABASE = flag("Database of PostgreSQL with the votes, in place of the folder's votes.db: postgresql://...", "URL")
"""The flag of commands that read or write votes."""


WEIGHTS = flag("int8: rounded to 8 bits while drawing, which is faster (native, CPU).")
"""The flag of commands that draw."""


def checked_database(given: str | None) -> str:
    """The URL of a database; empty for none. Raises InputError."""
    if given is None:
        return ""
    from tunesmith.collect.store.postgres import FORM, url_of

    if "://" not in given:
        raise InputError(f"--database is no URL; give {FORM}; the folder of a file is given by --dir")
    url_of(given)
    return given


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Flags of the commands that draw completions."""

    temperature: Annotated[float, flag("0 is greedy.", "T")] = 0.7
    top_p: Annotated[float, flag("Nucleus size; 1 is off.", "P")] = 1.0
    min_p: Annotated[float, flag("Least share of the likeliest token; 0 is off.", "P")] = 0
    repetition_penalty: Annotated[float, flag("Above 1, tokens recur less.", "X")] = 1.0
    stop: Annotated[tuple[str, ...], UseAppendAction, flag("A text that ends it; repeatable.", "TEXT")] = ()
    backend: Annotated[Literal["native", "transformers"], flag("Engine that draws.")] = "native"
    weights: Annotated[Weights, WEIGHTS] = "model"

    @property
    def engine(self) -> 'Literal["transformers"] | Native':
        """The engine that the flags name. Raises InputError for 8 bits of one that has none."""
        from tunesmith.engine.rollout.native_engine import Native

        if self.backend == "native":
            return Native(self.weights)
        if self.weights != "model":
            raise InputError(f"--weights {self.weights} is for --backend native; leave one of them out")
        return self.backend

    def sampling(self, max_new_tokens: int, seed: int | None, top_k: int = 0) -> "SamplingParams":
        """The sampling settings that the flags give."""
        from tunesmith.engine.batch.rollout import SamplingParams

        return SamplingParams(
            max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            stop_strings=self.stop,
            seed=seed,
        )


@dataclass(frozen=True, kw_only=True)
class EnvironmentFlags:
    """Flags of the commands in which a model talks to tools or an environment."""

    environment: Annotated[
        str | None, flag("./file.py:Class that the policy talks to over several turns.", "SOURCE")
    ] = None
    tools: Annotated[
        tuple[str, ...], UseAppendAction, flag("./file.py:function that the model may call; repeatable.", "SOURCE")
    ] = ()


def parse_with_environment(
    options: type[EnvironmentOptions], words: Sequence[str], command: str
) -> "tuple[EnvironmentOptions, Overrides]":
    """`options` filled from `words`, and what they and flags such as `--environment.max-turns 3` set of a recipe's
    section `environment`.
    """
    from tunesmith.base.config.load import parse_overrides

    parsed, unknown = parse_known(options, words, command)
    first = next((place for place, word in enumerate(unknown) if word.startswith("--environment.")), len(unknown))
    _refuse_unknown(options, unknown[:first], command)
    overrides = parse_overrides("grpo", unknown[first:])
    _refuse_unknown(options, [f"--{one}" for one in overrides.values if not one.startswith("environment.")], command)
    if parsed.environment is not None:
        overrides.put("environment.source", parsed.environment, "environment")
    if parsed.tools:
        overrides.put("environment.tools", [*parsed.tools], "tools")
    return parsed, overrides


def environment_of(overrides: "Overrides") -> "EnvironmentSection":
    """The section `environment` that the `overrides` give.

    Raises ConfigError for a key that there is not, or a value that is not allowed.
    """
    from tunesmith.base.config.load import load_recipe
    from tunesmith.base.config.recipe import PolicyRecipe

    found = load_recipe("grpo", overrides=overrides.values, origins=overrides.origins).recipe
    assert isinstance(found, PolicyRecipe)
    return found.environment


def parse(options: type[Options], words: Sequence[str], command: str) -> Options:
    """`options` filled from `words`; InputError for a bad value, and for words that belong to no flag."""
    parsed, unknown = parse_known(options, words, command)
    _refuse_unknown(options, unknown, command)
    return parsed


def _refuse_unknown(options: type[object], unknown: Sequence[str], command: str) -> None:
    """Raise InputError for words that belong to no flag."""
    if unknown:
        names = ["--" + field.name.replace("_", "-") for field in fields(options)]  # pyright: ignore[reportArgumentType]
        given = unknown[0].partition("=")[0]
        hint = did_you_mean(given, names) if given.startswith("-") else ""
        raise InputError(f"{given!r} is no flag of `tunesmith {command}`{hint}\n{_see_help(command)}")


def parse_known(options: type[Options], words: Sequence[str], command: str) -> tuple[Options, list[str]]:
    """As `parse`, but unknown words are returned in their order."""
    complaint = io.StringIO()
    try:
        with redirect_stderr(complaint):
            return tyro.cli(
                options, prog=f"tunesmith {command}", args=list(words), config=_SETTINGS, return_unknown_args=True
            )
    except SystemExit as exit_:
        if not exit_.code:
            raise
        raise InputError(f"{_plain(complaint.getvalue())}\n{_see_help(command)}") from None


def check_ranges(options: object, **ranges: tuple[float, float]) -> None:
    """Raise InputError for a flag outside of its range, ends included; None was not given."""
    for name, (low, high) in ranges.items():
        value = getattr(options, name)
        if value is not None and not low <= value <= high:
            allowed = f"at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
            raise InputError(f"--{name.replace('_', '-')} is {value}; it must be {allowed}")


def _see_help(command: str) -> str:
    return f"  `tunesmith {command} --help` lists the flags"


def _plain(boxed: str) -> str:
    """The first paragraph of an error that tyro drew in a box, as one line. Without UTF-8 the box has no sides."""
    # Each line begins with a side and a blank, or two blanks; the first holds the title.
    lines = [line[2:].rstrip(" │") for line in re.sub(r"\x1b\[[0-9;]*m", "", boxed).splitlines()[1:]]
    has_text = [not _RULE.match(line) for line in lines]
    start = has_text.index(True) if True in has_text else 0
    end = has_text.index(False, start) if False in has_text[start:] else len(lines)
    paragraph = lines[start:end]
    if paragraph and paragraph[0].startswith("Missing from"):
        names = [line.strip() for line in paragraph if re.match(r"^ {4}\S", line)]
        return f"missing: {', '.join(names)}"
    text = " ".join(line.strip() for line in paragraph)
    text = re.sub(r"invalid literal for int\(\) with base 10: (.*)$", r"\1 is no whole number", text)
    text = re.sub(r"could not convert string to float: (.*)$", r"\1 is no number", text)
    return text.removeprefix("Error parsing ") or "the command line cannot be read"
