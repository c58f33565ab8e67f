"""Passes in micro-batches that ranks share: the update of every algorithm, and forward passes over a rollout.

Shape legend: B sequences, S positions of prompt and completion, T completion tokens, H hidden.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TypeVar

import torch
from torch import nn
from torch.nn.functional import pad

from tunesmith.base.config.policy_sections import KLSection
from tunesmith.base.core.trace import span
from tunesmith.engine.batch.pack import (
    FrozenStates,
    PolicyBatch,
    Sequences,
    chunks,
    completion_of_rows,
    pack,
    select,
    units_of,
)
from tunesmith.engine.batch.rollout import Group
from tunesmith.engine.batch.upload import Uploader
from tunesmith.engine.distributed.ranks import gathered, share_of
from tunesmith.engine.models.language_model import LanguageModel
from tunesmith.engine.models.logprob import TokenScores, completion_states, frozen_states, token_logps
from tunesmith.engine.models.optimizer import MasterAdamW, StepReport
from tunesmith.learn.algorithms import kl
from tunesmith.learn.algorithms.divergence import Predictions
from tunesmith.learn.trainers import setup

MicroT = TypeVar("MicroT")
StatsT = TypeVar("StatsT")
BatchT = TypeVar("BatchT", bound=PolicyBatch)


def accumulate(
    optimizer: MasterAdamW,
    micro_batches: Sequence[MicroT],
    loss_of: Callable[[MicroT], tuple[torch.Tensor, StatsT]],
    max_norm: float | None = None,
    *,
    has_stages: bool = False,
    beside: Sequence[Callable[[], tuple[torch.Tensor, StatsT]]] = (),
) -> tuple[StepReport, list[StatsT]]:
    """One update by the sum of the losses of `micro_batches`, and of those `beside` them: the optimizer's report, and
    what was returned beside each loss, on every rank that of all ranks.

    A rank computes its share of the micro-batches, so the denominator of a mean in a loss must be a number that every
    rank knows: of tokens, rows or pairs of the whole update. A sum, or a gradient, that is not finite is refused.
    Gradients are clipped to `max_norm` (default: the recipe's). `has_stages`: `loss_of` has spans of its own, beside
    `forward`.
    """
    losses: list[torch.Tensor] = []
    stats: list[StatsT] = []
    # Ranks share each of the two: those of divided models make the passes of a micro-batch together.
    own = chain((partial(loss_of, micro) for micro in share_of(micro_batches)), share_of(beside))
    for micro_loss in own:
        with nullcontext() if has_stages else span("forward"):
            loss, micro_stats = micro_loss()
        with span("backward"):
            optimizer.scaled(loss).backward()
        losses.append(loss.detach())
        stats.append(micro_stats)
    with span("optimizer"):
        report = optimizer.step(max_norm=max_norm, loss=float(sum(losses)))
    return report, gathered(stats, "statistics")


def accumulate_rows(
    optimizer: MasterAdamW,
    batch: BatchT,
    micro_batch_size: int,
    loss_of: Callable[[BatchT], tuple[torch.Tensor, StatsT]],
    max_norm: float | None = None,
    beside: Sequence[Callable[[], tuple[torch.Tensor, StatsT]]] = (),
    together: int = 1,
) -> tuple[StepReport, list[StatsT]]:
    """`accumulate` over the rows of `batch`, `micro_batch_size` at a time, and the losses `beside` them. Those of
    `together` completions are in one micro-batch, which is larger if they alone are more.
    """
    parts: list[list[int]] = []
    for rows in units_of(batch.sequences, together):
        if parts and len(parts[-1]) + len(rows) <= micro_batch_size:
            parts[-1] += rows
        else:
            parts.append(rows)
    return accumulate(optimizer, parts, lambda rows: loss_of(batch.select(rows)), max_norm, beside=beside)


def micro_batches(sequences: Sequences, size: int) -> list[Sequences]:
    """Consecutive rows of `sequences`, `size` at a time."""
    return [select(sequences, rows) for rows in chunks(range(len(sequences.lengths_B)), size)]


def completion_scores(
    model: LanguageModel, sequences: Sequences, temperature: float, value_head: nn.Module | None = None
) -> TokenScores:
    """`token_logps` of the completions, with gradients; layers of `sequences.frozen` are not computed again."""
    return token_logps(
        model,
        sequences.ids_BS,
        sequences.lengths_B,
        prompt_lengths_B=sequences.prompt_lengths_B,
        temperature=temperature,
        value_head=value_head,
        frozen=sequences.frozen,
    )


def predictions(
    model: LanguageModel,
    ids_BS: torch.Tensor,
    lengths_B: torch.Tensor,
    prompt_lengths_B: torch.Tensor,
    weight: float = 1.0,
) -> Predictions:
    """The distributions of `model` at each completion token, row after row, with gradients; `weight` is a teacher's."""
    hidden_NH, layer = completion_states(model, ids_BS, lengths_B, prompt_lengths_B=prompt_lengths_B)
    return Predictions(hidden_NH, layer, weight)


def with_frozen_states(policy: LanguageModel, sequences: Sequences, micro_batch_size: int) -> Sequences:
    """`sequences` with the states after the layers of `policy` that are not trained, if there are any.

    They are computed once, for the reference, which has the same layers, and for all epochs.
    """
    decoder = policy.decoder
    if decoder is None or not (num_layers := decoder.num_frozen):
        return sequences
    with span("frozen"):
        parts = share_of(micro_batches(sequences, micro_batch_size))
        found = gathered([frozen_states(decoder, part.ids_BS, part.lengths_B) for part in parts], "frozen states")
        width = sequences.ids_BS.shape[1]
        x_BSH = torch.cat([pad(part_BSH, (0, 0, 0, width - part_BSH.shape[1])) for part_BSH in found])
        return replace(sequences, frozen=FrozenStates(num_layers, x_BSH))


@torch.no_grad()
def logps(model: LanguageModel, sequences: Sequences, temperature: float, micro_batch_size: int) -> torch.Tensor:
    """Log-probs of the completion tokens under `model`, `[B, T]`, without gradient."""
    parts_BT = [
        completion_scores(model, part, temperature).logp_BT
        for part in share_of(micro_batches(sequences, micro_batch_size))
    ]
    return join(gathered(parts_BT, "log-probs"), sequences.mask_BT.shape[1])


def join(parts_BT: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Micro-batches as one tensor, each padded with zeros to `width` columns."""
    return torch.cat([pad(part, (0, width - part.shape[1])) for part in parts_BT])


@torch.no_grad()
def sequence_kl(
    reference: LanguageModel,
    groups: Sequence[Group],
    section: KLSection,
    temperature: float,
    micro_batch_size: int,
    uploader: Uploader | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs of all completions under the reference, `[P * G, T]`; KL estimate of each completion summed over its
    tokens, `[P, G]`, in nats). The policy's log-probs are those that the engine recorded.
    """
    with span("reference"):
        sequences = setup.sent(pack(groups, pad_id=0), uploader)
        reference_logp_BT = logps(reference, sequences, temperature, micro_batch_size)
        kl_BT = kl.estimate(section.estimator, sequences.raw_logp_BT, reference_logp_BT)
        kl_B = kl.per_sequence(kl_BT, sequences.mask_BT)
        of_B = torch.tensor(completion_of_rows(groups), device=kl_B.device)
        num = sum(len(group.completions) for group in groups)
        return reference_logp_BT, kl_B.new_zeros(num).index_add(0, of_B, kl_B).reshape(len(groups), -1)
