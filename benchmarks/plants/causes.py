"""The table of causes and how each is planted, and healthy runs.

Nothing here writes a file that `tunesmith diagnose` reads: a plant is a setting, a variable of the environment, a
reward function, or a program that runs beside.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tunesmith.engine.kernels.linear.api import cpu_has_bfloat16

_SLOW_DTYPE = "float32" if cpu_has_bfloat16() else "bfloat16"
"""What this machine is not fast in: bfloat16 is emulated where the processor has none, dozens of times slower."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A run, or a part that is laid over one: settings by dotted key, variables, reward functions, programs beside.

    `{files}` stands for the folder of `files.write_files`, `{plants}` for this one.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    rewards: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()

    def plus(self, other: "Setup") -> "Setup":
        """This setup with `other` laid over it."""
        return Setup(
            {**self.settings, **other.settings},
            {**self.environment, **other.environment},
            self.rewards + other.rewards,
            self.programs + other.programs,
        )


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause, and how it is planted: much of it, a little of it, or much of it together with much of `other`.

    `mild` is as `strong` where the plant has no degrees. `diluted` is laid over the healthy run where a little is
    planted, so that the plant matters less. `instead` takes the place of the plant where the advice names no setting:
    what somebody does who follows it; `mild_instead` of the mild one. By default that is the run without the plant.
    """

    name: str
    healthy: Setup
    strong: Setup
    other: str
    mild: Setup | None = None
    diluted: Setup = field(default_factory=Setup)
    instead: Setup = field(default_factory=Setup)
    mild_instead: Setup | None = None

    def around(self, variant: str) -> Setup:
        """The run without the plant: healthy, but for the other cause where both are planted."""
        if variant == "together":
            return self.healthy.plus(next(cause.strong for cause in CAUSES if cause.name == self.other))
        return self.healthy.plus(self.diluted) if variant == "mild" else self.healthy

    def followed(self, variant: str) -> Setup:
        """What somebody does who follows advice without a setting."""
        return self.mild_instead if variant == "mild" and self.mild_instead else self.instead

    def plant(self, variant: str) -> Setup:
        """The plant that is laid over it."""
        return self.mild if variant == "mild" and self.mild else self.strong


def _variable(name: str, value: object) -> Setup:
    return Setup(environment={name: str(value)})


def _reward(name: str, **variables: float) -> Setup:
    environment = {f"PLANTED_{key.upper()}": str(number) for key, number in variables.items()}
    return Setup(environment=environment, rewards=(name,))


def _judge(reward: str, **variables: float) -> Setup:
    return _reward(reward, **variables).plus(Setup(programs=("server",)))


def _spinning(num_programs: int, share: float) -> Setup:
    return Setup(environment={"PLANTED_SPIN": str(share)}, programs=("spin",) * num_programs)


def _tracker(latency_s: float) -> Setup:
    environment = {"PYTHONPATH": "{plants}/trackers", "PLANTED_TRACKER_S": str(latency_s)}
    return Setup({"run.report_to": ["trackio"]}, environment)


_EVERY = {"model.name": "scratch", "run.checkpoint_every": 0}
_TOKENS = {"prompts.source": "films", "rollout.max_new_tokens": 48, "rollout.min_new_tokens": 48}
_PAIRS = {"pairs.source": "{files}/pairs.jsonl", "pairs.heldout_fraction": 0.0}


def _drawing(algorithm: str, settings: Mapping[str, Any]) -> Setup:
    """A run that draws completions of 48 tokens and scores them."""
    return Setup({"algorithm": algorithm, **_EVERY, **_TOKENS, **settings}, rewards=("signal",))


GRPO = _drawing(
    "grpo",
    {
        "rollout.prompts_per_step": 8,
        "rollout.completions_per_prompt": 8,
        "grpo.micro_batch_size": 64,
        "grpo.kl.coef": 0.0,
    },
)
"""Sixty-four completions, compared within groups of eight; one update, no reference."""

PPO = _drawing("ppo", {"rollout.prompts_per_step": 64, "ppo.micro_batch_size": 64})
BEST_OF_N = _drawing("best_of_n", {})
SFT = Setup(
    {
        "algorithm": "sft",
        **_EVERY,
        "demonstrations.source": "{files}/different.jsonl",
        "demonstrations.heldout_fraction": 0.0,
        "sft.demonstrations_per_step": 32,
    }
)
DPO = Setup({"algorithm": "dpo", **_EVERY, **_PAIRS, "dpo.micro_batch_size": 32})
REWARD = Setup({"algorithm": "reward", **_EVERY, **_PAIRS})

_SMALL = Setup({"model.name": "scratch"})
_MEDIUM = Setup({"model.name": "{files}/medium", "rollout.prompts_per_step": 4})
_SHORT = Setup({"rollout.max_new_tokens": 8, "rollout.min_new_tokens": 8})
_LONG_PROMPTS = _SHORT.plus(Setup({"prompts.source": "{files}/prompts.jsonl"}))
_ENDING = Setup({"model.name": "{files}/ending", "rollout.min_new_tokens": 1, "optimizer.learning_rate": 1e-7})
_FEW = Setup({"rollout.prompts_per_step": 4, "rollout.completions_per_prompt": 4})
_PADDED = Setup({"model.forward": "padded", "sft.micro_batch_tokens": 32768})
_NO_COMPILER = _variable("CXX", "/nowhere/c++")

CAUSES: tuple[Cause, ...] = (
    Cause(
        "engine_fallback", GRPO, strong=Setup({"rollout.backend": "transformers"}), other="slow_reward", diluted=_SHORT
    ),
    Cause("kernels_fallback", GRPO, _NO_COMPILER, other="checkpoints", diluted=_SHORT),
    Cause(
        "precision",
        GRPO.plus(_MEDIUM) if cpu_has_bfloat16() else GRPO,
        strong=Setup({"model.dtype": _SLOW_DTYPE}),
        other="evaluation",
        diluted=_SMALL,
    ),
    Cause(
        "threads_few",
        GRPO.plus(_MEDIUM),
        strong=Setup({"run.num_threads": 1}),
        other="remote_reward_serial",
        diluted=_SMALL,
    ),
    Cause(
        "threads_many",
        GRPO,
        strong=Setup({"run.num_threads": 16}),
        mild=Setup({"run.num_threads": 3}),
        other="slow_reward",
    ),
    Cause("starved", GRPO.plus(_MEDIUM), _spinning(2, 1.0), "evaluation", mild=_spinning(1, 0.5)),
    Cause("gil", GRPO, _reward("watched", pause_s=0.0), "checkpoints", mild=_reward("watched", pause_s=0.004)),
    Cause("slow_reward", GRPO, _reward("busy", busy=150_000), "evaluation", mild=_reward("busy", busy=45_000)),
    Cause(
        "reward_not_overlapped",
        GRPO.plus(Setup({"rollout.num_slots": 16})),
        strong=_judge("concurrent", at_once=4, latency_s=0.04),
        mild=_judge("concurrent", at_once=8, latency_s=0.02),
        other="gradient_checkpointing",
    ),
    Cause(
        "remote_reward_serial",
        GRPO,
        strong=_judge("serial", latency_s=0.01),
        mild=_judge("serial", latency_s=0.003),
        other="evaluation",
        instead=_judge("concurrent", at_once=64, latency_s=0.01),
    ),
    Cause(
        "small_micro_batches",
        GRPO,
        strong=Setup({"grpo.micro_batch_size": 1}),
        mild=Setup({"grpo.micro_batch_size": 8}),
        other="slow_reward",
    ),
    Cause(
        "padding",
        SFT,
        strong=_PADDED,
        mild=_PADDED.plus(Setup({"demonstrations.source": "{files}/similar.jsonl"})),
        other="checkpoints",
    ),
    Cause(
        "recomputed_old_policy",
        GRPO.plus(_LONG_PROMPTS).plus(Setup({"grpo.num_epochs": 2})),
        strong=Setup({"rollout.recompute_logps": True}),
        other="slow_reward",
        diluted=Setup({"grpo.num_epochs": 3}),
    ),
    Cause(
        "unneeded_reference",
        GRPO,
        strong=Setup({"grpo.kl.coef": 1e-6}),
        other="remote_reward_serial",
        diluted=Setup({"grpo.num_epochs": 3}),
    ),
    Cause(
        "long_tail",
        GRPO.plus(_ENDING),
        strong=Setup({"rollout.max_new_tokens": 900}),
        other="slow_reward",
        diluted=_FEW,
    ),
    Cause(
        "cache_starved",
        GRPO,
        strong=Setup({"rollout.kv_cache_mb": 1}),
        mild=Setup({"rollout.kv_cache_mb": 6}),
        other="slow_reward",
    ),
    Cause(
        "no_signal_groups",
        GRPO,
        _variable("PLANTED_TEACHING", 2),
        "checkpoints",
        mild=_variable("PLANTED_TEACHING", 6),
        # Prompts are filtered, and as many of those that teach are drawn as before.
        instead=Setup({"rollout.prompts_per_step": 2}),
        mild_instead=Setup({"rollout.prompts_per_step": 5}),
    ),
    Cause(
        "prompts_not_shared",
        GRPO.plus(_LONG_PROMPTS),
        strong=Setup({"model.share_prefixes": False}),
        mild=Setup({"grpo.micro_batch_size": 4}),
        other="slow_reward",
    ),
    Cause(
        "checkpoints",
        GRPO,
        strong=Setup({"run.checkpoint_every": 1, "run.checkpoint_in_background": False}),
        mild=Setup({"run.checkpoint_every": 3, "run.checkpoint_in_background": False}),
        other="slow_reward",
    ),
    Cause("logging", GRPO, _tracker(0.4), "evaluation", mild=_tracker(0.08)),
    Cause(
        "slow_disk",
        GRPO.plus(Setup({"run.checkpoint_every": 2})),
        strong=_variable("TUNESMITH_FAULT", "fsync:slow:200"),
        mild=_variable("TUNESMITH_FAULT", "fsync:slow:80"),
        other="slow_reward",
    ),
    Cause(
        "memory_growth",
        GRPO,
        strong=_reward("keeping", kept_mb=300),
        mild=_reward("keeping", kept_mb=120),
        other="remote_reward_serial",
    ),
    Cause(
        "evaluation",
        GRPO,
        strong=Setup({"prompts.heldout_source": "films", "run.eval_every": 1}),
        mild=Setup({"prompts.heldout_source": "films", "run.eval_every": 4}),
        other="slow_reward",
    ),
    Cause(
        "gradient_checkpointing",
        GRPO.plus(_MEDIUM),
        strong=Setup({"model.gradient_checkpointing": True}),
        other="remote_reward_serial",
        diluted=Setup({"model.num_trainable_layers": 4}),
    ),
)
"""The causes of rules that can be planted on a machine without a GPU."""

SEEN: tuple[Cause, ...] = (
    Cause("slow_steps", GRPO, _reward("rare", wait_s=4.0), "checkpoints", mild=_reward("rare", wait_s=1.0)),
    Cause("lock", GRPO, _reward("queued", hold_s=0.005), "evaluation", mild=_reward("queued", hold_s=0.001)),
    Cause("disk", GRPO, _reward("synced", syncs=20), "evaluation", mild=_reward("synced", syncs=2)),
    Cause("sleep", GRPO, _reward("paced", pace_s=0.5), "evaluation", mild=_reward("paced", pace_s=0.1)),
)
"""Causes that are seen in the run's stacks or in its slow steps, without a rule."""

NOT_RUN: Mapping[str, str] = {
    "gpu_launches": "no GPU here",
    "gpu_copies": "no GPU here",
    "gpu_idle": "no GPU here",
    "waiting_ranks": "training runs in one process",
    "engine_reload": "the setting is the default, and no run here is named for it: packed weights are small",
    "int8_drawing": "the setting is the default, and a trade of exact log-probs for time, on some machines",
    "slow_callback": "a callback is given in Python, and these runs are started as commands",
    "unknown_answers": "these runs have no reward model with heads; `benchmarks.pessimism` has such trainings",
    "slow_tools": "these runs talk to no environment; `benchmarks.environments` measures one whose tools are slow",
    "malformed_calls": "these runs talk to no environment",
    "broken_prefixes": "these runs talk to no environment",
    "slow_data": "rows are read before training, so the plant would be a defect",
    "garbage_collection": "it depends on the version of Python how long a collection takes",
    "throttled": "it takes the right to set the quota of a control group",
    "memory_pressure": "it takes all memory of the machine, and other programs with it",
}
"""Causes that are not planted here, and why."""

HEALTHY: Mapping[str, Setup] = {
    "grpo": GRPO,
    "grpo of a larger model": GRPO.plus(_MEDIUM),
    "grpo with a reference": GRPO.plus(Setup({"grpo.kl.coef": 0.04})),
    "grpo in minibatches": GRPO.plus(Setup({"grpo.num_minibatches": 2, "grpo.num_epochs": 2})),
    "grpo of SmolLM2": GRPO.plus(Setup({"model.name": "smollm2", "model.num_trainable_layers": 10})),
    "ppo": PPO,
    "best_of_n": BEST_OF_N,
    "dpo": DPO,
    "sft": SFT,
    "reward": REWARD,
}
"""Runs in which nothing is to be gained."""
