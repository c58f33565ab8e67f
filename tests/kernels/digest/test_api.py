"""Digests in C++ and in torch: the same numbers everywhere, and another one for every change that code makes."""

import pytest
import torch

from tunesmith.engine.kernels.digest.api import digests
from tunesmith.engine.kernels.native import Kernels

TORCH = Kernels("torch")
BLOCK = 8192  # bytes

TENSORS = {
    "empty": torch.empty(0, 5),
    "one byte": torch.tensor([7], dtype=torch.uint8),
    "a number": torch.tensor(0.5, dtype=torch.float64),
    "odd": torch.arange(1, 1024, dtype=torch.bfloat16),
    "a block": torch.arange(BLOCK // 4, dtype=torch.float32),
    "a block and a byte": torch.arange(BLOCK + 1).to(torch.uint8),
    "many": torch.randn(300, 777, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "flags": torch.arange(5000) % 3 == 0,
}


@pytest.fixture(scope="module")
def native(built) -> Kernels:
    return built("digest")


@pytest.mark.parametrize("name", TENSORS)
def test_both_implementations_give_the_same_number(name: str, native: Kernels) -> None:
    assert digests([TENSORS[name]], kernels=native) == digests([TENSORS[name]], kernels=TORCH)


def test_the_numbers_are_those_of_every_machine_and_release(native: Kernels) -> None:
    tensors = [TENSORS["one byte"], TENSORS["a block and a byte"]]
    expected = [13648833000334847427, 1705354687007982062]
    assert digests(tensors, kernels=native) == digests(tensors, kernels=TORCH) == expected


@pytest.mark.parametrize("choice", ["native", "torch", "triton"])
def test_views_copies_and_threads_make_no_difference(choice: str, native: Kernels) -> None:
    kernels = native if choice == "native" else Kernels(choice)  # type: ignore[arg-type]
    whole = torch.randn(500, 601).bfloat16()
    expected = digests([whole[3:, 5:].clone()], kernels=kernels)
    assert digests([whole[3:, 5:]], kernels=kernels) == expected  # rows apart, and not aligned
    assert digests([whole.flatten()[1:]], kernels=kernels) == digests([whole.flatten()[1:].clone()], kernels=kernels)
    assert digests([nan := torch.tensor([float("nan"), -0.0])], kernels=kernels) == digests([nan], kernels=kernels)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert digests([whole, whole[3:, 5:]], kernels=kernels)[1:] == expected
    finally:
        torch.set_num_threads(before)
    assert digests([], kernels=kernels) == []


CHANGES = {
    "one number": lambda x: x.view(-1)[12345].mul_(1.01),
    "the last bit of one number": lambda x: x.view(torch.int16).view(-1)[77].bitwise_xor_(1),
    "the sign of two numbers": lambda x: x.view(-1)[3:8:4].neg_(),
    "all signs": lambda x: x.neg_(),
    "two rows change places": lambda x: x.copy_(x[[1, 0, *range(2, len(x))]]),
    "two halves of a block change places": lambda x: x.view(-1)[:4096].copy_(x.view(-1)[:4096].roll(2048)),
    "two blocks change places": lambda x: x.view(-1)[:8192].copy_(x.view(-1)[:8192].roll(4096)),
    "zeros": lambda x: x.zero_(),
    "a rotation": lambda x: x.copy_(x.flatten().roll(1).view_as(x)),
    "zeros of the other sign": lambda x: x.view(-1)[0].fill_(-0.0),
}


@pytest.mark.parametrize("choice", ["native", "torch"])
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(change: str, choice: str, native: Kernels) -> None:
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    x.view(-1)[0] = 0.0
    kernels = native if choice == "native" else TORCH
    before = digests([x], kernels=kernels)
    CHANGES[change](x)
    assert digests([x], kernels=kernels) != before


def test_random_changes_of_few_numbers_are_all_seen(native: Kernels) -> None:
    generator, contents = torch.Generator().manual_seed(2), dict[int, torch.Tensor]()
    for _ in range(2000):
        changed = torch.zeros(3000)
        places = torch.randint(len(changed), (2,), generator=generator)
        changed[places] = torch.tensor([2.0, -2.0])[torch.randint(2, (2,), generator=generator)]
        (number,) = digests([changed], kernels=native)
        assert torch.equal(contents.setdefault(number, changed), changed)


def test_lengths_of_zeros_differ(native: Kernels) -> None:
    tensors = [torch.zeros(count, dtype=torch.uint8) for count in (0, 1, 7, 8, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK)]
    assert len(set(digests(tensors, kernels=native))) == len(tensors)
    assert len({digests([tensor], kernels=TORCH)[0] for tensor in tensors}) == len(tensors)
