"""The digest of a tensor's bytes, in torch: the definition of what C++ computes.

The bytes are divided into blocks of 2048 words of 32 bits, the last one filled with zeros. Of each block the hash NH
(Black et al. 1999, UMAC), in its signed form, is taken under two keys, which misses a change with a chance of about
2^-62. Both go through the finalizer of splitmix64 (Steele et al. 2014, doi 10.1145/2660193.2660195), with the place of
the block. The digest is the sum over all blocks, and of the number of bytes, modulo 2^64.

Shape legend: K blocks, W words of a block.
"""

import torch

_PAIRS = 1024
_BLOCK_BYTES = 2 * _PAIRS * 4
_FEW_BLOCKS, _MANY_BLOCKS = 128, 8192
"""Blocks at a time: few that fit into a cache, or many that keep a GPU busy."""

_STEP, _FACTORS, _SHIFTS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB), (30, 27, 31)


@torch.no_grad()
def digest(tensor: torch.Tensor) -> int:
    """A number of 64 bits for the bytes of `tensor`, in the order of its elements, on any device."""
    bytes_N, device = tensor.detach().contiguous().reshape(-1).view(torch.uint8), tensor.device
    key_W = _mixed(torch.zeros((), dtype=torch.int64, device=device), torch.arange(2 * _PAIRS, device=device))
    keys = key_W.int(), _shifted(key_W, 32).int()
    total = _mixed(torch.tensor(len(bytes_N), device=device), torch.tensor(-2, device=device))
    step = (_FEW_BLOCKS if device.type == "cpu" else _MANY_BLOCKS) * _BLOCK_BYTES
    for start in range(0, len(bytes_N), step):
        part_N = bytes_N[start : start + step]
        part_N = torch.nn.functional.pad(part_N, (0, -len(part_N) % _BLOCK_BYTES)).clone()  # aligned for wider words
        word_KW = part_N.view(torch.int32).view(-1, 2 * _PAIRS)
        place_K = torch.arange(len(word_KW), device=device) + start // _BLOCK_BYTES
        first_K, second_K = (_nh(word_KW, key_W) for key_W in keys)
        total = total + _mixed(_mixed(first_K, place_K) + second_K, place_K).sum()
    return int(total) % 2**64


def _nh(word_KW: torch.Tensor, key_W: torch.Tensor) -> torch.Tensor:
    left_KP, right_KP = (word_KW + key_W).split(_PAIRS, 1)
    return (left_KP.long() * right_KP).sum(1)


def _mixed(word: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    word = word + (place + 1) * _signed(_STEP)
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        word = (word ^ _shifted(word, shift)) * _signed(factor)
    return word ^ _shifted(word, _SHIFTS[-1])


def _shifted(word: torch.Tensor, count: int) -> torch.Tensor:
    """Without the sign, which torch would shift in."""
    return (word >> count) & ((1 << (64 - count)) - 1)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
