"""Tunesmith: from human votes to a better language model.

`tunesmith.train` runs whole trainings; the other names of `__all__` are the parts for a loop of your own. Both are the
public API; everything else may change. A name's module is loaded on its first use, so importing this package loads
nothing heavy.
"""

import importlib
from typing import TYPE_CHECKING

from tunesmith.core.extras import naming_extras
from tunesmith.core.system import compute_alone_after_fork, limit_spinning
from tunesmith.core.version import __version__

if TYPE_CHECKING:
    from tunesmith import train
    from tunesmith.algorithms.advantages import group_relative
    from tunesmith.algorithms.policy_loss import policy_loss
    from tunesmith.batch.pack import Sequences, pack
    from tunesmith.batch.rollout import Completion, Group, SamplingParams
    from tunesmith.config.load import load_recipe
    from tunesmith.config.sections import ModelSection, OptimizerSection
    from tunesmith.core.errors import InputError, TunesmithError
    from tunesmith.data.prompts import load_prompts
    from tunesmith.data.vote_files import write_votes
    from tunesmith.evaluation.compare import Comparison, Side, compare
    from tunesmith.kernels.policy_loss.records import PolicyTerms, PolicyTokens
    from tunesmith.models.language_model import LanguageModel, language_model
    from tunesmith.models.load import load_policy
    from tunesmith.models.loaded import LoadedModel
    from tunesmith.models.logprob import TokenScores, token_logps
    from tunesmith.models.lora import frozen_copy
    from tunesmith.models.optimizer import MasterAdamW, StepReport
    from tunesmith.rewards.scorer import Scorer, Scores
    from tunesmith.rollout.engine import Engine
    from tunesmith.rollout.factory import open_engine
    from tunesmith.rollout.remote.connection import VLLM
    from tunesmith.rollout.workers.engine import Workers
    from tunesmith.schema.records import Prompt
    from tunesmith.store.records import Candidate, NewItem
    from tunesmith.store.vote_reader import VoteReader
    from tunesmith.store.votes import VoteStore
    from tunesmith.trainers.api import Inputs, Learner, StepResult
    from tunesmith.trainers.grpo import GRPO
    from tunesmith.trainers.ppo import PPO
    from tunesmith.trainers.run import run
    from tunesmith.web.server import serve
    from tunesmith.web.settings import ServerSettings

__all__ = [
    "GRPO",
    "PPO",
    "VLLM",
    "Candidate",
    "Comparison",
    "Completion",
    "Engine",
    "Group",
    "InputError",
    "Inputs",
    "LanguageModel",
    "Learner",
    "LoadedModel",
    "MasterAdamW",
    "ModelSection",
    "NewItem",
    "OptimizerSection",
    "PolicyTerms",
    "PolicyTokens",
    "Prompt",
    "SamplingParams",
    "Scorer",
    "Scores",
    "Sequences",
    "ServerSettings",
    "Side",
    "StepReport",
    "StepResult",
    "TokenScores",
    "TunesmithError",
    "VoteReader",
    "VoteStore",
    "Workers",
    "__version__",
    "compare",
    "frozen_copy",
    "group_relative",
    "language_model",
    "load_policy",
    "load_prompts",
    "load_recipe",
    "open_engine",
    "pack",
    "policy_loss",
    "run",
    "serve",
    "token_logps",
    "train",
    "write_votes",
]

_NAMES = {
    "tunesmith.algorithms.advantages": "group_relative",
    "tunesmith.algorithms.policy_loss": "policy_loss",
    "tunesmith.batch.pack": "Sequences pack",
    "tunesmith.batch.rollout": "Completion Group SamplingParams",
    "tunesmith.config.load": "load_recipe",
    "tunesmith.config.sections": "ModelSection OptimizerSection",
    "tunesmith.core.errors": "InputError TunesmithError",
    "tunesmith.data.prompts": "load_prompts",
    "tunesmith.data.vote_files": "write_votes",
    "tunesmith.evaluation.compare": "Comparison Side compare",
    "tunesmith.kernels.policy_loss.records": "PolicyTerms PolicyTokens",
    "tunesmith.models.language_model": "LanguageModel language_model",
    "tunesmith.models.load": "load_policy",
    "tunesmith.models.loaded": "LoadedModel",
    "tunesmith.models.logprob": "TokenScores token_logps",
    "tunesmith.models.lora": "frozen_copy",
    "tunesmith.models.optimizer": "MasterAdamW StepReport",
    "tunesmith.rewards.scorer": "Scorer Scores",
    "tunesmith.rollout.engine": "Engine",
    "tunesmith.rollout.factory": "open_engine",
    "tunesmith.rollout.remote.connection": "VLLM",
    "tunesmith.rollout.workers.engine": "Workers",
    "tunesmith.schema.records": "Prompt",
    "tunesmith.store.records": "Candidate NewItem",
    "tunesmith.store.vote_reader": "VoteReader",
    "tunesmith.store.votes": "VoteStore",
    "tunesmith.trainers.api": "Inputs Learner StepResult",
    "tunesmith.trainers.grpo": "GRPO",
    "tunesmith.trainers.ppo": "PPO",
    "tunesmith.trainers.run": "run",
    "tunesmith.web.server": "serve",
    "tunesmith.web.settings": "ServerSettings",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}


limit_spinning()
compute_alone_after_fork()


def __getattr__(name: str) -> object:
    """Load the module of a public name on its first use (PEP 562)."""
    if name == "train":
        return importlib.import_module("tunesmith.train")
    if name in _MODULE_OF:
        with naming_extras():
            return getattr(importlib.import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'tunesmith' has no attribute {name!r}; it offers {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
