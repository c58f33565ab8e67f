"""Masks and scores for the tests of masked softmax, and its comparison with the definition in float64.

Shapes: B sequences, H heads, Q queries, K keys.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from drawn import normal
from tunesmith.engine.kernels.masked_softmax import torch_impl
from tunesmith.engine.kernels.masked_softmax.api import masked_softmax
from tunesmith.engine.kernels.masked_softmax.torch_impl import KeyMask
from tunesmith.engine.kernels.native import Kernels

SHAPE = (2, 3, 7, 19)
MASKS = {
    "none": KeyMask(causal=False),
    "causal": KeyMask(),
    "causal from a cache": KeyMask(offset=0),
    "window": KeyMask(window=3),
    "window both ways": KeyMask(causal=False, window=5),
    "padding": KeyMask(keys_B2=torch.tensor([[2, 19], [0, 5]])),
    "one for all": KeyMask(
        causal=False, allowed_BQK=torch.rand(1, 1, 19, generator=torch.Generator().manual_seed(1)) > 0.4
    ),
    "everything": KeyMask(
        window=9,
        keys_B2=torch.tensor([[2, 19], [0, 11]]),
        allowed_BQK=torch.rand(2, 7, 19, generator=torch.Generator().manual_seed(2)) > 0.3,
    ),
}
"""For scores of `SHAPE`."""

_TENSORS = ("keys_B2", "allowed_BQK")

Work = Callable[[torch.Tensor], torch.Tensor]


def with_gradient(scores: torch.Tensor, d_out: torch.Tensor, work: Work) -> tuple[torch.Tensor, torch.Tensor]:
    """What `work` gives, and the gradient of the scores."""
    leaf = scores.clone().requires_grad_()
    out = work(leaf)
    return out.detach(), torch.autograd.grad(out, leaf, d_out.to(out.dtype))[0]


def check_mask(mask: KeyMask, dtype: torch.dtype, kernels: Kernels, tolerance: float) -> None:
    """Probabilities and gradient are those of the definition in float64; keys that are not seen get exactly 0."""
    scores_BHQK, d_out = 3 * normal(*SHAPE, dtype=dtype), normal(*SHAPE, dtype=dtype, seed=1)
    given = {name: value.to(scores_BHQK.device) for name in _TENSORS if (value := getattr(mask, name)) is not None}
    mask = replace(mask, **given)
    found = with_gradient(scores_BHQK, d_out, lambda x: masked_softmax(x, scale=0.37, mask=mask, kernels=kernels))
    exact = with_gradient(scores_BHQK.double(), d_out, lambda x: torch_impl.masked_softmax(x, 0.37, mask))
    # The gradient is computed from the rounded probabilities.
    for mine, theirs, slack in zip(found, exact, (1, 4), strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), theirs, atol=slack * tolerance, rtol=2 * tolerance)
    seen = torch_impl.visible(scores_BHQK.shape, mask, scores_BHQK.device).expand(scores_BHQK.shape)
    assert not found[0][~seen].any() and not found[1][~seen].any()


def check_shape(sizes: tuple[int, ...], mask: KeyMask, kernels: Kernels, *, scale: float, seed: int) -> None:
    """In float32, probabilities and gradient of scores of any shape, empty ones too."""
    scores_BHQK, d_out = 5 * normal(*sizes, seed=seed), normal(*sizes, seed=seed + 1)
    found = with_gradient(scores_BHQK, d_out, lambda x: masked_softmax(x, scale=scale, mask=mask, kernels=kernels))
    exact = with_gradient(scores_BHQK.double(), d_out, lambda x: torch_impl.masked_softmax(x, scale, mask))
    for mine, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=1e-5, rtol=1e-5)


def check_extreme_scores(kernels: Kernels) -> None:
    """Scores of +-1e4 give exact probabilities, and rows that see nothing give zeros, with their gradients."""
    scores_BHQK = torch.tensor([[-1e4, 1e4, 0.0], [-1e4, -1e4, -1e4], [1e4, 1e4, -1e4]]).view(1, 1, 3, 3)
    found = masked_softmax(scores_BHQK, scale=1.0, mask=KeyMask(causal=False), kernels=kernels)
    third, half = 1 / 3, 0.5
    expected = torch.tensor([[0.0, 1.0, 0.0], [third, third, third], [half, half, 0.0]])
    torch.testing.assert_close(found[0, 0], expected)
    nothing = KeyMask(keys_B2=torch.tensor([[3, 3]]))
    out, gradient = with_gradient(
        scores_BHQK, scores_BHQK, lambda x: masked_softmax(x, scale=1.0, mask=nothing, kernels=kernels)
    )
    assert not out.any() and not gradient.any()
