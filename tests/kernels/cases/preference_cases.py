"""Votes for the tests of selection, and what the definition makes of them in float64.

Shapes: B pairs, N numbers of an output.
"""

import torch

from drawn import normal
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.kernels.preference import torch_impl
from tunesmith.engine.kernels.preference.api import select_and_update, update_in_place
from tunesmith.engine.kernels.preference.torch_impl import PreferenceBatch, Selected


def batch_of(
    num_pairs: int, num_columns: int, dtype: torch.dtype = torch.float32, seed: int = 0, share_of_ties: float = 1 / 3
) -> PreferenceBatch:
    """Random outputs, choices, ties among them, and vote weights."""
    draw = torch.Generator().manual_seed(seed)
    is_a_B, is_tie_B = torch.rand(2, num_pairs, generator=draw).unbind()
    return PreferenceBatch(
        normal(num_pairs, num_columns, dtype=dtype, seed=seed),
        normal(num_pairs, num_columns, dtype=dtype, seed=seed + 1),
        torch.where(is_tie_B < share_of_ties, 0.5, (is_a_B < 0.5).float()),
        torch.rand(num_pairs, generator=draw),
    )


def exact(batch: PreferenceBatch, weights_N: torch.Tensor, scale: float) -> Selected:
    """What the definition gives in float64."""
    votes_B = None if batch.vote_weights_B is None else batch.vote_weights_B.double()
    wide = PreferenceBatch(batch.outputs_a_BN.double(), batch.outputs_b_BN.double(), batch.choices_B, votes_B)
    return torch_impl.select_and_update(wide, weights_N.double(), scale)


def run(batch: PreferenceBatch, weights_N: torch.Tensor, scale: float, kernels: Kernels, **options: bool) -> Selected:
    """What `kernels` give."""
    return select_and_update(
        *(batch.outputs_a_BN, batch.outputs_b_BN, batch.choices_B, weights_N),
        scale=scale,
        vote_weights_B=batch.vote_weights_B,
        kernels=kernels,
        **options,
    )


def check(batch: PreferenceBatch, kernels: Kernels, *, scale: float = 0.7, seed: int = 5) -> None:
    """In float32, selection and weights are those of the definition, up to its rounding."""
    weights_N = normal(batch.outputs_a_BN.shape[1], seed=seed)
    found, expected = run(batch, weights_N, scale, kernels), exact(batch, weights_N, scale)
    torch.testing.assert_close(found.selected_BN.double(), expected.selected_BN)
    torch.testing.assert_close(found.weights_N.double(), expected.weights_N, atol=1e-5, rtol=1e-5)


def check_weights_that_lie_apart(kernels: Kernels) -> None:
    """A column of a table is updated in place, and no other."""
    batch, table = batch_of(9, 17), torch.zeros(17, 3)
    update_in_place(batch, table[:, 1], scale=0.5, kernels=kernels)
    assert torch.equal(table[:, 1], run(batch, torch.zeros(17), 0.5, kernels).weights_N)
    assert not table[:, [0, 2]].any()


def check_copies_of_what_was_selected(kernels: Kernels, dtype: torch.dtype, num_pairs: int) -> None:
    """Denormals, -0, infinity and large numbers keep their bits in either output, and NaN in the other is not seen."""
    a_BN = torch.tensor([1e-40, -0.0, float("inf"), 3e38] * 9).to(dtype).repeat(num_pairs, 1)
    b_BN = torch.full_like(a_BN, torch.nan)
    view = torch.int16 if dtype == torch.bfloat16 else torch.int32
    for batch in (
        PreferenceBatch(a_BN, b_BN, torch.ones(num_pairs)),
        PreferenceBatch(b_BN, a_BN, torch.zeros(num_pairs)),
    ):
        found = run(batch, torch.zeros(36), 0.0, kernels)
        assert torch.equal(found.selected_BN.view(view), a_BN.view(view))
        assert found.weights_N[:2].tolist() == [0.0, 0.0]
