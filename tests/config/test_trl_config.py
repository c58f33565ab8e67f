"""TRL's configs as recipes: every field of the installed TRL is known, with its default, and means the same."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import trl
from trl.scripts.grpo import GRPOScriptArguments
from trl.scripts.utils import DatasetMixtureConfig

from tunesmith.apps.cli.main import main
from tunesmith.base.config import trl_config
from tunesmith.base.config.load import load_recipe
from tunesmith.base.core.errors import ConfigError

CONFIGS = {"grpo": trl.GRPOConfig, "dpo": trl.DPOConfig, "sft": trl.SFTConfig, "reward": trl.RewardConfig}
SHARED = (trl.ModelConfig, GRPOScriptArguments, DatasetMixtureConfig)


@pytest.mark.parametrize("algorithm", trl_config.ALGORITHMS)
def test_every_field_of_the_installed_trl_is_in_one_table(algorithm: str) -> None:
    table = trl_config.fields()
    offered = {field.name for part in (CONFIGS[algorithm], *SHARED) for field in dataclasses.fields(part)}
    if algorithm != "grpo":
        offered -= {"reward_funcs", "reward_model_name_or_path"}
    followed = set(table.followed[algorithm])
    groups = (followed, set(table.not_needed), set(table.not_possible))
    assert offered <= set().union(*groups)
    assert not groups[0] & groups[1] and not groups[0] & groups[2] and not groups[1] & groups[2]
    assert followed <= offered, "no field is followed that TRL has not"


@pytest.mark.parametrize("algorithm", trl_config.ALGORITHMS)
def test_the_defaults_are_those_of_the_installed_trl(algorithm: str) -> None:
    table = trl_config.fields()
    parts = (CONFIGS[algorithm], *SHARED)
    theirs: dict[str, Any] = {f.name: f.default for part in parts for f in dataclasses.fields(part)}
    theirs |= {"optim": "adamw_torch", "dtype": None}  # float32, under autocast to bfloat16
    ours = {**table.followed[algorithm], **{name: default for name, (default, _) in table.not_possible.items()}}
    for name, default in ours.items():
        given = getattr(theirs.get(name, default), "value", theirs.get(name, default))
        if given is not dataclasses.MISSING:
            assert (default or None) == (given or None), name


def test_a_grpo_config_becomes_the_recipe_that_trains_the_same() -> None:
    given = {
        **{"model_name_or_path": "org/model", "dataset_name": "org/math", "dataset_config": "main", "seed": 7},
        **{"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 4},
        **{"num_generations": 4, "num_iterations": 2, "max_steps": 400, "save_steps": 100, "logging_steps": 1},
        **{"loss_type": "dr_grpo", "scale_rewards": False, "beta": 0.02, "epsilon_high": 0.28, "data_seed": 1},
        **{"reward_funcs": ["accuracy_reward", "mine.rewards.short"], "reward_weights": [1.0, 0.5]},
        **{"use_peft": True, "lora_r": 8, "lora_target_modules": ["q_proj"], "learning_rate": 5e-6, "bf16": True},
    }
    converted = trl_config.convert(given, "grpo")
    recipe: Any = converted.recipe
    assert (recipe.model.name, recipe.model.dtype, recipe.model.lora.rank) == ("org/model", "bfloat16", 8)
    assert recipe.model.lora.dropout == 0 and "lora_dropout" in converted.not_possible
    assert recipe.prompts.source == "org/math/main:train"
    assert (recipe.rollout.prompts_per_step, recipe.rollout.completions_per_prompt) == (8, 4)  # 32 drawn at a time
    assert (recipe.grpo.num_minibatches, recipe.grpo.num_epochs, recipe.grpo.micro_batch_size) == (2, 2, 8)
    assert (recipe.run.steps, recipe.run.checkpoint_every, recipe.run.log_every) == (100, 25, 1)  # 4 updates a step
    assert (recipe.grpo.loss_normalization, recipe.grpo.scale) == ("constant", "none")
    assert (recipe.grpo.kl.coef, recipe.grpo.kl.estimator, recipe.grpo.kl.place) == (0.02, "k3", "loss")
    assert recipe.grpo.kl.bias_correction
    assert (recipe.grpo.clip_low, recipe.grpo.clip_high) == (0.2, 0.28)
    assert recipe.optimizer.betas == (0.9, 0.999) and recipe.optimizer.learning_rate == 5e-6
    assert [(one.source, one.weight) for one in recipe.reward] == [
        ("trl.rewards:accuracy_reward", 1.0),
        ("mine.rewards:short", 0.5),
    ]
    assert list(converted.not_needed) == ["data_seed"]
    assert recipe.rollout.backend == "native"


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ({}, "http://localhost:8000"),
        ({"vllm_server_host": "10.0.0.2", "vllm_server_port": 9000}, "http://10.0.0.2:9000"),
        ({"vllm_server_base_url": "https://far:1", "vllm_server_port": 9000}, "https://far:1"),
    ],
)
def test_a_server_of_vllm_is_the_engine_with_trl_s_importance_weights(given: dict[str, Any], url: str) -> None:
    given = {"use_vllm": True, "vllm_mode": "server", "vllm_server_timeout": 60.0, **given}
    recipe: Any = trl_config.convert(given, "grpo").recipe
    rollout = recipe.rollout
    assert (rollout.backend, rollout.server_url, rollout.server_timeout_s) == ("vllm", url, 60.0)
    assert rollout.vllm_options == {}
    importance = rollout.importance
    assert (importance.level, importance.mode, importance.cap, importance.floor) == ("sequence", "mask", 3.0, 0.0)


def test_vllm_in_the_process_gets_its_settings() -> None:
    given = {"use_vllm": True, "vllm_max_model_length": 512}
    recipe: Any = trl_config.convert(given, "grpo").recipe
    assert recipe.rollout.server_url is None
    assert recipe.rollout.vllm_options == {
        **{"gpu_memory_utilization": 0.3, "tensor_parallel_size": 1, "model_impl": "vllm", "max_model_len": 512}
    }
    off: Any = trl_config.convert({**given, "vllm_importance_sampling_correction": False}, "grpo").recipe
    assert off.rollout.importance.mode == "off"
    bounds = {"vllm_importance_sampling_clip_max": 4.0, "vllm_importance_sampling_clip_min": 0.5}
    given |= {"vllm_importance_sampling_mode": "token_truncate", **bounds}
    other: Any = trl_config.convert(given, "grpo").recipe
    assert other.rollout.importance.model_dump() == {"level": "token", "mode": "truncate", "cap": 4.0, "floor": 0.5}
    without: Any = trl_config.convert({"vllm_mode": "server"}, "grpo").recipe
    assert without.rollout.backend == "native"


def test_losses_and_selections_keep_their_meaning() -> None:
    given = {"loss_type": "discopop", "discopop_tau": 0.1}
    dpo: Any = trl_config.convert(given, "dpo").recipe
    assert (dpo.dpo.loss, dpo.dpo.discopop_tau) == ("discopop", 0.1)
    assert trl_config.convert({"loss_type": "apo_zero"}, "dpo").recipe.dpo.loss == "apo_zero"  # type: ignore[attr-defined]
    given = {"top_entropy_quantile": 0.2, "off_policy_mask_threshold": 0.1, "num_iterations": 2}
    grpo: Any = trl_config.convert(given, "grpo").recipe
    assert (grpo.grpo.top_entropy_share, grpo.grpo.off_policy_mask) == (0.2, 0.1)


def test_trl_s_defaults_hold_where_a_config_says_nothing() -> None:
    for algorithm, rate in {"grpo": 1e-6, "dpo": 1e-6, "sft": 2e-5, "reward": 1e-4}.items():
        recipe: Any = trl_config.convert({}, algorithm).recipe
        assert recipe.optimizer.learning_rate == rate
        assert recipe.optimizer.schedule == "linear"
        assert recipe.run.seed == 42
    dpo: Any = trl_config.convert({"loss_type": ["ipo"], "beta": 0.3, "truncation_mode": "keep_end"}, "dpo").recipe
    assert (dpo.dpo.loss, dpo.dpo.beta, dpo.pairs.truncate, dpo.pairs.max_tokens) == ("ipo", 0.3, "left", 1024)
    assert (dpo.dpo.num_epochs, dpo.dpo.pairs_per_step, dpo.dpo.micro_batch_size) == (3, 8, 8)
    sft: Any = trl_config.convert({"completion_only_loss": False, "max_length": 256}, "sft").recipe
    assert (sft.demonstrations.loss_on, sft.demonstrations.max_tokens) == ("all", 256)
    reward: Any = trl_config.convert({"center_rewards_coefficient": 0.01}, "reward").recipe
    assert reward.reward_model.center_coef == 0.01
    assert reward.optimizer.head_learning_rate == 1e-4  # TRL's head has the rate of its model


@pytest.mark.parametrize(
    ("algorithm", "given", "message"),
    [
        ("grpo", {"num_generation": 4}, "num_generation: no field of TRL's grpo config; did you mean num_generations"),
        ("sft", {"num_generations": 4}, "num_generations: no field of TRL's sft config"),
        ("grpo", {"loss_type": "vespo"}, "loss_type is 'vespo', which is not possible; allowed: grpo, dr_grpo"),
        ("sft", {"loss_type": "dft"}, "loss_type is 'dft', which is not possible; allowed: nll"),
        ("dpo", {"loss_type": ["sigmoid", "bco_pair"]}, r"loss_type is sigmoid\+bco_pair, which is not possible"),
        ("dpo", {"lr_scheduler_type": "polynomial"}, "lr_scheduler_type is 'polynomial', which is not possible"),
        ("dpo", {"optim": "sgd"}, "optim is 'sgd', which is not possible"),
        ("grpo", {"num_generations": 5}, "8 completions are drawn at a time, which must be a multiple of num_gen"),
        ("grpo", {"use_vllm": True, "vllm_mode": "far"}, "vllm_mode is 'far', which is not possible; allowed: server"),
        ("grpo", {"reward_funcs": ["mine"]}, "reward_funcs: 'mine' is no dotted path"),
        ("reward", {"save_steps": 0.1}, "save_steps is 0.1, a share of all steps"),
        ("dpo", {"beta": -1}, "dpo.beta"),
    ],
)
def test_what_no_recipe_can_express_is_an_error(algorithm: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trl_config.convert(given, algorithm)


def test_fields_that_are_not_followed_are_named_if_they_say_something() -> None:
    given = {"load_in_4bit": True, "push_to_hub": False, "top_entropy_quantile": 1.0, "max_steps": 8}
    notes = trl_config.convert(given, "grpo").not_possible
    assert notes["load_in_4bit"] == "weights have 16 or 32 bits"
    assert notes.keys() == {"load_in_4bit", "model_name_or_path", "dataset_name", "reward_funcs"}


@pytest.mark.usefixtures("own_logging")
def test_the_command_writes_a_recipe_that_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "grpo.yaml").write_text(
        "model_name_or_path: tiny:llama\ndataset_name: org/math\nnum_generations: 4\nlearning_rate: 1e-6\n"
        "use_vllm: true\ndata_seed: 1\nload_in_4bit: true\nreward_funcs: [mine.short]\nmax_steps: 10\n"
    )
    out = tmp_path / "recipe.yaml"
    assert main(["convert", "trl-config", str(tmp_path / "grpo.yaml"), "--out", str(out)]) == 0
    text = out.read_text()
    assert "# not possible: load_in_4bit: weights have 16 or 32 bits\n" in text
    assert "# not needed: data_seed:" in text
    recipe: Any = load_recipe("grpo", file=out).recipe
    converted: Any = trl_config.convert({**_fields(tmp_path), "load_in_4bit": None}, "grpo").recipe
    assert recipe.model_copy(update={"run": converted.run}) == converted
    assert main(["convert", "trl-config", str(tmp_path / "grpo.yaml"), "--out", str(out)]) == 2, (
        "nothing is overwritten"
    )
    assert "recipe.yaml cannot be written: File exists" in capsys.readouterr().err
    assert main(["validate", str(out)]) == 0


def _fields(folder: Path) -> dict[str, Any]:
    from tunesmith.base.config.yaml_text import parse

    data: Any = parse((folder / "grpo.yaml").read_text(), "grpo.yaml").data
    return data


@pytest.mark.usefixtures("own_logging")
def test_a_config_of_no_known_trainer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.yaml").write_text("learning_rate: 1e-6\n")
    assert main(["convert", "trl-config", str(tmp_path / "x.yaml")]) == 2
    assert "add --algorithm grpo | dpo | sft | reward" in capsys.readouterr().err
    assert main(["convert", "trl-config", str(tmp_path / "x.yaml"), "--algorithm", "dpo"]) == 0
    assert capsys.readouterr().out.startswith("# From x.yaml, a config of TRL.\n")
