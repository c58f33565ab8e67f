"""The extra or command that brings a package that a plain `pip install tunesmith` does not."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager

from tunesmith.base.core.errors import MissingDependencyError

EXTRA_OF: Mapping[str, str] = {
    "gguf": "smollm2",
    "accelerate": "smollm2",
    "peft": "lora",
    "datasets": "data",
    "pyarrow": "data",
    "tensorboard": "trackers",
    "fastapi": "web",
    "starlette": "web",
    "uvicorn": "web",
    "sqlalchemy": "web",
    "alembic": "web",
    "nh3": "web",
    "markdown_it": "web",
    "math_core": "web",
    "prometheus_client": "web",
    "psycopg": "postgresql",
    "triton": "gpu",
    "ray": "ray",
    "trl": "trl",
    "lm_eval": "eval",
    "textarena": "environments",
    "gymnasium": "environments",
    "reasoning_gym": "environments",
    "skyrl_gym": "environments",
    "gem": "gem",
    "openenv": "openenv",
    "verifiers": "verifiers",
}
"""Top-level module -> the extra of pyproject.toml that installs it."""


@contextmanager
def naming_extras() -> Generator[None]:
    """Raise MissingDependencyError, which says what to install, where the block does not find a module of an extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        extra = EXTRA_OF.get(module)
        if extra is None:
            raise
        raise MissingDependencyError(
            f"this needs the package {module}, which is not installed; run `pip install 'tunesmith[{extra}]'`"
        ) from error
