"""Sequences of which some tokens are learnt: which of them a step takes, and how they are packed into micro-batches.

Shape legend: T tokens of all sequences of a micro-batch, one sequence after the other; N learnt tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tunesmith.base.core.seeds import derive, items_at, permutation


@dataclass(frozen=True, slots=True)
class LearntSequence:
    """Token ids, and the ranges of those that a model is to predict: ascending, apart, and none at index 0. `is_cut`:
    the end was cut off.

    Example: the prompt (72, 105) and the completion (97, 2) are `ids=(72, 105, 97, 2)`, `spans=(range(2, 4),)`.
    """

    id: str
    ids: tuple[int, ...]
    spans: tuple[range, ...]
    is_cut: bool = field(default=False, repr=False)  # the hash of rows, which a resumed run finds again, is without it

    @property
    def num_learnt(self) -> int:
        """Tokens that are learnt."""
        return sum(map(len, self.spans))

    @property
    def num_used(self) -> int:
        """Tokens that a pass needs: those before the last learnt one, which nothing has to see."""
        return self.spans[-1].stop - 1

    def cut(self, max_tokens: int) -> "LearntSequence":
        """The first `max_tokens` tokens, and what is learnt of them, perhaps nothing."""
        spans = [range(span.start, min(span.stop, max_tokens)) for span in self.spans]
        is_cut = self.is_cut or len(self.ids) > max_tokens
        return LearntSequence(self.id, self.ids[:max_tokens], tuple(span for span in spans if len(span)), is_cut)


@dataclass(frozen=True, slots=True)
class Targets:
    """A micro-batch without padding: sequence b has `lengths[b]` tokens in `ids_T`; all tensors are int64.

    `state_N` says where in `ids_T` the token before each learnt one is, `chosen_N` is the learnt one. A sequence
    ends before its last learnt token: no state behind it is needed.
    """

    ids_T: torch.Tensor
    lengths: tuple[int, ...]
    state_N: torch.Tensor
    chosen_N: torch.Tensor


def pack_targets(sequences: Sequence[LearntSequence], device: torch.device | str = "cpu") -> Targets:
    """The sequences as one micro-batch on `device`."""
    ids: list[int] = []
    states: list[int] = []
    chosen: list[int] = []
    for sequence in sequences:
        for span in sequence.spans:
            states += range(len(ids) + span.start - 1, len(ids) + span.stop - 1)
            chosen += sequence.ids[span.start : span.stop]
        ids += sequence.ids[: sequence.num_used]
    lengths = tuple(sequence.num_used for sequence in sequences)
    tensors = [torch.tensor(values, dtype=torch.int64, device=device) for values in (ids, states, chosen)]
    return Targets(tensors[0], lengths, tensors[1], tensors[2])


def by_token_budget(lengths: Sequence[int], budget: int, *, padded: bool) -> list[list[int]]:
    """Indices of sequences in groups of at most `budget` tokens, the longest first; a longer one is a group alone.

    Packed, a group costs the sum of its lengths, and each sequence goes to the first group that it fits (first-fit
    decreasing, Johnson 1973: at most 11/9 of the fewest groups, and one). `padded`, it costs rows times the longest
    row, so that neighbours in length share a group.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    groups: list[list[int]] = []
    left: list[int] = []
    for index in order:
        first = max(0, len(groups) - 1) if padded else 0
        cost = lengths[groups[-1][0]] if padded and groups else lengths[index]
        place = next((place for place in range(first, len(groups)) if left[place] >= cost), None)
        if place is None:
            groups.append([index])
            left.append(budget - lengths[index])
        else:
            groups[place].append(index)
            left[place] -= cost
    return groups


def items_of_step(seed: int, step: int, size: int, lengths: Sequence[int], *, window: int = 1) -> list[int]:
    """Indices of the `size` sequences that step `step` (from 0) learns from: a pure function of its arguments.

    The order is that of `core.seeds.items_at`. The sequences of `window` steps are dealt out by length, so that those
    of a step are about equally long, and the steps of the window are shuffled. A window ends at the last step that a
    pass over the sequences takes; how long the run is does not matter, so that it may be given more steps.
    """
    steps_per_pass = -(-len(lengths) // size)
    first = step - step % steps_per_pass % window
    width = min(window, steps_per_pass - first % steps_per_pass)
    drawn = items_at(seed, first * size, width * size, len(lengths))
    if width > 1:
        drawn.sort(key=lambda index: lengths[index])
    place = permutation(derive(seed, "window"), first, width)[step - first]
    return drawn[place * size : (place + 1) * size]
