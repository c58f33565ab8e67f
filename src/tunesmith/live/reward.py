"""Updates of the live loop by a reward model: it learns from the votes, then the policy makes some steps of PPO or GRPO
against it. The steps are those of `reward`, `ppo` and `grpo`; policy, optimizer and engine are the loop's own.
"""

from collections.abc import Callable, Iterator, Sequence

from tunesmith.algorithms import kl
from tunesmith.batch.pack import chunks
from tunesmith.config.schema import GRPORecipe, PPORecipe, RewardRecipe
from tunesmith.core.seeds import derive, permutation_of_groups
from tunesmith.core.trace import span
from tunesmith.data.collate import EncodedPair
from tunesmith.data.rows import Tally
from tunesmith.data.sets import Facts
from tunesmith.live.state import ENDLESS, State
from tunesmith.live.votes import Comparison
from tunesmith.models.freeze import freeze_lower_layers, keep_lower_layers
from tunesmith.models.load import new_reward_model
from tunesmith.models.optimizer import MasterAdamW, StepReport
from tunesmith.models.tokenizer import stop_token_ids
from tunesmith.rewards.model import ModelReward
from tunesmith.rewards.scorer import Scorer
from tunesmith.trainers import grpo, ppo, reward, rollouts, setup


class RewardUpdate:
    """A reward model beside the policy, made anew at each start. It learns all earlier votes at its first use."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._reward = _reward_state(state)
        self._kl: kl.Controller | None = None
        self._knows_earlier = False

    def learn(
        self, votes: Sequence[Comparison], seed: int, beat: Callable[[str], None]
    ) -> Iterator[tuple[setup.Metrics, StepReport]]:
        """Metrics and report of each step on the policy, as it is made; the reward model learns from `votes` first."""
        accuracy = self._learn_rewards(votes, seed, beat)
        scorer = Scorer(
            [ModelReward(self._reward.model, "votes", policy_tokenizer=self._state.tokenizer)],
            policy_tokenizer=self._state.tokenizer,
        )
        trainer = _policy_state(self._state, scorer, self._kl)
        self._kl = trainer.kl
        for index in range(self._state.cfg.live.policy_steps):
            prompts = rollouts.prompts_of_step(trainer.cfg, trainer.prompts.train, self._state.position.num_steps)
            beat("policy step")
            if isinstance(trainer, ppo.State):
                result = ppo.step(trainer, prompts, derive(seed, index))
            else:
                result = grpo.step(trainer, prompts, derive(seed, index))
            self._state.position.num_steps += 1
            if result.report is not None:  # None: all rewards of each group were equal
                yield {**result.metrics, "reward_model/accuracy": accuracy}, result.report

    def _learn_rewards(self, votes: Sequence[Comparison], seed: int, beat: Callable[[str], None]) -> float:
        """The reward model's accuracy on the votes, as it was when it met them."""
        section = self._state.cfg.reward_model
        if not self._knows_earlier:
            votes = [*self._state.memory.learnt.values()]
            self._knows_earlier = True
        ends = stop_token_ids(self._state.policy.module, self._state.tokenizer)
        pairs = [_encoded(vote, ends) for vote in votes]
        accuracies: list[float] = []
        for epoch in range(section.num_epochs):
            order = permutation_of_groups(seed, epoch, [pair.prompt_id for pair in pairs])
            for places in chunks(order, section.pairs_per_step):
                beat("reward model")
                with span("reward_model"):
                    metrics = reward.step(self._reward, [pairs[place] for place in places]).metrics
                accuracies.append(metrics.get("accuracy", 0.5))
        return sum(accuracies) / len(accuracies)


def _encoded(vote: Comparison, ends: Sequence[int]) -> EncodedPair:
    """Both sides as the reward model sees completions in PPO: one that its length limit cut off is closed."""
    closing = tuple(ends[:1])
    sides = [
        (*one.prompt_ids, *one.completion_ids, *(() if one.completion_ids[-1] in ends else closing))
        for one in vote.answers
    ]
    return EncodedPair(str(vote.prompt.content), sides[0], sides[1], tie=vote.tie)


def _reward_state(state: State) -> reward.State:
    cfg = RewardRecipe(
        model=state.cfg.model, optimizer=state.cfg.optimizer, reward_model=state.cfg.reward_model, run=state.cfg.run
    )
    model = new_reward_model(cfg.model, device=state.device)
    keep_lower_layers(model.model, cfg.reward_model.num_layers)
    if cfg.reward_model.num_layers is None:
        freeze_lower_layers(model.model, cfg.model.num_trainable_layers)
    model.model.score.requires_grad_(True)
    return reward.State(
        cfg=cfg,
        device=state.device,
        model=model,
        optimizer=MasterAdamW(model, cfg.optimizer, total_steps=ENDLESS),
        pairs=(),
        heldout=(),
        heldout_prompts={},
        identity={},
        num_steps=ENDLESS,
        facts=Facts(Tally(0, 0), None, (), 0),
    )


def _policy_state(state: State, scorer: Scorer, known: kl.Controller | None) -> ppo.State | grpo.State:
    """The state of PPO or GRPO on the loop's policy, optimizer and engine; `known` goes on with its KL coefficient."""
    live = state.cfg
    shared = {"model": live.model, "optimizer": live.optimizer, "prompts": live.prompts, "run": live.run}
    section = live.ppo if live.live.update == "ppo" else live.grpo
    controller = known or kl.controller(section.kl.coef, section.kl.target, section.kl.horizon)
    reference = state.reference if section.kl.coef > 0 else None
    if live.live.update == "ppo":
        return ppo.State(
            cfg=PPORecipe.model_validate({**shared, "rollout": live.rollout.model_dump(), "ppo": live.ppo}),
            device=state.device,
            policy=state.policy,
            value_head=None,
            critic=None,
            reference=reference,
            engine=state.engine,
            scorer=scorer,
            optimizer=state.optimizer,
            kl=controller,
            tokenizer=state.tokenizer,
            prompts=state.prompts,
            identity=state.identity,
            num_steps=ENDLESS,
        )
    return grpo.State(
        cfg=GRPORecipe.model_validate({**shared, "rollout": live.rollout.model_dump(), "grpo": live.grpo}),
        device=state.device,
        policy=state.policy,
        reference=reference,
        engine=state.engine,
        scorer=scorer,
        optimizer=state.optimizer,
        kl=controller,
        tokenizer=state.tokenizer,
        prompts=state.prompts,
        identity=state.identity,
        num_steps=ENDLESS,
    )
