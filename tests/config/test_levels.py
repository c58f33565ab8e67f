"""Levels: what each one sets, what it lies over and under, and where it is shown."""

from pathlib import Path

import pytest

from tunesmith.base.config.algorithms.grpo import GRPORecipe
from tunesmith.base.config.algorithms.ppo import PPORecipe
from tunesmith.base.config.keys import leaves
from tunesmith.base.config.levels import (
    LADDER_ONLY,
    LEVELS,
    MICRO_BATCH,
    TECHNIQUES,
    WHOLE,
    Level,
    settings_of,
    shown_keys,
)
from tunesmith.base.config.load import Resolved, load_recipe, parse_overrides
from tunesmith.base.config.schema import RECIPES
from tunesmith.base.core.errors import ConfigError


def load(algorithm: str, *words: str, file: Path | None = None, recipe: str | None = None) -> Resolved:
    overrides = parse_overrides(algorithm, words)
    return load_recipe(algorithm, recipe=recipe, file=file, overrides=overrides.values, origins=overrides.origins)


def ppo(*words: str) -> PPORecipe:
    recipe = load("ppo", *words).recipe
    assert isinstance(recipe, PPORecipe)
    return recipe


def figures(recipe: PPORecipe) -> tuple[object, ...]:
    """Settings that levels set, one of each technique."""
    model, rollout = recipe.model, recipe.rollout
    return (
        *(recipe.ppo.gae, recipe.run.keep_freed_memory, model.forward, model.dtype, recipe.ppo.micro_batch_size),
        *(rollout.score_while_drawing, rollout.backend, rollout.recompute_logps),
        *(model.kernels, model.share_prefixes, recipe.optimizer.fused),
    )


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("baseline", ("loop", False, "full", "float32", WHOLE, False, "transformers", True, "torch", False, False)),
        ("basic", ("auto", True, "padded", "float32", WHOLE, False, "transformers", True, "torch", False, False)),
        ("advanced", ("auto", True, "auto", "auto", 16, True, "transformers", True, "torch", False, False)),
        ("optimal", ("auto", True, "auto", "auto", 16, True, "native", False, "auto", True, True)),
    ],
)
def test_each_level_sets_what_its_page_says(level: Level, expected: tuple[object, ...]) -> None:
    assert figures(ppo("--level", level)) == expected


@pytest.mark.parametrize("algorithm", RECIPES)
def test_without_a_level_nothing_is_set(algorithm: str) -> None:
    assert load(algorithm).recipe == load(algorithm, "--level", "null").recipe
    assert not [origin for origin in load(algorithm).provenance.values() if origin.startswith("level")]


@pytest.mark.parametrize("algorithm", RECIPES)
@pytest.mark.parametrize("level", LEVELS)
def test_every_training_has_every_level(algorithm: str, level: Level) -> None:
    resolved = load(algorithm, "--level", level)
    assert resolved.recipe.level == level
    assert resolved.provenance["level"] == "command line --level"
    assert resolved.provenance["model.kernels"] == f"level {level}"


def test_a_level_lies_over_a_shipped_recipe_and_under_what_the_user_says(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("algorithm: grpo\nlevel: baseline\nmodel: {dtype: bfloat16}\nrollout: {backend: native}\n")
    resolved = load("grpo", "--rollout.recompute-logps", "false", file=file, recipe="grpo_arithmetic")
    recipe = resolved.recipe
    assert isinstance(recipe, GRPORecipe)
    assert (recipe.model.dtype, recipe.rollout.backend, recipe.rollout.recompute_logps) == ("bfloat16", "native", False)
    assert resolved.provenance["model.dtype"] == f"file {file}:3"
    assert (recipe.grpo.micro_batch_size, resolved.provenance["grpo.micro_batch_size"]) == (WHOLE, "level baseline")
    assert resolved.provenance["rollout.max_new_tokens"].startswith("recipe grpo_arithmetic:")


def test_the_level_of_the_command_line_wins_over_that_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("algorithm: ppo\nlevel: baseline\n")
    assert load("ppo", "--level", "optimal", file=file).recipe.model.kernels == "auto"
    assert load("ppo", "--level", "null", file=file).recipe == load("ppo", "--run.name", "my").recipe


def test_an_unknown_level_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="level: 'best' given; must be 'baseline', 'basic', 'advanced' or 'optimal'"):
        load("ppo", "--level", "best")


def test_every_key_of_a_technique_exists_and_its_levels_differ() -> None:
    known = {key.path for schema in RECIPES.values() for key in leaves(schema)} | {MICRO_BATCH}
    assert {path for one in TECHNIQUES for path in one.without} >= LADDER_ONLY
    assert not LADDER_ONLY & {key.path for key in shown_keys(PPORecipe)}
    for technique in TECHNIQUES:
        assert {*technique.without, *technique.used} <= known
        keys = {path.replace("<section>", "ppo") for path in technique.without}
        with_it, without = (
            {path: value for path, value in settings_of(level, PPORecipe).items() if path in keys}
            for level in (technique.level, LEVELS[LEVELS.index(technique.level) - 1])
        )
        assert with_it != without
