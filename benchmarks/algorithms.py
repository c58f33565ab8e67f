"""GAE over all rows at once in C++ against torch, at the sizes of a PPO step. Writes benchmarks/algorithms.json.

Shape legend: B sequences, T tokens.
"""

import sys
from functools import partial

import torch

from benchmarks.measure import ratio, write
from tunesmith.algorithms.advantages import gae
from tunesmith.kernels.gae import torch_impl

SIZES_BT = ((32, 24), (64, 64), (256, 256))


def main() -> int:
    """Exit code 0; prints and writes the ratios."""
    ratios = []
    for num_sequences, num_tokens in SIZES_BT:
        generator = torch.Generator().manual_seed(0)
        reward_BT, value_BT = torch.randn(2, num_sequences, num_tokens, generator=generator)
        lengths_B = torch.randint(num_tokens // 2, num_tokens + 1, (num_sequences,), generator=generator)
        mask_BT = torch.arange(num_tokens) < lengths_B[:, None]
        arguments = (reward_BT, value_BT, mask_BT, 1.0, 0.95)
        name = f"gae {num_sequences}x{num_tokens}"
        ratios.append(ratio(name, fast=partial(gae, *arguments), slow=partial(torch_impl.gae, *arguments)))
    print(f"written to {write('algorithms', ratios)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
