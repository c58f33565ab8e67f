"""Facts of runs that never happened, shaped like real ones: a healthy one, and what makes each cause show."""

from pathlib import Path

from tunesmith.base.config.schema import RECIPES
from tunesmith.observe.profiling.facts import Facts

PEAKS = {"setup.peak_flop_per_s.float32": 1.5e11, "setup.peak_flop_per_s.bfloat16": 7.5e11}

SETUP = {
    "setup.engine": "native",
    "setup.engine_exact": True,
    "setup.forward": "decoder",
    "setup.device": "cpu",
    "setup.dtype": "bfloat16",
    "setup.best_dtype": "bfloat16",
    "setup.kernels": "native",
    "setup.num_threads": 2,
    "setup.usable_cores": 2,
    "setup.cpu_quota": None,
    "setup.num_parameters": 135_000_000,
    "setup.num_layers": 30,
    "setup.num_trained": 135_000_000,
    "setup.estimate_gb.activations": 0.1,
    "setup.estimate_gb.cache": 0.1,
    "setup.estimate_gb.packed weights": 0.3,
    "setup.products_s.model": 0.02,
    "setup.products_s.int8": 0.02,
    **PEAKS,
}

MEASURED = {
    "time/step_s": 6.0,
    "time/rollout_s": 1.8,
    "time/rollout/load_s": 0.1,
    "time/reward_s": 0.02,
    "time/reference_s": 0.6,
    "time/update_s": 3.5,
    "time/update/forward_s": 1.1,
    "time/update/backward_s": 2.2,
    "time/update/optimizer_s": 0.2,
    "time/log_s": 0.004,
    "time/checkpoint_s": 0.02,
    "time/callback_s": 0.001,
    "time/data_s": 0.002,
    "time/evaluate_s": 0.0,
    "time/other_s": 0.05,
    "flop_per_s": 3e11,
    "num_tokens": 3840.0,
    "cpu/process": 1.8,
    "cpu/others": 0.05,
    "cpu/stolen": 0.0,
    "cpu/run_delay_s": 0.05,
    "cpu/stage/reward": 1.0,
    "cpu/throttled_s": 0.0,
    "gc/pause_s": 0.01,
    "gil/wait_ms": 0.05,
    "gil/waiting_share": 0.01,
    "gil/waiting/rollout": 0.01,
    "memory/growth_mb": 0.2,
    "memory/available_gb": 20.0,
    "faults/major": 0.0,
    "io/fsync_s": 0.005,
    "io/written_mb": 40.0,
    "rollout/slots_used": 0.9,
    "rollout/tail_s": 0.02,
    "rollout/starved_s": 0.0,
    "rollout/decode_steps": 64.0,
    "rollout/prefill_tokens": 64.0,
    "rollout/shared_tokens": 448.0,
    "rollout/unused_tokens": 0.0,
    "update/micro_batch_tokens": 1100.0,
    "update/padding_share": 0.0,
    "update/shared_tokens": 448.0,
    "completions/mean_length": 60.0,
    "completions/max_length": 64.0,
    "completions/clipped_ratio": 0.8,
    "groups/num_drawn": 8.0,
    "groups/num_dropped": 0.0,
    "reward_std": 1.0,
    "objective/kl": 0.5,
}


def recipe(algorithm: str) -> dict[str, object]:
    """The defaults of a recipe by dotted path, as facts have them."""

    def leaves(prefix: str, tree: dict[str, object]) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in tree.items():
            found |= leaves(f"{prefix}.{key}", value) if isinstance(value, dict) else {f"{prefix}.{key}": value}
        return found

    return leaves("recipe", RECIPES[algorithm]().model_dump(mode="json"))


def facts(changes: dict[str, object] | None = None, algorithm: str = "grpo") -> Facts:
    """The healthy run with `changes`."""
    values = {**recipe(algorithm), **SETUP, **MEASURED, **(changes or {})}
    return Facts(Path("runs/x"), values, 9)


SHOWN: dict[str, dict[str, object]] = {
    "engine_fallback": {"setup.engine": "transformers", "recipe.rollout.backend": "transformers"},
    "kernels_fallback": {"setup.kernels": "torch"},
    "precision": {"setup.dtype": "float32"},
    "recomputed_old_policy": {
        "setup.dtype": "float32",
        "setup.engine_exact": False,
        "flop_per_s": 1e9,
        "time/old_policy_s": 0.9,
    },
    "threads_few": {"setup.num_threads": 1, "recipe.run.num_threads": 1},
    "threads_many": {"setup.num_threads": 16, "recipe.run.num_threads": 16, "cpu/run_delay_s": 40.0},
    "starved": {"cpu/others": 1.0, "cpu/run_delay_s": 3.0, "cpu/process": 1.0},
    "gil": {"gil/wait_ms": 5.0, "gil/waiting_share": 0.5, "gil/waiting/rollout": 0.9},
    "slow_reward": {"time/reward_s": 3.0, "cpu/stage/reward": 1.0},
    "remote_reward_serial": {"time/reward_s": 3.0, "cpu/stage/reward": 0.05},
    "reward_not_overlapped": {
        "time/reward_s": 3.0,
        "time/reward/async/judge_s": 3.0,
        "cpu/stage/reward": 0.05,
        "recipe.rollout.num_slots": 16,
    },
    "small_micro_batches": {"recipe.grpo.micro_batch_size": 1, "update/micro_batch_tokens": 68.0},
    "prompts_not_shared": {
        "recipe.grpo.micro_batch_size": 2,
        "rollout/prefill_tokens": 4000.0,
        "rollout/shared_tokens": 28000.0,
        "update/shared_tokens": 16000.0,
        "update/micro_batch_tokens": 620.0,
    },
    "padding": {"update/padding_share": 0.6, "setup.forward": "padded"},
    "gradient_checkpointing": {"recipe.model.gradient_checkpointing": True},
    "unneeded_reference": {"recipe.grpo.kl.coef": 1e-6},
    "long_tail": {"rollout/tail_s": 0.9, "completions/mean_length": 20.0, "completions/max_length": 400.0},
    "unknown_answers": {"unfamiliar": 0.9},
    "slow_tools": {
        "environment/turns": 3.0,
        "time/rollout/reply_s": 2.0,
        "environment/reply_mean_s": 0.1,
        "environment/reply_max_s": 4.0,
    },
    "malformed_calls": {
        "environment/turns": 4.0,
        "environment/calls": 3.0,
        "environment/failed_calls": 0.8,
        "environment/samples": 1.0,
    },
    "broken_prefixes": {
        "environment/turns": 4.0,
        "environment/samples": 3.0,
        "environment/calls": 3.0,
        "environment/failed_calls": 0.0,
    },
    "int8_drawing": {"setup.products_s.int8": 0.008},
    "cache_starved": {
        "rollout/starved_s": 1.5,
        "rollout/slots_used": 0.05,
        "recipe.rollout.kv_cache_mb": 1,
    },
    "no_signal_groups": {"groups/num_dropped": 6.0},
    "engine_reload": {"time/rollout/load_s": 1.0},
    "checkpoints": {"time/checkpoint_s": 1.0, "recipe.run.checkpoint_every": 1},
    "evaluation": {"time/evaluate_s": 2.0, "recipe.run.eval_every": 1},
    "logging": {"time/log_s": 0.8},
    "slow_callback": {"time/callback_s": 1.0},
    "slow_data": {"time/data_s": 1.0},
    "garbage_collection": {"gc/pause_s": 1.0},
    "throttled": {"cpu/throttled_s": 4.0},
    "slow_disk": {"io/fsync_s": 1.0, "time/checkpoint_s": 1.1},
    "memory_growth": {"memory/growth_mb": 400.0, "time/reward_s": 0.1},
    "memory_pressure": {"faults/major": 3000.0},
    "gpu_launches": {"setup.device": "cuda", "gpu/kernel_s": 2.0, "gpu/copy_s": 0.1},
    "gpu_copies": {"setup.device": "cuda", "gpu/kernel_s": 5.5, "gpu/copy_s": 1.0},
    "gpu_idle": {"setup.device": "cuda", "gpu/busy": 0.3, "time/reward_s": 1.5, "cpu/stage/reward": None},
    "waiting_ranks": {"setup.device": "cuda", "ranks/wait_s": 1.0},
}
"""Changes to the healthy run that show one cause, by its name."""
