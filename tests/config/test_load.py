from pathlib import Path

import pytest

from tunesmith.base.config.algorithms.grpo import GRPORecipe
from tunesmith.base.config.algorithms.ppo import PPORecipe
from tunesmith.base.config.algorithms.reward import RewardRecipe
from tunesmith.base.config.load import Resolved, algorithm_of, load_recipe, origins_of, parse_overrides
from tunesmith.base.config.yaml_text import parse
from tunesmith.base.core.errors import ConfigError


def load_ppo(*words: str, file: Path | None = None, recipe: str | None = None) -> Resolved:
    overrides = parse_overrides("ppo", words)
    return load_recipe("ppo", recipe=recipe, file=file, overrides=overrides.values, origins=overrides.origins)


def ppo(*words: str) -> PPORecipe:
    recipe = load_ppo(*words).recipe
    assert isinstance(recipe, PPORecipe)
    return recipe


def problems(*words: str, file: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_ppo(*words, file=file)
    return list(caught.value.problems)


def test_without_any_source_every_value_is_a_default() -> None:
    resolved = load_recipe("ppo")
    assert resolved.recipe.model_copy(update={"run": PPORecipe().run}) == PPORecipe()
    assert set(resolved.provenance.values()) == {"default"}
    assert resolved.recipe.run.name == "ppo"


def test_each_layer_wins_over_the_one_below_and_leaves_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("rollout:\n  max_new_tokens: 11\n  temperature: 0.9\n")
    resolved = load_ppo("--rollout.temperature", "0.5", recipe="ppo_sentiment", file=file)
    recipe = resolved.recipe
    assert isinstance(recipe, PPORecipe)
    assert (recipe.rollout.temperature, recipe.rollout.max_new_tokens, recipe.rollout.prompts_per_step) == (0.5, 11, 32)
    assert resolved.provenance["rollout.temperature"] == "command line --rollout.temperature"
    assert resolved.provenance["rollout.max_new_tokens"] == f"file {file}:2"
    assert resolved.provenance["rollout.prompts_per_step"].startswith("recipe ppo_sentiment:")
    assert resolved.provenance["rollout.top_k"] == "default"
    assert recipe.run.name == "my"


def test_provenance_names_every_leaf_and_nothing_else() -> None:
    provenance = load_ppo("--reward", "length", "--reward", "sentiment").provenance
    assert "reward.1.weight" in provenance
    assert "reward.2.weight" not in provenance
    assert "ppo.kl.coef" in provenance
    assert "ppo.kl" not in provenance


def test_a_bare_value_sets_the_main_key_of_a_section_and_keeps_the_others() -> None:
    recipe = ppo("--model.dtype", "float32", "--model", "tiny:llama", "--ppo.kl", "0.2", "--ppo.kl.target", "6")
    assert (recipe.model.name, recipe.model.dtype) == ("tiny:llama", "float32")
    assert (recipe.ppo.kl.coef, recipe.ppo.kl.target) == (0.2, 6.0)


def test_rewards_on_the_command_line_replace_the_list_and_take_weights_by_index() -> None:
    recipe = ppo(
        "--reward.1.weight", "0.5", "--reward", "./my.py:fn", "--reward=length", "--reward.1.arguments.max", "3"
    )
    assert [(r.source, r.weight) for r in recipe.reward] == [("./my.py:fn", 1.0), ("length", 0.5)]
    assert recipe.reward[1].arguments == {"max": 3}


def test_an_index_changes_one_item_of_the_list_below() -> None:
    recipe = ppo("--reward.0.weight", "2", "--reward.1.source", "length")
    assert [(r.source, r.weight) for r in recipe.reward] == [("sentiment", 2.0), ("length", 1.0)]


def test_values_of_the_command_line_are_read_as_yaml_or_json_unless_the_key_is_text() -> None:
    recipe = ppo(
        *("--optimizer.learning-rate=1e-6", "--prompts.prefix_tokens", "[2,", "8]", "--optimizer.betas", "[0.8, 0.9]"),
        *("--ppo.value-clip", "null", "--ppo.whiten-rewards", "--run.name", "2024", "--reward.0.label", "1"),
        *("--report-to", "tensorboard", "--report-to", "wandb", "--ppo.kl", '{"coef": 0.3, "place": "loss"}'),
    )
    assert recipe.optimizer.learning_rate == 1e-6
    assert recipe.prompts.prefix_tokens == (2, 8)
    assert recipe.optimizer.betas == (0.8, 0.9)
    assert recipe.ppo.value_clip is None
    assert recipe.ppo.whiten_rewards
    assert recipe.run.name == "2024"
    assert recipe.reward[0].label == 1
    assert recipe.run.report_to == ("tensorboard", "wandb")
    assert (recipe.ppo.kl.coef, recipe.ppo.kl.place) == (0.3, "loss")


def test_values_from_python_need_no_text() -> None:
    resolved = load_recipe("ppo", overrides={"run.steps": 3, "reward": ["length"]}, origins={"run.steps": "argument"})
    assert resolved.recipe.run.steps == 3
    assert resolved.provenance["run.steps"] == "argument"


def test_all_problems_are_reported_at_once_with_path_and_origin(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("optimizer:\n  learning_rate: -1\n  lr: 1e-6\nppo: {critic: shard}\nreward:\n  - {wieght: 2}\n")
    with pytest.raises(ConfigError) as caught:
        load_ppo("--steps", "abc", file=file)
    lines = str(caught.value).splitlines()
    assert lines[0] == "6 problems in the recipe"
    text = "\n".join(lines)
    assert f"optimizer.learning_rate: -1 given; must be greater than 0 (file {file}:2)" in text
    assert f"optimizer.lr: unknown key; did you mean optimizer.learning_rate? (file {file}:3)" in text
    assert "ppo.critic: 'shard' given; must be 'shared', 'separate' or 'none'; did you mean shared?" in text
    assert "reward.0.wieght: unknown key; did you mean reward.0.weight?" in text
    assert "reward.0.source: is required" in text
    assert "run.steps: 'abc' given; must be a valid integer (command line --steps)" in text


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--lr", "optimizer.learning_rate"),
        ("--ppo.lr", "optimizer.learning_rate"),
        ("--kl_coef", "ppo.kl.coef"),
        ("--rollout.max_new_tokenz", "rollout.max_new_tokens"),
        ("--max-new-tokens", "rollout.max_new_tokens"),
        ("--stepz", "run.steps"),
        ("--modle", "model"),
        ("--rolout.top_p", "rollout.top_p"),
        ("--reward.2.wieght", "the list has 1 item"),
        ("--reward.pessimism", "reward.0.pessimism"),
        ("--reward.wieght", "reward.0.weight"),
        ("--pessimism", "reward.0.pessimism"),
    ],
)
def test_a_misspelt_key_is_told_the_key_that_was_meant(flag: str, meant: str) -> None:
    (problem,) = problems(flag, "1")
    assert f"did you mean {meant}?" in problem or meant in problem


def test_an_unknown_key_without_a_likeness_is_told_what_is_allowed() -> None:
    (problem,) = problems("--zzz", "1")
    assert "allowed here: schema_version" in problem


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--optimizer.learning_rate", ".nan"), "finite"),
        (("--optimizer.learning_rate", ".inf"), "finite"),
        (("--rollout.top_p", "1.5"), "less than or equal to 1"),
        (("--rollout.prompts_per_step", "0"), "greater than or equal to 1"),
        (("--rollout.prompts_per_step", "2.5"), "integer"),
        (("--optimizer.learning_rate", "--seed", "1"), "true given; must be float > 0"),
        (("--run.steps", "true"), "true given; must be int"),
        (("--prompts.prefix_tokens", "[8, 2]"), "give the smaller number first"),
        (("--prompts.prefix_tokens", "[8]"), "prompts.prefix_tokens"),
        (("--reward", "[]"), "at least 1"),
        (("--ppo", "3"), "is a section"),
        (("--algorithm", "reward"), "'reward' given; must be 'ppo'"),
        (("--reward.0.arguments", "[1]"), "dictionary"),
        (("--rollout.min_new_tokens", "80"), "more than max_new_tokens"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(words: tuple[str, ...], problem: str) -> None:
    found = problems(*words)
    assert len(found) == 1
    assert problem in found[0]
    assert "command line --" in found[0]


@pytest.mark.parametrize(("words", "problem"), [(("foo",), "belongs to no flag"), (("-x", "1"), "belongs to no flag")])
def test_stray_words_are_refused(words: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_overrides("ppo", words)


def test_a_flag_given_again_replaces_the_first_value() -> None:
    assert ppo("--seed", "1", "--seed", "2").run.seed == 2


def test_a_recipe_for_another_trainer_is_refused() -> None:
    with pytest.raises(ConfigError, match="recipe reward_votes is for `tunesmith train reward`, not for"):
        load_recipe("ppo", recipe="reward_votes")
    with pytest.raises(ConfigError, match="no algorithm 'pop'; did you mean ppo"):
        load_recipe("pop")


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}\n"])
def test_an_empty_file_changes_nothing(tmp_path: Path, text: str) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(text)
    assert load_recipe("reward", file=file).recipe.model == RewardRecipe().model


@pytest.mark.parametrize("text", ["- a\n", "hello\n", "3\n"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="a recipe is a mapping of sections"):
        load_recipe("reward", file=file)


def test_the_algorithm_is_known_from_its_key_or_its_sections() -> None:
    assert algorithm_of(parse("algorithm: ppo", "f"), "f") == "ppo"
    assert algorithm_of(parse("pairs: votes.jsonl\nreward_model: {}", "f"), "f") == "reward"
    assert algorithm_of(parse("pairs: votes.jsonl\ndpo: ipo", "f"), "f") == "dpo"
    assert algorithm_of(parse("prompts: films\nppo: {}", "f"), "f") == "ppo"
    for text in ("model: smollm2", "pairs: votes.jsonl", "prompts: films"):
        with pytest.raises(
            ConfigError,
            match=r"add `algorithm: sft \| reward \| dpo \| online_dpo \| ppo \| grpo \| best_of_n \| distill \| live`",
        ):
            algorithm_of(parse(text, "f"), "f")
    with pytest.raises(ConfigError, match="did you mean ppo"):
        algorithm_of(parse("algorithm: ppoo", "f"), "f")


def test_values_that_were_set_in_python_have_that_origin():
    recipe = GRPORecipe.model_validate({"run": {"steps": 3}, "rollout": {}})
    assert [path for path, origin in origins_of(recipe).items() if origin != "default"] == ["run.steps"]
    assert origins_of(recipe)["run.steps"] == "Python"
