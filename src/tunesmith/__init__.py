"""Tunesmith: from human votes to a better language model.

`tunesmith.train` runs whole trainings; the other names of `__all__` are the parts for a loop of your own. Both are the
public API; everything else may change. A name's module is loaded on its first use, so importing this package loads
nothing heavy.
"""

import importlib
from typing import TYPE_CHECKING

from tunesmith.base.core.extras import naming_extras
from tunesmith.base.core.system import compute_alone_after_fork, limit_spinning
from tunesmith.base.core.version import __version__

if TYPE_CHECKING:
    from tunesmith import train
    from tunesmith.base.config.load import load_recipe
    from tunesmith.base.config.sections import ModelSection, OptimizerSection
    from tunesmith.base.core.errors import InputError, TunesmithError
    from tunesmith.base.schema.records import Prompt
    from tunesmith.collect.data.prompts import load_prompts
    from tunesmith.collect.data.vote_files import write_votes
    from tunesmith.collect.store.records import Candidate, NewItem
    from tunesmith.collect.store.vote_reader import VoteReader
    from tunesmith.collect.store.votes import VoteStore
    from tunesmith.collect.web.server import serve
    from tunesmith.collect.web.settings import ServerSettings
    from tunesmith.engine.batch.pack import Sequences, pack
    from tunesmith.engine.batch.rollout import Completion, Group, SamplingParams
    from tunesmith.engine.kernels.policy_loss.records import PolicyTerms, PolicyTokens
    from tunesmith.engine.models.language_model import LanguageModel, language_model
    from tunesmith.engine.models.load import load_policy
    from tunesmith.engine.models.loaded import LoadedModel
    from tunesmith.engine.models.logprob import TokenScores, token_logps
    from tunesmith.engine.models.lora import frozen_copy
    from tunesmith.engine.models.optimizer import MasterAdamW, StepReport
    from tunesmith.engine.rollout.engine import Engine
    from tunesmith.engine.rollout.factory import open_engine
    from tunesmith.engine.rollout.native_engine import Native
    from tunesmith.engine.rollout.remote.connection import VLLM
    from tunesmith.engine.rollout.workers.engine import Workers
    from tunesmith.learn.algorithms.advantages import group_relative
    from tunesmith.learn.algorithms.policy_loss import policy_loss
    from tunesmith.learn.environments.contract import ToolResult
    from tunesmith.learn.evaluation.compare import Comparison, Side, compare
    from tunesmith.learn.rewards.scorer import Scorer, Scores
    from tunesmith.learn.trainers.api import Inputs, Learner, StepResult
    from tunesmith.learn.trainers.grpo import GRPO
    from tunesmith.learn.trainers.ppo import PPO
    from tunesmith.learn.trainers.run import run

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
    "Native",
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
    "ToolResult",
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
    "tunesmith.learn.algorithms.advantages": "group_relative",
    "tunesmith.learn.algorithms.policy_loss": "policy_loss",
    "tunesmith.engine.batch.pack": "Sequences pack",
    "tunesmith.engine.batch.rollout": "Completion Group SamplingParams",
    "tunesmith.base.config.load": "load_recipe",
    "tunesmith.base.config.sections": "ModelSection OptimizerSection",
    "tunesmith.base.core.errors": "InputError TunesmithError",
    "tunesmith.collect.data.prompts": "load_prompts",
    "tunesmith.collect.data.vote_files": "write_votes",
    "tunesmith.learn.environments.contract": "ToolResult",
    "tunesmith.learn.evaluation.compare": "Comparison Side compare",
    "tunesmith.engine.kernels.policy_loss.records": "PolicyTerms PolicyTokens",
    "tunesmith.engine.models.language_model": "LanguageModel language_model",
    "tunesmith.engine.models.load": "load_policy",
    "tunesmith.engine.models.loaded": "LoadedModel",
    "tunesmith.engine.models.logprob": "TokenScores token_logps",
    "tunesmith.engine.models.lora": "frozen_copy",
    "tunesmith.engine.models.optimizer": "MasterAdamW StepReport",
    "tunesmith.learn.rewards.scorer": "Scorer Scores",
    "tunesmith.engine.rollout.engine": "Engine",
    "tunesmith.engine.rollout.factory": "open_engine",
    "tunesmith.engine.rollout.native_engine": "Native",
    "tunesmith.engine.rollout.remote.connection": "VLLM",
    "tunesmith.engine.rollout.workers.engine": "Workers",
    "tunesmith.base.schema.records": "Prompt",
    "tunesmith.collect.store.records": "Candidate NewItem",
    "tunesmith.collect.store.vote_reader": "VoteReader",
    "tunesmith.collect.store.votes": "VoteStore",
    "tunesmith.learn.trainers.api": "Inputs Learner StepResult",
    "tunesmith.learn.trainers.grpo": "GRPO",
    "tunesmith.learn.trainers.ppo": "PPO",
    "tunesmith.learn.trainers.run": "run",
    "tunesmith.collect.web.server": "serve",
    "tunesmith.collect.web.settings": "ServerSettings",
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
