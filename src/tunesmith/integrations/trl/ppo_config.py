"""The arguments of TRL 1.12's PPOTrainer, their checks, and the sections of our recipes that they stand for."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from transformers import TrainingArguments

from tunesmith.base.config.algorithms.ppo import PPOSection
from tunesmith.base.config.policy_sections import KLSection
from tunesmith.base.config.sections import OptimizerSection
from tunesmith.base.config.trl_config import SCHEDULES
from tunesmith.base.core.errors import InputError
from tunesmith.base.core.log import get_logger

_log = get_logger(__name__)

NOT_USED: Mapping[str, str] = {
    "bf16": "the weights are computed in their own dtype; load the model with `dtype=torch.bfloat16`",
    "fp16": "the weights are computed in their own dtype; load the model with `dtype=torch.float16`",
    "ds3_gather_for_generation": "there is no DeepSpeed",
    "lr_scheduler_kwargs": "the schedules take none",
    "max_steps": "`total_episodes` says how long to train",
    "torch_compile": "the forward pass is ours",
    "use_liger_kernel": "the forward pass is ours",
}
"""Arguments that change nothing here, and why: a value other than the default is warned of."""

REFUSED: Mapping[str, str] = {
    "model_adapter_name": "the active adapter is trained",
    "ref_adapter_name": "the reference is `ref_model`, or the model without its adapters",
    "deepspeed": "training runs in one process",
    "fsdp": "training runs in one process",
}
"""Arguments that cannot be followed, and why: a value other than the default is an error."""


@dataclass
class PPOConfig(TrainingArguments):
    """Arguments of `PPOTrainer`: the fields and defaults of TRL 1.12. The trainer sets the sizes of batches."""

    learning_rate: float = 3e-6
    logging_steps: float = 10
    gradient_checkpointing: bool = True
    bf16: bool | None = None
    dataset_num_proc: int | None = None
    num_mini_batches: int = 1
    total_episodes: int | None = None
    local_rollout_forward_batch_size: int = 64
    num_sample_generations: int = 10
    response_length: int = 53
    stop_token: Literal["eos"] | None = None
    stop_token_id: int | None = None
    temperature: float = 0.7
    missing_eos_penalty: float | None = None
    sft_model_path: str = "EleutherAI/pythia-160m"
    world_size: int | None = None
    num_total_batches: int | None = None
    micro_batch_size: int | None = None
    local_batch_size: int | None = None
    batch_size: int | None = None
    local_mini_batch_size: int | None = None
    mini_batch_size: int | None = None
    push_to_hub: bool = False
    reward_model_path: str = "EleutherAI/pythia-160m"
    model_adapter_name: str | None = None
    ref_adapter_name: str | None = None
    num_ppo_epochs: int = 4
    whiten_rewards: bool = False
    kl_coef: float = 0.05
    kl_estimator: Literal["k1", "k3"] = "k1"
    cliprange: float = 0.2
    vf_coef: float = 0.1
    cliprange_value: float = 0.2
    gamma: float = 1.0
    lam: float = 0.95
    ds3_gather_for_generation: bool = True

    def __post_init__(self) -> None:
        # TRL turned it on by default, which transformers refuses on a CPU; here it changes nothing.
        self.bf16 = bool(self.bf16)
        super().__post_init__()


def check_config(args: PPOConfig) -> None:
    """Raise InputError for arguments that cannot be followed, and warn of those that change nothing."""
    for field in dataclasses.fields(PPOConfig):
        name, given = field.name, getattr(args, field.name)
        if (given or None) == (field.default or None):
            continue
        if name in REFUSED:
            raise InputError(f"{name} is {given!r}, but {REFUSED[name]}; leave it out")
        if name in NOT_USED:
            _log.warning("%s = %r is not used: %s", name, given, NOT_USED[name])
    if args.stop_token and args.stop_token_id is not None:
        raise InputError("both stop_token and stop_token_id are set; keep one")
    allowed = {
        "stop_token": ("eos", None),
        "kl_estimator": ("k1", "k3"),
        "lr_scheduler_type": tuple(SCHEDULES),
        "optim": ("adamw_torch", "adamw_torch_fused"),
    }
    for name, values in allowed.items():
        given = getattr(getattr(args, name), "value", getattr(args, name))
        if given not in values:
            raise InputError(f"{name} is {given!r}; allowed are {', '.join(map(repr, values))}")
    if args.parallel_mode.value == "distributed":
        raise InputError("PPO trains in one process; start the script by `python`, without `accelerate launch`")


def set_sizes(args: PPOConfig, num_rows: int) -> None:
    """Set the sizes that follow from others, as TRL does. Raises InputError for those that do not fit."""
    args.world_size = 1
    args.local_batch_size = args.batch_size = args.per_device_train_batch_size * args.gradient_accumulation_steps
    args.micro_batch_size = args.per_device_train_batch_size
    if args.batch_size % args.num_mini_batches:
        raise InputError(
            f"a batch has {args.batch_size} completions (per_device_train_batch_size * gradient_accumulation_steps), "
            f"which num_mini_batches, {args.num_mini_batches}, does not divide"
        )
    if num_rows < args.batch_size:
        raise InputError(f"train_dataset has {num_rows} rows, fewer than the {args.batch_size} of a batch; lower it")
    args.local_mini_batch_size = args.mini_batch_size = args.batch_size // args.num_mini_batches
    if args.total_episodes is None:
        args.total_episodes = int(args.num_train_epochs * num_rows)
    args.num_total_batches = math.ceil(args.total_episodes / args.batch_size)


def ppo_section(args: PPOConfig) -> PPOSection:
    """The settings of our PPO that `args` ask for."""
    return PPOSection(
        num_epochs=args.num_ppo_epochs,
        num_minibatches=args.num_mini_batches,
        micro_batch_size=args.per_device_train_batch_size,
        clip_low=args.cliprange,
        clip_high=args.cliprange,
        value_clip=args.cliprange_value,
        value_coef=args.vf_coef,
        gamma=args.gamma,
        lam=args.lam,
        whiten_rewards=args.whiten_rewards,
        loss_normalization="micro_batch",
        critic="separate",
        kl=KLSection(coef=args.kl_coef, estimator=args.kl_estimator),
    )


def optimizer_section(args: PPOConfig) -> OptimizerSection:
    """The optimizer that `args` ask for; TRL counts its schedule in batches, ours in updates."""
    assert args.num_total_batches is not None
    schedule: Any = SCHEDULES[getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)]
    return OptimizerSection(
        learning_rate=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        weight_decay=args.weight_decay,
        max_grad_norm=args.max_grad_norm or 1e9,  # 0 is off
        warmup_steps=args.get_warmup_steps(args.num_total_batches) * args.num_ppo_epochs * args.num_mini_batches,
        schedule=schedule,
    )
