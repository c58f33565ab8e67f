"""`accelerate(trainer)`: our parts for a TRL trainer that exists already, of a class of the user's too."""

from typing import Any, TypeVar

from trl.trainer import dpo_trainer, grpo_trainer, kto_trainer, reward_trainer, rloo_trainer, sft_trainer

from tunesmith.base.core.errors import InputError
from tunesmith.integrations.trl.packed import FastPreference, PackedLosses
from tunesmith.integrations.trl.policy import FastGRPO, FastRLOO
from tunesmith.integrations.trl.reward import FastReward

_MIXINS = {
    grpo_trainer.GRPOTrainer: FastGRPO,
    rloo_trainer.RLOOTrainer: FastRLOO,
    dpo_trainer.DPOTrainer: FastPreference,
    kto_trainer.KTOTrainer: FastPreference,
    sft_trainer.SFTTrainer: PackedLosses,
    reward_trainer.RewardTrainer: FastReward,
}
"""By TRL's class: what comes before it."""

T = TypeVar("T")


def accelerate(trainer: T, **options: Any) -> T:
    """`trainer` itself, with our parts before its own class; `options` are arguments of the mixin's `start`.

    Raises:
        InputError: it is none of TRL's trainers that have such parts.
    """
    mixin: Any = next((mixin for base, mixin in _MIXINS.items() if isinstance(trainer, base)), None)
    if mixin is None:
        names = ", ".join(base.__name__ for base in _MIXINS)
        raise InputError(f"a {type(trainer).__name__} cannot be accelerated; give one of TRL's {names}")
    if not isinstance(trainer, mixin):
        trainer.__class__ = type(type(trainer).__name__, (mixin, type(trainer)), {})
    trainer.start(**options)  # type: ignore[attr-defined]
    return trainer
