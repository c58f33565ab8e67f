"""The reward model: a scalar head on a language model, trained on which of two completions was preferred.

Bradley and Terry 1952; Stiennon et al. 2020. Shape legend: N pairs, B = 2 N sequences, T tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tunesmith.algorithms.preference_loss import PreferenceStats, bradley_terry
from tunesmith.algorithms.sums import merged
from tunesmith.batch.pack import chunks
from tunesmith.config.schema import RewardRecipe
from tunesmith.core.errors import DataError
from tunesmith.core.seeds import items_at
from tunesmith.core.trace import span, trace
from tunesmith.data.collate import EncodedPair, collate_pairs, encode_pairs
from tunesmith.data.pairs import load_pairs
from tunesmith.data.split import split_by_prompt
from tunesmith.distributed import collectives
from tunesmith.models.export import ModelCard, save_final
from tunesmith.models.freeze import freeze_lower_layers, keep_lower_layers
from tunesmith.models.heads import RewardModel
from tunesmith.models.load import new_reward_model
from tunesmith.models.optimizer import MasterAdamW, StepReport
from tunesmith.schema.records import Pair
from tunesmith.trainers import setup
from tunesmith.trainers.estimate import announce, reward_estimate

SHOWN = ("loss", "accuracy", "margin")
"""Figures that stand behind the progress bar."""


@dataclass(slots=True)
class State:
    """What the loop owns. `step` changes the model and the optimizer, nothing else."""

    cfg: RewardRecipe
    device: torch.device
    model: RewardModel
    optimizer: MasterAdamW
    pairs: Sequence[EncodedPair]
    heldout: Sequence[EncodedPair]
    num_steps: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step hands to `run`."""

    metrics: setup.Metrics
    report: StepReport


def build(
    cfg: RewardRecipe, *, pairs: Sequence[Pair] | None = None, heldout_pairs: Sequence[Pair] | None = None
) -> State:
    """The state before the first step. `pairs`, where given, stand in for those that `cfg` names.

    Pairs are held out by prompt as `cfg` says, unless `heldout_pairs` are given.
    """
    device = setup.prepare(cfg)
    rows = load_pairs(cfg.pairs.source) if pairs is None else list(pairs)
    fraction = cfg.pairs.heldout_fraction if heldout_pairs is None else 0.0
    split = split_by_prompt(rows, fraction, cfg.run.seed)
    if not split.train:
        raise DataError("no pairs are left to train on; give more rows or lower pairs.heldout_fraction")
    model = new_reward_model(cfg.model, device=device)
    keep_lower_layers(model.model, cfg.reward_model.num_layers)
    freeze_lower_layers(model.model, cfg.model.num_trainable_layers)
    model.model.score.requires_grad_(True)
    encoded = encode_pairs(split.train, model.tokenizer, cfg.pairs.max_tokens)
    heldout = encode_pairs(
        split.heldout if heldout_pairs is None else heldout_pairs, model.tokenizer, cfg.pairs.max_tokens
    )
    num_steps = cfg.run.steps or -(-len(encoded) * cfg.reward_model.num_epochs // cfg.reward_model.pairs_per_step)
    optimizer = MasterAdamW(model, cfg.optimizer, total_steps=num_steps)
    return State(cfg, device, model, optimizer, encoded, heldout, num_steps)


def step(state: State, pairs: Sequence[EncodedPair]) -> StepResult:
    """One step: the Bradley-Terry loss of `pairs`, accumulated over micro-batches, and an update."""
    cfg = state.cfg.reward_model
    num_pairs = collectives.sum_over_ranks(len(pairs))  # one global denominator
    stats: list[PreferenceStats] = []
    total_loss = 0.0
    for micro in chunks(pairs, cfg.micro_batch_size):
        batch = collate_pairs(micro, pad_id=0, device=state.device)
        with span("forward"):
            chosen_N, rejected_N = batch.chosen_and_rejected(state.model.score_sequences(batch.ids_BT, batch.lengths_B))
            loss, micro_stats = bradley_terry(
                chosen_N,
                rejected_N,
                margin_B=batch.margin_N if cfg.margin == "column" else None,
                tie_B=batch.tie_N,
                num_pairs=num_pairs,
                center_coef=cfg.center_coef,
            )
        with span("backward"):
            loss.backward()
        total_loss += loss.item()
        stats.append(micro_stats)
    with span("optimizer"):
        report = state.optimizer.step(loss=total_loss)
    metrics = {**merged(stats).metrics(), "grad_norm": report.grad_norm, "lr": report.learning_rate}
    return StepResult({**metrics, "refused_steps": float(report.refused)}, report)


@torch.no_grad()
def evaluate(state: State) -> setup.Metrics:
    """Accuracy, margin and loss on the held-out pairs; empty without them.

    `eval/longer_wins` is the accuracy of the rule "the longer one was preferred", a coin decides between equals: a
    reward model must beat it.
    """
    decided = [pair for pair in state.heldout if not pair.tie]
    if not decided:
        return {}
    stats: list[PreferenceStats] = []
    with span("evaluate"):
        for micro in chunks(decided, state.cfg.reward_model.micro_batch_size):
            batch = collate_pairs(micro, pad_id=0, device=state.device)
            chosen_N, rejected_N = batch.chosen_and_rejected(state.model.score_sequences(batch.ids_BT, batch.lengths_B))
            stats.append(bradley_terry(chosen_N, rejected_N, num_pairs=len(decided))[1])
    longer = sum((lengths[0] > lengths[1]) + 0.5 * (lengths[0] == lengths[1]) for lengths in map(_lengths, decided))
    metrics = {f"eval/{name}": value for name, value in merged(stats).metrics().items() if name != "tie_fraction"}
    return {**metrics, "eval/num_pairs": float(len(decided)), "eval/longer_wins": longer / len(decided)}


def mean_pair_tokens(pairs: Sequence[EncodedPair]) -> float:
    """Tokens of both sides of a pair, on average; a completion that stands in several pairs counts once."""
    distinct = {ids for pair in pairs for ids in (pair.chosen_ids, pair.rejected_ids)}
    return sum(map(len, distinct)) / len(pairs)


def _lengths(pair: EncodedPair) -> tuple[int, int]:
    return len(pair.chosen_ids), len(pair.rejected_ids)


def run(
    cfg: RewardRecipe,
    *,
    provenance: Mapping[str, str] | None = None,
    pairs: Sequence[Pair] | None = None,
    heldout_pairs: Sequence[Pair] | None = None,
    progress: bool = True,
) -> setup.RunResult:
    """Train a reward model as `cfg` says; the run's folder, metrics and summary.

    Raises:
        InputError: for a config, model or pairs that cannot be used, before the run folder is made.
        TrainingError: if too many steps in a row are not finite.
    """
    watch = setup.Stopwatch()
    state = build(cfg, pairs=pairs, heldout_pairs=heldout_pairs)
    estimate = reward_estimate(state.model.model, cfg, pair_tokens=mean_pair_tokens(state.pairs))
    announce(estimate, state.num_steps, progress)
    per_step = cfg.reward_model.pairs_per_step
    keys = [pair.prompt_id for pair in state.pairs]
    with setup.session(cfg, state.num_steps, provenance=provenance, show_progress=progress) as session:
        for index in range(state.num_steps):
            size = min(per_step, len(state.pairs))
            # The pairs of one prompt stay together: a completion that stands in several is scored once.
            chosen = items_at(cfg.run.seed, index * size, size, len(state.pairs), keys=keys)
            with trace() as times:
                result = step(state, [state.pairs[i] for i in chosen])
                is_last = index + 1 == state.num_steps
                due = is_last or (cfg.run.eval_every and (index + 1) % cfg.run.eval_every == 0)
                evaluation = evaluate(state) if due else {}
            session.record(index + 1, {**result.metrics, **evaluation, **times.metrics()}, SHOWN)
            setup.check_refused(result.report, cfg.optimizer.max_refused_steps, session.folder.path)
            session.checkpoint(index + 1, *checkpoint_contents(state), is_last=is_last)
        figures = summary(state, session)
        card = ModelCard(
            base_model=cfg.model.name,
            algorithm="Bradley-Terry reward model",
            title=session.folder.path.name,
            metrics=figures,
            recipe=cfg.model_dump(mode="json"),
        )
        save_final(state.model, state.model.tokenizer, session.folder.final, card)
        return session.finish({**figures, "algorithm": "reward", "minutes": watch.minutes})


def checkpoint_contents(state: State) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, object]]:
    """Tensors and numbers from which training can go on."""
    optimizer = state.optimizer.state_dict()
    tensors = {"model": dict(state.model.named_parameters()), "optimizer": dict(optimizer.tensors)}
    return tensors, {"optimizer": dict(optimizer.scalars)}


def summary(state: State, session: setup.Session) -> dict[str, object]:
    """What the run came to: the last training loss, and the figures on held-out pairs."""
    last = session.metrics[-1]
    names = ("loss", "accuracy", "eval/accuracy", "eval/margin", "eval/num_pairs", "eval/longer_wins")
    refused = int(sum(row["refused_steps"] for row in session.metrics))
    figures = {name: last[name] for name in names if name in last}
    return {"steps": len(session.metrics), "num_pairs": len(state.pairs), "refused_steps": refused, **figures}
