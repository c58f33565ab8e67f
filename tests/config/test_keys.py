import re

from tunesmith.base.config.algorithms.ppo import PPORecipe
from tunesmith.base.config.effects import rules_of
from tunesmith.base.config.keys import leaves
from tunesmith.base.config.load import load_recipe
from tunesmith.base.config.schema import RECIPES


def test_keys_say_type_bounds_default_and_meaning() -> None:
    keys = {key.path: key for key in leaves(PPORecipe)}
    assert keys["optimizer.learning_rate"].type == "float > 0"
    assert keys["optimizer.head_learning_rate"].type == "float > 0 or null"
    assert keys["rollout.min_new_tokens"].type == "int >= 0"
    assert keys["ppo.clip_low"].type == "float > 0 and < 1"
    assert keys["prompts.prefix_tokens"].type == "[int >= 1, int >= 1] or null"
    assert keys["ppo.kl.place"].type == "reward | loss"
    assert keys["reward.0.source"].default == "required"
    assert keys["run.dir"].default == "runs"


def test_every_key_is_explained() -> None:
    for schema in RECIPES.values():
        assert [key.path for key in leaves(schema) if not key.description] == []


def test_the_keys_are_those_of_a_resolved_recipe() -> None:
    for algorithm, schema in RECIPES.items():
        of_no_item = ("pairs.sources.0.", "pairs.heldout_sources.0.")  # lists that are empty unless they are given
        keys = {key.path for key in leaves(schema) if not key.path.startswith(of_no_item)}
        assert keys == set(load_recipe(algorithm).provenance)


def test_what_is_said_of_a_key_without_effect_names_keys_that_there_are() -> None:
    """`model.reference` was said to need `model.kl.coef`, in place of `grpo.kl.coef`."""
    for algorithm, schema in RECIPES.items():
        keys = {key.path for key in leaves(schema)}
        for rule in rules_of(algorithm):
            for path in filter(rule.covers, keys):
                said = rule.why.format(section=path.partition(".")[0], value="")
                named = re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b(?!\()", said)
                lost = [name for name in named if not any(f"{key}.".startswith(f"{name}.") for key in keys)]
                assert not lost, (algorithm, path, said)
