"""Configs of TRL's command line as recipes: each field of its GRPO, DPO, SFT and Reward trainers is followed, is not
needed, or is not possible; `trl_fields.yaml` lists them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, get_args

from tunesmith.base.config.algorithms.dpo import REFERENCE_FREE, DirectLoss
from tunesmith.base.config.effects import ineffective
from tunesmith.base.config.keys import did_you_mean
from tunesmith.base.config.load import load_recipe
from tunesmith.base.config.recipe import Recipe
from tunesmith.base.config.yaml_text import parse
from tunesmith.base.core.errors import ConfigError

ALGORITHMS = ("grpo", "dpo", "sft", "reward")

SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "warmup_stable_decay",
}
"""Our name of each learning-rate schedule of transformers that we have."""

_NORMALIZATIONS = {
    "grpo": "sequence",
    "dr_grpo": "constant",
    "dapo": "token",
    "bnpo": "micro_batch",
    "cispo": "token",
    "sapo": "sequence",
}
_IMPORTANCE = {f"{level}_{mode}": (level, mode) for level in ("token", "sequence") for mode in ("truncate", "mask")}
_TRACKERS = ("tensorboard", "wandb", "trackio")
_OWN_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
_NO_LIMIT = 1_000_000


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of TRL's configs: those that are followed, by algorithm, with TRL's defaults; why others are not
    needed; and of those that are not possible TRL's default, and what there is instead.
    """

    followed: Mapping[str, Mapping[str, object]]
    not_needed: Mapping[str, str]
    not_possible: Mapping[str, tuple[object, str]]


@dataclass(frozen=True, slots=True)
class Converted:
    """A recipe, and for each field that it does not follow why not."""

    recipe: Recipe
    not_needed: Mapping[str, str]
    not_possible: Mapping[str, str]


@cache
def fields() -> Fields:
    """The table of TRL's fields."""
    text = resources.files("tunesmith.base.config").joinpath("trl_fields.yaml").read_text(encoding="utf-8")
    data: Any = parse(text, "trl_fields.yaml").data
    followed = data["followed"]
    return Fields(
        {name: {**followed["common"], **followed[name]} for name in ALGORITHMS},
        {name: reason for reason, names in data["not_needed"].items() for name in names.split()},
        {name: (default, instead) for name, (default, instead) in data["not_possible"].items()},
    )


def algorithm_of(given: Mapping[str, object]) -> str:
    """The algorithm whose trainer alone has some of the fields. Raises ConfigError if that says nothing."""
    tables = fields().followed
    scores = {name: len(given.keys() & tables[name].keys()) for name in ALGORITHMS}
    best = [name for name, score in scores.items() if score == max(scores.values())]
    if len(best) != 1:
        raise ConfigError(f"the config does not say for which trainer it is; add --algorithm {' | '.join(best)}")
    return best[0]


def convert(given: Mapping[str, object], algorithm: str) -> Converted:
    """A TRL config for `algorithm` as a recipe.

    Raises:
        ConfigError: for a field that no such config has, and for a value that no recipe can express.
    """
    table = fields()
    followed = table.followed[algorithm]
    known = {*followed, *table.not_needed, *table.not_possible}
    unknown = sorted(given.keys() - known)
    if unknown:
        what = f"no field of TRL's {algorithm} config"
        raise ConfigError(*(f"{name}: {what}{did_you_mean(name, known)}" for name in unknown))
    not_needed = {name: table.not_needed[name] for name in given if name in table.not_needed}
    not_possible = {
        name: table.not_possible[name][1]
        for name, value in given.items()
        if name in table.not_possible and (value or None) != (table.not_possible[name][0] or None)
    }
    complete = {**followed, **{name: value for name, value in given.items() if value is not None}}
    conversion = _Conversion(algorithm, complete, not_possible)
    origins = dict.fromkeys(conversion.keys, "the TRL config")
    resolved = load_recipe(algorithm, overrides=conversion.keys, origins=origins)
    found = [one.problem for one in ineffective(resolved.recipe, resolved.provenance) if not one.warns]
    idle = {one.path: one.message for one in found if one.path in origins}
    if idle:  # a recipe would be refused with them
        kept = {path: value for path, value in conversion.keys.items() if path not in idle}
        resolved = load_recipe(algorithm, overrides=kept, origins=origins)
        defaults = _Conversion(algorithm, dict(followed), {}).keys  # what TRL sets by itself is not worth a word
        idle = {path: message for path, message in idle.items() if conversion.keys[path] != defaults.get(path)}
    return Converted(resolved.recipe, not_needed, {**not_possible, **idle})


class _Conversion:
    """The keys of the recipe for a config, which is complete with TRL's defaults.

    `notes` takes what they do not follow.
    """

    def __init__(self, algorithm: str, f: Mapping[str, Any], notes: dict[str, str]) -> None:
        self.algorithm, self.f, self.notes = algorithm, f, notes
        self.micro: int = f["per_device_train_batch_size"]
        self.batch = self.micro * f["gradient_accumulation_steps"]
        self.updates = 1  # optimizer steps, which TRL counts, in one step of ours
        own = {"grpo": self._grpo, "dpo": self._dpo, "sft": self._sft, "reward": self._reward}[algorithm]()
        every = {**own, **self._model(), **self._optimizer(), **self._run()}
        self.keys = {path: value for path, value in every.items() if value is not None}

    def _pick(self, name: str, choices: Mapping[Any, object]) -> Any:
        if self.f[name] not in choices:
            allowed = ", ".join(map(str, choices))
            raise ConfigError(f"{name} is {self.f[name]!r}, which is not possible; allowed: {allowed}")
        return choices[self.f[name]]

    def _steps(self, name: str) -> int:
        """A number of optimizer steps as one of our steps."""
        if 0 < self.f[name] < 1:
            raise ConfigError(f"{name} is {self.f[name]}, a share of all steps; give a number of steps")
        return max(1, math.ceil(self.f[name] / self.updates))

    def _model(self) -> dict[str, object]:
        f = self.f
        keys: dict[str, object] = {
            "model.name": f["model_name_or_path"],
            "model.dtype": f["dtype"] or ("bfloat16" if f["bf16"] else "float16" if f["fp16"] else None),
            "model.trust_remote_code": f["trust_remote_code"],
            "model.gradient_checkpointing": bool(f["gradient_checkpointing"] or f["activation_checkpointing"]),
        }
        if not f["model_name_or_path"]:
            self.notes["model_name_or_path"] = "the config names no model; set `model`"
        if f["use_peft"]:
            targets = f["lora_target_modules"] or ["q_proj", "v_proj"]
            dropout = f["lora_dropout"]
            if self.algorithm == "grpo" and dropout:
                dropout, self.notes["lora_dropout"] = 0.0, "it is 0, because ratios compare two passes"
            keys |= {
                **{"model.lora.rank": f["lora_r"], "model.lora.alpha": f["lora_alpha"], "model.lora.dropout": dropout},
                **{"model.lora.use_rslora": f["use_rslora"], "model.lora.use_dora": f["use_dora"]},
                "model.lora.target_modules": [targets] if isinstance(targets, str) else targets,
            }
        return keys

    def _optimizer(self) -> dict[str, object]:
        f, warmup = self.f, self.f["warmup_steps"]
        if 0 < warmup < 1 and f["max_steps"] <= 0:
            warmup, self.notes["warmup_steps"] = 0, "a share needs `max_steps`; set `optimizer.warmup_steps`"
        if not str(f["optim"]).startswith("adamw"):
            raise ConfigError(f"optim is {f['optim']!r}, which is not possible; the optimizer is AdamW")
        return {
            "optimizer.learning_rate": f["learning_rate"],
            "optimizer.betas": [f["adam_beta1"], f["adam_beta2"]],
            "optimizer.eps": f["adam_epsilon"],
            "optimizer.weight_decay": f["weight_decay"],
            "optimizer.max_grad_norm": f["max_grad_norm"] or 1e9,  # 0 is off
            "optimizer.warmup_steps": math.ceil(warmup * f["max_steps"]) if 0 < warmup < 1 else int(warmup),
            "optimizer.schedule": self._pick("lr_scheduler_type", SCHEDULES),
            "optimizer.state": "int8" if "8bit" in str(f["optim"]) else "float32",
            **({"optimizer.head_learning_rate": f["learning_rate"]} if self.algorithm == "reward" else {}),
        }

    def _run(self) -> dict[str, object]:
        f = self.f
        trackers = [f["report_to"]] if isinstance(f["report_to"], str) else list(f["report_to"])
        if set(trackers) - {*_TRACKERS, "none"}:
            self.notes["report_to"] = f"trackers are {', '.join(_TRACKERS)}"
        evaluates = self._pick("eval_strategy", {"no": False, "steps": True})
        saves = self._pick("save_strategy", {"no": False, "steps": True})
        return {
            **{"run.dir": f["output_dir"], "run.name": f["run_name"], "run.seed": f["seed"]},
            "run.steps": self._steps("max_steps") if f["max_steps"] > 0 else None,
            "run.log_every": self._steps("logging_steps"),
            "run.checkpoint_every": self._steps("save_steps") if saves else 0,
            "run.keep_checkpoints": f["save_total_limit"],
            "run.eval_every": self._steps("eval_steps" if f["eval_steps"] else "logging_steps") if evaluates else 0,
            "run.report_to": [name for name in trackers if name in _TRACKERS],
        }

    def _data(self, section: str) -> dict[str, object]:
        """The source of rows, and that of held-out rows if they are evaluated."""
        f, mixture = self.f, self.f["datasets"] or [{"path": self.f["dataset_name"], "name": self.f["dataset_config"]}]
        if len(mixture) > 1 or mixture[0].keys() - {"path", "name", "split"}:
            raise ConfigError("datasets: one with `path`, `name` and `split` is possible; write others to a file")
        path, config = mixture[0]["path"], mixture[0].get("name")
        if not path:
            self.notes["dataset_name"] = f"the config names no data; set `{section}.source`"
            return {}
        source = f"{path}/{config}" if config else str(path)
        holds_out = f["eval_strategy"] == "steps" and not f["test_split_size"]
        return {
            f"{section}.source": f"{source}:{mixture[0].get('split', f['dataset_train_split'])}",
            f"{section}.heldout_source": f"{source}:{f['dataset_test_split']}" if holds_out else "",
            f"{section}.heldout_fraction": f["test_split_size"] or 0.0,
        }

    def _epochs(self) -> int:
        epochs = self.f["num_train_epochs"]
        if epochs != int(epochs) and self.f["max_steps"] <= 0:
            self.notes["num_train_epochs"] = "epochs are whole; set `run.steps`"
        return max(1, round(epochs))

    def _pairs(self) -> dict[str, object]:
        return {**self._data("pairs"), "pairs.max_tokens": self.f["max_length"] or _NO_LIMIT, "pairs.skip_bad": True}

    def _reward(self) -> dict[str, object]:
        return {
            **self._pairs(),
            "reward_model.num_epochs": self._epochs(),
            "reward_model.pairs_per_step": self.batch,
            "reward_model.micro_batch_size": self.micro,
            "reward_model.center_coef": self.f["center_rewards_coefficient"],
        }

    def _dpo(self) -> dict[str, object]:
        f, losses = self.f, self.f["loss_type"]
        loss = losses if isinstance(losses, str) else "+".join(losses)
        known = sorted({*get_args(DirectLoss)} - {*REFERENCE_FREE, "kto"})  # under TRL's names
        if loss not in known:
            raise ConfigError(f"loss_type is {loss}, which is not possible; allowed: {', '.join(known)}")
        if f["truncation_mode"] == "keep_start":
            self.notes["truncation_mode"] = "rows longer than `max_length` are left out, not cut at their end"
        return {
            **self._pairs(),
            "pairs.truncate": "left" if f["truncation_mode"] == "keep_end" else "none",
            **{"dpo.loss": loss, "dpo.beta": f["beta"], "dpo.label_smoothing": f["label_smoothing"]},
            "dpo.discopop_tau": f["discopop_tau"],
            **{"dpo.pairs_per_step": self.batch, "dpo.micro_batch_size": self.micro, "dpo.num_epochs": self._epochs()},
        }

    def _sft(self) -> dict[str, object]:
        f, limit = self.f, self.f["max_length"] or _NO_LIMIT
        self._pick("loss_type", {"nll": None})
        if f["completion_only_loss"] is None and not f["assistant_only_loss"]:
            self.notes["assistant_only_loss"] = (
                "of `messages` the assistant's turns are learnt; `demonstrations.loss_on: all` learns all tokens"
            )
        return {
            **self._data("demonstrations"),
            "demonstrations.max_tokens": limit,
            "demonstrations.truncate": self._pick("truncation_mode", {"keep_start": "right"}),
            "demonstrations.loss_on": "all" if f["completion_only_loss"] is False else "assistant",
            "sft.demonstrations_per_step": self.batch,
            "sft.micro_batch_tokens": self.micro * min(limit, 4096),
            "sft.num_epochs": self._epochs(),
        }

    def _grpo(self) -> dict[str, object]:
        f, group = self.f, self.f["num_generations"]
        per_draw = f["steps_per_generation"] or f["gradient_accumulation_steps"]
        drawn = f["generation_batch_size"] or self.micro * per_draw
        if drawn % group or drawn % self.batch:
            raise ConfigError(
                f"{drawn} completions are drawn at a time, which must be a multiple of num_generations, {group}, and "
                f"of the {self.batch} of an update"
            )
        self.updates = drawn // self.batch * f["num_iterations"]
        if f["max_steps"] <= 0:
            self.notes["num_train_epochs"] = "set `run.steps`: epochs * rows / rollout.prompts_per_step; 100 without"
        is_cispo = f["loss_type"] == "cispo"
        high = f["epsilon"] if f["epsilon_high"] is None else f["epsilon_high"]
        same = [
            "entropy_coef",
            "importance_sampling_level",
            "mask_truncated_completions",
            "multi_objective_aggregation",
        ]
        drawing = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"]
        scales = {"group": "group", "batch": "batch", "none": "none", True: "group", False: "none"}
        return {
            **self._data("prompts"),
            "reward": self._rewards(),
            **{"rollout.prompts_per_step": drawn // group, "rollout.completions_per_prompt": group},
            "rollout.max_new_tokens": f["max_completion_length"],
            **{f"rollout.{name}": f[name] for name in drawing},
            **(self._vllm() if f["use_vllm"] else {}),
            **{f"grpo.{name}": f[name] for name in same},
            **{"grpo.num_epochs": f["num_iterations"], "grpo.num_minibatches": drawn // self.batch},
            "grpo.micro_batch_size": self.micro,
            "grpo.surrogate": f["loss_type"] if f["loss_type"] in ("cispo", "sapo") else "clip",
            "grpo.loss_normalization": self._pick("loss_type", _NORMALIZATIONS),
            "grpo.clip_low": f["epsilon"],
            "grpo.clip_high": high - 1 if is_cispo else high,  # of CISPO, TRL bounds the ratio itself
            "grpo.dual_clip": f["delta"],
            "grpo.temperature_positive": f["sapo_temperature_pos"],
            "grpo.temperature_negative": f["sapo_temperature_neg"],
            "grpo.top_entropy_share": f["top_entropy_quantile"],
            "grpo.off_policy_mask": f["off_policy_mask_threshold"],
            "grpo.scale": self._pick("scale_rewards", scales),
            **{"grpo.kl.coef": f["beta"], "grpo.kl.bias_correction": f["use_bias_correction_kl"]},
        }

    def _vllm(self) -> dict[str, object]:
        f = self.f
        level, mode = self._pick("vllm_importance_sampling_mode", _IMPORTANCE)
        cap = f["vllm_importance_sampling_cap"] or f["vllm_importance_sampling_clip_max"]
        options = {
            "gpu_memory_utilization": f["vllm_gpu_memory_utilization"],
            "tensor_parallel_size": f["vllm_tensor_parallel_size"],
            "model_impl": f["vllm_model_impl"],
            "max_model_len": f["vllm_max_model_length"],
        }
        host = "localhost" if f["vllm_server_host"] == "0.0.0.0" else f["vllm_server_host"]
        server = {
            "rollout.server_url": f["vllm_server_base_url"] or f"http://{host}:{f['vllm_server_port']}",
            "rollout.server_timeout_s": f["vllm_server_timeout"],
        }
        colocated = {"rollout.vllm_options": {name: value for name, value in options.items() if value is not None}}
        return {
            "rollout.backend": "vllm",
            **self._pick("vllm_mode", {"server": server, "colocate": colocated}),
            "rollout.importance.mode": mode if f["vllm_importance_sampling_correction"] else "off",
            "rollout.importance.level": level,
            "rollout.importance.cap": _NO_LIMIT if cap is None else cap,
            "rollout.importance.floor": f["vllm_importance_sampling_clip_min"] or 0.0,
        }

    def _rewards(self) -> list[dict[str, object]] | None:
        f = self.f
        names: list[object] = f["reward_funcs"] or []
        rewards: list[dict[str, object]] = []
        if f["reward_model_name_or_path"]:
            rewards.append({"source": f["reward_model_name_or_path"]})
        for name in names:
            module, _, function = str(name).rpartition(".")
            if name == "get_soft_overlong_punishment":
                arguments = {"max_completion_len": 1280, "soft_punish_cache": 256}  # the numbers of TRL's script
                rewards.append({"source": "overlong", "arguments": arguments})
            elif module or name in _OWN_REWARDS:
                rewards.append({"source": f"{module or 'trl.rewards'}:{function}"})
            else:
                raise ConfigError(f"reward_funcs: {name!r} is no dotted path, nor one of {', '.join(_OWN_REWARDS)}")
        if not rewards:
            self.notes["reward_funcs"] = "the config names no reward; set `reward`"
            return None
        weights: Sequence[float] = f["reward_weights"] or [1.0] * len(rewards)
        if len(weights) != len(rewards):
            raise ConfigError(f"reward_weights has {len(weights)} numbers for {len(rewards)} rewards")
        return [{**reward, "weight": weight} for reward, weight in zip(rewards, weights, strict=True)]
