"""The recipes that ship with Tunesmith, by name: the YAML files of this folder."""

from importlib import resources

from tunesmith.config.keys import did_you_mean
from tunesmith.core.errors import ConfigError

_SUFFIX = ".yaml"


def names() -> list[str]:
    """Names of the shipped recipes, sorted."""
    files = resources.files(__name__).iterdir()
    return sorted(file.name.removesuffix(_SUFFIX) for file in files if file.name.endswith(_SUFFIX))


def text(name: str) -> str:
    """The YAML text of the recipe `name`; ConfigError with the allowed names if there is none."""
    known = names()
    if name not in known:
        if name.endswith((_SUFFIX, ".yml")) or "/" in name:
            raise ConfigError(f"{name!r} is no shipped recipe; a file of your own goes to --config")
        raise ConfigError(f"there is no recipe {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}")
    return (resources.files(__name__) / (name + _SUFFIX)).read_text(encoding="utf-8")
