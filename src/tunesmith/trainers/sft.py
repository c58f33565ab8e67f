"""Supervised fine-tuning: a language model learns the completions of demonstrations, token by token.

The first stage of Ouyang et al. 2022 (arXiv 2203.02155). Only completions are learnt, only the states before their
tokens meet the head, and nothing is padded where the model has a flat decoder.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from tunesmith.algorithms import sums
from tunesmith.algorithms.sums import merged
from tunesmith.algorithms.token_loss import TokenStats, negative_log_likelihood
from tunesmith.batch.targets import LearntSequence, by_token_budget, items_of_step, pack_targets
from tunesmith.batch.upload import Uploader
from tunesmith.config.schema import SFTRecipe
from tunesmith.core.trace import span
from tunesmith.data.demonstrations import DemonstrationLike
from tunesmith.data.sets import Facts, demonstration_sets
from tunesmith.kernels.native import Kernels
from tunesmith.models.export import ModelCard, save_final
from tunesmith.models.freeze import freeze_lower_layers
from tunesmith.models.language_model import LanguageModel, language_model
from tunesmith.models.load import load_policy
from tunesmith.models.loaded import PreTrainedTokenizerBase, context_length
from tunesmith.models.next_token import next_token_scores
from tunesmith.models.optimizer import MasterAdamW, StepReport
from tunesmith.models.tokenizer import decode
from tunesmith.trainers import setup
from tunesmith.trainers.estimate import announce, sft_estimate
from tunesmith.trainers.restart import Resumable, fingerprint_of_rows, fingerprint_of_tensors
from tunesmith.trainers.session import Session, StepRecord, open_session
from tunesmith.trainers.update_metrics import update_metrics

SHOWN = ("loss", "mean_token_accuracy")
"""Figures that stand behind the progress bar."""


@dataclass(slots=True)
class State:
    """What the loop owns. `step` changes the model and the optimizer, nothing else."""

    cfg: SFTRecipe
    device: torch.device
    policy: LanguageModel
    tokenizer: PreTrainedTokenizerBase
    optimizer: MasterAdamW
    sequences: Sequence[LearntSequence]
    heldout: Sequence[LearntSequence]
    identity: Mapping[str, str]
    num_steps: int
    facts: Facts
    uploader: Uploader | None = field(init=False)

    def __post_init__(self) -> None:
        self.uploader = setup.uploader_to(self.device)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step hands to `run`."""

    metrics: setup.Metrics
    report: StepReport


def build(
    cfg: SFTRecipe,
    *,
    demonstrations: Sequence[DemonstrationLike] | None = None,
    heldout_demonstrations: Sequence[DemonstrationLike] | None = None,
) -> State:
    """The state before the first step. `demonstrations`, where given, stand in for those that `cfg` names.

    They are held out by prompt as `cfg` says, unless `heldout_demonstrations` are given.
    """
    device = setup.prepare(cfg)
    loaded = load_policy(cfg.model, device=device)
    room = context_length(loaded.model)
    data = demonstration_sets(
        cfg.demonstrations, loaded.tokenizer, cfg.run.seed, demonstrations, heldout_demonstrations, room=room
    )
    freeze_lower_layers(loaded.model, cfg.model.num_trainable_layers)
    num_steps = cfg.run.steps or -(-len(data.train) * cfg.sft.num_epochs // cfg.sft.demonstrations_per_step)
    identity = {
        "the model": fingerprint_of_tensors(loaded.model),
        "the demonstrations": fingerprint_of_rows([*data.train, *data.heldout]),
        "the device": device.type,
    }
    policy = language_model(loaded.model, Kernels())
    return State(
        cfg=cfg,
        device=device,
        policy=policy,
        tokenizer=loaded.tokenizer,
        optimizer=MasterAdamW(loaded.model, cfg.optimizer, total_steps=num_steps, kernels=policy.kernels),
        sequences=data.train,
        heldout=data.heldout,
        identity=identity,
        num_steps=num_steps,
        facts=data.facts,
    )


def step(state: State, sequences: Sequence[LearntSequence]) -> StepResult:
    """One step: the mean loss of all tokens that are learnt of `sequences`, in micro-batches, and an update."""
    num_learnt = sum(sequence.num_learnt for sequence in sequences)
    num_tokens = sums.sum_over_ranks(num_learnt)  # one global denominator
    stats: list[TokenStats] = []
    total_loss = torch.zeros((), device=state.device)
    for micro in micro_batches(state, sequences):
        with span("forward"):
            loss, micro_stats = micro_batch_loss(state, micro, num_tokens)
        with span("backward"):
            state.optimizer.scaled(loss).backward()
        total_loss += loss.detach()
        stats.append(micro_stats)
    with span("optimizer"):
        report = state.optimizer.step(loss=total_loss.item())
    sizes = {"num_tokens": float(sum(len(one.ids) for one in sequences)), "num_learnt_tokens": float(num_learnt)}
    return StepResult({**merged(stats).metrics(), **sizes, **update_metrics([report])}, report)


def micro_batches(state: State, sequences: Sequence[LearntSequence]) -> list[list[LearntSequence]]:
    """`sequences` in groups of `sft.micro_batch_tokens`, those of equal length together where the model pads."""
    lengths = [sequence.num_used for sequence in sequences]
    groups = by_token_budget(lengths, state.cfg.sft.micro_batch_tokens, padded=state.policy.decoder is None)
    return [[sequences[index] for index in group] for group in groups]


def micro_batch_loss(
    state: State, sequences: Sequence[LearntSequence], num_tokens: float
) -> tuple[torch.Tensor, TokenStats]:
    """The loss of one micro-batch, divided by `num_tokens`, and its statistics."""
    scores = next_token_scores(state.policy, setup.sent(pack_targets(sequences), state.uploader))
    return negative_log_likelihood(scores.logp_N, scores.entropy_N, scores.is_top_N, num_tokens=num_tokens)


@torch.no_grad()
def evaluate(state: State) -> setup.Metrics:
    """Loss, accuracy and entropy of all learnt tokens of the held-out demonstrations, and their number; empty without
    any.
    """
    if not state.heldout:
        return {}
    with span("evaluate"):
        stats = merged(micro_batch_loss(state, micro, 1)[1] for micro in micro_batches(state, state.heldout))
    metrics = {f"eval/{name}": value for name, value in stats.metrics().items()}
    return {**metrics, "eval/num_learnt_tokens": stats.floats()["tokens"]}


def run(
    cfg: SFTRecipe,
    *,
    provenance: Mapping[str, str] | None = None,
    demonstrations: Sequence[DemonstrationLike] | None = None,
    heldout_demonstrations: Sequence[DemonstrationLike] | None = None,
    progress: bool = True,
    resume: Path | None = None,
) -> setup.RunResult:
    """Train a language model as `cfg` says, or go on with the run in the folder `resume`; folder, metrics and summary.

    Raises:
        InputError: for a config, model or demonstrations that cannot be used, before the run folder is made.
        TrainingError: if too many steps in a row are not finite, or memory runs out.
        StoppedError: after SIGTERM or SIGINT, once a checkpoint is written.
    """
    state = build(cfg, demonstrations=demonstrations, heldout_demonstrations=heldout_demonstrations)
    estimate = sft_estimate(state.policy.module, cfg, mean_tokens=mean_tokens(state.sequences))
    announce(estimate, state.num_steps, progress)
    with open_session(
        cfg,
        resumable(state),
        provenance=provenance,
        show_progress=progress,
        data=state.facts,
        resume=resume,
        from_python=setup.given(demonstrations=demonstrations),
    ) as session:
        if session.first_step == 0:
            with session.working():
                session.facts |= {f"{name}_before": value for name, value in evaluate(state).items()}
        for index in session.steps():
            chosen = sequences_of_step(state, index)
            with session.working() as times:
                result = step(state, chosen)
                evaluation = evaluate(state) if session.is_due(index, cfg.run.eval_every) else {}
            speed = {"tokens_per_s": result.metrics["num_tokens"] / times.wall_s}
            metrics = {**result.metrics, **evaluation, **times.metrics(), **speed}
            rows = partial(batch_rows, state, chosen)
            session.end_step(index + 1, StepRecord(metrics, result.report, rows), SHOWN)
        export(state, session)
        return session.finish({**summary(state, session), "algorithm": "sft"})


def sequences_of_step(state: State, index: int) -> list[LearntSequence]:
    """What step `index` (from 0) learns from."""
    section = state.cfg.sft
    size = min(section.demonstrations_per_step, len(state.sequences))
    lengths = [sequence.num_used for sequence in state.sequences]
    chosen = items_of_step(state.cfg.run.seed, index, size, lengths, window=section.bucket_steps)
    return [state.sequences[i] for i in chosen]


def mean_tokens(sequences: Sequence[LearntSequence]) -> float:
    """Tokens that a pass over a demonstration computes, on average."""
    return sum(sequence.num_used for sequence in sequences) / len(sequences)


def resumable(state: State) -> Resumable:
    """How a session saves and restores `state`."""
    return Resumable({"policy": state.policy.module}, state.optimizer, {}, state.num_steps, state.identity)


def batch_rows(state: State, sequences: Sequence[LearntSequence]) -> list[dict[str, object]]:
    """The demonstrations of a step, for a person who looks why an update was refused."""
    return [
        {
            "id": sequence.id,
            "text": decode(state.tokenizer, sequence.ids),
            "learnt": [decode(state.tokenizer, sequence.ids[span.start : span.stop]) for span in sequence.spans],
        }
        for sequence in sequences
    ]


def summary(state: State, session: Session) -> dict[str, object]:
    """What the run came to: the last training loss, and the figures on held-out demonstrations before and after."""
    last = session.metrics[-1]
    names = ("loss", "mean_token_accuracy", "eval/loss", "eval/mean_token_accuracy", "eval/num_learnt_tokens")
    refused = int(sum(row["refused_steps"] for row in session.metrics))
    before = {name: session.facts[name] for name in ("eval/loss_before",) if name in session.facts}
    figures = {name: last[name] for name in names if name in last}
    sizes = {"steps": len(session.metrics), "num_demonstrations": len(state.sequences), "refused_steps": refused}
    return {**sizes, **before, **figures}


def export(state: State, session: Session) -> None:
    """Write `final/`: the model in the Hugging Face layout."""
    card = ModelCard(
        base_model=state.cfg.model.name,
        algorithm="supervised fine-tuning",
        title=session.folder.path.name,
        metrics=summary(state, session),
        recipe=state.cfg.model_dump(mode="json"),
    )
    save_final(state.policy.module, state.tokenizer, session.folder.final, card)
