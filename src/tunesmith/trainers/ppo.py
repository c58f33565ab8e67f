"""Proximal policy optimisation for language models (Schulman et al. 2017; Ziegler et al. 2019; Ouyang et al. 2022).

Shape legend: P prompts, G completions per prompt, B = P * G sequences, S positions of prompt and completion, T
completion tokens. `step` is the whole algorithm; `build` makes what it works on, `run` adds cadence: evaluation,
checkpoints, logs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from tunesmith.algorithms import advantages, kl, policy_loss, value_loss
from tunesmith.batch.pack import PolicyScores, PPOBatch, Sequences, chunks, pack
from tunesmith.batch.upload import Uploader
from tunesmith.config.schema import PPORecipe
from tunesmith.core.seeds import derive
from tunesmith.core.trace import span
from tunesmith.data.prompts import PromptLike
from tunesmith.kernels.native import Kernels
from tunesmith.models.export import ModelCard, save_final
from tunesmith.models.freeze import freeze_lower_layers
from tunesmith.models.heads import Critic, ScalarHead, critic_values, hidden_size
from tunesmith.models.language_model import LanguageModel, language_model
from tunesmith.models.load import frozen_copy, load_policy
from tunesmith.models.loaded import PreTrainedTokenizerBase
from tunesmith.models.logprob import token_logps
from tunesmith.models.optimizer import MasterAdamW
from tunesmith.rewards.scorer import Scorer, TrainerState
from tunesmith.rewards.sources import RewardLike
from tunesmith.rollout.engine import Engine
from tunesmith.schema.records import Prompt
from tunesmith.trainers import policy_metrics, ppo_metrics, rollouts, setup
from tunesmith.trainers.estimate import announce, policy_estimate
from tunesmith.trainers.objective import Weights, objective_of
from tunesmith.trainers.policy_record import StepResult, step_record
from tunesmith.trainers.restart import Resumable
from tunesmith.trainers.session import Session, open_session

SHOWN = ("reward", "objective/kl", "completions/mean_length")
"""Figures that stand behind the progress bar."""


@dataclass(slots=True)
class State:
    """What the loop owns. `step` changes the policy, the critic, the optimizer and the KL controller, nothing else."""

    cfg: PPORecipe
    device: torch.device
    policy: LanguageModel
    value_head: ScalarHead | None
    critic: Critic | None
    reference: LanguageModel | None
    engine: Engine
    scorer: Scorer
    optimizer: MasterAdamW
    kl: kl.Controller
    tokenizer: PreTrainedTokenizerBase
    prompts: rollouts.PromptSets
    identity: Mapping[str, str]
    num_steps: int
    uploader: Uploader | None = field(init=False)

    def __post_init__(self) -> None:
        self.uploader = setup.uploader_to(self.device)


def build(
    cfg: PPORecipe, *, prompts: Sequence[PromptLike] | None = None, rewards: Sequence[RewardLike] | None = None
) -> State:
    """The state before the first step. `prompts` and `rewards`, where given, stand in for those that `cfg` names."""
    device = setup.prepare(cfg)
    loaded = load_policy(cfg.model, device=device)
    sets = rollouts.prompt_sets(cfg, loaded, prompts)
    policy = language_model(loaded.model, Kernels())
    reference = language_model(frozen_copy(loaded.model), policy.kernels) if cfg.ppo.kl.coef > 0 else None
    value_head = ScalarHead(hidden_size(loaded.model)).to(device) if cfg.ppo.critic == "shared" else None
    critic = Critic.from_policy(loaded.model) if cfg.ppo.critic == "separate" else None
    freeze_lower_layers(loaded.model, cfg.model.num_trainable_layers)
    num_steps = cfg.run.steps or 100
    trained: dict[str, nn.Module] = {"policy": loaded.model}
    trained |= {name: part for name, part in (("value_head", value_head), ("critic", critic)) if part is not None}
    scorer = rollouts.scorer_of(cfg, rewards, loaded.tokenizer, device)
    optimizer = MasterAdamW(
        nn.ModuleDict(trained),
        cfg.optimizer,
        total_steps=num_steps * cfg.ppo.num_epochs * cfg.ppo.num_minibatches,
        kernels=policy.kernels,
    )
    return State(
        cfg=cfg,
        device=device,
        policy=policy,
        value_head=value_head,
        critic=critic,
        reference=reference,
        engine=rollouts.engine_of(cfg, policy, loaded.tokenizer, optimizer, value_head=value_head),
        scorer=scorer,
        optimizer=optimizer,
        kl=kl.controller(cfg.ppo.kl.coef, cfg.ppo.kl.target, cfg.ppo.kl.horizon),
        tokenizer=loaded.tokenizer,
        prompts=sets,
        identity=rollouts.identity(loaded.model, sets, scorer, device),
        num_steps=num_steps,
    )


def step(state: State, prompts: Sequence[Prompt], index: int) -> StepResult:
    """PPO step `index` (from 0): draw, score, estimate advantages, update for some epochs, move the KL coefficient."""
    cfg, sampling = state.cfg.ppo, rollouts.sampling_params(state.cfg, "rollout", index)
    asked = TrainerState(index, state.num_steps)
    groups, scores = rollouts.draw_scored(state.engine, state.scorer, state.cfg, prompts, sampling, asked)
    rows = rollouts.valid_rows(scores)
    sequences = setup.sent(pack(groups, pad_id=0, rows=rows), state.uploader)
    mask_BT = sequences.mask_BT
    with span("old_policy"):  # what the policy that drew the tokens, and its critic, say of them
        old_logp_BT, old_value_BT = old_scores(state, sequences)
    reference_logp_BT = old_logp_BT  # without KL control the policy is its own reference
    if state.reference is not None:
        with span("reference"):
            temperature = state.cfg.rollout.temperature
            reference_logp_BT = rollouts.logps(state.reference, sequences, temperature, cfg.micro_batch_size)

    kl_BT = kl.estimate(cfg.kl.estimator, old_logp_BT, reference_logp_BT)
    kl_in_reward = state.kl.value if cfg.kl.place == "reward" else 0.0
    reward_BT = kl.penalised_reward(scores.total_PG.flatten()[rows].to(kl_BT), kl_BT, mask_BT, kl_in_reward)
    if cfg.whiten_rewards:
        reward_BT = advantages.whiten(reward_BT, mask_BT, shift_mean=False)
    advantage_BT, return_BT = advantages.gae(reward_BT, old_value_BT, mask_BT, cfg.gamma, cfg.lam)
    if cfg.whiten_advantages:
        advantage_BT = advantages.whiten(advantage_BT, mask_BT)
    batch = PPOBatch(sequences, old_logp_BT, reference_logp_BT, advantage_BT, old_value_BT, return_BT)

    stats = policy_metrics.UpdateStats()
    for minibatch in rollouts.minibatches(batch, cfg, derive(state.cfg.run.seed, "minibatches", index)):
        size = rollouts.update_size(minibatch.sequences, cfg.micro_batch_size)  # global denominators
        total_loss = torch.zeros((), device=state.device)
        for rows in chunks(range(len(minibatch.sequences.lengths_B)), cfg.micro_batch_size):
            micro = minibatch.select(rows)
            with span("update/forward"):
                loss = micro_batch_loss(state, micro, size, stats)
            with span("update/backward"):
                state.optimizer.scaled(loss).backward()
            total_loss += loss.detach()
        with span("update/optimizer"):
            stats.add_report(state.optimizer.step(loss=total_loss.item()))  # refuses what is not finite
        if cfg.target_kl is not None and stats.last_minibatch_kl() > cfg.target_kl:
            stats.stopped_early = True
            break
    state.kl.update(policy_metrics.kl_per_sequence(old_logp_BT, reference_logp_BT, mask_BT), len(sequences.lengths_B))
    metrics = ppo_metrics.step_metrics(groups, scores, batch, kl_in_reward, stats)
    return StepResult({**metrics, "objective/kl_coef": state.kl.value}, groups, scores, stats.worst_report())


def micro_batch_loss(
    state: State, micro: PPOBatch, size: policy_loss.UpdateSize, stats: policy_metrics.UpdateStats
) -> torch.Tensor:
    """The PPO loss of one micro-batch, a scalar; its statistics are added to `stats`."""
    cfg, mask_BT = state.cfg.ppo, micro.sequences.mask_BT
    denominator = policy_loss.loss_denominator(cfg.loss_normalization, mask_BT, size, state.cfg.rollout.max_new_tokens)
    weights = Weights(denominator, size.num_tokens, state.kl.value)
    objective = objective_of(cfg, state.cfg.rollout.importance, micro, weights)
    new = forward(state, micro.sequences)
    policy = objective.of(new.logp_BT, new.entropy_BT)
    loss, value_stats = policy.loss, None
    if cfg.critic != "none":
        value, value_stats = value_loss.clipped(
            new.value_BT, micro.old_value_BT, micro.return_BT, mask_BT, size.num_tokens, cfg.value_clip
        )
        loss = loss + cfg.value_coef * value
    stats.add(policy.stats, value_stats)
    stats.add_pass(micro.sequences, new.logp_BT, new.entropy_BT, policy.drawn)
    return loss


def forward(state: State, sequences: Sequences) -> PolicyScores:
    """Log-probs, entropies and values of the completion tokens under the current weights."""
    ids_BS, lengths_B, prompt_lengths_B = sequences.ids_BS, sequences.lengths_B, sequences.prompt_lengths_B
    scores = token_logps(
        state.policy,
        ids_BS,
        lengths_B,
        prompt_lengths_B=prompt_lengths_B,
        temperature=state.cfg.rollout.temperature,
        value_head=state.value_head,
    )
    if state.critic is not None:
        value_BT = critic_values(state.critic, ids_BS, lengths_B, prompt_lengths_B)
        return PolicyScores(scores.logp_BT, scores.entropy_BT, value_BT)
    value_BT = torch.zeros_like(scores.logp_BT) if scores.value_BT is None else scores.value_BT  # zeros without both
    return PolicyScores(scores.logp_BT, scores.entropy_BT, value_BT)


@torch.no_grad()
def old_scores(state: State, sequences: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs, values) of the tokens under the policy that drew them, without gradient.

    An exact engine has recorded what a pass of the trainer would give, so there is none. A critic of its own is asked.
    """
    size, width = state.cfg.ppo.micro_batch_size, sequences.mask_BT.shape[1]
    micros = list(rollouts.micro_batches(sequences, size))
    if not state.engine.is_exact:
        parts = [forward(state, micro) for micro in micros]
        logp_BT = rollouts.join([part.logp_BT for part in parts], width)
        return logp_BT, rollouts.join([part.value_BT for part in parts], width)
    if state.critic is not None:
        values = [critic_values(state.critic, m.ids_BS, m.lengths_B, m.prompt_lengths_B) for m in micros]
        return sequences.raw_logp_BT, rollouts.join(values, width)
    value_BT = torch.zeros_like(sequences.raw_logp_BT) if sequences.value_BT is None else sequences.value_BT
    return sequences.raw_logp_BT, value_BT


def run(
    cfg: PPORecipe,
    *,
    provenance: Mapping[str, str] | None = None,
    prompts: Sequence[PromptLike] | None = None,
    rewards: Sequence[RewardLike] | None = None,
    progress: bool = True,
    resume: Path | None = None,
) -> setup.RunResult:
    """Train a policy by PPO as `cfg` says, or go on with the run in the folder `resume`; folder, metrics and summary.

    Raises:
        InputError: for a config, model, prompts or reward that cannot be used, before the run folder is made.
        TrainingError: if too many steps in a row are not finite, or memory runs out.
        StoppedError: after SIGTERM or SIGINT, once a checkpoint is written.
    """
    state = build(cfg, prompts=prompts, rewards=rewards)
    estimate = policy_estimate(
        state.policy.module, cfg, prompt_tokens=state.prompts.mean_tokens, num_reward_models=state.scorer.num_models
    )
    announce(estimate, state.num_steps, progress)
    with open_session(
        cfg,
        resumable(state),
        provenance=provenance,
        show_progress=progress,
        data=state.prompts.facts,
        resume=resume,
        from_python=setup.given(prompts=prompts, rewards=rewards),
    ) as session:
        for index in session.steps():
            with session.working() as times:
                result = step(state, rollouts.prompts_of_step(cfg, state.prompts.train, index), index)
                evaluation = evaluate(state) if session.is_due(index, cfg.run.eval_every) else {}
            session.end_step(index + 1, step_record(session, index, result, evaluation, times), SHOWN)
        export(state, session)
        return session.finish({**policy_metrics.summary(session.metrics), "algorithm": "ppo"})


def evaluate(state: State) -> setup.Metrics:
    """Mean reward of one completion of each held-out prompt, with the same noise at every step."""
    sampling = rollouts.sampling_params(state.cfg, "evaluate", 0)
    return rollouts.mean_reward(state.engine, state.scorer, state.prompts.heldout, sampling)


def resumable(state: State) -> Resumable:
    """How a session saves and restores `state`."""
    heads: dict[str, nn.Module | None] = {"value_head": state.value_head, "critic": state.critic}
    modules: dict[str, nn.Module] = {"policy": state.policy.module}
    modules |= {name: module for name, module in heads.items() if module is not None}
    return Resumable(
        modules=modules,
        optimizer=state.optimizer,
        counters={"kl": state.kl},
        num_steps=state.num_steps,
        identity=state.identity,
    )


def export(state: State, session: Session) -> None:
    """Write `final/`: the policy in the Hugging Face layout, its value head beside it."""
    card = ModelCard(
        base_model=state.cfg.model.name,
        algorithm="PPO",
        title=session.folder.path.name,
        metrics=policy_metrics.summary(session.metrics),
        recipe=state.cfg.model_dump(mode="json"),
    )
    save_final(state.policy.module, state.tokenizer, session.folder.final, card, value_head=state.value_head)
