"""Log-likelihoods of texts behind other texts by exact forward passes, as multiple choice and perplexity need them.

Shape legend: B rows, S positions, N scored tokens in row order.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch.nn.utils.rnn import pad_sequence

from tunesmith.base.core.trace import span
from tunesmith.engine.models.language_model import FullForward, LanguageModel
from tunesmith.engine.models.logprob import completion_scores
from tunesmith.learn.evaluation.kept import KeptAnswers

BATCH_TOKENS = 4096
"""Positions of a forward pass, unless one row has more."""

_LOGITS_SHARE = 4
"""A model's own forward pass holds all logits of the scored tokens, so its passes are as many times smaller."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """Token ids to be scored, and those in front of them, one at least."""

    context_ids: tuple[int, ...]
    ids: tuple[int, ...]

    @property
    def all_ids(self) -> tuple[int, ...]:
        """Both."""
        return self.context_ids + self.ids


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The log-prob of a continuation in nats, summed over its tokens, and whether greedy decoding would draw it."""

    logp: float
    is_greedy: bool


def likelihoods(
    model: LanguageModel,
    continuations: Sequence[Continuation],
    *,
    batch_tokens: int = BATCH_TOKENS,
    on_progress: Callable[[int], object] = lambda _: None,
    kept: KeptAnswers | None = None,
) -> list[Likelihood]:
    """The likelihood of each of `continuations`, in their order, at temperature 1.

    Equal ones are computed once. With a decoder nothing is padded, and continuations of one context, such as the
    choices of a question, share it, as do contexts that begin alike, such as those with the same examples. Other
    backends pad, so rows of like length go together. `on_progress` is called with how many are scored.

    A batch whose answers are `kept` is not computed again; as bits may depend on what else is in a batch, those of
    other batches do not serve.

    Raises:
        ModelError: a context is empty.
    """
    kept = kept or KeptAnswers()
    asked = Counter(continuations)
    found = {one: Likelihood(0.0, True) for one in asked if not one.ids}
    num_done = sum(asked[one] for one in found)
    with span("likelihoods"), torch.no_grad():
        for batch in _batches(model, [one for one in asked if one.ids], batch_tokens):
            key = kept.key("likelihoods", [(row.context_ids, row.ids) for row in batch])
            answers = cast("list[tuple[float, bool]] | None", kept.get(key, len(batch)))
            if answers is None:
                answers = [(one.logp, one.is_greedy) for one in _scored(model, batch)]
                kept.add(key, answers)
            found.update(zip(batch, (Likelihood(*one) for one in answers), strict=True))
            num_done += sum(asked[one] for one in batch)
            on_progress(num_done)
    return [found[one] for one in continuations]


def _batches(model: LanguageModel, rows: Sequence[Continuation], batch_tokens: int) -> Iterator[Sequence[Continuation]]:
    """Rows of one pass each, of about `batch_tokens` positions."""
    if model.decoder is not None and model.decoder.shares_prefixes:
        yield from _sharing_batches(rows, batch_tokens)
        return
    if isinstance(model.backend, FullForward):
        batch_tokens //= _LOGITS_SHARE
    batch: list[Continuation] = []
    for row in sorted(rows, key=lambda row: len(row.all_ids), reverse=True):  # the first of a batch is its longest
        if batch and (len(batch) + 1) * len(batch[0].all_ids) > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _sharing_batches(rows: Sequence[Continuation], batch_tokens: int) -> Iterator[Sequence[Continuation]]:
    """As `_batches`: in the order of their ids, so that what begins alike is neighbours; a context is in one pass."""
    batch: list[Continuation] = []
    num_tokens = 0
    last: tuple[int, ...] = ()
    ordered = sorted(rows, key=lambda row: (row.context_ids, row.ids))
    for context, members in itertools.groupby(ordered, key=lambda row: row.context_ids):
        group = list(members)
        num_own = sum(len(row.ids) for row in group)
        # Either the group has its context once, or all of them have the rest of it behind what they share with others.
        num_rest = len(context) - _num_common(last, context)
        added = num_own + min(len(context), num_rest * len(group))
        if batch and num_tokens + added > batch_tokens:
            yield batch
            batch, num_tokens, added = [], 0, num_own + len(context)
        batch += group
        num_tokens, last = num_tokens + added, context
    if batch:
        yield batch


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens that both begin with."""
    both = zip(first, second, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda ids: ids[0] == ids[1], both))


def _scored(model: LanguageModel, batch: Sequence[Continuation]) -> list[Likelihood]:
    rows = [torch.tensor(row.all_ids) for row in batch]
    counts = [len(row.ids) for row in batch]
    device = model.module.device
    lengths_B = torch.tensor([len(row) for row in rows], device=device)
    scores = completion_scores(
        model,
        pad_sequence(rows, batch_first=True).to(device),
        lengths_B,
        prompt_lengths_B=lengths_B - torch.tensor(counts, device=device),
    )
    logps = scores.logp_N.double().cpu().split(counts)
    tops = scores.is_top_N.cpu().split(counts)
    return [Likelihood(logp.sum().item(), bool(top.all())) for logp, top in zip(logps, tops, strict=True)]
