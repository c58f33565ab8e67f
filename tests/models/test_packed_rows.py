"""Padded rows as packed tokens: every token is found again, and what rows begin with in common stands there once."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.engine.models.packed_rows import pack_rows, states_at

Rows = list[list[int]]


def padded(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows)) + 1
    return torch.tensor([[*row, *[7] * (width - len(row))] for row in rows]), torch.tensor([len(row) for row in rows])


def full_index(lengths_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and position of every token."""
    row_N = torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B)
    position_N = torch.cat([torch.arange(length) for length in lengths_B.tolist()])
    return row_N, position_N


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=7))
def test_every_token_is_found_behind_the_tokens_of_its_row(rows: Rows) -> None:
    ids_BS, lengths_B = padded(rows)
    packed = pack_rows(ids_BS, lengths_B)
    row_N, position_N = full_index(lengths_B)
    index_N = packed.index(row_N, position_N)
    assert packed.ids_T[index_N].tolist() == [token for row in rows for token in row]
    assert packed.segments.positions()[index_N].tolist() == position_N.tolist()
    # Each token sees, in this order, what stands before it in its row.
    chains = packed.segments.token_indices()
    segment_T = torch.repeat_interleave(
        torch.arange(len(packed.segments.lengths)), torch.tensor(packed.segments.lengths)
    )
    for place, row, position in zip(index_N.tolist(), row_N.tolist(), position_N.tolist(), strict=True):
        seen = chains[int(segment_T[place])][: position + 1]
        assert packed.ids_T[seen].tolist() == rows[row][: position + 1]
    assert packed.segments.num_tokens <= sum(map(len, rows))


def test_a_groups_prompt_stands_there_once() -> None:
    prompt, other = list(range(10, 40)), list(range(50, 60))
    rows = [[*prompt, 1, 2], [*prompt, 3], [*prompt, 4, 5, 6], [*other, 1], [*other, 2, 2]]
    packed = pack_rows(*padded(rows))
    assert packed.segments.lengths == (30, 2, 1, 3, 10, 1, 2)
    assert packed.segments.parents == (-1, 0, 0, 0, -1, 4, 4)


def test_a_row_that_is_the_beginning_of_another_has_no_tokens_of_its_own() -> None:
    packed = pack_rows(*padded([[1, 2, 3, 4], [1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3]]))
    assert packed.ids_T.tolist() == [1, 2, 3, 4, 4, 5]
    assert packed.segments.parents == (-1, 0, 0)


def test_a_few_common_tokens_do_not_break_up_a_larger_group() -> None:
    """All five rows begin with 1 2; sharing that alone would save less than the two prompts do."""
    first, second = [1, 2, *range(10, 30)], [1, 2, *range(40, 60)]
    packed = pack_rows(*padded([[*first, 3], [*first, 4], [*first, 5], [*second, 3], [*second, 4]]))
    assert packed.segments.lengths == (22, 1, 1, 1, 22, 1, 1)


def test_gradients_of_a_state_that_is_asked_for_often_are_summed_in_float32() -> None:
    hidden_TH = torch.zeros(3, 4, dtype=torch.bfloat16, requires_grad=True)
    index_N = torch.tensor([1] * 300 + [2])
    states_at(hidden_TH, index_N).sum().backward()
    assert hidden_TH.grad is not None
    assert hidden_TH.grad[:, 0].tolist() == [0.0, 300.0, 1.0]  # in bfloat16 the sum would stay at 256
