"""Memory of a run by part, and the work of a step in floating-point operations.

Both follow from the number of parameters N: a forward pass costs 2 N operations a token, a backward pass twice that
(Kaplan et al. 2020, section 2.1). Activations are counted for the layers that are trained.
"""

from dataclasses import dataclass

import psutil
import torch

from tunesmith.config.schema import Recipe, SamplingRecipe
from tunesmith.models.loaded import PreTrainedModel
from tunesmith.models.lora import has_adapters
from tunesmith.models.optimizer import moment_bytes
from tunesmith.profiling.peak import matmul_flop_per_s
from tunesmith.reports.text import duration
from tunesmith.trainers.setup import say

# Sequences at which drawing a token takes twice as long as scoring one: with fewer, matrices are narrow. Measured on
# two CPU cores; vLLM is taken to be like the native engine.
_ROWS_FOR_HALF_SPEED = {"native": 20, "transformers": 160, "vllm": 20}

# Share of the matrix-product rate that a whole pass reaches; norms, attention and Python take the rest. Measured on
# two CPU cores.
_EFFICIENCY = 0.6


@dataclass(frozen=True, slots=True)
class Estimate:
    """Memory in GB (1e9 bytes) by part, floating-point operations of one step, and their dtype."""

    num_parameters: int
    num_trained: int
    memory_gb: dict[str, float]
    step_flop: float
    dtype: torch.dtype

    @property
    def total_gb(self) -> float:
        """Sum of all parts."""
        return sum(self.memory_gb.values())

    @property
    def stage_gb(self) -> dict[str, float]:
        """Peak memory of each stage in GB; the engine keeps its cache and packed weights during the update."""
        drawing = {"rollout": self.total_gb - self.memory_gb["activations"] - self.memory_gb.get("logits", 0.0)}
        return {**(drawing if "cache" in self.memory_gb else {}), "update": self.total_gb}

    def flop(self, num_positions: float, num_trained_positions: float) -> float:
        """Operations of forward passes over `num_positions`, and of backward passes over `num_trained_positions`."""
        return 2 * self.num_parameters * num_positions + 4 * self.num_trained * num_trained_positions


def training_estimate(
    model: PreTrainedModel,
    cfg: Recipe,
    *,
    step_tokens: int,
    micro_tokens: int,
    logit_tokens: int | None = None,
    num_passes: int = 0,
    holds_reference: bool | None = None,
) -> Estimate:
    """Estimate for an algorithm that learns from given rows: `step_tokens` a step, `micro_tokens` a micro-batch.

    `logit_tokens` counts the float32 rows of logits that exist at a time, `num_passes` the forward passes besides the
    one that is trained, of the reference for example. None: the algorithm has no logits, or no reference.
    """
    num_all, num_trained = model.num_parameters(), _num_trained(model)
    memory = {
        "weights": num_all * model.dtype.itemsize,
        "optimizer": _optimizer_bytes(model, num_trained, cfg),
        "activations": _activation_bytes(model, micro_tokens, cfg.model.gradient_checkpointing),
    }
    if holds_reference is not None:
        memory["reference"] = num_all * model.dtype.itemsize * holds_reference
    if logit_tokens is not None:
        memory["logits"] = 4 * logit_tokens * model.config.get_text_config().vocab_size
    flop = step_tokens * (2 * num_all * (1 + num_passes) + 4 * num_trained)
    return Estimate(num_all, num_trained, _in_gb(memory), flop, model.dtype)


def policy_estimate(
    model: PreTrainedModel,
    cfg: SamplingRecipe,
    *,
    prompt_tokens: float,
    num_epochs: int,
    micro_batch_size: int,
    num_reward_models: int,
    has_reference: bool,
    has_own_critic: bool = False,
) -> Estimate:
    """Estimate for an algorithm that draws completions of prompts of `prompt_tokens` on average, and makes
    `num_epochs` passes over them.

    Reward models are assumed to have the policy's size.
    """
    num_all, num_trained = model.num_parameters(), _num_trained(model)
    num_sequences = cfg.rollout.prompts_per_step * cfg.rollout.completions_per_prompt
    micro_batch_size = min(micro_batch_size, num_sequences)
    drawn = num_sequences * cfg.rollout.max_new_tokens
    width = int(cfg.rollout.max_new_tokens + prompt_tokens)
    scored = num_sequences * width
    in_batches = cfg.rollout.backend == "transformers"
    rows = min(num_sequences, cfg.rollout.batch_size if in_batches else cfg.rollout.num_slots)
    slowdown = 1 + _ROWS_FOR_HALF_SPEED[cfg.rollout.backend] / rows
    num_passes = 1 + has_reference + num_reward_models + has_own_critic
    training = num_epochs * (2 * num_all + 4 * num_trained) * (1 + has_own_critic)
    flop = 2 * num_all * (drawn * slowdown + scored * num_passes) + scored * training
    weight_bytes = num_all * model.dtype.itemsize
    num_bases = not has_adapters(model)  # models with adapters share one base
    logit_rows = micro_batch_size * cfg.rollout.max_new_tokens
    memory = {
        "weights": weight_bytes * (1 + has_own_critic * num_bases),
        "optimizer": _optimizer_bytes(model, num_trained, cfg) * (1 + has_own_critic),
        "reference": weight_bytes * has_reference * num_bases,
        "reward models": weight_bytes * num_reward_models,
        "activations": _activation_bytes(model, micro_batch_size * width, cfg.model.gradient_checkpointing),
        "logits": 2 * 4 * logit_rows * model.config.get_text_config().vocab_size,
        "cache": _cache_bytes(model, rows * width),
        "packed weights": weight_bytes * (cfg.rollout.backend == "native"),
    }
    return Estimate(num_all, num_trained, _in_gb(memory), flop, model.dtype)


def announce(estimate: Estimate, num_steps: int, enabled: bool, device: torch.device) -> None:
    """Print to stderr whether the run fits into the memory of `device`, and about how long it takes there."""
    if not enabled:
        return
    is_gpu = device.type == "cuda"
    available_gb = (torch.cuda.mem_get_info(device)[0] if is_gpu else psutil.virtual_memory().available) / 1e9
    parts = ", ".join(f"{name} {gb:.1f}" for name, gb in estimate.memory_gb.items() if gb >= 0.05)
    fit = "fits" if estimate.total_gb < available_gb else "MAY NOT FIT: lower micro_batch_size, or train fewer layers"
    say(f"memory: about {estimate.total_gb:.1f} GB of {available_gb:.1f} GB available, {fit} ({parts})", enabled=True)
    stages = ", ".join(f"{stage} {gb:.1f}" for stage, gb in estimate.stage_gb.items())
    say(f"memory by stage, in GB: {stages}", enabled=True)
    seconds = seconds_of(estimate, num_steps, device)
    say(f"time: about {duration(seconds)} for {num_steps} steps, by a short measurement of this machine", enabled=True)


def seconds_of(estimate: Estimate, num_steps: int, device: torch.device) -> float:
    """About how long `num_steps` take on `device`, by a short measurement of it."""
    return max(1.0, num_steps * estimate.step_flop / (matmul_flop_per_s(estimate.dtype, device) * _EFFICIENCY))


def _num_trained(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _optimizer_bytes(model: PreTrainedModel, num_trained: int, cfg: Recipe) -> int:
    """Two moments and a float32 gradient, and a float32 master for 16-bit weights."""
    return moment_bytes(num_trained, cfg.optimizer) + num_trained * (4 if model.dtype.itemsize == 4 else 8)


def _activation_bytes(model: PreTrainedModel, num_tokens: int, checkpointed: bool) -> int:
    """About 34 values a token, layer and hidden unit (Korthikanti et al. 2022, eq. 1); with checkpointing one."""
    config = model.config.get_text_config()
    share = _num_trained(model) / max(1, model.num_parameters())
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
