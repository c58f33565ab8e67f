"""Groups become right-padded tensors whose masks come from lengths."""

import torch

from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.pack import PolicyBatch, chunks, pack, select
from tunesmith.engine.batch.rollout import Completion, Group


def _group(prompt_ids: tuple[int, ...], *completions: tuple[int, ...]) -> Group:
    drawn = tuple(
        Completion(ids, tuple(-token / 4 for token in ids), tuple(-token / 2 for token in ids), "", "length")
        for ids in completions
    )
    return Group(Prompt("p", "text"), prompt_ids, drawn, weight_version=0)


GROUPS = [_group((7, 8), (1, 2, 3), (4,)), _group((9,), (5, 6), (7, 7, 7, 7))]


def test_rows_hold_prompt_then_completion_then_padding() -> None:
    batch = pack(GROUPS, pad_id=0)
    assert batch.ids_BS.tolist() == [[7, 8, 1, 2, 3], [7, 8, 4, 0, 0], [9, 5, 6, 0, 0], [9, 7, 7, 7, 7]]
    assert batch.lengths_B.tolist() == [5, 3, 3, 5]
    assert batch.prompt_lengths_B.tolist() == [2, 2, 1, 1]


def test_mask_counts_completion_tokens_even_where_pad_is_a_real_token() -> None:
    batch = pack(GROUPS, pad_id=7)
    assert batch.mask_BT.sum(dim=1).tolist() == [3, 1, 2, 4]
    assert batch.num_tokens == 10


def test_selected_rows_are_trimmed_to_their_own_longest() -> None:
    batch = select(pack(GROUPS, pad_id=0), [1, 2])
    assert batch.ids_BS.tolist() == [[7, 8, 4], [9, 5, 6]]
    assert batch.mask_BT.tolist() == [[True, False], [True, True]]


def test_ppo_batch_selects_the_same_rows_of_every_tensor() -> None:
    sequences = pack(GROUPS, pad_id=0)
    numbers_BT = torch.arange(16.0).reshape(4, 4)
    batch = PolicyBatch(sequences, *(numbers_BT + k for k in range(5)))
    part = batch.select([2, 0])
    assert part.old_logp_BT.tolist() == [[8.0, 9.0, 10.0], [0.0, 1.0, 2.0]]
    assert part.return_BT.tolist() == [[12.0, 13.0, 14.0], [4.0, 5.0, 6.0]]


def test_rows_are_counted_over_all_groups_and_packed_as_if_they_were_all() -> None:
    batch = pack(GROUPS, pad_id=0, rows=[2, 1])
    assert batch.ids_BS.tolist() == [[9, 5, 6], [7, 8, 4]]
    assert batch.lengths_B.tolist() == [3, 3]
    assert batch.prompt_lengths_B.tolist() == [1, 2]
    assert batch.mask_BT.tolist() == [[True, True], [True, False]]
    assert batch.num_tokens == 3
    every = pack(GROUPS, pad_id=0, rows=range(4))
    for name in ("ids_BS", "lengths_B", "prompt_lengths_B", "mask_BT", "sampled_logp_BT"):
        assert torch.equal(getattr(every, name), getattr(pack(GROUPS, pad_id=0), name)), name


def test_the_engine_s_log_probs_stand_beside_their_tokens_with_zeros_behind() -> None:
    batch = pack(GROUPS, pad_id=7)
    assert batch.sampled_logp_BT.dtype == torch.float32
    ids_BT = [[1, 2, 3, 0], [4, 0, 0, 0], [5, 6, 0, 0], [7, 7, 7, 7]]
    assert (batch.sampled_logp_BT * -4).tolist() == ids_BT
    assert (select(batch, [1, 2]).sampled_logp_BT * -4).tolist() == [[4, 0], [5, 6]]
    assert (pack(GROUPS, pad_id=7, rows=[3, 0]).sampled_logp_BT * -4).tolist() == [[7, 7, 7, 7], [1, 2, 3, 0]]


def test_policy_batch_selects_the_same_rows_of_every_tensor() -> None:
    numbers_BT = torch.arange(16.0).reshape(4, 4)
    batch = PolicyBatch(pack(GROUPS, pad_id=0), *(numbers_BT + k for k in range(3)))
    part = batch.select([2, 1])
    assert type(part) is PolicyBatch
    assert part.sequences.ids_BS.tolist() == [[9, 5, 6], [7, 8, 4]]
    assert part.old_logp_BT.tolist() == [[8.0, 9.0], [4.0, 5.0]]
    assert part.reference_logp_BT.tolist() == [[9.0, 10.0], [5.0, 6.0]]
    assert part.advantage_BT.tolist() == [[10.0, 11.0], [6.0, 7.0]]


def test_chunks_cover_everything_once() -> None:
    assert [list(part) for part in chunks(range(5), 2)] == [[0, 1], [2, 3], [4]]
