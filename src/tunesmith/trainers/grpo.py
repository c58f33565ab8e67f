"""Group-relative policy optimisation (Shao et al. 2024, arXiv 2402.03300), RLOO (Ahmadian et al. 2024), and variants.

Several completions are drawn for each prompt, and each is measured against the others of its group: no critic. Groups
whose rewards are all equal teach nothing and are left out. Shape legend: P prompts, G completions per prompt, R
rewards, B sequences (the completions that are left), S positions of prompt and completion, T completion tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch

from tunesmith.algorithms import advantages, kl, policy_loss
from tunesmith.batch.pack import PolicyBatch, chunks, pack
from tunesmith.batch.rollout import Group
from tunesmith.batch.upload import Uploader
from tunesmith.config.algorithm_sections import GRPOSection
from tunesmith.config.schema import GRPORecipe
from tunesmith.core.errors import DataError
from tunesmith.core.seeds import derive, permutation
from tunesmith.core.trace import span
from tunesmith.data.prompts import PromptLike
from tunesmith.evaluation import accuracy
from tunesmith.kernels.native import Kernels
from tunesmith.models.export import ModelCard, save_final
from tunesmith.models.freeze import freeze_lower_layers
from tunesmith.models.language_model import LanguageModel, language_model
from tunesmith.models.load import frozen_copy, load_policy
from tunesmith.models.loaded import PreTrainedTokenizerBase
from tunesmith.models.logprob import token_logps
from tunesmith.models.optimizer import MasterAdamW
from tunesmith.rewards.scorer import Scorer, Scores, TrainerState, joined
from tunesmith.rewards.sources import RewardLike
from tunesmith.rollout.engine import Engine
from tunesmith.schema.records import Prompt
from tunesmith.trainers import grpo_metrics, policy_metrics, rollouts, setup
from tunesmith.trainers.estimate import announce, policy_estimate
from tunesmith.trainers.objective import Weights, objective_of
from tunesmith.trainers.policy_record import StepResult, step_record
from tunesmith.trainers.restart import Resumable
from tunesmith.trainers.session import Session, open_session

SHOWN = ("reward", "frac_reward_zero_std", "completions/mean_length")
"""Figures that stand behind the progress bar."""


@dataclass(slots=True)
class State:
    """What the loop owns. `step` changes the policy, the optimizer and the KL controller, nothing else."""

    cfg: GRPORecipe
    device: torch.device
    policy: LanguageModel
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
    cfg: GRPORecipe, *, prompts: Sequence[PromptLike] | None = None, rewards: Sequence[RewardLike] | None = None
) -> State:
    """The state before the first step. `prompts` and `rewards`, where given, stand in for those that `cfg` names."""
    device = setup.prepare(cfg)
    loaded = load_policy(cfg.model, device=device)
    sets = rollouts.prompt_sets(cfg, loaded, prompts)
    if cfg.evaluation.correct_at is not None and not sets.heldout:
        raise DataError(
            "evaluation.correct_at asks for the accuracy on held-out prompts, but none are held out; give "
            "prompts.heldout_fraction a share above 0, or prompts.heldout_source a file"
        )
    policy = language_model(loaded.model, Kernels())
    scorer = rollouts.scorer_of(cfg, rewards, loaded.tokenizer, device)
    identity = rollouts.identity(loaded.model, sets, scorer, device)
    reference = language_model(frozen_copy(loaded.model), policy.kernels) if cfg.grpo.kl.coef > 0 else None
    freeze_lower_layers(loaded.model, cfg.model.num_trainable_layers)
    num_steps = cfg.run.steps or 100
    optimizer = MasterAdamW(
        loaded.model,
        cfg.optimizer,
        total_steps=num_steps * cfg.grpo.num_epochs * cfg.grpo.num_minibatches,
        kernels=policy.kernels,
    )
    engine = rollouts.engine_of(cfg, policy, loaded.tokenizer, optimizer)
    return State(
        cfg=cfg,
        device=device,
        policy=policy,
        reference=reference,
        engine=engine,
        scorer=scorer,
        optimizer=optimizer,
        kl=kl.controller(cfg.grpo.kl.coef, cfg.grpo.kl.target, cfg.grpo.kl.horizon),
        tokenizer=loaded.tokenizer,
        prompts=sets,
        identity=identity,
        num_steps=num_steps,
    )


def step(state: State, prompts: Sequence[Prompt], index: int) -> StepResult:
    """GRPO step `index` (from 0): draw groups, score, compare within each group, update the policy."""
    cfg, temperature = state.cfg.grpo, state.cfg.rollout.temperature
    groups, scores = draw_and_score(state, prompts, index)
    stats = grpo_metrics.StepStats(groups, scores)
    advantage_PG = compare(state, groups, scores)
    varies_P = differing(state, scores)  # a KL in the reward is no signal alone
    taught_PG = scores.valid_PG & varies_P[:, None] & ~left_out(cfg, groups)
    rows = torch.nonzero(taught_PG.flatten()).flatten().tolist()
    if not rows:  # every completion was as good as its neighbours
        return StepResult(stats.metrics(varies_P), groups, scores, None)

    sequences = setup.sent(pack(groups, pad_id=0, rows=rows), state.uploader)
    advantage_BT = advantage_PG.flatten()[rows].to(state.device)[:, None] * sequences.mask_BT
    old_logp_BT = reference_logp_BT = sequences.raw_logp_BT
    is_single = cfg.num_epochs * cfg.num_minibatches == 1  # then the old policy is the one that is updated
    if not (is_single or state.engine.is_exact):
        with span("old_policy"):
            old_logp_BT = rollouts.logps(state.policy, sequences, temperature, cfg.micro_batch_size)
    if state.reference is not None:
        with span("reference"):
            reference_logp_BT = rollouts.logps(state.reference, sequences, temperature, cfg.micro_batch_size)
    batch = PolicyBatch(sequences, old_logp_BT, reference_logp_BT, advantage_BT)
    num_asked = len(prompts) * scores.valid_PG.shape[1]
    drawn_per_row = min(num_asked, int(scores.valid_PG.sum())) / len(rows)  # those that are left out count in means

    for minibatch in rollouts.minibatches(batch, cfg, derive(state.cfg.run.seed, "minibatches", index)):
        drawn = drawn_per_row * len(minibatch.sequences.lengths_B)
        size = rollouts.update_size(minibatch.sequences, cfg.micro_batch_size, drawn)  # global denominators
        total_loss = torch.zeros((), device=state.device)
        for chosen in chunks(range(len(minibatch.sequences.lengths_B)), cfg.micro_batch_size):
            micro = minibatch.select(chosen)
            with span("update/forward"):
                loss = micro_batch_loss(state, micro, size, is_single, stats)
            with span("update/backward"):
                state.optimizer.scaled(loss).backward()
            total_loss += loss.detach()
        with span("update/optimizer"):
            stats.add_report(state.optimizer.step(loss=total_loss.item()))  # refuses what is not finite
    state.kl.update(stats.mean_kl(), len(rows))
    metrics = {**stats.metrics(varies_P), "objective/kl_coef": state.kl.value}
    return StepResult(metrics, groups, scores, stats.worst_report())


def draw_and_score(state: State, prompts: Sequence[Prompt], index: int) -> tuple[list[Group], Scores]:
    """The groups of `prompts` and their scores.

    Dynamic sampling (DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.2) then draws groups of further prompts, one for
    each group that teaches nothing, until enough teach something or the recipe's limit is reached.
    """
    drawn: list[Group] = []
    parts: list[Scores] = []
    num_missing, asked = len(prompts), list(prompts)
    further = rollouts.further_prompts(state.cfg, state.prompts.train, prompts, index)
    for attempt in range(1 + state.cfg.grpo.dynamic_sampling):
        stream = f"refill {attempt}" if attempt else "rollout"
        sampling = rollouts.sampling_params(state.cfg, stream, index)
        about = TrainerState(index, state.num_steps)
        groups, scores = rollouts.draw_scored(state.engine, state.scorer, state.cfg, asked, sampling, about)
        drawn.extend(groups)
        parts.append(scores)
        num_missing -= int(differing(state, scores).sum())
        asked = list(islice(further, num_missing))
        if not asked:
            break
    return drawn, joined(parts)


def differing(state: State, scores: Scores) -> torch.Tensor:
    """True for each group that teaches something, `[P]`: its rewards differ, or one of those compared alone."""
    if state.cfg.grpo.multi_objective_aggregation == "sum_then_normalize":
        return advantages.rewards_differ(scores.total_PG, scores.valid_PG)
    differs_P = torch.zeros(len(scores.total_PG), dtype=torch.bool)
    for weight, part_PG in zip(state.scorer.weights, scores.parts.values(), strict=True):
        if weight != 0:
            differs_P |= advantages.rewards_differ(part_PG, scores.valid_PG & ~part_PG.isnan())
    return differs_P


def compare(state: State, groups: Sequence[Group], scores: Scores) -> torch.Tensor:
    """Advantage of each completion, `[P, G]`, by the rewards of its group."""
    cfg, valid_PG = state.cfg.grpo, scores.valid_PG
    if cfg.multi_objective_aggregation == "normalize_then_sum":
        part_RPG = torch.stack(list(scores.parts.values()))
        return advantages.normalized_sum(part_RPG, torch.tensor(state.scorer.weights), valid_PG).advantage_PG
    reward_PG = scores.total_PG
    if state.reference is not None and cfg.kl.place == "reward":
        reward_PG = reward_PG - state.kl.value * sequence_kl(state, groups).to(reward_PG)
    return advantages.group_relative(reward_PG, valid_PG, baseline=cfg.baseline, scale=cfg.scale).advantage_PG


def left_out(cfg: GRPOSection, groups: Sequence[Group]) -> torch.Tensor:
    """True for completions that the length limit ended, `[P, G]`, if the recipe does not learn from them."""
    truncated = [[completion.finish_reason == "length" for completion in group.completions] for group in groups]
    return torch.tensor(truncated) & cfg.mask_truncated_completions


def micro_batch_loss(
    state: State, micro: PolicyBatch, size: policy_loss.UpdateSize, is_single: bool, stats: grpo_metrics.StepStats
) -> torch.Tensor:
    """The GRPO loss of one micro-batch, a scalar; its statistics are added to `stats`."""
    cfg, sequences = state.cfg.grpo, micro.sequences
    denominator = policy_loss.loss_denominator(
        cfg.loss_normalization, sequences.mask_BT, size, state.cfg.rollout.max_new_tokens
    )
    weights = Weights(denominator, size.num_tokens, state.kl.value)
    objective = objective_of(cfg, state.cfg.rollout.importance, micro, weights, is_single=is_single)
    new = token_logps(
        state.policy,
        sequences.ids_BS,
        sequences.lengths_B,
        prompt_lengths_B=sequences.prompt_lengths_B,
        temperature=state.cfg.rollout.temperature,
    )
    policy = objective.of(new.logp_BT, new.entropy_BT)
    reference_logp_BT = None if state.reference is None else micro.reference_logp_BT
    stats.add(policy.stats, sequences, new, reference_logp_BT, policy.drawn)
    return policy.loss


@torch.no_grad()
def sequence_kl(state: State, groups: Sequence[Group]) -> torch.Tensor:
    """KL estimate of each completion to the reference, summed over its tokens, `[P, G]`, in nats.

    The policy's side is what the engine recorded.
    """
    assert state.reference is not None
    size, temperature = state.cfg.grpo.micro_batch_size, state.cfg.rollout.temperature
    sequences = setup.sent(pack(groups, pad_id=0), state.uploader)
    with span("reference"):
        reference_logp_BT = rollouts.logps(state.reference, sequences, temperature, size)
    kl_BT = kl.estimate(state.cfg.grpo.kl.estimator, sequences.raw_logp_BT, reference_logp_BT)
    return kl.per_sequence(kl_BT, sequences.mask_BT).reshape(len(groups), -1)


def run(
    cfg: GRPORecipe,
    *,
    provenance: Mapping[str, str] | None = None,
    prompts: Sequence[PromptLike] | None = None,
    rewards: Sequence[RewardLike] | None = None,
    progress: bool = True,
    resume: Path | None = None,
) -> setup.RunResult:
    """Train a policy by GRPO as `cfg` says, or go on with the run in the folder `resume`; folder, metrics and summary.

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
        measure_accuracy(state, session, "before")
        for index in session.steps():
            with session.working() as times:
                result = step(state, rollouts.prompts_of_step(cfg, state.prompts.train, index), index)
                evaluation = evaluate(state) if session.is_due(index, cfg.run.eval_every) else {}
            session.end_step(index + 1, step_record(session, index, result, evaluation, times), SHOWN)
        measure_accuracy(state, session, "after")
        export(state, session)
        figures = accuracy.figures(session.facts)
        return session.finish({**policy_metrics.summary(session.metrics), **figures, "algorithm": "grpo"})


def evaluate(state: State) -> setup.Metrics:
    """Mean reward of one completion of each held-out prompt, with the same noise at every step."""
    sampling = rollouts.sampling_params(state.cfg, "evaluate", 0)
    return rollouts.mean_reward(state.engine, state.scorer, state.prompts.heldout, sampling)


def measure_accuracy(state: State, session: Session, when: str) -> None:
    """Measure the share of right answers on held-out prompts, if the recipe wants it and it is not known yet."""
    section = state.cfg.evaluation
    if section.correct_at is None or f"accuracy_{when}" in session.facts:
        return
    setup.say(f"accuracy {when} training", enabled=session.shows_progress)
    with session.working():
        measured = accuracy.measure(
            state.engine,
            state.scorer,
            asked_prompts(state),
            rollouts.sampling_params(state.cfg, f"accuracy {when}", 0),
            num_completions=section.completions_per_prompt,
            correct_at=section.correct_at,
        )
    session.facts |= measured.facts(when)
    session.leave_if_asked()


def asked_prompts(state: State) -> list[Prompt]:
    """The held-out prompts on which accuracy is measured, drawn evenly: rows are often sorted by difficulty."""
    heldout = state.prompts.heldout
    drawn = permutation(derive(state.cfg.run.seed, "accuracy"), 0, len(heldout))
    return [heldout[i] for i in sorted(drawn[: state.cfg.evaluation.num_prompts])]


def resumable(state: State) -> Resumable:
    """How a session saves and restores `state`."""
    return Resumable(
        modules={"policy": state.policy.module},
        optimizer=state.optimizer,
        counters={"kl": state.kl},
        num_steps=state.num_steps,
        identity=state.identity,
    )


def export(state: State, session: Session) -> None:
    """Write `final/`: the policy in the Hugging Face layout."""
    card = ModelCard(
        base_model=state.cfg.model.name,
        algorithm="GRPO",
        title=session.folder.path.name,
        metrics=policy_metrics.summary(session.metrics),
        recipe=state.cfg.model_dump(mode="json"),
    )
    save_final(state.policy.module, state.tokenizer, session.folder.final, card)
