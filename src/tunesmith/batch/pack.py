"""Groups as right-padded tensors.

Shape legend: B sequences, S positions of prompt and completion, T completion tokens. Column t of a `_BT` tensor belongs
to the t-th completion token of its row, whatever the length of the prompt; columns behind the last token are padding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch

from tunesmith.batch.rollout import Group

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sequences:
    """Prompts and completions side by side.

    Example: a prompt of 2 tokens with a completion of 3 is `ids_BS[0] = [7, 8, 1, 2, 3]`, `prompt_lengths_B[0] = 2`,
    `lengths_B[0] = 5`; `mask_BT[0]` is True for the 3 completion tokens. Masks come from lengths: pad may equal eos.
    """

    ids_BS: torch.Tensor
    lengths_B: torch.Tensor
    prompt_lengths_B: torch.Tensor
    mask_BT: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """Completion tokens in the batch."""
        return int(self.mask_BT.sum())


@dataclass(frozen=True, slots=True)
class PolicyScores:
    """What a policy and its critic say of each completion token, all `[B, T]` float32, zeros in the padding.

    `logp_BT` and `entropy_BT` in nats; `value_BT` is the value of the state before the token was drawn.
    """

    logp_BT: torch.Tensor
    entropy_BT: torch.Tensor
    value_BT: torch.Tensor


@dataclass(frozen=True, slots=True)
class PPOBatch:
    """A scored rollout: sequences, and one number per completion token for everything that the losses need."""

    sequences: Sequences
    old_logp_BT: torch.Tensor
    reference_logp_BT: torch.Tensor
    old_value_BT: torch.Tensor
    advantage_BT: torch.Tensor
    return_BT: torch.Tensor

    def select(self, index_B: Sequence[int]) -> "PPOBatch":
        """The rows `index_B`, trimmed to their own longest sequence and completion."""
        sequences = select(self.sequences, index_B)
        rows, width = torch.as_tensor(index_B), sequences.mask_BT.shape[1]
        per_token = {f.name: getattr(self, f.name)[rows, :width] for f in fields(self) if f.name != "sequences"}
        return replace(self, sequences=sequences, **per_token)


def pack(groups: Sequence[Group], pad_id: int, device: torch.device | str = "cpu") -> Sequences:
    """All completions of `groups`, group after group, as right-padded tensors on `device`."""
    rows = [(group.prompt_token_ids, completion.token_ids) for group in groups for completion in group.completions]
    prompt_lengths = [len(prompt) for prompt, _ in rows]
    completion_lengths = [len(completion) for _, completion in rows]
    width = max(p + c for p, c in zip(prompt_lengths, completion_lengths, strict=True))
    ids = [[*prompt, *completion, *[pad_id] * (width - len(prompt) - len(completion))] for prompt, completion in rows]
    columns_T = torch.arange(max(completion_lengths))
    mask_BT = columns_T[None, :] < torch.tensor(completion_lengths)[:, None]
    lengths_B = torch.tensor(prompt_lengths) + torch.tensor(completion_lengths)
    return Sequences(
        torch.tensor(ids, device=device),
        lengths_B.to(device),
        torch.tensor(prompt_lengths, device=device),
        mask_BT.to(device),
    )


def select(sequences: Sequences, index_B: Sequence[int]) -> Sequences:
    """The rows `index_B` of `sequences`, trimmed to their own longest sequence and completion."""
    rows = torch.as_tensor(index_B)
    lengths_B, prompt_lengths_B = sequences.lengths_B[rows], sequences.prompt_lengths_B[rows]
    return Sequences(
        sequences.ids_BS[rows, : int(lengths_B.max())],
        lengths_B,
        prompt_lengths_B,
        sequences.mask_BT[rows, : int((lengths_B - prompt_lengths_B).max())],
    )


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Consecutive parts of `items`, each of `size` items, the last one perhaps shorter."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
