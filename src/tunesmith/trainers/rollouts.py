"""What every trainer that draws completions shares: its prompts, how they are drawn, and passes without gradient.

Shape legend: B sequences, T completion tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import TypeVar

import torch
from torch import nn
from torch.nn.functional import pad

from tunesmith.algorithms import sums
from tunesmith.algorithms.policy_loss import UpdateSize
from tunesmith.batch.pack import PolicyBatch, Sequences, chunks, select
from tunesmith.batch.rollout import Group, SamplingParams
from tunesmith.config.algorithm_sections import GRPOSection, PPOSection
from tunesmith.config.schema import PolicyRecipe
from tunesmith.core.seeds import derive, items_at, permutation
from tunesmith.core.trace import span
from tunesmith.data import sets
from tunesmith.data.prompts import PromptLike
from tunesmith.data.sets import PromptSets
from tunesmith.models.language_model import LanguageModel
from tunesmith.models.loaded import LoadedModel, PreTrainedModel, PreTrainedTokenizerBase, context_length
from tunesmith.models.logprob import token_logps
from tunesmith.models.optimizer import MasterAdamW
from tunesmith.rewards.scorer import Scorer, Scores, TrainerState
from tunesmith.rewards.sources import RewardLike
from tunesmith.rollout.engine import Engine, OnGroup
from tunesmith.rollout.factory import open_engine
from tunesmith.schema.records import Prompt
from tunesmith.trainers.restart import fingerprint_of_file, fingerprint_of_rows, fingerprint_of_tensors

BatchT = TypeVar("BatchT", bound=PolicyBatch)


def prompt_sets(cfg: PolicyRecipe, loaded: LoadedModel, prompts: Sequence[PromptLike] | None) -> PromptSets:
    """The prompts that `cfg` names, or `prompts` in their place: split, cut to prefixes if wanted, lengths checked."""
    context = context_length(loaded.model)
    room = None if context is None else context - cfg.rollout.max_new_tokens
    return sets.prompt_sets(cfg.prompts, loaded.tokenizer, cfg.run.seed, prompts, room=room)


def identity(policy: PreTrainedModel, prompts: PromptSets, scorer: Scorer, device: torch.device) -> dict[str, str]:
    """What a resumed run must find unchanged, as short hashes; to be taken before the first step.

    Of a reward function it is the file that it is in, not what that imports.
    """
    rows = [(prompt.id, prompt.content, dict(prompt.columns)) for prompt in (*prompts.train, *prompts.heldout)]
    return {
        "the model": fingerprint_of_tensors(policy),
        "the prompts": fingerprint_of_rows(rows),
        **{f"the reward's file {place}": fingerprint_of_file(file) for place, file in scorer.code_files.items()},
        **{f"the reward model {name}": fingerprint_of_tensors(model) for name, model in scorer.models.items()},
        "the device": device.type,
    }


def prompts_of_step(cfg: PolicyRecipe, prompts: Sequence[Prompt], step_index: int) -> list[Prompt]:
    """The prompts of step `step_index` (from 0): a pure function of the run's seed and the step."""
    size = cfg.rollout.prompts_per_step
    return [prompts[i] for i in items_at(cfg.run.seed, step_index * size, size, len(prompts))]


def further_prompts(
    cfg: PolicyRecipe, prompts: Sequence[Prompt], asked: Sequence[Prompt], step_index: int
) -> Iterator[Prompt]:
    """The prompts that step `step_index` may ask besides `asked`, each once, in an order of its own: a pure function of
    the run's seed and the step, so a resumed run needs no stored place.
    """
    known = {prompt.id for prompt in asked}
    order = permutation(derive(cfg.run.seed, "further prompts", step_index), 0, len(prompts))
    return (prompts[i] for i in order if prompts[i].id not in known)


def sampling_params(cfg: PolicyRecipe, stream: str, step_index: int) -> SamplingParams:
    """How the completions of a step are drawn; the seed is a pure function of run seed, stream and step."""
    return SamplingParams(
        max_new_tokens=cfg.rollout.max_new_tokens,
        min_new_tokens=cfg.rollout.min_new_tokens,
        temperature=cfg.rollout.temperature,
        top_p=cfg.rollout.top_p,
        top_k=cfg.rollout.top_k,
        min_p=cfg.rollout.min_p,
        repetition_penalty=cfg.rollout.repetition_penalty,
        seed=derive(cfg.run.seed, stream, step_index),
    )


def engine_of(
    cfg: PolicyRecipe,
    policy: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: MasterAdamW,
    *,
    value_head: nn.Module | None = None,
) -> Engine:
    """The engine that `cfg` names, on the weights that `optimizer` changes."""
    section = cfg.rollout
    return open_engine(
        policy,
        tokenizer,
        backend=section.backend,
        weight_version=lambda: optimizer.weight_version,
        batch_size=section.batch_size,
        num_slots=section.num_slots,
        kv_cache_mb=section.kv_cache_mb,
        value_head=value_head,
    )


def scorer_of(
    cfg: PolicyRecipe,
    rewards: Sequence[RewardLike] | None,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
) -> Scorer:
    """The rewards that `cfg` names, or `rewards` in their place."""
    return Scorer(
        cfg.reward if rewards is None else rewards,
        policy_tokenizer=tokenizer,
        device=device,
        while_drawing=cfg.rollout.score_while_drawing,
    )


def draw(
    engine: Engine,
    cfg: PolicyRecipe,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    on_group: OnGroup | None = None,
) -> list[Group]:
    """The completions of one step; if the recipe wants it, the engine's memory is free when they are there."""
    groups = engine.generate(prompts, cfg.rollout.completions_per_prompt, sampling, on_group=on_group)
    if cfg.rollout.unload_during_update:
        engine.unload()
    return groups


def draw_scored(
    engine: Engine,
    scorer: Scorer,
    cfg: PolicyRecipe,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    state: TrainerState,
) -> tuple[list[Group], Scores]:
    """The completions of one step and their scores, given afterwards or, if the recipe wants it, meanwhile."""
    ahead = scorer.ahead(len(prompts), cfg.rollout.completions_per_prompt, state)
    with ahead or nullcontext():
        with span("rollout"):
            groups = draw(engine, cfg, prompts, sampling, None if ahead is None else ahead.add)
        with span("reward"):
            return groups, scorer.score(groups, state=state, ahead=ahead)


def mean_reward(
    engine: Engine, scorer: Scorer, prompts: Sequence[Prompt], sampling: SamplingParams
) -> dict[str, float]:
    """`eval/reward`, the mean reward of one completion of each prompt; empty without prompts."""
    if not prompts:
        return {}
    with span("evaluate"):
        return {"eval/reward": scorer.score(engine.generate(prompts, 1, sampling)).metrics()["reward"]}


def valid_rows(scores: Scores) -> list[int]:
    """The completions, counted over all groups, whose score counts: those that a failed reward dropped are left out."""
    return torch.nonzero(scores.valid_PG.flatten()).flatten().tolist()


def micro_batches(sequences: Sequences, size: int) -> Iterator[Sequences]:
    """Consecutive rows of `sequences`, `size` at a time."""
    for rows in chunks(range(len(sequences.lengths_B)), size):
        yield select(sequences, rows)


def minibatches(batch: BatchT, section: PPOSection | GRPOSection, seed: int) -> Iterator[BatchT]:
    """Minibatches of every epoch over the rollout, a pure function of `seed` and epoch.

    Within one, rows stand as in the rollout: those of one prompt together, so that it is computed once.
    """
    num_rows = len(batch.sequences.lengths_B)
    size = -(-num_rows // section.num_minibatches)
    for epoch in range(section.num_epochs):
        for rows in chunks(permutation(seed, epoch, num_rows), size):
            yield batch.select(sorted(rows))


def update_size(sequences: Sequences, micro_batch_size: int, num_drawn: float | None = None) -> UpdateSize:
    """How much a minibatch of `sequences` learns from, over all ranks: the global denominators of its losses.

    `num_drawn` is the number of completions that it stands for, where some were left out; None counts its own.
    """
    num_rows = len(sequences.lengths_B)
    return UpdateSize(
        num_tokens=sums.sum_over_ranks(sequences.num_tokens),
        num_sequences=sums.sum_over_ranks(num_rows if num_drawn is None else num_drawn),
        num_micro_batches=sums.sum_over_ranks(-(-num_rows // micro_batch_size)),
    )


@torch.no_grad()
def logps(model: LanguageModel, sequences: Sequences, temperature: float, micro_batch_size: int) -> torch.Tensor:
    """Log-probs of the completion tokens under `model`, `[B, T]`, without gradient."""
    parts_BT = [
        token_logps(
            model, part.ids_BS, part.lengths_B, prompt_lengths_B=part.prompt_lengths_B, temperature=temperature
        ).logp_BT
        for part in micro_batches(sequences, micro_batch_size)
    ]
    return join(parts_BT, sequences.mask_BT.shape[1])


def join(parts_BT: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Micro-batches as one tensor, each padded with zeros to `width` columns."""
    return torch.cat([pad(part, (0, width - part.shape[1])) for part in parts_BT])
