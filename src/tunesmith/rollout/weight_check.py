"""Does the engine compute what the trainer computes? Fixed tokens are scored by both; and where do numbers go wrong?

The engine works on a packed copy of the weights. If an update were missed, or a copy were damaged, training would go on
with log-probs of another model, and nothing else would say so.
"""

from collections.abc import Callable, Sequence

import torch

from tunesmith.core.errors import TrainingError
from tunesmith.kernels.sample.api import score
from tunesmith.models.decoder import Decoder, OnLayer
from tunesmith.rollout.kv_cache import KVCache
from tunesmith.rollout.runner import Runner
from tunesmith.rollout.scheduler import Rows

FIRST_CHECK = (7, 40, 24)
"""Lengths of the sequences that are scored when weights are packed for the first time."""

LATER_CHECK = (16,)

MAX_DIFFERENCE = {torch.bfloat16: 0.5, torch.float16: 0.5, torch.float32: 1e-2, torch.float64: 1e-6}
"""Nats by which two right computations in that dtype may differ on one token; several times what was measured."""


@torch.no_grad()
def largest_difference(
    decoder: Decoder, runner: Runner, cache: KVCache, storage: torch.Tensor, lengths: Sequence[int]
) -> float:
    """Largest absolute difference in nats between the engine's and the trainer's log-prob of a fixed token.

    The trainer takes all sequences in one pass, the engine takes the first half of each as one chunk and the rest token
    by token, so both ways of the cache are used. The cache must be free. Sequences are cut to the model's context.
    """
    longest = decoder.architecture.context_length
    vocabulary_size = decoder.architecture.head.sizes[0]
    cut = [min(length, longest) for length in lengths]
    ids = [[(7919 * (i + 1) + 104729 * row) % vocabulary_size for i in range(cut[row])] for row in range(len(cut))]
    flat_T = torch.tensor([token for row in ids for token in row])
    target_T = flat_T.roll(-1)  # any fixed token will do, also behind the end of a sequence
    ones_T = torch.ones(len(flat_T), dtype=torch.float64)
    logits_TV = decoder.logits(decoder.hidden_states(flat_T, cut))
    if not bool(logits_TV.isfinite().all()):
        place = first_bad_layer(lambda look: decoder.hidden_states(flat_T, cut, on_layer=look))
        raise TrainingError(not_finite(place))
    trained_T = score(logits_TV, target_T, ones_T, kernels=decoder.kernels)
    drawn_TH = torch.cat(_in_steps(runner, cache, storage, ids))
    drawn_T = score(runner.logits(drawn_TH), target_T, ones_T, kernels=decoder.kernels)
    return float((drawn_T - trained_T).abs().max())


def _in_steps(runner: Runner, cache: KVCache, storage: torch.Tensor, ids: list[list[int]]) -> list[torch.Tensor]:
    """Hidden states of each sequence, computed as decoding would."""
    tables = [cache.allocate(row) for row in ids]
    halves = [-(-len(row) // 2) for row in ids]
    hidden: list[list[torch.Tensor]] = [[] for _ in ids]
    first = Rows()
    for row, table, half in zip(ids, tables, halves, strict=True):
        first.token_ids.extend(row[:half])
        first.positions.extend(range(half))
        first.table_rows.extend([table.row] * half)
    done_TH = runner.hidden_states(first, storage, cache.block_tables)
    for row, part_TH in enumerate(done_TH.split(halves)):
        hidden[row].append(part_TH)
    for step in range(max(len(row) - half for row, half in zip(ids, halves, strict=True))):
        going = [row for row in range(len(ids)) if halves[row] + step < len(ids[row])]
        tokens = Rows(
            [ids[row][halves[row] + step] for row in going],
            [halves[row] + step for row in going],
            [tables[row].row for row in going],
        )
        done_TH = runner.hidden_states(tokens, storage, cache.block_tables)
        for row, part_TH in zip(going, done_TH.split(1), strict=True):
            hidden[row].append(part_TH)
    for table in reversed(tables):
        cache.free(table)
    return [torch.cat(parts) for parts in hidden]


def first_bad_layer(compute: Callable[[OnLayer], object]) -> str:
    """The first place in the model where a number is not finite, in words; `compute` does a pass that it watches."""
    bad: list[str] = []

    def look(name: str, hidden_TH: torch.Tensor) -> None:
        if not bool(hidden_TH.isfinite().all()):
            bad.append(name)

    compute(look)
    return bad[0] if bad else "the output layer"


def not_finite(place: str) -> str:
    """What to say where numbers are not finite from `place` on."""
    return (
        f"the model's numbers are not finite from {place} on, so nothing can be drawn; its weights are damaged, or "
        "overflow in float16: set model.dtype to float32, or go back to an older checkpoint"
    )
