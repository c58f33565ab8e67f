"""What the tests of log-probs share with their twins in Triton."""

from functools import partial

import torch

import drawn

normal = partial(drawn.normal, scale=4.0)


def ids_of(num_rows: int, num_tokens: int) -> torch.Tensor:
    return torch.randint(num_tokens, (num_rows,), generator=torch.Generator().manual_seed(7))
