"""TRL's trainers with our rollouts and log-probs, by one changed import:

from tunesmith.integrations.trl import GRPOTrainer  # instead of: from trl import GRPOTrainer
"""

from tunesmith.integrations.trl import contract

contract.check()

from tunesmith.integrations.trl.apply import accelerate  # noqa: E402  (TRL is checked first)
from tunesmith.integrations.trl.packed import DPOTrainer, KTOTrainer, SFTTrainer  # noqa: E402
from tunesmith.integrations.trl.policy import GRPOTrainer, Options, RLOOTrainer  # noqa: E402
from tunesmith.integrations.trl.ppo import PPOTrainer  # noqa: E402
from tunesmith.integrations.trl.ppo_config import PPOConfig  # noqa: E402
from tunesmith.integrations.trl.reward import RewardTrainer  # noqa: E402

__all__ = [
    "DPOTrainer",
    "GRPOTrainer",
    "KTOTrainer",
    "Options",
    "PPOConfig",
    "PPOTrainer",
    "RLOOTrainer",
    "RewardTrainer",
    "SFTTrainer",
    "accelerate",
]
