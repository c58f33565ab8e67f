"""Options of `tunesmith compare-algorithms`, for the command line and the page that starts it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from tunesmith.base.config.sections import PositiveInt, Section
from tunesmith.base.config.yaml_text import is_mapping, parse, read
from tunesmith.base.core.errors import ConfigError, RunError

COMPARISON = "compare_algorithms"
"""Name in the place of an algorithm, in recipes of the folders of comparisons and in requests of pages."""


class ComparisonOptions(Section):
    """A comparison of PPO, GRPO, DPO and best-of-n from the same votes. The seeds are 0, 1, ..."""

    model: str = "smollm2"
    """Hub id, local folder, GGUF file, the alias `smollm2`, or `tiny:<family>`."""
    seeds: Annotated[int, Field(ge=1, le=20)] = 3
    """Trainings of each algorithm; intervals need two."""
    steps: PositiveInt = 16
    """Most steps of a training, which ends earlier once its KL is beyond 6 nats; of DPO's short steps four times as
    many."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of all models."""
    quick: bool = False
    """Few openings and completions, to see that all parts work."""


def comparison_options(values: Mapping[str, object]) -> ComparisonOptions:
    """The options with these values, numbers also as text. Raises ConfigError for what is not allowed."""
    try:
        return ComparisonOptions.model_validate(values)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, one['loc']))}: {one['msg']} ({one['input']!r} given)" for one in error.errors()
        ]
        raise ConfigError(*problems) from None


def read_comparison(folder: Path) -> ComparisonOptions:
    """The options of the comparison in `folder`. Raises RunError if it holds none."""
    recipe = parse(read(folder / "recipe.yaml"), "recipe.yaml").data if (folder / "recipe.yaml").is_file() else None
    if not is_mapping(recipe) or not is_mapping(options := recipe.get("comparison")):
        raise RunError(f"{folder} is no folder of `tunesmith compare-algorithms`; give one that it made")
    return comparison_options({str(name): value for name, value in options.items()})
