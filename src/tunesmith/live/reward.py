"""Updates of the live loop by a reward model: it learns from the votes, then the policy takes steps of PPO or GRPO
against it. The learners are those of `trainers`, on the loop's own policy, optimizer and engine.
"""

from collections.abc import Callable, Iterator, Sequence

from tunesmith.algorithms import kl
from tunesmith.batch.pack import chunks
from tunesmith.core.seeds import derive, permutation_of_groups
from tunesmith.core.trace import span
from tunesmith.data.collate import EncodedPair
from tunesmith.live.state import ENDLESS, State
from tunesmith.live.votes import Comparison
from tunesmith.models.freeze import freeze_lower_layers, keep_lower_layers
from tunesmith.models.load import new_reward_model
from tunesmith.models.optimizer import MasterAdamW
from tunesmith.models.tokenizer import stop_token_ids
from tunesmith.rewards.model import ModelReward
from tunesmith.rewards.scorer import Scorer
from tunesmith.trainers import rollouts
from tunesmith.trainers.api import StepResult
from tunesmith.trainers.grpo import GRPO
from tunesmith.trainers.ppo import PPO
from tunesmith.trainers.reward import Reward
from tunesmith.trainers.rollouts import Rollouts


class RewardUpdate:
    """A reward model beside the policy, created at each start. Its first update learns from all earlier votes."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._reward = _reward_learner(state)
        section = state.cfg.ppo if state.cfg.live.update == "ppo" else state.cfg.grpo
        self._kl = kl.controller(section.kl.coef, section.kl.target, section.kl.horizon)
        self._knows_earlier = False

    def learn(self, votes: Sequence[Comparison], seed: int, beat: Callable[[str], None]) -> Iterator[StepResult]:
        """The result of each step on the policy, as it is made; the reward model learns from `votes` first."""
        state = self._state
        accuracy = self._learn_rewards(votes, seed, beat)
        model = ModelReward(self._reward.model, "votes", policy_tokenizer=state.tokenizer)
        policy = self._policy_learner(Scorer([model], policy_tokenizer=state.tokenizer))
        size, run_seed = state.cfg.rollout.prompts_per_step, state.cfg.run.seed
        for index in range(state.cfg.live.policy_steps):
            prompts = rollouts.prompts_of_step(state.prompts.train, size, run_seed, state.position.num_steps)
            beat("policy step")
            result = policy.step(prompts, derive(seed, index))
            state.position.num_steps += 1
            if result.report is not None:  # None: all rewards of each group were equal
                result.metrics["reward_model/accuracy"] = accuracy
                yield result

    def _learn_rewards(self, votes: Sequence[Comparison], seed: int, beat: Callable[[str], None]) -> float:
        """Train the reward model; returns its accuracy on the votes, each measured before it was learnt."""
        section = self._state.cfg.reward_model
        if not self._knows_earlier:
            votes = [*self._state.memory.learnt.values()]
            self._knows_earlier = True
        ends = stop_token_ids(self._state.policy.module, self._state.tokenizer)
        pairs = [_encoded(vote, ends) for vote in votes]
        accuracies: list[float] = []
        for epoch in range(section.num_epochs):
            order = permutation_of_groups(seed, epoch, [pair.prompt_id for pair in pairs])
            for index, places in enumerate(chunks(order, section.pairs_per_step)):
                beat("reward model")
                with span("reward_model"):
                    metrics = self._reward.step([pairs[place] for place in places], index).metrics
                accuracies.append(metrics.get("accuracy", 0.5))
        return sum(accuracies) / len(accuracies)

    def _policy_learner(self, scorer: Scorer) -> PPO | GRPO:
        """PPO or GRPO on the loop's policy, optimizer and engine."""
        state, cfg = self._state, self._state.cfg
        drawing = Rollouts(state.engine, scorer, cfg.rollout, cfg.run.seed, ENDLESS)
        shared = (state.optimizer, self._kl, state.tokenizer)
        if cfg.live.update == "ppo":
            return PPO(cfg.ppo, drawing, state.policy, state.reference if cfg.ppo.kl.coef > 0 else None, *shared)
        reference = state.reference if cfg.grpo.kl.coef > 0 else None
        return GRPO(cfg.grpo, drawing, state.policy, reference, *shared, pool=state.prompts.train)


def _encoded(vote: Comparison, ends: Sequence[int]) -> EncodedPair:
    """Both sides as the reward model scores completions in PPO: a truncated one gets an end token."""
    closing = tuple(ends[:1])
    sides = [
        (*one.prompt_ids, *one.completion_ids, *(() if one.completion_ids[-1] in ends else closing))
        for one in vote.answers
    ]
    return EncodedPair(str(vote.prompt.content), sides[0], sides[1], tie=vote.tie)


def _reward_learner(state: State) -> Reward:
    section = state.cfg.reward_model
    model = new_reward_model(state.cfg.model, device=state.device)
    keep_lower_layers(model.model, section.num_layers)
    if section.num_layers is None:
        freeze_lower_layers(model.model, state.cfg.model.num_trainable_layers)
    model.model.score.requires_grad_(True)
    return Reward(section, model, MasterAdamW(model, state.cfg.optimizer, total_steps=ENDLESS))
