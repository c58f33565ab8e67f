"""Keys of a recipe that make each other meaningless: refused by name, where somebody set them."""

import json
from pathlib import Path

import pytest

from tunesmith import run
from tunesmith.base.config.algorithms.grpo import GRPORecipe
from tunesmith.base.config.effects import ineffective, rules_of
from tunesmith.base.config.keys import leaves
from tunesmith.base.config.levels import LEVELS
from tunesmith.base.config.load import load_recipe, read_algorithm, shipped_names
from tunesmith.base.config.schema import RECIPES
from tunesmith.base.config.trl_config import convert
from tunesmith.base.core.errors import ConfigError, ModelError

LIVE = "live.update"
CASES: list[tuple[str, str, dict[str, object]]] = [
    # (algorithm, key that has no effect, all that is set)
    ("grpo", "grpo.scale", {"grpo.scale": "none", "grpo.multi_objective_aggregation": "normalize_then_sum"}),
    (
        "grpo",
        "grpo.baseline",
        {"grpo.baseline": "leave_one_out", "grpo.multi_objective_aggregation": "normalize_then_sum"},
    ),
    ("grpo", "grpo.clip_low", {"grpo.clip_low": 0.1, "grpo.surrogate": "cispo", "grpo.num_epochs": 2}),
    ("grpo", "grpo.clip_high", {"grpo.clip_high": 0.1, "grpo.surrogate": "sapo", "grpo.num_epochs": 2}),
    ("grpo", "grpo.temperature_positive", {"grpo.temperature_positive": 0.5, "grpo.num_epochs": 2}),
    ("ppo", "ppo.temperature_negative", {"ppo.temperature_negative": 0.5, "ppo.num_epochs": 2}),
    ("grpo", "model.reference", {"grpo.kl": 0, "model.reference": "int8"}),
    ("grpo", "model.reference", {"model.base": "int8", "model.lora.rank": 4, "model.reference": "int8"}),
    ("sft", "model.reference", {"model.reference": "int8"}),
    ("reward", "model.reference", {"model.reference": "int8"}),
    ("dpo", "model.reference", {"model.reference": "int8"}),
    ("grpo", "grpo.kl.estimator", {"grpo.kl": 0, "grpo.kl.estimator": "k1"}),
    ("grpo", "grpo.kl.place", {"grpo.kl": 0, "grpo.kl.place": "reward"}),
    ("grpo", "grpo.kl.bias_correction", {"grpo.kl": 0, "grpo.kl.bias_correction": True}),
    ("grpo", "alarms.max_kl", {"grpo.kl": 0, "alarms.max_kl": 10}),
    ("grpo", "rollout.recompute_logps", {"rollout.recompute_logps": True}),
    ("grpo", "evaluation.num_prompts", {"evaluation.num_prompts": 8}),
    ("grpo", "evaluation.completions_per_prompt", {"evaluation.completions_per_prompt": 8}),
    ("grpo", "optimizer.head_learning_rate", {"optimizer.head_learning_rate": 1e-4}),
    ("ppo", "ppo.kl.target", {"ppo.kl": 0, "ppo.kl.target": 6}),
    ("ppo", "ppo.kl.horizon", {"ppo.kl.horizon": 5000}),
    ("ppo", "ppo.value_coef", {"ppo.critic": "none", "ppo.lam": 1, "ppo.value_coef": 0.5}),
    ("ppo", "ppo.value_clip", {"ppo.critic": "none", "ppo.lam": 1, "ppo.value_clip": 0.5}),
    ("ppo", "optimizer.head_learning_rate", {"ppo.critic": "none", "ppo.lam": 1, "optimizer.head_learning_rate": 1}),
    ("ppo", "ppo.target_kl", {"ppo.num_epochs": 1, "ppo.target_kl": 0.1}),
    ("ppo", "ppo.value_clip", {"ppo.num_epochs": 1, "ppo.value_clip": 0.1}),
    ("dpo", "dpo.simpo_gamma", {"dpo.simpo_gamma": 1}),
    ("dpo", "dpo.tie_theta", {"dpo.tie_theta": 2}),
    ("dpo", "dpo.desirable_weight", {"dpo.desirable_weight": 2}),
    ("dpo", "dpo.undesirable_weight", {"dpo.undesirable_weight": 2}),
    ("dpo", "dpo.reference", {"dpo.loss": "simpo", "dpo.reference": "live"}),
    ("dpo", "pairs.heldout_fraction", {"pairs.heldout_source": "x.jsonl", "pairs.heldout_fraction": 0.2}),
    ("sft", "demonstrations.heldout_fraction", {"demonstrations": {"heldout_source": "x", "heldout_fraction": 0.2}}),
    ("ppo", "prompts.heldout_fraction", {"prompts.heldout_source": "x.jsonl", "prompts.heldout_fraction": 0.2}),
    ("ppo", "prompts.split_column", {"prompts.heldout_source": "x.jsonl", "prompts.split_column": "topic"}),
    ("ppo", "prompts.split_column", {"prompts.split_column": "topic"}),
    (
        "best_of_n",
        "best_of_n.kl.bias_correction",
        {"best_of_n.kl": {"coef": 1, "place": "loss", "bias_correction": True}},
    ),
    ("best_of_n", "best_of_n.kl.estimator", {"best_of_n.kl.estimator": "k3"}),
    ("best_of_n", "rollout.importance.mode", {"rollout.importance": "mask"}),
    ("best_of_n", "rollout.recompute_logps", {"rollout.recompute_logps": True}),
    ("best_of_n", "alarms.max_cut_share", {"alarms.max_cut_share": 0.2}),
    ("online_dpo", "alarms.max_logp_difference", {"alarms.max_logp_difference": 0.2}),
    ("distill", "alarms.max_cut_share", {"alarms.max_cut_share": 0.2}),
    ("distill", "distill.beta", {"distill.beta": 0.2}),
    ("distill", "distill.teachers.0.weight", {"distill.teachers.0.weight": 2}),
    ("distill", "distill.context.template", {"distill.context.template": "{prompt}"}),
    ("distill", "distill.self_weights", {"distill.self_weights": "ema"}),
    ("distill", "distill.ema_rate", {"distill.teachers": ["self"], "distill.ema_rate": 0.5}),
    ("live", "live.reasons.template", {"live.reasons.template": "{prompt}"}),
    ("live", "live.reasons.weight", {"live.update": "grpo", "live.reasons.weight": 1}),
    ("distill", "rollout.importance.cap", {"rollout.importance.cap": 3}),
    ("distill", "rollout.score_while_drawing", {"rollout.score_while_drawing": True}),
    ("distill", "alarms.max_kl", {"alarms.max_kl": 3}),
    ("sft", "model.lora.alpha", {"model.lora.alpha": 16}),
    ("sft", "model.lora.dropout", {"model.lora.dropout": 0.1}),
    ("sft", "model.lora.target_modules", {"model.lora.target_modules": ["q_proj"]}),
    ("sft", "model.lora.use_dora", {"model.lora.use_dora": True}),
    ("sft", "model.lora.use_rslora", {"model.lora.use_rslora": True}),
    ("sft", "model.lora.seed", {"model.lora.seed": 1}),
    ("sft", "model.seed", {"model.seed": 1}),
    ("sft", "optimizer.min_ratio", {"optimizer.min_ratio": 0.1}),
    ("sft", "optimizer.decay_share", {"optimizer.schedule": "cosine", "optimizer.decay_share": 0.1}),
    ("sft", "optimizer.fused", {"optimizer.state": "int8", "optimizer.fused": False}),
    ("sft", "optimizer.loss_scale", {"model.dtype": "bfloat16", "optimizer.loss_scale": 1024}),
    ("sft", "optimizer.loss_scale_window", {"model.dtype": "float32", "optimizer.loss_scale_window": 10}),
    ("sft", "optimizer.head_learning_rate", {"optimizer.head_learning_rate": 1e-4}),
    ("sft", "run.keep_checkpoints", {"run.checkpoint_every": 0, "run.keep_checkpoints": 5}),
    ("sft", "scale.shard", {"scale.shard": "parameters"}),
    ("sft", "scale.rank_timeout_s", {"scale.rank_timeout_s": 60}),
    ("grpo", "scale.lease", {"scale.lease": 4}),
    ("grpo", "scale.threads_per_worker", {"scale.threads_per_worker": 2}),
    ("grpo", "scale.timeout_s", {"scale.timeout_s": 60}),
    ("grpo", "rollout.server_timeout_s", {"rollout.server_timeout_s": 60}),
    ("grpo", "rollout.server_folder", {"rollout.backend": "vllm", "rollout.server_folder": "w"}),
    (
        "grpo",
        "rollout.vllm_options",
        {"rollout.backend": "vllm", "rollout.server_url": "http://a", "rollout.vllm_options": {"seed": 1}},
    ),
    ("grpo", "rollout.num_slots", {"rollout.backend": "transformers", "rollout.num_slots": 8}),
    ("grpo", "rollout.kv_cache_mb", {"rollout.backend": "transformers", "rollout.kv_cache_mb": 8}),
    ("grpo", "rollout.batch_size", {"rollout.backend": "vllm", "rollout.batch_size": 8}),
    ("grpo", "rollout.top_p", {"rollout.top_k": 1, "rollout.top_p": 0.9}),
    ("grpo", "rollout.min_p", {"rollout.top_k": 1, "rollout.min_p": 0.1}),
    ("grpo", "rollout.importance.cap", {"rollout.importance": "off", "rollout.importance.cap": 3}),
    ("grpo", "rollout.importance.level", {"rollout.importance": {"mode": "off", "level": "sequence"}}),
    ("live", "ppo.gamma", {"ppo.gamma": 0.9}),
    ("live", "grpo.scale", {"grpo.scale": "none"}),
    ("live", "reward_model.num_layers", {"reward_model.num_layers": 2}),
    ("live", "live.policy_steps", {"live.policy_steps": 3}),
    ("live", "rollout.importance.cap", {"rollout.importance.cap": 3}),
    ("live", "rollout.recompute_logps", {"rollout.recompute_logps": True}),
    ("live", "rollout.score_while_drawing", {LIVE: "ppo", "rollout.score_while_drawing": True}),
    ("live", "dpo.beta", {LIVE: "ppo", "dpo.beta": 0.5}),
    ("live", "live.kl.coef", {LIVE: "ppo", "live.kl.coef": 0.5}),
    ("live", "dpo.reference", {"dpo.reference": "live"}),
    ("live", "run.steps", {"run.steps": 3}),
    ("live", "run.eval_every", {"run.eval_every": 3}),
    ("live", "run.report_to", {"run.report_to": ["wandb"]}),
    ("live", "scale.rank_timeout_s", {"scale.rank_timeout_s": 3}),
]


@pytest.mark.parametrize(("algorithm", "key", "given"), CASES, ids=[f"{name} {key}" for name, key, _ in CASES])
def test_a_key_without_effect_is_refused_by_name(algorithm: str, key: str, given: dict[str, object]) -> None:
    """A setting that another one switches off was taken in silence. Reported: issue 45.9."""
    with pytest.raises(ConfigError) as caught:
        load_recipe(algorithm, overrides=given)
    told = [problem for problem in caught.value.problems if problem.startswith(f"{key}: is ")]
    assert len(told) == 1
    assert "which has no effect: " in told[0]
    assert "(command line --" in told[0]


def test_what_makes_a_key_meaningful_lets_it_pass() -> None:
    """The same keys with the setting that they belong to. Reported: issue 45.9."""
    for algorithm, given in (
        ("grpo", {"grpo.clip_high": 0.28, "grpo.num_minibatches": 4, "rollout.recompute_logps": True}),
        ("grpo", {"grpo.kl.estimator": "k1", "evaluation.correct_at": 1, "evaluation.num_prompts": 8}),
        ("ppo", {"ppo.kl.target": 6, "ppo.kl.horizon": 5000, "optimizer.head_learning_rate": 1e-3}),
        ("dpo", {"dpo.loss": "kto", "dpo.desirable_weight": 2}),
        ("sft", {"model.lora.rank": 8, "model.lora.alpha": 16, "model.dtype": "auto", "optimizer.loss_scale": 2}),
        ("sft", {"model.name": "tiny:llama", "model.seed": 3, "scale.ranks": 2, "scale.shard": "parameters"}),
        ("live", {LIVE: "ppo", "ppo.gamma": 0.9, "reward_model.num_layers": 2, "live.policy_steps": 3}),
        ("live", {LIVE: "grpo", "grpo.scale": "none", "dpo.ties": "drop", "run.measure": False}),
    ):
        load_recipe(algorithm, overrides=given)


def test_defaults_levels_and_shipped_recipes_are_never_refused() -> None:
    """Only what somebody set for this run can be a mistake of theirs. Reported: issue 45.9."""
    for algorithm, schema in RECIPES.items():
        assert ineffective(schema(), {}) == []
        for level in LEVELS:
            load_recipe(algorithm, overrides={"level": level})
    for name in shipped_names():
        resolved = load_recipe(read_algorithm(name), recipe=name)
        assert ineffective(resolved.recipe, resolved.provenance) == []  # those of a shipped recipe all count
    assert load_recipe("grpo", recipe="grpo_gsm8k", overrides={"evaluation.correct_at": None}).recipe


def test_a_key_set_to_its_default_is_no_mistake() -> None:
    """A file that names every key with its default, as the docs list them. Reported: issue 45.9."""
    load_recipe("grpo", overrides={"grpo.scale": "group", "grpo.multi_objective_aggregation": "normalize_then_sum"})


def test_every_rule_names_keys_that_there_are() -> None:
    """A rule with a misspelt key would never hold. Reported: issue 45.9."""
    paths = {key.path for schema in RECIPES.values() for key in leaves(schema)}
    patterns = {pattern for name in RECIPES for rule in rules_of(name) for pattern in rule.keys.split()}
    missing = {one for one in patterns if not any(path.startswith(one.rstrip("*")) for path in paths)}
    assert missing == {"pairs.split_column", "demonstrations.split_column"}  # of a rule for all three kinds of data


def test_a_run_goes_on_with_the_recipe_that_it_wrote(tmp_path: Path) -> None:
    """A shipped recipe sets a key, the command line switches it off; the run writes both, and can be resumed.
    Reported: issue 45.9.
    """
    written = load_recipe("ppo", overrides={"ppo.num_epochs": 1}).recipe.model_dump(mode="json")
    written["ppo"]["target_kl"] = 0.3
    (tmp_path / "recipe.yaml").write_text(json.dumps(written), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"ppo\.target_kl: is 0\.3, which has no effect"):
        load_recipe("ppo", file=tmp_path / "recipe.yaml")
    (tmp_path / "provenance.json").write_text("{}", encoding="utf-8")
    assert load_recipe("ppo", file=tmp_path / "recipe.yaml").recipe.ppo.target_kl == 0.3  # type: ignore[attr-defined]


def test_a_recipe_made_in_python_is_checked_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`tunesmith.run` takes a recipe that never was a file; who set its keys is not known. Reported: issue 45.9."""
    section = {"scale": "none", "multi_objective_aggregation": "normalize_then_sum"}
    given = {"grpo": section, "run": {"dir": str(tmp_path / "runs")}, "model": {"name": str(tmp_path / "none")}}
    with pytest.raises(ModelError):
        run(GRPORecipe.model_validate(given))
    assert "grpo.scale: is none, which has no effect: " in caplog.text


def test_a_config_of_trl_is_converted_without_what_has_no_effect() -> None:
    """TRL's config has `lr_scheduler_kwargs` and LoRA's alpha beside anything. Reported: issue 45.9."""
    config = {"model_name_or_path": "smollm2", "dataset_name": "a/b", "save_strategy": "no", "save_total_limit": 7}
    converted = convert(config, "sft")
    assert converted.recipe.run.keep_checkpoints == 2
    assert "run.checkpoint_every is 0" in converted.not_possible["run.keep_checkpoints"]


@pytest.mark.parametrize("key", ["grpo.clip_high", "grpo.clip_low", "grpo.dual_clip", "ppo.clip_high", "ppo.surrogate"])
def test_clips_of_a_single_update_are_a_warning(key: str, caplog: pytest.LogCaptureFixture) -> None:
    """DAPO's `clip_high` with one update for each rollout, as TRL's defaults are, does nothing. Reported: issue
    45.9."""
    value = {"clip_high": 0.28, "clip_low": 0.1, "dual_clip": 3.0, "surrogate": "cispo"}[key.partition(".")[2]]
    given = {key: value, **({"ppo.num_epochs": 1} if key.startswith("ppo") else {})}
    load_recipe(key.partition(".")[0], overrides=given)
    assert f"{key}: is {value}, which has no effect: " in caplog.text
    assert "the ratio to the old policy is 1" in caplog.text
