"""Uploads: packing, views, buffers in turn. On the CPU the same code runs without pinned memory."""

import os
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.base.core.errors import InputError
from tunesmith.engine.batch.upload import ALIGNMENT, Uploader, copy_s

DEVICE = "cuda" if os.environ.get("TUNESMITH_TEST_GPU") == "1" else "cpu"
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def drawn(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    whole = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(seed))
    return whole > 0 if dtype == torch.bool else whole.to(dtype)


def same(found: list[torch.Tensor], given: list[torch.Tensor]) -> None:
    assert len(found) == len(given)
    for ours, sent in zip(found, given, strict=True):
        assert ours.dtype == sent.dtype and ours.is_contiguous() and torch.equal(ours.cpu(), sent)


@settings(max_examples=60, deadline=None)
@given(
    fields=st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=3)), max_size=9),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_tensors_arrive_as_they_were_sent(fields, seed):
    sent = [drawn(dtype, tuple(shape), seed + index) for index, (dtype, shape) in enumerate(fields)]
    same([tensor.cpu() for tensor in Uploader(DEVICE).tensors(sent)], sent)
    assert DEVICE != "cpu" or copy_s() == 0.0  # no copy to a GPU


def test_fields_begin_at_multiples_and_share_one_allocation():
    sent = [drawn(torch.bool, (3,), 0), drawn(torch.float64, (100,), 1), drawn(torch.int64, (), 2)]
    received = Uploader(DEVICE).tensors(sent)
    places = {tensor.untyped_storage().data_ptr() for tensor in received}
    assert len(places) == 1 and received[0].untyped_storage().nbytes() == 1536
    assert [tensor.data_ptr() - places.copy().pop() for tensor in received] == [0, 256, 1280]
    assert ALIGNMENT % max(tensor.element_size() for tensor in sent) == 0


def test_tensors_may_be_spread_in_memory():
    whole = drawn(torch.float32, (8, 6), 0)
    sent = [whole.t(), whole[::2, 1:4], whole[:1].expand(5, 6), whole[0, 0]]
    same(Uploader(DEVICE).tensors(sent), [tensor.contiguous() for tensor in sent])


def test_what_was_received_outlives_the_buffers_and_what_was_sent():
    uploader, batches = Uploader(DEVICE), []
    for index in range(7):
        sent = [torch.full((10 ** (index % 4 + 1),), index), torch.full((3,), -1.0 * index)]
        batches.append(uploader.tensors(sent))
        for tensor in sent:
            tensor.fill_(99)
    for index, (first, second) in enumerate(batches):
        assert (first == index).all() and (second == -1.0 * index).all()


def test_gradients_do_not_pass():
    leaf = torch.ones(3, requires_grad=True)
    assert not Uploader(DEVICE).tensors([2 * leaf])[0].requires_grad


@dataclass(frozen=True, slots=True)
class Inner:
    ids_BS: torch.Tensor
    width: int
    extra_BT: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Outer:
    sequences: Inner
    reward_B: torch.Tensor
    name: str


def test_a_record_arrives_with_the_records_inside_of_it():
    sent = Outer(Inner(drawn(torch.int64, (2, 3), 0), 3), drawn(torch.float32, (2,), 1), "batch")
    received = Uploader(DEVICE).record(sent)
    assert received.name == "batch" and received.sequences.width == 3 and received.sequences.extra_BT is None
    same([received.sequences.ids_BS, received.reward_B], [sent.sequences.ids_BS, sent.reward_B])
    assert received.reward_B.untyped_storage().data_ptr() == received.sequences.ids_BS.untyped_storage().data_ptr()


def test_what_does_not_fit_is_refused():
    uploader = Uploader(DEVICE)
    with pytest.raises(InputError, match="uploads go to a CPU or a CUDA device"):
        Uploader("meta")
    with pytest.raises(InputError, match=r"tensor 1 is torch\.strided on meta"):
        uploader.tensors([torch.ones(1), torch.ones(1, device="meta")])
    with pytest.raises(InputError, match=r"tensor 0 is torch\.sparse_coo on cpu"):
        uploader.tensors([torch.eye(2).to_sparse()])
    with pytest.raises(InputError, match="record is int; give a dataclass of tensors"):
        uploader.record(3)
