"""Compares the engine's log-probs of fixed tokens with the trainer's, and locates the first non-finite layer.

The engine computes with a packed copy of the weights. A missed update or a damaged copy would otherwise go unnoticed,
and train on the log-probs of another model.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tunesmith.base.core.errors import TrainingError
from tunesmith.engine.kernels.logprob.api import score
from tunesmith.engine.kernels.sample.torch_impl import NOT_FINITE, require_rows
from tunesmith.engine.models.decoder import Decoder, OnLayer
from tunesmith.engine.rollout.kv_cache import KVCache, allocate_storage, blocks_for
from tunesmith.engine.rollout.runner import CachedDecoder, cache_shape
from tunesmith.engine.rollout.scheduler import Rows


@dataclass(frozen=True, slots=True)
class Check:
    """Lengths of the sequences, and tokens per step of the engine after their first half."""

    lengths: tuple[int, ...]
    step: int


FIRST_CHECK = Check((7, 40, 24), step=1)
"""The first time: token by token, as in decoding."""

LATER_CHECK = Check((16,), step=8)
"""After each update: two short steps."""

MAX_DIFFERENCE = {torch.bfloat16: 0.5, torch.float16: 0.5, torch.float32: 1e-2, torch.float64: 1e-6}
"""Largest difference in nats on one token between two correct computations; several times the measured one."""

MAX_INT8_DIFFERENCE = 8.0
"""As `MAX_DIFFERENCE`, with weights and inputs in 8 bits. Seen: 1.3 with a model of 135M parameters. A missed update is
not found by this, but damaged numbers are."""


@torch.no_grad()
def largest_difference(decoder: Decoder, runner: CachedDecoder, check: Check) -> float:
    """Largest absolute difference in nats between the engine's and the trainer's log-prob of a fixed token.

    The trainer computes all sequences in one pass, the engine in steps over its cache. Sequences are cut to the model's
    context length.

    Raises:
        TrainingError: the trainer's own logits are not finite; the message names the layer.
    """
    ids = _fixed_tokens(decoder, check)
    trained_T = trained_logps(decoder, check)
    target_T = _targets(ids, decoder.architecture.device)
    drawn_TH = _drawn_states(decoder, runner, check)
    drawn_T = score(runner.logits(drawn_TH), target_T, 1.0, kernels=decoder.kernels).logp_N
    require_rows(drawn_T.isfinite(), NOT_FINITE)
    return float((drawn_T.float() - trained_T.float()).abs().max())


@torch.no_grad()
def steps_are_alike(decoder: Decoder, runner: CachedDecoder) -> bool:
    """True if logits of fixed tokens have the same bits token by token and several at a time."""
    alone, together = (_drawn_states(decoder, runner, replace(FIRST_CHECK, step=step)) for step in (1, 5))
    logits_TV = runner.logits(together)
    rows = (runner.logits(row_H[None].repeat(runner.min_rows, 1))[0] for row_H in alone)
    return all(torch.equal(row_V, logits_V) for row_V, logits_V in zip(rows, logits_TV, strict=True))


def _drawn_states(decoder: Decoder, runner: CachedDecoder, check: Check) -> torch.Tensor:
    """Hidden states `[T, H]` of the fixed tokens, by the engine over a cache of its own."""
    ids = _fixed_tokens(decoder, check)
    lengths = list(map(len, ids))
    num_blocks = sum(map(blocks_for, lengths))
    cache = KVCache(num_blocks, max_tokens=max(lengths), max_tables=len(ids))
    storage = allocate_storage(cache_shape(decoder.architecture), num_blocks, decoder.architecture.device)
    return torch.cat(_in_steps(runner, cache, storage, ids, check.step))


@torch.no_grad()
def trained_logps(decoder: Decoder, check: Check = FIRST_CHECK) -> torch.Tensor:
    """Log-probs `[T]` of fixed tokens under the trainer's own forward pass, which computes all sequences at once.

    Raises:
        TrainingError: its logits are not finite; the message names the layer.
    """
    ids = _fixed_tokens(decoder, check)
    lengths, device = list(map(len, ids)), decoder.architecture.device
    flat_T = torch.tensor([token for row in ids for token in row], device=device)
    logits_TV = decoder.logits(decoder.hidden_states(flat_T, lengths))
    if not bool(logits_TV.isfinite().all()):
        place = first_bad_layer(lambda look: decoder.hidden_states(flat_T, lengths, on_layer=look))
        raise TrainingError(not_finite(place))
    return score(logits_TV, _targets(ids, device), 1.0, kernels=decoder.kernels).logp_N


def _fixed_tokens(decoder: Decoder, check: Check) -> list[list[int]]:
    longest, size = decoder.architecture.context_length, decoder.architecture.head.sizes[0]
    return [
        [(7919 * (i + 1) + 104729 * row) % size for i in range(min(length, longest))]
        for row, length in enumerate(check.lengths)
    ]


def _targets(ids: list[list[int]], device: torch.device) -> torch.Tensor:
    """The next token of each; any fixed token will do, across sequence ends too."""
    return torch.tensor([token for row in ids for token in row], device=device).roll(-1)


def _in_steps(
    runner: CachedDecoder, cache: KVCache, storage: torch.Tensor, ids: list[list[int]], step: int
) -> list[torch.Tensor]:
    """Hidden states of each sequence: the first half in one step, then `step` tokens per step."""
    tables = [cache.allocate(row) for row in ids]
    hidden: list[list[torch.Tensor]] = [[] for _ in ids]
    start, stop = [0 for _ in ids], [-(-len(row) // 2) for row in ids]
    while any(start[row] < len(ids[row]) for row in range(len(ids))):
        tokens = Rows()
        for row, table in enumerate(tables):
            here = range(start[row], stop[row])
            tokens.token_ids.extend(ids[row][start[row] : stop[row]])
            tokens.positions.extend(here)
            tokens.table_rows.extend([table.row] * len(here))
        done_TH = runner.hidden_states(tokens, storage, cache.block_tables)
        counts = [stop[row] - start[row] for row in range(len(ids))]
        for row, part_TH in enumerate(done_TH.split(counts)):
            hidden[row].append(part_TH)
        start, stop = stop, [min(stop[row] + step, len(ids[row])) for row in range(len(ids))]
    return [torch.cat(parts) for parts in hidden]


def first_bad_layer(compute: Callable[[OnLayer], object]) -> str:
    """The name of the first layer with a non-finite output; `compute` runs a pass with the given callback."""
    bad: list[str] = []

    def look(name: str, hidden_TH: torch.Tensor) -> None:
        if not bool(hidden_TH.isfinite().all()):
            bad.append(name)

    compute(look)
    return bad[0] if bad else "the output layer"


def not_finite(place: str) -> str:
    """Error message for numbers that are not finite from the layer `place` on."""
    return (
        f"the model's numbers are not finite from {place} on, so nothing can be drawn; its weights are damaged, or "
        "overflow in float16: set model.dtype to float32, or go back to an older checkpoint"
    )
