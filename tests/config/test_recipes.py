import pytest

from tunesmith.base.config.load import algorithm_of, load_recipe, shipped_names, shipped_text
from tunesmith.base.config.yaml_text import parse
from tunesmith.base.core.errors import ConfigError


@pytest.mark.parametrize("name", shipped_names())
def test_every_shipped_recipe_is_valid_and_describes_itself(name: str) -> None:
    text = shipped_text(name)
    algorithm = algorithm_of(parse(text, name), name)
    recipe = load_recipe(algorithm, recipe=name).recipe
    assert recipe.description
    assert recipe.run.name == name
    assert text.startswith("# ")


def test_the_recipes_that_the_documents_name_are_there() -> None:
    expected = {"reward_votes", "ppo_sentiment", "ppo_from_reward_model", "scratch_ppo", "demo_reward", "demo_ppo"}
    expected |= {"demo_grpo", "grpo_arithmetic", "grpo_v100", "grpo_gsm8k", "ppo_scratch", "sft_oasst", "dpo_demo"}
    expected |= {"reward_hh", "reward_mix", "grpo_int8"}
    expected |= {"sentiment_imdb_sft", "sentiment_imdb_reward", "sentiment_imdb", "sentiment_imdb_hub"}
    assert expected <= set(shipped_names())


def test_an_unknown_recipe_is_told_the_nearest_and_all_names() -> None:
    with pytest.raises(
        ConfigError,
        match="no recipe 'ppo_sentimant'; did you mean ppo_sentiment\\?; there are demo_best_of_n, demo_grpo, demo_ppo",
    ):
        shipped_text("ppo_sentimant")


@pytest.mark.parametrize("name", ["my.yaml", "../__init__", "/etc/passwd"])
def test_a_path_is_no_name_and_is_sent_to_config(name: str) -> None:
    with pytest.raises(ConfigError, match="--config"):
        shipped_text(name)
