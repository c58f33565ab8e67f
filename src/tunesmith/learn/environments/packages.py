"""Environments of other packages by the names that a recipe gives them, and the prompts that they bring.

textarena:Wordle-v0, gem:game:GuessTheNumber-v0-easy, gymnasium:MyGame-v0, skyrl_gym:gsm8k   registered ids
openenv:http://localhost:8000                                                                a running server
reasoning_gym:chain_sum, verifiers:my_tasks                                                  see `tasks`
"""

import difflib
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

from tunesmith.base.core.errors import EnvironmentFailedError, InputError, MissingDependencyError
from tunesmith.base.core.extras import EXTRA_OF
from tunesmith.learn.environments.dialects import PerRow
from tunesmith.learn.environments.openenv import Server
from tunesmith.learn.environments.tasks import ReasoningTasks, VerifiersTasks
from tunesmith.learn.environments.text import TASK, placeholder
from tunesmith.learn.rewards.functions import add_to_path, load_named

KINDS = ("textarena", "gem", "gymnasium", "skyrl_gym", "openenv", "reasoning_gym", "verifiers")
"""The packages whose environments have names, as they are imported."""

REGISTRIES = {
    "textarena": "textarena.envs.registration:ENV_REGISTRY",
    "gem": "gem.envs.registration:ENV_REGISTRY",
    "gymnasium": "gymnasium.envs.registration:registry",
    "skyrl_gym": "skyrl_gym.envs.registration:registry",
    "reasoning_gym": "reasoning_gym.factory:DATASETS",
}
"""The registries in which packages keep the names of what they have."""

NUM_ROWS = "num_rows"
"""An argument for prompts alone: how many rows a source without an end brings."""

MOST_ROWS = 1000
"""Rows of a source without an end, unless `num_rows` says otherwise."""

Factory = Callable[[], object]


def source_factory(source: str, arguments: Mapping[str, Any]) -> Factory:
    """Makes what `source` names, with `arguments`: an environment, or what makes episodes.

    Raises:
        InputError: it names nothing, or a server that does not answer.
        MissingDependencyError: its package is not installed.
    """
    kind, _, name = source.partition(":")
    if kind not in KINDS:
        close = difflib.get_close_matches(kind, KINDS, n=1)
        if close and "." not in kind and "/" not in kind:
            raise InputError(f"environment {source!r} is of no known package; did you mean `{close[0]}:{name}`?")
        found = load_named(source, "environment")
        if not callable(found):
            raise InputError(f"environment {source!r} is of type {type(found).__name__}; name a class, or a function")
        return as_factory(found, arguments)
    arguments = {key: value for key, value in arguments.items() if key != NUM_ROWS}
    if kind == "openenv":
        server = _server(name, arguments)
        return lambda: server
    if kind in ("reasoning_gym", "verifiers"):
        tasks = _tasks(source, json.dumps(arguments, sort_keys=True))
        return lambda: tasks
    package = _package(kind)
    _check_registered(kind, name)
    if kind == "skyrl_gym":
        return lambda: _per_row(partial(package.make, name), arguments)
    return partial(_made, source, partial(package.make, name, **arguments))


def as_factory(found: Callable[..., object], arguments: Mapping[str, Any]) -> Factory:
    """Makes `found(**arguments)`; of a class of skyrl-gym, what makes it for each row."""
    if isinstance(found, type) and hasattr(found, "init") and hasattr(found, "step"):
        return lambda: _per_row(found, arguments)
    return partial(found, **arguments)


def rows_of(source: str, arguments: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The prompts that `source` brings itself, with a number in the column `task`; None if it brings none.

    Those of a game are placeholders, which what the game says replaces.

    Raises:
        InputError: as `source_factory`.
    """
    kind, _, name = source.partition(":")
    num_rows = arguments.get(NUM_ROWS)
    given = {key: value for key, value in arguments.items() if key != NUM_ROWS}
    if kind in ("reasoning_gym", "verifiers"):
        return _tasks(source, json.dumps(given, sort_keys=True)).rows(num_rows or MOST_ROWS)
    if kind not in KINDS or kind == "skyrl_gym":
        return None
    if kind != "openenv":
        _package(kind)
        _check_registered(kind, name)
    numbers = range(num_rows or MOST_ROWS)
    return [{"prompt": [{"role": "user", "content": placeholder(number)}], TASK: number} for number in numbers]


@lru_cache(maxsize=8)
def _tasks(source: str, arguments: str) -> "ReasoningTasks | VerifiersTasks":
    """The tasks of `source`, which prompts and environment share."""
    kind, _, name = source.partition(":")
    _package(kind)
    if kind == "reasoning_gym":
        _check_registered(kind, name)
    make = ReasoningTasks if kind == "reasoning_gym" else VerifiersTasks
    return _made(source, partial(make, name, json.loads(arguments)))


def _made(source: str, make: Callable[[], Any]) -> Any:
    """The result of `make`. Raises InputError for arguments that it refuses, EnvironmentFailedError for the rest."""
    try:
        return make()
    except (InputError, EnvironmentFailedError):
        raise
    except (TypeError, ValueError, AssertionError) as error:
        raise InputError(f"environment {source!r} cannot be made with these arguments: {_line(error)}") from error
    except Exception as error:
        raise EnvironmentFailedError(f"environment {source!r} cannot be made: {_line(error)}") from error


def _line(error: Exception) -> str:
    """An error in one line of 300 characters at most: messages of data to download fill a page."""
    return f"{type(error).__name__}: {' '.join(str(error).strip(' *').split())}"[:300]


def _per_row(make: Callable[..., Any], arguments: Mapping[str, Any]) -> PerRow:
    """Makes environments of skyrl-gym, whose settings are `arguments`."""
    settings: Any = dict(arguments)
    with suppress(ImportError):  # skyrl-gym depends on it, and its environments read settings as attributes
        settings = import_module("omegaconf").OmegaConf.create(settings)
    return PerRow(lambda row: make(env_config=settings, extras=dict(row)))


def _package(kind: str) -> Any:
    """The module of a kind of source. Raises MissingDependencyError if it, or what it needs, is not installed."""
    add_to_path(Path.cwd())  # `gymnasium:my_games:ID` and `verifiers:my_tasks` may be modules there
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        return import_module(kind if kind != "verifiers" else "verifiers.v1")
    except ImportError as error:
        raise MissingDependencyError(
            f"environments `{kind}:...` need what is not installed ({error}); run `pip install "
            f"'tunesmith[{EXTRA_OF[kind]}]'`"
        ) from error
    finally:  # GEM sets up logging for the whole process
        root.setLevel(level)
        root.handlers[:] = handlers


def _check_registered(kind: str, name: str) -> None:
    place, _, attribute = REGISTRIES[kind].partition(":")
    registry = getattr(import_module(place), attribute)
    if name in registry or (kind == "gymnasium" and ":" in name):  # `module:ID` registers itself
        return
    close = difflib.get_close_matches(name, list(registry), n=3)
    hint = f"; did you mean {' or '.join(f'`{kind}:{one}`' for one in close)}?" if close else ""
    raise InputError(f"{kind} has no {name!r} among its {len(registry)} names{hint}")


def _server(address: str, arguments: Mapping[str, Any]) -> Server:
    """A server of OpenEnv. Raises InputError if none answers at `address`."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise InputError(f"openenv:{address} is no address; write `openenv:http://host:port`")
    _package("openenv")
    client = import_module("openenv.core.generic_client").GenericEnvClient
    try:
        with urlopen(f"{address.rstrip('/')}/schema", timeout=10) as answer:
            schema = json.load(answer)["action"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"no OpenEnv server answers at {address} ({_line(error)}); start it, or correct the address"
        ) from error
    return Server(address, schema, lambda timeout_s: client(address, **{"message_timeout_s": timeout_s, **arguments}))
