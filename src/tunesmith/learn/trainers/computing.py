"""The record of how a run computes, `setup.json`: engine, forward pass, kernels, dtypes, threads, sizes, peak rates;
and the rates of its steps.
"""

from typing import Any

import psutil
import torch

from tunesmith.base.config.recipe import Recipe, SamplingRecipe
from tunesmith.base.core.errors import NativeUnavailableError
from tunesmith.base.core.trace import Trace
from tunesmith.base.runs import cgroup
from tunesmith.base.runs.environment import usable_cores
from tunesmith.engine.distributed.ranks import num_ranks
from tunesmith.engine.kernels import native
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models.decoder import Decoder
from tunesmith.engine.models.heads import RewardModel
from tunesmith.engine.models.language_model import Backend, FullForward, TrunkForward, language_model
from tunesmith.engine.models.load import compute_dtype
from tunesmith.engine.models.loaded import PreTrainedModel
from tunesmith.engine.rollout.engine import Engine
from tunesmith.engine.rollout.products import int8_needs_old_policy, product_seconds
from tunesmith.learn.trainers.api import Learner, Metrics
from tunesmith.learn.trainers.estimate import Estimate
from tunesmith.observe.profiling.peak import matmul_flop_per_s

_PROBE = "rms_norm"
"""An operation that every pass has, with a kernel in C++ and one in Triton."""

_SIZES = {"num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "vocab_size": "vocab_size"}


def computing(cfg: Recipe, learner: Learner, estimate: Estimate) -> dict[str, object]:
    """The keys of `setup.json`, see docs/metrics.md. The engine packs its weights, which the first rollout then has."""
    trained: Any = next(iter(learner.modules.values()))
    module = trained.model if isinstance(trained, RewardModel) else trained
    config, device = module.config.get_text_config(), module.device
    best = compute_dtype("auto", device)
    dtypes = dict.fromkeys((estimate.dtype, best, torch.float32))  # each once
    return {
        **_engine(cfg, learner, module),
        "forward": _forward(learner, trained),
        "device": device.type,
        "dtype": _name(estimate.dtype),
        "best_dtype": _name(best),
        **_kernels(Kernels(cfg.model.kernels), estimate.dtype, device),
        "num_ranks": num_ranks(),
        "num_threads": torch.get_num_threads(),
        "usable_cores": usable_cores(),
        "cpu_quota": cgroup.quota_cores(),
        "num_parameters": estimate.num_parameters,
        "num_trained": estimate.num_trained,
        **{key: getattr(config, name, None) for key, name in _SIZES.items()},
        "peak_flop_per_s": {_name(dtype): matmul_flop_per_s(dtype, device) for dtype in dtypes},
        "memory_gb": min(psutil.virtual_memory().total, cgroup.memory_bytes() or float("inf")) / 1e9,
        "estimate_gb": estimate.memory_gb,
    }


def _engine(cfg: Recipe, learner: Any, module: PreTrainedModel) -> dict[str, object]:
    """The rollout engine, and why it is not the native one; null in an algorithm that draws nothing."""
    if not isinstance(cfg, SamplingRecipe):
        names = ("engine", "engine_exact", "rollout_weights", "products_s", "int8_needs_old_policy")
        return {**dict.fromkeys(names), "engine_reason": ""}
    chosen = {
        "rollout_weights": cfg.rollout.own_weights,
        "products_s": product_seconds(learner.policy, cfg),
        "int8_needs_old_policy": int8_needs_old_policy(cfg),
    }
    engine: Engine = learner.engine
    reason = ""
    if cfg.rollout.backend != "native":
        reason = f"rollout.backend is {cfg.rollout.backend}"
    elif engine.name == "transformers" and isinstance(unknown := language_model(module).backend, FullForward):
        reason = unknown.reason
    return {"engine": engine.name, "engine_reason": reason, "engine_exact": engine.is_exact, **chosen}


def _forward(learner: Any, trained: Any) -> str:
    """The kind of forward pass: packed rows, the trunk over padded rows, or the model's own over padded rows."""
    if isinstance(trained, RewardModel):
        if trained.packs_rows:
            return "decoder"
        return "padded" if trained.pools_last_token else "model"
    backend: Backend = learner.policy.backend
    if isinstance(backend, Decoder):
        return "decoder"
    return "padded" if isinstance(backend, TrunkForward) else "model"


def _kernels(kernels: Kernels, dtype: torch.dtype, device: torch.device) -> dict[str, object]:
    """The backend of the kernels for weights of `dtype`, and why it is torch, if it is."""
    backend, reason = kernels.picked(_PROBE, torch.empty(0, dtype=dtype, device=device)), ""
    if backend == "torch" and kernels.choice == "torch":
        reason = "model.kernels is torch"
    elif backend == "torch" and device.type == "cuda":
        reason = native.why_not_on(device, native.LEAST_CAPABILITY) or f"there are none for {_name(dtype)}"
    elif backend == "torch":
        reason = f"there are none for {_name(dtype)}" if dtype not in native.NATIVE_DTYPES else _why_not_loaded()
    return {"kernels": backend, "kernels_reason": reason}


def _why_not_loaded() -> str:
    try:
        native.load(_PROBE)
    except NativeUnavailableError as error:
        return str(error)
    return ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def rates_of(
    cfg: Recipe, estimate: Estimate, device: torch.device, num_rows: int, num_tokens: float | None, times: Trace
) -> Metrics:
    """Samples, tokens and floating-point operations per second of a step, and the share of the machine's peak.

    All models are taken to be as large as the one that is trained.
    """
    samples_per_row = cfg.rollout.completions_per_prompt if isinstance(cfg, SamplingRecipe) else 1
    metrics = {"samples_per_s": num_rows * samples_per_row / times.wall_s}
    if num_tokens is not None:
        metrics["tokens_per_s"] = num_tokens / times.wall_s
    trained, others = _total(times, "micro_batch_tokens"), _total(times, "computed_tokens")
    drawn = _total(times, "prefill_tokens") + (num_tokens or 0.0) if "rollout" in times.seconds else 0.0
    if trained + others and num_ranks() == 1:  # the trace counts this rank's tokens alone
        metrics["flop_per_s"] = estimate.flop(trained + others + drawn, trained) / times.wall_s
        metrics["mfu"] = metrics["flop_per_s"] / matmul_flop_per_s(estimate.dtype, device)
    return metrics


def _total(times: Trace, name: str) -> float:
    """The sum of the figure `name` over all stages."""
    return sum(value for path, value in times.sums.items() if path.endswith(f"/{name}"))
