"""What a run will need: memory by part, and the work of a step in floating-point operations.

Counts follow from the number of parameters N: a forward pass costs 2 N operations a token, a backward pass twice that
(Kaplan et al. 2020, section 2.1). Activations are counted for the layers that are trained.
"""

import time
from dataclasses import dataclass

import psutil
import torch

from tunesmith.config.schema import DPORecipe, PolicyRecipe, PPORecipe, RewardRecipe, SFTRecipe
from tunesmith.config.sections import OptimizerSection
from tunesmith.data.sets import DirectSets
from tunesmith.models.load import count_parameters
from tunesmith.models.loaded import PreTrainedModel
from tunesmith.models.lora import has_adapters
from tunesmith.models.optimizer import moment_bytes
from tunesmith.trainers.setup import say

_ROWS_FOR_HALF_SPEED = {"native": 20, "transformers": 160}
"""Drawing tokens for this many sequences at a time takes twice as long as scoring them: narrow matrices, a growing
cache. Fewer sequences take longer in proportion. Measured on two CPU cores.
"""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Memory in GB (1e9 bytes) by part, operations of one step, and the dtype that they are done in."""

    num_parameters: int
    memory_gb: dict[str, float]
    step_flop: float
    dtype: torch.dtype

    @property
    def total_gb(self) -> float:
        """Sum of all parts."""
        return sum(self.memory_gb.values())


def policy_estimate(
    model: PreTrainedModel, cfg: PolicyRecipe, *, prompt_tokens: float, num_reward_models: int
) -> Estimate:
    """Estimate for a run of PPO or GRPO on `model` with prompts of `prompt_tokens` on average.

    Reward models are taken to be of the policy's size.
    """
    num_all, num_trained = count_parameters(model), _num_trained(model)
    num_sequences = cfg.rollout.prompts_per_step * cfg.rollout.completions_per_prompt
    drawn = num_sequences * cfg.rollout.max_new_tokens
    width = int(cfg.rollout.max_new_tokens + prompt_tokens)
    scored = num_sequences * width
    section = cfg.ppo if isinstance(cfg, PPORecipe) else cfg.grpo
    has_reference = section.kl.coef > 0
    is_separate = isinstance(cfg, PPORecipe) and cfg.ppo.critic == "separate"
    is_native = cfg.rollout.backend == "native"
    rows = min(num_sequences, cfg.rollout.num_slots if is_native else cfg.rollout.batch_size)
    slowdown = 1 + _ROWS_FOR_HALF_SPEED[cfg.rollout.backend] / rows
    passes = 1 + has_reference + num_reward_models + is_separate
    training = section.num_epochs * (2 * num_all + 4 * num_trained) * (1 + is_separate)
    flop = 2 * num_all * (drawn * slowdown + scored * passes) + scored * training
    weight_bytes = num_all * model.dtype.itemsize
    num_bases = not has_adapters(model)  # under adapters all share one
    memory = {
        "weights": weight_bytes * (1 + is_separate * num_bases),
        "optimizer": _optimizer_bytes(model, num_trained, cfg.optimizer) * (1 + is_separate),
        "reference": weight_bytes * has_reference * num_bases,
        "reward models": weight_bytes * num_reward_models,
        "activations": _activation_bytes(model, section.micro_batch_size * width, cfg.model.gradient_checkpointing),
        "logits": 2
        * 4
        * section.micro_batch_size
        * cfg.rollout.max_new_tokens
        * model.config.get_text_config().vocab_size,
        "cache": _cache_bytes(model, rows * width),
        "packed weights": weight_bytes * is_native,
    }
    return Estimate(num_all, _in_gb(memory), flop, model.dtype)


def reward_estimate(model: PreTrainedModel, cfg: RewardRecipe, *, pair_tokens: float) -> Estimate:
    """Estimate for a reward-model run on `model` with pairs of `pair_tokens` on average, both sides together."""
    num_all, num_trained = count_parameters(model), _num_trained(model)
    tokens = int(cfg.reward_model.pairs_per_step * pair_tokens)
    micro_tokens = int(cfg.reward_model.micro_batch_size * pair_tokens)
    memory = {
        "weights": num_all * model.dtype.itemsize,
        "optimizer": _optimizer_bytes(model, num_trained, cfg.optimizer),
        "activations": _activation_bytes(model, micro_tokens, cfg.model.gradient_checkpointing),
    }
    return Estimate(num_all, _in_gb(memory), tokens * (2 * num_all + 4 * num_trained), model.dtype)


def sft_estimate(model: PreTrainedModel, cfg: SFTRecipe, *, mean_tokens: float) -> Estimate:
    """Estimate for supervised fine-tuning of `model` on demonstrations of `mean_tokens` on average."""
    num_all, num_trained = count_parameters(model), _num_trained(model)
    tokens = int(cfg.sft.demonstrations_per_step * mean_tokens)
    micro_tokens = max(min(tokens, cfg.sft.micro_batch_tokens), int(mean_tokens))
    memory = {
        "weights": num_all * model.dtype.itemsize,
        "optimizer": _optimizer_bytes(model, num_trained, cfg.optimizer),
        "activations": _activation_bytes(model, micro_tokens, cfg.model.gradient_checkpointing),
        "logits": 4 * micro_tokens * model.config.get_text_config().vocab_size,
    }
    return Estimate(num_all, _in_gb(memory), tokens * (2 * num_all + 4 * num_trained), model.dtype)


def direct_estimate(model: PreTrainedModel, cfg: DPORecipe, data: DirectSets) -> Estimate:
    """Estimate for learning from the preferences `data` directly, each distinct completion computed once in an epoch. A
    pass for precomputed log-probs of the reference is shared out over the steps of an epoch.
    """
    num_all, num_trained = count_parameters(model), _num_trained(model)
    asked = [data.answers[place] for place in {place for unit in data.train for place in unit.answers}]
    scale = 1 / len(data.train)
    completion_tokens = scale * sum(len(answer.completion_ids) for answer in asked)
    pair_tokens = completion_tokens + scale * sum(len(answer.prompt_ids) for answer in asked)
    passes = cfg.dpo.needs_reference * (2 if cfg.dpo.loss == "kto" else 1) + (cfg.dpo.loss == "kto")
    is_live = cfg.dpo.needs_reference and cfg.dpo.reference == "live"
    micro_tokens = int(cfg.dpo.micro_batch_size * pair_tokens)
    micro_logits = int(cfg.dpo.micro_batch_size * completion_tokens) * model.config.get_text_config().vocab_size
    memory = {
        "weights": num_all * model.dtype.itemsize,
        "optimizer": _optimizer_bytes(model, num_trained, cfg.optimizer),
        "reference": num_all * model.dtype.itemsize * is_live,
        "activations": _activation_bytes(model, micro_tokens, cfg.model.gradient_checkpointing),
        "logits": 2 * 4 * micro_logits,
    }
    flop = int(cfg.dpo.pairs_per_step * pair_tokens) * (2 * num_all * (1 + passes) + 4 * num_trained)
    return Estimate(num_all, _in_gb(memory), flop, model.dtype)


def announce(estimate: Estimate, num_steps: int, enabled: bool) -> None:
    """Say on stderr, before the first step, whether the run fits into memory and about how long it takes."""
    if not enabled:
        return
    available_gb = psutil.virtual_memory().available / 1e9
    parts = ", ".join(f"{name} {gb:.1f}" for name, gb in estimate.memory_gb.items() if gb >= 0.05)
    fit = "fits" if estimate.total_gb < available_gb else "MAY NOT FIT: lower micro_batch_size, or train fewer layers"
    say(f"memory: about {estimate.total_gb:.1f} GB of {available_gb:.1f} GB available, {fit} ({parts})", enabled=True)
    seconds = num_steps * estimate.step_flop / (_matmul_flop_per_s(estimate.dtype) * _EFFICIENCY)
    say(f"time: about {_duration(seconds)} for {num_steps} steps, by a short measurement of this machine", enabled=True)


_EFFICIENCY = 0.6
"""Share of the matrix rate that a whole pass reaches: norms, attention and Python take the rest. Measured on two CPU
cores.
"""


def _matmul_flop_per_s(dtype: torch.dtype) -> float:
    """Rate of a matrix product of the kind that dominates a pass, best of a few tries of milliseconds each."""
    rows, inner, columns = 512, 576, 1536
    left, right = torch.randn(rows, inner, dtype=dtype), torch.randn(inner, columns, dtype=dtype)
    best_s = float("inf")
    for _ in range(8):
        start_s = time.perf_counter()
        torch.mm(left, right)
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2 * rows * inner * columns / best_s


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds))} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _num_trained(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _optimizer_bytes(model: PreTrainedModel, num_trained: int, section: OptimizerSection) -> int:
    """Two moments and a float32 gradient, and a float32 master for 16-bit weights."""
    return moment_bytes(num_trained, section) + num_trained * (4 if model.dtype.itemsize == 4 else 8)


def _activation_bytes(model: PreTrainedModel, num_tokens: int, checkpointed: bool) -> int:
    """About 34 values a token, layer and hidden unit (Korthikanti et al. 2022, eq. 1); with checkpointing one."""
    config = model.config.get_text_config()
    share = _num_trained(model) / max(1, count_parameters(model))
    per_layer = 2 if checkpointed else 34
    return int(
        num_tokens * config.num_hidden_layers * config.hidden_size * per_layer * model.dtype.itemsize / 2 * share
    )


def _cache_bytes(model: PreTrainedModel, num_tokens: int) -> int:
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * num_tokens * config.num_hidden_layers * heads * head_dim * model.dtype.itemsize


def _in_gb(parts: dict[str, int]) -> dict[str, float]:
    return {name: num_bytes / 1e9 for name, num_bytes in parts.items()}
