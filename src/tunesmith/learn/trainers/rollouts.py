"""Parts of the algorithms that draw completions: prompts, scored rollouts, minibatches, and the loss of a micro-batch.

Shape legend: B sequences, T completion tokens.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import nn

from tunesmith.base.config.algorithms.sft import SFTSection
from tunesmith.base.config.policy_sections import KLSection
from tunesmith.base.config.recipe import PolicyRecipe, PtxRecipe
from tunesmith.base.config.sections import EvaluationSection, RolloutSection
from tunesmith.base.core.errors import DataError, InputError
from tunesmith.base.core.log import get_logger
from tunesmith.base.core.seeds import derive, items_at, permutation
from tunesmith.base.core.trace import span
from tunesmith.base.schema.records import Prompt
from tunesmith.collect.data import sets
from tunesmith.engine.batch.pack import PolicyBatch
from tunesmith.engine.batch.rollout import Group, SamplingParams
from tunesmith.engine.batch.targets import LearntSequence
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models.language_model import LanguageModel, model_of_recipe, reference_of
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.models.loaded import context_length, freeze_lower_layers, room_for_prompts
from tunesmith.engine.models.optimizer import MasterAdamW
from tunesmith.engine.rollout.engine import Engine, OnGroup
from tunesmith.engine.rollout.factory import engine_for
from tunesmith.engine.rollout.workers.ahead import Ahead, Arguments
from tunesmith.learn.algorithms import kl
from tunesmith.learn.environments.calls import Open
from tunesmith.learn.environments.dialects import name_in
from tunesmith.learn.environments.episodes import Conversations
from tunesmith.learn.environments.packages import KINDS, rows_of
from tunesmith.learn.environments.sources import opener
from tunesmith.learn.evaluation import accuracy
from tunesmith.learn.rewards.calling import ENVIRONMENTS
from tunesmith.learn.rewards.functions import file_of, identity_of
from tunesmith.learn.rewards.outcome import TrainerState
from tunesmith.learn.rewards.scorer import Scorer, Scores
from tunesmith.learn.trainers import metrics, setup
from tunesmith.learn.trainers.api import Inputs, Learner, Metrics
from tunesmith.learn.trainers.estimate import Estimate, policy_estimate
from tunesmith.learn.trainers.ptx import Ptx, ReplyLoss
from tunesmith.learn.trainers.restart import fingerprint_of_file, fingerprint_of_rows, fingerprint_of_tensors
from tunesmith.learn.trainers.session import Session
from tunesmith.learn.trainers.sft import SFT

_log = get_logger(__name__)

BatchT = TypeVar("BatchT", bound=PolicyBatch)


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Draws completions and scores them. The seed of each draw is a pure function of `seed`, stream and step."""

    engine: Engine
    scorer: Scorer
    cfg: RolloutSection
    seed: int
    num_steps: int
    num_prompts: float = float("inf")
    conversations: Conversations | None = None

    @property
    def is_exact(self) -> bool:
        """True if the engine's log-probs are those of the old policy, so that no forward pass is made for them."""
        return self.engine.is_exact and not self.cfg.recompute_logps

    @property
    def max_completion_tokens(self) -> int:
        """Tokens behind a prompt at most."""
        return self.cfg.max_new_tokens if self.conversations is None else self.conversations.max_tokens

    def draw(
        self, prompts: Sequence[Prompt], stream: str, index: int, *, with_greedy: bool = False
    ) -> tuple[list[Group], Scores]:
        """The completions of step `index` and their scores, computed afterwards or, if the recipe wants it, meanwhile.

        `with_greedy` also draws the completion of likeliest tokens of each prompt, for `Scores.greedy_P`. With
        `rollout.unload_during_update` the engine's memory is freed.
        """
        num, epoch = self.cfg.completions_per_prompt, index * self.cfg.prompts_per_step / self.num_prompts
        state = TrainerState(index, self.num_steps, epoch)
        ahead = self.scorer.ahead(len(prompts), num, state)
        with ahead or nullcontext():
            with span("rollout"):
                on_group = None if ahead is None else ahead.add
                sampling = sampling_params(self.cfg, derive(self.seed, stream, index))
                groups = self.generate(prompts, num, sampling, on_group=on_group)
                likeliest = replace(sampling, temperature=0)
                greedy = self.generate(prompts, 1, likeliest, keeps=True) if with_greedy else []
                if self.cfg.unload_during_update:
                    self.engine.unload()
            with span("reward"):
                scores = self.scorer.score(groups, state=state, ahead=ahead)
        if not greedy:
            return groups, scores
        with span("reward"):
            known = self.scorer.score(greedy, state=state)
            return groups, replace(scores, greedy_P=known.total_PG.masked_fill(~known.valid_PG, math.nan)[:, 0])

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: SamplingParams,
        *,
        on_group: OnGroup | None = None,
        keeps: bool = False,
    ) -> list[Group]:
        """`n` completions of each prompt: of one turn, or trajectories with the environment, if there is one. Those of
        the call before keep the instances that they were played with until they are scored, if this one `keeps` them.
        """
        if self.conversations is not None:
            return self.conversations.draw(self.engine, prompts, n, sampling, on_group, keeps=keeps)
        return self.engine.generate(prompts, n, sampling, on_group=on_group)

    def mean_reward(self, prompts: Sequence[Prompt]) -> Metrics:
        """`eval/reward`: mean reward of one completion of each prompt, with the same noise at every step, if any.
        With an environment also how the trajectories went, but for seconds. Empty if a reward compares the completions
        of a prompt with each other.
        """
        if not prompts or self.scorer.is_relative:
            return {}
        with span("evaluate"):
            sampling = sampling_params(self.cfg, derive(self.seed, "evaluate", 0))
            groups = self.generate(prompts, 1, sampling)
            went = {f"eval/{k}": v for k, v in metrics.trajectory_metrics(groups).items() if not k.endswith("_s")}
            return {"eval/reward": self.scorer.score(groups).metrics()["reward"], **went}


def sampling_params(cfg: RolloutSection, seed: int) -> SamplingParams:
    """Sampling parameters of a recipe's section."""
    return SamplingParams(
        max_new_tokens=cfg.max_new_tokens,
        min_new_tokens=cfg.min_new_tokens,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        top_k=cfg.top_k,
        min_p=cfg.min_p,
        repetition_penalty=cfg.repetition_penalty,
        seed=seed,
    )


def prompts_of_step(prompts: Sequence[Prompt], size: int, seed: int, index: int) -> list[Prompt]:
    """The prompts of step `index` (from 0): a pure function of the run's seed and the index."""
    return [prompts[i] for i in items_at(seed, index * size, size, len(prompts))]


def further_prompts(pool: Sequence[Prompt], used: Sequence[Prompt], seed: int, index: int) -> Iterator[Prompt]:
    """The prompts of `pool` that are not in `used`, each once, in an order that is a pure function of seed and step."""
    ids = {prompt.id for prompt in used}
    order = permutation(derive(seed, "further prompts", index), 0, len(pool))
    return (pool[i] for i in order if pool[i].id not in ids)


class PolicyLearner(Learner, Protocol):
    """A learner that draws completions; `build` is its constructor from a recipe."""

    policy: LanguageModel
    rollouts: Rollouts

    @classmethod
    def build(cls, task: "PolicyTask", cfg: Any, /) -> Self:
        """The learner of the recipe `cfg` before its first step."""
        ...


class PolicyTask:
    """Prompts and rewards of an algorithm that draws completions, and how its policy is evaluated."""

    def __init__(self, learner: type[PolicyLearner], cfg: PolicyRecipe, inputs: Inputs, device: torch.device) -> None:
        self.cfg = cfg
        self.device = device
        self.num_steps = cfg.run.steps or 100
        # Before the model is loaded, so that a wrong name is told at once.
        open_episode = opener(cfg.environment, tools=inputs.tools or (), environment_factory=inputs.environment_factory)
        self.loaded = load_policy(cfg.model, device=device)
        tokenizer, max_length = self.loaded.tokenizer, room_for_prompts(self.loaded.model, cfg.rollout.max_new_tokens)
        given = rows_of(cfg.prompts.source, cfg.environment.arguments) if inputs.prompts is None else inputs.prompts
        self.data = sets.prompt_sets(cfg.prompts, tokenizer, cfg.run.seed, given, max_length=max_length)
        self._evaluation = getattr(cfg, "evaluation", EvaluationSection())
        if self._evaluation.correct_at is not None and not self.data.heldout:
            raise DataError(
                "evaluation.correct_at asks for the accuracy on held-out prompts, but none are held out; give "
                "prompts.heldout_fraction a share above 0, or prompts.heldout_source a file"
            )
        self.demonstrations: Sequence[LearntSequence] = ()
        if isinstance(cfg, PtxRecipe) and cfg.ptx.coef > 0:
            limit = context_length(self.loaded.model)
            given = cfg.demonstrations, tokenizer, cfg.run.seed, inputs.demonstrations
            self.demonstrations = sets.demonstration_sets(*given, max_length=limit).train
        elif inputs.demonstrations is not None:
            raise InputError(
                f"demonstrations are given, but {cfg.algorithm} would not learn them; set ptx.coef of PPO or GRPO "
                "above 0, or leave them out"
            )
        freeze_lower_layers(self.loaded.model, cfg.model.num_trainable_layers)
        self._learner, self._rewards = learner, inputs.rewards
        self._given: dict[str, str] = {}
        self._has_environment = cfg.environment.source is not None or inputs.environment_factory is not None
        self.conversations = None if open_episode is None else self._conversations(open_episode, inputs)

    @cached_property
    def scorer(self) -> Scorer:
        """The rewards that the recipe names, or those given from Python; none needs a column that there is not."""
        scorer = Scorer(
            self.cfg.reward if self._rewards is None else self._rewards,
            policy_tokenizer=self.loaded.tokenizer,
            device=self.device,
            while_drawing=self.cfg.rollout.score_while_drawing,
        )
        has_instances = self._has_environment and not self.cfg.environment.processes
        scorer.check_columns([*self.data.train[0].columns, *([ENVIRONMENTS] if has_instances else ())])
        return scorer

    def build(self) -> PolicyLearner:
        """The learner before its first step."""
        return self._learner.build(self, self.cfg)

    def policy_and_reference(self, section: KLSection) -> tuple[LanguageModel, LanguageModel | None, kl.Controller]:
        """(The policy; its frozen copy, None if the KL coefficient is 0; the controller of that coefficient)."""
        model, own = self.loaded.model, self.cfg.model
        policy = model_of_recipe(model, own)
        reference = reference_of(policy, own) if section.coef > 0 else None
        return policy, reference, kl.Controller(section.coef, section.target, section.horizon)

    def optimizer(self, module: nn.Module, kernels: Kernels) -> MasterAdamW:
        """The optimizer of all trainable parameters of `module`."""
        section = self.cfg.section
        total_steps = self.num_steps * section.num_epochs * section.num_minibatches
        return setup.optimizer_of(self.cfg, module, kernels, total_steps)

    def ptx(self, policy: LanguageModel, optimizer: MasterAdamW) -> Ptx | None:
        """The term of supervised learning; None if the recipe has none."""
        cfg = self.cfg
        if not isinstance(cfg, PtxRecipe) or not self.demonstrations:
            return None
        section = SFTSection(
            demonstrations_per_step=cfg.ptx.demonstrations_per_update, micro_batch_tokens=cfg.ptx.micro_batch_tokens
        )
        sft = SFT(section, policy, optimizer, self.loaded.tokenizer)
        return Ptx(cfg.ptx.coef, sft, self.demonstrations, cfg.run.seed)

    def reply_loss(self, policy: LanguageModel, optimizer: MasterAdamW) -> ReplyLoss | None:
        """The loss of what an environment replies; None if the recipe has none."""
        coef = self.cfg.environment.reply_loss_coef
        if not coef:
            return None
        if self.conversations is None:
            raise InputError(f"environment.reply_loss_coef is {coef:g}, but no environment replies; set one, or 0")
        sft = SFT(SFTSection(), policy, optimizer, self.loaded.tokenizer)
        return ReplyLoss(coef, sft, self.cfg.section.micro_batch_size)

    def rollouts(self, policy: LanguageModel, optimizer: MasterAdamW, value_head: nn.Module | None = None) -> Rollouts:
        """The engine on the policy's weights, with the scorer."""
        tokenizer, scale = self.loaded.tokenizer, self.cfg.scale
        ahead = Ahead(scale.staleness, self.num_steps, self.arguments_of, scale.swap_tokens)
        engine = engine_for(self.cfg.rollout, policy, tokenizer, lambda: optimizer, value_head, scale, ahead)
        return Rollouts(
            engine,
            self.scorer,
            self.cfg.rollout,
            self.cfg.run.seed,
            self.num_steps,
            len(self.data.train),
            self.conversations,
        )

    def _conversations(self, open_episode: Open, inputs: Inputs) -> Conversations:
        """The policy's environment, of which one episode is made, so that what is wrong with it is said at once."""
        section = self.cfg.environment
        factory = inputs.environment_factory
        given: dict[str, object] = {"environment": factory}
        if isinstance(factory, Mapping):
            for prompt in (*self.data.train, *self.data.heldout):
                name_in(prompt.columns, factory)
            given = {f"environment {name}": one for name, one in factory.items()}
        given |= {f"tool {number}": tool for number, tool in enumerate(inputs.tools or ())}
        self._given = {name: identity_of(one) for name, one in given.items() if one is not None}
        found = Conversations(
            open_episode,
            self.loaded.tokenizer,
            section,
            max_new_tokens=self.cfg.rollout.max_new_tokens,
            context=context_length(self.loaded.model),
        )
        found.check()
        return found

    def close(self) -> None:
        """Close the episodes of the environment, if there is one."""
        if self.conversations is not None:
            self.conversations.close()

    def prepare(self, learner: PolicyLearner, progress: bool) -> dict[str, str]:
        """Hashes of the model, the prompts and the rewards. A reward function is hashed by its file, or by its source
        if it was given from Python, without the modules that it imports.
        """
        rows = [
            (prompt.id, prompt.content, {name: value for name, value in prompt.columns.items() if value is not None})
            for prompt in (*self.data.train, *self.data.heldout)
        ]
        files, models = self.scorer.code_files.items(), self.scorer.models.items()
        return {
            "the model": fingerprint_of_tensors(learner.policy.module),
            "the prompts": fingerprint_of_rows(rows),
            **({"the demonstrations": fingerprint_of_rows(self.demonstrations)} if self.demonstrations else {}),
            "the rewards": ", ".join(self.scorer.names),
            **{f"the reward function {name}": code for name, code in self.scorer.functions.items()},
            **{f"the judge {name}": judge.identity for name, judge in self.scorer.judges.items()},
            **{f"the {name}": code for name, code in self._given.items()},
            **{
                f"the environment's file {place}": fingerprint_of_file(file)
                for place, file in self._environment_files()
            },
            **{f"the reward's file {place}": fingerprint_of_file(file) for place, file in files},
            **{f"the reward model {name}": fingerprint_of_tensors(model) for name, model in models},
        }

    def _environment_files(self) -> list[tuple[str, Path]]:
        """The files that the recipe's environment and tools come from."""
        section = self.cfg.environment
        sources = (section.source, *section.tools)
        named = [one for one in sources if one is not None and ":" in one and one.partition(":")[0] not in KINDS]
        files = [(source, file_of(source)) for source in named]
        return [(source, file) for source, file in files if file is not None]

    def estimate(self, *, longest: bool = True) -> Estimate:
        """Memory and work of a run, with trajectories that are as long as they may be, or end with their first turn."""
        most = self._most_tokens
        if most is not None and not longest:
            most = self.cfg.rollout.max_new_tokens, self.cfg.rollout.max_new_tokens
        return policy_estimate(
            self.loaded.model,
            self.cfg,
            prompt_tokens=self.data.mean_tokens,
            num_heldout=len(self.data.heldout),
            reward_parameters=[model.model.num_parameters() for model in self.scorer.models.values()],
            demonstration_tokens=fmean(one.num_used for one in self.demonstrations) if self.demonstrations else 0.0,
            trajectory_tokens=most,
        )

    @property
    def _most_tokens(self) -> tuple[int, int] | None:
        """(Tokens of a trajectory at most, those of them that are drawn); None without an environment."""
        if self.conversations is None:
            return None
        most = self.conversations.max_tokens
        most = min(most, context_length(self.loaded.model) or most)
        return most, min(most, self.cfg.environment.max_turns * self.cfg.rollout.max_new_tokens)

    @property
    def assumed(self) -> str:
        """The length of trajectories that the estimate assumes, in words; empty without an environment."""
        if (tokens := self._most_tokens) is None:
            return ""
        section = self.cfg.environment
        return (
            f"the longest trajectories, {section.max_turns} turns of {self.cfg.rollout.max_new_tokens} tokens with "
            f"replies of {section.max_reply_tokens}, {tokens[0]:,} tokens at most, and no wait for replies"
        )

    def batch(self, index: int) -> list[Prompt]:
        """The prompts of step `index` (from 0)."""
        return prompts_of_step(self.data.train, self.cfg.rollout.prompts_per_step, self.cfg.run.seed, index)

    def arguments_of(self, index: int) -> Arguments:
        """The arguments of the first call of the engine in step `index` (from 0)."""
        sampling = sampling_params(self.cfg.rollout, derive(self.cfg.run.seed, "rollout", index))
        return self.batch(index), self.cfg.rollout.completions_per_prompt, sampling

    def evaluate(self, learner: PolicyLearner) -> Metrics:
        """Mean reward on the held-out prompts."""
        return learner.rollouts.mean_reward(self.data.heldout)

    def measure(self, learner: PolicyLearner, when: str) -> dict[str, object]:
        """The share of right answers on held-out prompts, if the recipe has `evaluation.correct_at`."""
        section = self._evaluation
        if section.correct_at is None:
            return {}
        _log.info("measuring the accuracy %s training", when)
        # Drawn evenly, because rows are often sorted by difficulty.
        order = permutation(derive(self.cfg.run.seed, "accuracy"), 0, len(self.data.heldout))
        return accuracy.measure(
            learner.rollouts,
            self.scorer,
            [self.data.heldout[i] for i in sorted(order[: section.num_prompts])],
            sampling_params(self.cfg.rollout, derive(self.cfg.run.seed, f"accuracy {when}", 0)),
            num_completions=section.completions_per_prompt,
            correct_at=section.correct_at,
            when=when,
        )

    def summary(self, learner: PolicyLearner, session: Session) -> dict[str, object]:
        """Reward and KL at the first and the last step, and the accuracies, if they were measured."""
        return {**metrics.summary(session.metrics), **accuracy.figures(session.facts)}
