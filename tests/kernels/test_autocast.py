"""Kernels under autocast: values and gradients are what they are without it, whatever runs.

The output layer, which does a linear map's work, follows autocast instead: tests/kernels/logprob/test_head.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch

from drawn import normal
from tunesmith.engine.kernels.attention.api import attend_packed
from tunesmith.engine.kernels.attention.records import AttentionSettings, Rope
from tunesmith.engine.kernels.gated.api import gated, softcap
from tunesmith.engine.kernels.logprob.api import chosen_logp_entropy
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.kernels.preference.api import select_and_update
from tunesmith.engine.kernels.rms_norm.api import add_rms_norm

Work = Callable[[Sequence[torch.Tensor], Kernels], Sequence[torch.Tensor]]

IDS_N = torch.tensor([3, 0, 69, 12, 12, 41])
CHOICES_B = torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0, 0.0])
SETTINGS = AttentionSettings(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
ANGLE_PF = torch.outer(torch.arange(6.0), torch.tensor([1.0, 0.1, 0.01]))
ROPE = Rope(ANGLE_PF.cos(), ANGLE_PF.sin())


def _parts(record: Any) -> list[torch.Tensor]:
    return [getattr(record, field.name) for field in fields(record)]


WORKS: dict[str, tuple[Work, list[tuple[int, ...]]]] = {
    "logprob": (lambda x, kernels: chosen_logp_entropy(x[0], IDS_N, 0.7, kernels=kernels), [(6, 70)]),
    "rms_norm": (
        lambda x, kernels: _parts(add_rms_norm(*x, 1e-6, offset=1.0, kernels=kernels)),
        [(6, 48), (6, 48), (48,)],
    ),
    "gated": (lambda x, kernels: [gated(*x, "silu", kernels=kernels)], [(6, 48), (6, 48)]),
    "softcap": (lambda x, kernels: [softcap(x[0], 3.0, kernels=kernels)], [(6, 48)]),
    "preference": (
        lambda x, kernels: _parts(select_and_update(x[0], x[1], CHOICES_B, x[2], scale=0.1, kernels=kernels)),
        [(6, 48), (6, 48), (48,)],
    ),
    "attention": (
        lambda x, kernels: [attend_packed(*x, ROPE, (2, 4), SETTINGS, kernels=kernels)],
        [(6, 64), (6, 32), (6, 32)],
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("op", WORKS)
@pytest.mark.parametrize("choice", ["native", "torch"])
def test_values_and_gradients_are_those_without_it(choice: str, op: str, dtype: torch.dtype, native: Kernels) -> None:
    if choice == "native" and dtype == torch.float64:
        pytest.skip("float64 runs in torch")
    work, shapes = WORKS[op]
    leaves = [normal(*shape, dtype=dtype, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
    kernels = native if choice == "native" else Kernels("torch")

    def all_of_it() -> list[torch.Tensor]:
        found = list(work(leaves, kernels))
        return [*found, *torch.autograd.grad(found, leaves, [torch.sin(one) for one in found])]

    expected = all_of_it()
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, all_of_it(), expected))
