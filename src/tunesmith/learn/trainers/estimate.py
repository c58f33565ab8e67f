"""Memory of a run by part, and its work. Activations are counted for the layers that are trained."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tunesmith.base.config.recipe import Recipe, SamplingRecipe
from tunesmith.base.config.schema import SPECS
from tunesmith.base.config.spec import Passes
from tunesmith.engine.models.int8_base import has_int8_base
from tunesmith.engine.models.loaded import PreTrainedModel, layers_of
from tunesmith.engine.models.lora import has_adapters
from tunesmith.engine.models.optimizer import moment_bytes
from tunesmith.learn.trainers.setup import say
from tunesmith.learn.trainers.work import Rows, RunWork, Work
from tunesmith.observe.planning.workload import INT8_BYTES
from tunesmith.observe.profiling.meter import available_gb
from tunesmith.observe.reports.text import memory_size

_END_S, _GB_PER_S = 1.5, 0.4
"""Seconds of a report and the end of the process, and the rate at which weights reach a disk; of two CPU cores."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Memory in GB (1e9 bytes) by part, dtype of the weights, and the work of the run.

    Of its parameters and of the trained ones `num_read` are rows of an input embedding that no product has: those of a
    model whose output layer, if it has one, has weights of its own.
    """

    num_parameters: int
    num_trained: int
    memory_gb: dict[str, float]
    dtype: torch.dtype
    work: RunWork
    num_read: tuple[int, int] = (0, 0)

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
        """Operations of forward passes over `num_positions`, and of backward passes over `num_trained_positions`: 2 a
        token and parameter of a product, and twice as many backward (Kaplan et al. 2020, section 2.1).
        """
        multiplied, trained = self.num_parameters - self.num_read[0], self.num_trained - self.num_read[1]
        return 2 * multiplied * num_positions + 4 * trained * num_trained_positions


def training_estimate(
    model: PreTrainedModel,
    cfg: Recipe,
    work: RunWork,
    *,
    micro_tokens: float,
    logit_tokens: float | None = None,
    holds_reference: bool | None = None,
) -> Estimate:
    """Estimate for an algorithm that learns from given rows, `micro_tokens` in a micro-batch.

    `logit_tokens` counts the float32 rows of logits that exist at a time. None: the algorithm has no logits, or no
    reference.
    """
    num_all, num_trained = model.num_parameters(), _num_trained(model)
    weight_bytes = _weight_bytes(model)
    memory = {
        "weights": weight_bytes,
        "optimizer": _optimizer_bytes(model, num_trained, cfg),
        "activations": _activation_bytes(model, int(micro_tokens), cfg.model.gradient_checkpointing),
    }
    if holds_reference is not None:
        memory["reference"] = weight_bytes * holds_reference
    if logit_tokens is not None:
        memory["logits"] = 4 * int(logit_tokens) * model.config.get_text_config().vocab_size
    return Estimate(num_all, num_trained, _in_gb(memory), model.dtype, work, _num_read(model))


def policy_estimate(
    model: PreTrainedModel,
    cfg: SamplingRecipe,
    *,
    prompt_tokens: float,
    num_heldout: int = 0,
    reward_parameters: Sequence[int] = (),
    teacher_parameters: Sequence[int] = (),
    demonstration_tokens: float = 0.0,
    trajectory_tokens: tuple[int, int] | None = None,
) -> Estimate:
    """Estimate for an algorithm that draws completions of prompts of `prompt_tokens` on average, and perhaps learns
    demonstrations of `demonstration_tokens`. Completions are taken to be as long as the recipe allows; of a
    trajectory `trajectory_tokens` are its tokens, and those of them that are drawn.

    The other models are given by their numbers of parameters.
    """
    passes = SPECS[cfg.algorithm].passes(cfg)
    num_all, num_trained = model.num_parameters(), _num_trained(model)
    num_sequences = passes.num_rows
    micro_batch_size = min(passes.micro_batch_size, num_sequences)
    num_new, num_drawn = trajectory_tokens or (cfg.max_completion_tokens,) * 2
    width = int(num_new + prompt_tokens)
    in_batches = cfg.rollout.backend == "transformers"
    num_slots = min(num_sequences, cfg.rollout.batch_size if in_batches else cfg.rollout.num_slots)
    has_own_critic = passes.critic == "separate"
    others = sum(reward_parameters) / num_all, sum(teacher_parameters) / num_all
    frozen = 0.0 if passes.num_teachers else _frozen_share(model, cfg.model.num_trainable_layers)
    work = _policy_work(cfg, passes, (prompt_tokens, num_new, num_drawn), num_slots, num_heldout, others, frozen)
    beside = Work(trained=passes.num_demonstrations * demonstration_tokens * passes.num_updates)
    work = replace(work, step=work.step + beside)
    weight_bytes = _weight_bytes(model)
    packed_bytes: float = weight_bytes
    if has_int8_base(model):  # the engine draws with the same memory, and packs the output layer alone
        output: Any = model.get_output_embeddings()
        packed_bytes = output.weight.nbytes
    if cfg.rollout.weights == "int8":
        packed_bytes *= INT8_BYTES / model.dtype.itemsize
    num_bases = not has_adapters(model)  # models with adapters share one base
    logit_rows = micro_batch_size * num_new
    memory = {
        "weights": weight_bytes * (1 + has_own_critic * num_bases),
        "optimizer": _optimizer_bytes(model, num_trained, cfg) * (1 + has_own_critic),
        "reference": weight_bytes * passes.reference * num_bases,
        "reward models": sum(reward_parameters) * model.dtype.itemsize,
        "activations": _activation_bytes(model, micro_batch_size * width, cfg.model.gradient_checkpointing),
        "logits": 2 * 4 * logit_rows * model.config.get_text_config().vocab_size,
        "cache": _cache_bytes(model, num_slots * width),
        "packed weights": packed_bytes * (cfg.rollout.backend == "native"),
    }
    if frozen:
        hidden = model.config.get_text_config().hidden_size
        memory["frozen states"] = num_sequences * width * hidden * model.dtype.itemsize
    if teacher_parameters:
        memory["teachers"] = sum(teacher_parameters) * model.dtype.itemsize
    return Estimate(num_all, num_trained, _in_gb(memory), model.dtype, work, _num_read(model))


def _policy_work(
    cfg: SamplingRecipe,
    passes: Passes,
    tokens: tuple[float, int, int],
    num_slots: int,
    num_heldout: int,
    others: tuple[float, float],
    frozen: float,
) -> RunWork:
    """The work of a run that draws; `tokens` are those of a prompt, of a completion, and of what of it is drawn;
    `others` are the sizes of all reward models and teachers by that of the model,
    `frozen` is the share of a forward pass that is computed once for all passes over a rollout.
    """
    reward_models, teachers = others
    rollout, (prompt_tokens, num_new) = cfg.rollout, tokens[:2]
    num_drawn = tokens[2]
    rows = Rows(prompt_tokens, num_new, rollout.completions_per_prompt)
    step = work_of_step(passes, rows, num_slots, reward_models, teachers, frozen)
    step += Work.drawing(passes.num_rows, num_drawn - num_new, num_slots)  # replies are not drawn
    measured = 1 + reward_models + teachers + (passes.num_teachers > 0)  # the student too
    evaluation = Work.drawing(num_heldout, num_drawn, num_slots) + Work(
        num_heldout * (prompt_tokens + num_new) * measured
    )
    accuracy = getattr(cfg, "evaluation", None)
    once = evaluation if passes.num_teachers else Work()
    if accuracy is not None and accuracy.correct_at is not None:
        num = min(num_heldout, accuracy.num_prompts or num_heldout) * (1 + accuracy.completions_per_prompt)
        once = (Work.drawing(num, num_drawn, num_slots) + Work(num * prompt_tokens)) * 2
    return RunWork(rows, step, evaluation, once, num_slots=num_slots)


def work_of_step(
    passes: Passes,
    rows: Rows,
    num_slots: int,
    reward_models: float = 0.0,
    teachers: float = 0.0,
    frozen: float = 0.0,
) -> Work:
    """The work of a step that draws `rows`, `num_slots` at a time; arguments as of `_policy_work`."""
    has_own_critic = passes.critic == "separate"
    num_scored = passes.old_policy + passes.reference
    before_update = rows.tokens(passes.num_rows if passes.scores_all else passes.num_learnt) * num_scored
    scored_at_all = rows.tokens(passes.num_rows) * (has_own_critic + reward_models)
    learnt = rows.tokens(passes.num_learnt) * passes.num_epochs
    saved = frozen * (rows.tokens(passes.num_learnt) * (num_scored - 1) + learnt)
    prefill = passes.num_rows / rows.per_prompt * rows.prompt
    scored = prefill + before_update + scored_at_all + learnt * teachers
    update = Work(
        scored=scored - saved,
        trained=learnt * (1 + has_own_critic) + rows.tokens(passes.num_replied) * passes.num_epochs,
        updates=passes.num_updates * (1 + has_own_critic),
    )
    return update + Work.drawing(passes.num_rows, rows.completion, num_slots)


def ending_s(estimate: Estimate, cfg: Recipe) -> float:
    """Seconds of what follows the last step: a checkpoint, if there are any, the exported model and the report."""
    exported_gb = estimate.memory_gb["weights"]
    moments_gb = moment_bytes(estimate.num_trained, cfg.optimizer) / 1e9
    return _END_S + (exported_gb + (exported_gb + moments_gb) * (cfg.run.checkpoint_every > 0)) / _GB_PER_S


def fit_of(total_gb: float, device: torch.device | None = None) -> str:
    """The memory that is available on `device`, by default the CPU, and whether `total_gb` fit into it, in words."""
    is_gpu = device is not None and device.type == "cuda"
    free_gb = torch.cuda.mem_get_info(device)[0] / 1e9 if is_gpu else available_gb()
    fit = "fits" if total_gb < free_gb else "MAY NOT FIT: lower micro_batch_size, or train fewer layers"
    return f"of {memory_size(free_gb)} available, {fit}"


def announce(estimate: Estimate, enabled: bool, device: torch.device) -> None:
    """Print to stderr whether the run fits into the memory of `device`."""
    if not enabled:
        return
    parts = ", ".join(
        f"{name} {memory_size(gb)}" for name, gb in estimate.memory_gb.items() if gb >= estimate.total_gb / 50
    )
    say(f"memory: about {memory_size(estimate.total_gb)} {fit_of(estimate.total_gb, device)} ({parts})", enabled=True)
    stages = ", ".join(f"{stage} {memory_size(gb)}" for stage, gb in estimate.stage_gb.items())
    say(f"memory by stage: {stages}", enabled=True)


def _frozen_share(model: PreTrainedModel, num_trainable_layers: int | None) -> float:
    """The lower layers' share of the parameters, if they are frozen and a decoder computes them (on a CPU)."""
    if num_trainable_layers is None or model.device.type != "cpu":
        return 0.0
    frozen = layers_of(model)[:-num_trainable_layers]
    return sum(parameter.numel() for parameter in frozen.parameters()) / model.num_parameters()


def _weight_bytes(model: PreTrainedModel) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _num_trained(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _num_read(model: PreTrainedModel) -> tuple[int, int]:
    """How many parameters an input embedding has that is not the output layer's weight too, and how many of them are
    trained.
    """
    output = model.get_output_embeddings()
    shared = set() if output is None else {id(weight) for weight in output.parameters()}
    read = [weight for weight in model.get_input_embeddings().parameters() if id(weight) not in shared]
    return sum(one.numel() for one in read), sum(one.numel() for one in read if one.requires_grad)


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
