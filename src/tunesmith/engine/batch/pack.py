"""Groups as right-padded tensors.

Shape legend: B sequences, S positions of prompt and completion, T completion tokens. Column t of a `_BT` tensor belongs
to the t-th completion token of its row, whatever the length of the prompt; columns behind the last token are padding.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self, TypeVar

import torch

from tunesmith.engine.batch.rollout import Completion, Group, Turn

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FrozenStates:
    """States `[B, S, H]` of the tokens of `Sequences` after the first `num_layers` layers of a decoder, which are not
    trained: the same for policy, reference and every epoch. The last token of a row, which predicts nothing, has none.
    """

    num_layers: int
    x_BSH: torch.Tensor


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """The turns of trajectories: `index_BT`, int64, counts the turns of a trajectory from 0 (0 too where nothing was
    drawn); `reward_BT` has what the environment gave for a turn at its last token, float32.
    """

    index_BT: torch.Tensor
    reward_BT: torch.Tensor

    def select(self, rows: torch.Tensor, width: int) -> "TurnTokens":
        """Those of `rows`, in the first `width` columns."""
        return TurnTokens(self.index_BT[rows, :width], self.reward_BT[rows, :width])


@dataclass(frozen=True, slots=True)
class Sequences:
    """Prompts and completions side by side.

    Example: a prompt of 2 tokens with a completion of 3 is `ids_BS[0] = [7, 8, 1, 2, 3]`, `prompt_lengths_B[0] = 2`,
    `lengths_B[0] = 5`; `mask_BT[0]` is True for the 3 completion tokens. Masks come from lengths: pad may equal eos.
    `sampled_logp_BT` is the engine's log-prob of each completion token under the distribution that it was drawn from,
    `raw_logp_BT` that under the model itself at the same temperature; `value_BT`, from an engine with a value head, is
    the value of the state before each. All float32, 0 in the padding. Passes begin at `frozen`, if it is there.

    A completion of several `turns` has False in `mask_BT`, and 0 in the others, for tokens that the model did not draw.
    """

    ids_BS: torch.Tensor
    lengths_B: torch.Tensor
    prompt_lengths_B: torch.Tensor
    mask_BT: torch.Tensor
    sampled_logp_BT: torch.Tensor
    raw_logp_BT: torch.Tensor
    value_BT: torch.Tensor | None = None
    frozen: FrozenStates | None = None
    turns: TurnTokens | None = None

    @property
    def num_tokens(self) -> int:
        """Completion tokens in the batch."""
        return int(self.mask_BT.sum())


@dataclass(frozen=True, slots=True)
class PolicyBatch:
    """A scored rollout: sequences, and one number per completion token for everything that the losses need.

    `old_logp_BT` is of the policy that drew the tokens: what the engine recorded if that is exact, or if the rollout is
    used for a single update, which does not need it; else from a pass of its own. `reference_logp_BT` is None without
    a reference. With a critic there are its values, and the returns that they are fitted to.
    """

    sequences: Sequences
    old_logp_BT: torch.Tensor
    reference_logp_BT: torch.Tensor | None
    advantage_BT: torch.Tensor
    old_value_BT: torch.Tensor | None = None
    return_BT: torch.Tensor | None = None

    def select(self, index_B: Sequence[int]) -> Self:
        """The rows `index_B`, trimmed to their own longest sequence and completion."""
        sequences = select(self.sequences, index_B)
        rows, width = torch.as_tensor(index_B, device=sequences.mask_BT.device), sequences.mask_BT.shape[1]
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "sequences"}
        chosen = {name: None if x_BT is None else x_BT[rows, :width] for name, x_BT in tensors.items()}
        return replace(self, sequences=sequences, **chosen)


def pack(
    groups: Sequence[Group], pad_id: int, device: torch.device | str = "cpu", *, rows: Sequence[int] | None = None
) -> Sequences:
    """The completions of `groups`, group after group, as right-padded tensors on `device`.

    `rows` are the completions to take, counted over all groups; None takes all. A completion of several samples has as
    many rows, see `completion_of_rows`.
    """
    every = [(group.prompt_token_ids, completion) for group in groups for completion in group.completions]
    chosen = every if rows is None else [every[row] for row in rows]
    taken = [(sample.prompt_ids or prompt, sample) for prompt, completion in chosen for sample in completion.samples]
    prompt_lengths = [len(prompt) for prompt, _ in taken]
    completion_lengths = [len(completion.token_ids) for _, completion in taken]
    ids_BS = _padded([(*prompt, *completion.token_ids) for prompt, completion in taken], pad_id)
    sampled_logp_BT = _padded([completion.logps for _, completion in taken], 0.0)
    raw_logp_BT = _padded([completion.raw_logps for _, completion in taken], 0.0)
    values = [completion.values for _, completion in taken if completion.values is not None]
    value_BT = _padded(values, 0.0).to(device, torch.float32) if len(values) == len(taken) else None
    mask_BT = torch.arange(max(completion_lengths))[None, :] < torch.tensor(completion_lengths)[:, None]
    turns = None
    if any(completion.trajectory is not None for _, completion in taken):
        mask_BT = _padded([completion.is_sampled for _, completion in taken], False)
        turns = _turns([completion for _, completion in chosen], mask_BT.shape[1])
        turns = TurnTokens(turns.index_BT.to(device), turns.reward_BT.to(device))
    lengths_B = torch.tensor(prompt_lengths) + torch.tensor(completion_lengths)
    return Sequences(
        ids_BS.to(device),
        lengths_B.to(device),
        torch.tensor(prompt_lengths, device=device),
        mask_BT.to(device),
        sampled_logp_BT.to(device, torch.float32),
        raw_logp_BT.to(device, torch.float32),
        value_BT,
        turns=turns,
    )


def completion_of_rows(groups: Sequence[Group], rows: Sequence[int] | None = None) -> list[int]:
    """The completion, counted over all groups, of each row of `pack(groups, rows=rows)`."""
    every = [completion for group in groups for completion in group.completions]
    return [row for row in (range(len(every)) if rows is None else rows) for _ in every[row].samples]


def units_of(sequences: Sequences, together: int = 1) -> list[list[int]]:
    """The rows that are not to be torn apart: those of each `together` consecutive completions, with all samples of
    each; for 1 each row by itself.
    """
    num_rows = len(sequences.lengths_B)
    if together == 1 or sequences.turns is None:
        return [list(rows) for rows in chunks(range(num_rows), together)]
    units: list[list[int]] = []
    num_begun = 0
    for row, first_turn in enumerate(sequences.turns.index_BT[:, 0].tolist()):
        if first_turn == 0:  # later samples of a completion begin with a later turn
            if num_begun % together == 0:
                units.append([])
            num_begun += 1
        units[-1].append(row)
    return units


def _turns(completions: Sequence[Completion], width: int) -> TurnTokens:
    """The turns of all samples of `completions`, numbered within each completion."""
    rows = [turns for completion in completions for turns in _numbered(completion)]
    index_BT = torch.zeros((len(rows), width), dtype=torch.int64)
    reward_BT = torch.zeros((len(rows), width))
    for row, turns in enumerate(rows):
        for number, turn in turns:
            index_BT[row, turn.start : turn.stop] = number
            reward_BT[row, turn.stop - 1] = turn.reward or 0.0
    return TurnTokens(index_BT, reward_BT)


def _numbered(completion: Completion) -> list[list[tuple[int, Turn]]]:
    """The turns of each sample, with their numbers in the trajectory."""
    numbers = itertools.count()
    return [[(next(numbers), turn) for turn in sample.trajectory_turns] for sample in completion.samples]


def _padded(rows: Sequence[Sequence[float]], fill: float) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])


def select(sequences: Sequences, index_B: Sequence[int]) -> Sequences:
    """The rows `index_B` of `sequences`, trimmed to their own longest sequence and completion."""
    rows = torch.as_tensor(index_B, device=sequences.ids_BS.device)  # once, not for each field
    lengths_B, prompt_lengths_B = sequences.lengths_B[rows], sequences.prompt_lengths_B[rows]
    width, longest, frozen = int((lengths_B - prompt_lengths_B).max()), int(lengths_B.max()), sequences.frozen
    return Sequences(
        sequences.ids_BS[rows, :longest],
        lengths_B,
        prompt_lengths_B,
        sequences.mask_BT[rows, :width],
        sequences.sampled_logp_BT[rows, :width],
        sequences.raw_logp_BT[rows, :width],
        None if sequences.value_BT is None else sequences.value_BT[rows, :width],
        None if frozen is None else replace(frozen, x_BSH=frozen.x_BSH[rows, :longest]),
        None if sequences.turns is None else sequences.turns.select(rows, width),
    )


def chunks(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Consecutive parts of `items`, each of `size` items, the last one perhaps shorter."""
    return [items[start : start + size] for start in range(0, len(items), size)]
