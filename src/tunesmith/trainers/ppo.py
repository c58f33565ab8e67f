"""Proximal policy optimisation for language models (Schulman et al. 2017; Ziegler et al. 2019; Ouyang et al. 2022).

Shape legend: P prompts, G completions per prompt, B = P * G sequences, S positions of prompt and completion, T
completion tokens. `step` is the whole algorithm; `build` makes what it works on, `run` adds cadence: evaluation,
checkpoints, logs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tunesmith.algorithms import advantages, kl, policy_loss, value_loss
from tunesmith.batch.pack import PolicyScores, PPOBatch, Sequences, chunks, pack, select
from tunesmith.batch.rollout import Group, SamplingParams
from tunesmith.config.schema import PPORecipe
from tunesmith.core.seeds import derive, items_at, permutation
from tunesmith.core.trace import span, trace
from tunesmith.data.collate import check_prompt_lengths, mean_prompt_tokens, prefix_prompts
from tunesmith.data.prompts import PromptLike, load_prompts
from tunesmith.data.split import split_by_prompt
from tunesmith.distributed import collectives
from tunesmith.models.export import ModelCard, save_final
from tunesmith.models.freeze import freeze_lower_layers
from tunesmith.models.heads import Critic, ScalarHead, critic_values, hidden_size
from tunesmith.models.load import frozen_copy, load_policy
from tunesmith.models.loaded import PreTrainedModel, PreTrainedTokenizerBase
from tunesmith.models.logprob import token_logps
from tunesmith.models.optimizer import MasterAdamW, StepReport
from tunesmith.rewards.scorer import RewardLike, Scorer, Scores
from tunesmith.rollout.engine import Engine
from tunesmith.rollout.transformers_backend import TransformersEngine
from tunesmith.schema.records import Prompt
from tunesmith.trainers import ppo_metrics, setup
from tunesmith.trainers.estimate import announce, ppo_estimate

SHOWN = ("reward", "objective/kl", "completions/mean_length")
"""Figures that stand behind the progress bar."""


@dataclass(slots=True)
class State:
    """What the loop owns. `step` changes the policy, the critic, the optimizer and the KL controller, nothing else."""

    cfg: PPORecipe
    device: torch.device
    policy: PreTrainedModel
    value_head: ScalarHead | None
    critic: Critic | None
    reference: PreTrainedModel | None
    engine: Engine
    scorer: Scorer
    optimizer: MasterAdamW
    kl: kl.Controller
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Prompt]
    heldout: Sequence[Prompt]
    num_steps: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step hands to `run`: metrics, the groups it drew and their scores."""

    metrics: setup.Metrics
    groups: Sequence[Group]
    scores: Scores
    report: StepReport


def build(
    cfg: PPORecipe, *, prompts: Sequence[PromptLike] | None = None, rewards: Sequence[RewardLike] | None = None
) -> State:
    """The state before the first step. `prompts` and `rewards`, where given, stand in for those that `cfg` names."""
    device = setup.prepare(cfg)
    loaded = load_policy(cfg.model, device=device)
    texts = load_prompts(cfg.prompts.source if prompts is None else prompts, cfg.prompts)
    split = split_by_prompt(texts, cfg.prompts.heldout_fraction, cfg.run.seed)
    train, heldout = split.train, split.heldout
    if cfg.prompts.prefix_tokens:
        train = prefix_prompts(train, loaded.tokenizer, cfg.prompts.prefix_tokens, cfg.run.seed)
        heldout = prefix_prompts(heldout, loaded.tokenizer, cfg.prompts.prefix_tokens, cfg.run.seed)
    check_prompt_lengths([*train, *heldout], loaded.tokenizer, cfg.prompts.max_tokens)
    policy = loaded.model
    reference = frozen_copy(policy) if cfg.ppo.kl.coef > 0 else None
    shared = cfg.ppo.critic == "shared"
    value_head = ScalarHead(hidden_size(policy)).to(device) if shared else None
    critic = None if shared else Critic.from_policy(policy)
    freeze_lower_layers(policy, cfg.model.num_trainable_layers)
    num_steps = cfg.run.steps or 100
    trained: dict[str, nn.Module] = {"policy": policy}
    trained |= {name: part for name, part in (("value_head", value_head), ("critic", critic)) if part is not None}
    optimizer = MasterAdamW(
        nn.ModuleDict(trained),
        cfg.optimizer,
        total_steps=num_steps * cfg.ppo.num_epochs * cfg.ppo.num_minibatches,
    )
    return State(
        cfg=cfg,
        device=device,
        policy=policy,
        value_head=value_head,
        critic=critic,
        reference=reference,
        engine=TransformersEngine(
            policy,
            loaded.tokenizer,
            weight_version=lambda: optimizer.weight_version,
            batch_size=cfg.rollout.batch_size,
        ),
        scorer=Scorer(cfg.reward if rewards is None else rewards, policy_tokenizer=loaded.tokenizer, device=device),
        optimizer=optimizer,
        kl=kl.controller(cfg.ppo.kl.coef, cfg.ppo.kl.target, cfg.ppo.kl.horizon),
        tokenizer=loaded.tokenizer,
        prompts=train,
        heldout=heldout,
        num_steps=num_steps,
    )


def step(state: State, prompts: Sequence[Prompt], sampling: SamplingParams) -> StepResult:
    """One PPO step: draw, score, estimate advantages, update over several epochs, move the KL coefficient."""
    cfg = state.cfg.ppo
    with span("rollout"):
        groups = state.engine.generate(prompts, state.cfg.rollout.completions_per_prompt, sampling)
    with span("reward"):
        scores = state.scorer.score(groups)
    sequences = pack(groups, pad_id=0, device=state.device)
    mask_BT = sequences.mask_BT
    with span("old_policy"):  # log-probs and values of the policy that drew the tokens
        old = score_policy(state, sequences)
    reference_logp_BT = score_reference(state, sequences)
    if reference_logp_BT is None:  # no KL control: the policy is its own reference
        reference_logp_BT = old.logp_BT

    kl_BT = kl.estimate(cfg.kl.estimator, old.logp_BT, reference_logp_BT)
    kl_in_reward = state.kl.value if cfg.kl.place == "reward" else 0.0
    reward_BT = kl.penalised_reward(scores.total_PG.flatten().to(kl_BT), kl_BT, mask_BT, kl_in_reward)
    if cfg.whiten_rewards:
        reward_BT = advantages.whiten(reward_BT, mask_BT, shift_mean=False)
    advantage_BT, return_BT = advantages.gae(reward_BT, old.value_BT, mask_BT, cfg.gamma, cfg.lam)
    if cfg.whiten_advantages:
        advantage_BT = advantages.whiten(advantage_BT, mask_BT)
    batch = PPOBatch(sequences, old.logp_BT, reference_logp_BT, old.value_BT, advantage_BT, return_BT)

    stats = ppo_metrics.UpdateStats()
    for minibatch in minibatches(state, batch):
        num_tokens = collectives.sum_over_ranks(minibatch.sequences.num_tokens)  # one global denominator
        total_loss = 0.0
        for rows in chunks(range(len(minibatch.sequences.lengths_B)), cfg.micro_batch_size):
            micro = minibatch.select(rows)
            with span("update/forward"):
                loss = micro_batch_loss(state, micro, num_tokens, stats)
            with span("update/backward"):
                loss.backward()
            total_loss += loss.item()
        with span("update/optimizer"):
            stats.add_report(state.optimizer.step(loss=total_loss))  # refuses what is not finite
        if cfg.target_kl is not None and stats.last_minibatch_kl() > cfg.target_kl:
            stats.stopped_early = True
            break
    kl_per_sequence = ppo_metrics.kl_per_sequence(old.logp_BT, reference_logp_BT, mask_BT)
    state.kl.update(kl_per_sequence, len(sequences.lengths_B))
    metrics = ppo_metrics.step_metrics(groups, scores, old, batch, kl_in_reward, stats)
    return StepResult({**metrics, "objective/kl_coef": state.kl.value}, groups, scores, stats.last_report())


def micro_batch_loss(state: State, micro: PPOBatch, num_tokens: float, stats: ppo_metrics.UpdateStats) -> torch.Tensor:
    """The PPO loss of one micro-batch, a scalar; its statistics are added to `stats`."""
    cfg, mask_BT = state.cfg.ppo, micro.sequences.mask_BT
    new = forward(state, micro.sequences)
    policy, policy_stats = policy_loss.clipped(
        new.logp_BT, micro.old_logp_BT, micro.advantage_BT, mask_BT, num_tokens, cfg.clip_low, cfg.clip_high
    )
    value, value_stats = value_loss.clipped(
        new.value_BT, micro.old_value_BT, micro.return_BT, mask_BT, num_tokens, cfg.value_clip
    )
    loss = policy + cfg.value_coef * value
    if cfg.entropy_coef > 0:
        loss = loss - cfg.entropy_coef * policy_loss.entropy_bonus(new.entropy_BT, mask_BT, num_tokens)
    if cfg.kl.place == "loss" and state.kl.value > 0:
        penalty = kl.penalty_loss(cfg.kl.estimator, new.logp_BT, micro.reference_logp_BT, mask_BT, num_tokens)
        loss = loss + state.kl.value * penalty
    stats.add(policy_stats, value_stats)
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
    assert scores.value_BT is not None, "without a critic the policy has a value head"
    return PolicyScores(scores.logp_BT, scores.entropy_BT, scores.value_BT)


@torch.no_grad()
def score_policy(state: State, sequences: Sequences) -> PolicyScores:
    """What `forward` gives, without gradient, in micro-batches."""
    parts = [forward(state, part) for part in micro_batches(state, sequences)]
    mask_BT = sequences.mask_BT
    return PolicyScores(
        ppo_metrics.join([part.logp_BT for part in parts], mask_BT),
        ppo_metrics.join([part.entropy_BT for part in parts], mask_BT),
        ppo_metrics.join([part.value_BT for part in parts], mask_BT),
    )


@torch.no_grad()
def score_reference(state: State, sequences: Sequences) -> torch.Tensor | None:
    """Log-probs of the completion tokens under the reference, `[B, T]`; None without one."""
    if state.reference is None:
        return None
    with span("reference"):
        parts_BT = [
            token_logps(
                state.reference,
                part.ids_BS,
                part.lengths_B,
                prompt_lengths_B=part.prompt_lengths_B,
                temperature=state.cfg.rollout.temperature,
            ).logp_BT
            for part in micro_batches(state, sequences)
        ]
    return ppo_metrics.join(parts_BT, sequences.mask_BT)


def micro_batches(state: State, sequences: Sequences) -> Iterator[Sequences]:
    """Consecutive rows of `sequences`, a micro-batch at a time."""
    for rows in chunks(range(len(sequences.lengths_B)), state.cfg.ppo.micro_batch_size):
        yield select(sequences, rows)


def minibatches(state: State, batch: PPOBatch) -> Iterator[PPOBatch]:
    """Minibatches of every epoch over the rollout; the order is a pure function of seed, weight version and epoch."""
    num_rows = len(batch.sequences.lengths_B)
    size = -(-num_rows // state.cfg.ppo.num_minibatches)
    seed = derive(state.cfg.run.seed, "minibatches", state.optimizer.weight_version)
    for epoch in range(state.cfg.ppo.num_epochs):
        for rows in chunks(permutation(seed, epoch, num_rows), size):
            yield batch.select(rows)


def sampling_params(cfg: PPORecipe, stream: str, step_index: int) -> SamplingParams:
    """How the completions of a step are drawn; the seed is a pure function of run seed, stream and step."""
    return SamplingParams(
        max_new_tokens=cfg.rollout.max_new_tokens,
        min_new_tokens=cfg.rollout.min_new_tokens,
        temperature=cfg.rollout.temperature,
        top_p=cfg.rollout.top_p,
        top_k=cfg.rollout.top_k,
        seed=derive(cfg.run.seed, stream, step_index),
    )


def evaluate(state: State, step_index: int) -> setup.Metrics:
    """Mean reward of one completion of each held-out prompt; empty without held-out prompts."""
    if not state.heldout:
        return {}
    with span("evaluate"):
        groups = state.engine.generate(state.heldout, 1, sampling_params(state.cfg, "evaluate", 0))
        return {"eval/reward": state.scorer.score(groups).total_PG.mean().item()}


def run(
    cfg: PPORecipe,
    *,
    provenance: Mapping[str, str] | None = None,
    prompts: Sequence[PromptLike] | None = None,
    rewards: Sequence[RewardLike] | None = None,
    progress: bool = True,
) -> setup.RunResult:
    """Train a policy by PPO as `cfg` says; the run's folder, metrics and summary.

    Raises:
        InputError: for a config, model, prompts or reward that cannot be used, before the run folder is made.
        TrainingError: if too many steps in a row are not finite.
    """
    watch = setup.Stopwatch()
    state = build(cfg, prompts=prompts, rewards=rewards)
    estimate = ppo_estimate(
        state.policy,
        cfg,
        prompt_tokens=mean_prompt_tokens(state.prompts, state.tokenizer),
        num_reward_models=state.scorer.num_models,
    )
    announce(estimate, state.num_steps, progress)
    per_step = cfg.rollout.prompts_per_step
    with setup.session(cfg, state.num_steps, provenance=provenance, show_progress=progress) as session:
        for index in range(state.num_steps):
            chosen = items_at(cfg.run.seed, index * per_step, per_step, len(state.prompts))
            with trace() as times:
                result = step(state, [state.prompts[i] for i in chosen], sampling_params(cfg, "rollout", index))
                is_last = index + 1 == state.num_steps
                due = is_last or (cfg.run.eval_every and (index + 1) % cfg.run.eval_every == 0)
                evaluation = evaluate(state, index) if due else {}
            session.record(index + 1, ppo_metrics.with_times({**result.metrics, **evaluation}, times), SHOWN)
            if index % cfg.run.sample_every == 0 or is_last:
                session.folder.append_samples(ppo_metrics.sample_rows(index + 1, result.groups, result.scores))
            setup.check_refused(result.report, cfg.optimizer.max_refused_steps, session.folder.path)
            session.checkpoint(index + 1, *checkpoint_contents(state), is_last=is_last)
        export(state, session)
        return session.finish({**ppo_metrics.summary(session.metrics), "algorithm": "ppo", "minutes": watch.minutes})


def checkpoint_contents(state: State) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, object]]:
    """Tensors and numbers from which training can go on."""
    optimizer = state.optimizer.state_dict()
    tensors = {"policy": dict(state.policy.named_parameters()), "optimizer": dict(optimizer.tensors)}
    for name, head in (("value_head", state.value_head), ("critic", state.critic)):
        if head is not None:
            tensors[name] = dict(head.named_parameters())
    return tensors, {"kl": state.kl.state_dict(), "optimizer": dict(optimizer.scalars)}


def export(state: State, session: setup.Session) -> None:
    """Write `final/`: the policy in the Hugging Face layout, its value head beside it."""
    card = ModelCard(
        base_model=state.cfg.model.name,
        algorithm="PPO",
        title=session.folder.path.name,
        metrics=ppo_metrics.summary(session.metrics),
        recipe=state.cfg.model_dump(mode="json"),
    )
    save_final(state.policy, state.tokenizer, session.folder.final, card, value_head=state.value_head)
