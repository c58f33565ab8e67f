"""Cases of `benchmarks.kernels` for selection by votes and for masked softmax.

Shapes: B pairs or sequences, N numbers of an output, H heads, Q queries, K keys.
"""

import itertools
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.kernel_case import Case, Setting, error_of
from tunesmith.kernels.masked_softmax import torch_impl as softmax_torch
from tunesmith.kernels.masked_softmax.api import masked_softmax
from tunesmith.kernels.masked_softmax.records import KeyMask
from tunesmith.kernels.native import Kernels
from tunesmith.kernels.preference import torch_impl as preference_torch
from tunesmith.kernels.preference.api import update_in_place
from tunesmith.kernels.preference.records import PreferenceBatch
from tunesmith.kernels.preference.tuning import iterative_tuning, process_user_preference

_CHECKED_PAIRS, _CHECKED_SEQUENCES = 1 << 17, 4
"""What is compared with the definition in float64, which takes four times the memory and more."""

_BLOCKS = (64, 128, 256, 512)
_TUNING_BATCHES = 10


def preference_case(
    setting: Setting, num_pairs: int | None = None, dtype: torch.dtype = torch.float32, *, all_ways: bool = False
) -> Case:
    """The selected of 65,536 pairs of 512 numbers, or of `num_pairs`, and the update, against the definition in torch.

    The bytes are those of the selected rows, read and written; the output is memory in use, as a copy's target is. With
    `all_ways` its variants are `process_user_preference` and, for ten batches, `iterative_tuning`, as `_ways` has them.
    """
    num_pairs, width, scale = num_pairs or setting.sized(65536, 64), setting.sized(512, 33, 512), 1e-3
    outputs = setting.normal(num_pairs, width, dtype=dtype), setting.normal(num_pairs, width, dtype=dtype, stream=1)
    batch = PreferenceBatch(*outputs, setting.whole(2, num_pairs).float())
    weights_N, out_BN, kernels = setting.normal(width, stream=2), torch.empty_like(outputs[0]), Kernels(setting.choice)

    def error() -> float:
        found_N, rows = weights_N.clone(), slice(0, _CHECKED_PAIRS)
        update_in_place(_part(batch, rows), found_N, scale=scale, out_BN=out_BN[rows], kernels=kernels)
        exact = preference_torch.select_and_update(
            outputs[0][rows].double(), outputs[1][rows].double(), batch.choices_B[rows], weights_N.double(), scale
        )
        return error_of([(out_BN[rows], exact.selected_BN), (found_N, exact.weights_N)])

    updated_N = weights_N.clone()
    picked = kernels.picked("preference", outputs[0])
    return Case(
        ours=lambda: update_in_place(batch, updated_N, scale=scale, out_BN=out_BN, kernels=kernels),
        plain=lambda: preference_torch.select_and_update(*outputs, batch.choices_B, weights_N, scale),
        max_error=error,
        tolerance=1e-5,
        num_bytes=2 * outputs[0].element_size() * num_pairs * width,
        device=setting.device,
        size=f"{num_pairs} pairs of {width} numbers, {str(dtype).removeprefix('torch.')}",
        against="where, and a product and a sum",
        picked=picked,
        variants=_ways(batch, updated_N, out_BN, kernels) if all_ways else {},
    )


def _ways(
    batch: PreferenceBatch, weights_N: torch.Tensor, out_BN: torch.Tensor, kernels: Kernels
) -> dict[str, Callable[[], object]]:
    """Both functions that tune by votes, at every size of a block, and with atomic sums where there are any."""
    size = max(1, len(out_BN) // _TUNING_BATCHES)
    parts = [_part(batch, slice(start, start + size)) for start in range(0, len(out_BN), size)]
    sums = (True, False) if kernels.picked("preference", out_BN) == "triton" else (True,)
    ways: dict[str, Callable[[], object]] = {}
    for block, deterministic in itertools.product((None, *_BLOCKS), sums):
        how = {"learning_rate": 1e-6, "deterministic": deterministic, "block": block, "kernels": kernels}
        label = f"{'' if block is None else f', block {block}'}{'' if deterministic else ', atomic'}"
        ways[f"process{label}"] = partial(process_user_preference, batch, weights_N, out_BN=out_BN, **how)
        ways[f"tuning{label}"] = partial(iterative_tuning, parts, weights_N, **how)
    return ways


def _part(batch: PreferenceBatch, rows: slice) -> PreferenceBatch:
    return PreferenceBatch(batch.outputs_a_BN[rows], batch.outputs_b_BN[rows], batch.choices_B[rows])


def masked_softmax_case(setting: Setting) -> Case:
    """Causal softmax of the scores of 4 sequences, 9 heads and 512 tokens, against a mask that is added first."""
    width = setting.sized(512, 24, 2048)
    shape, scale = (setting.sized(4, 2, 8), setting.sized(9, 2, 14), width, width), 0.125
    scores_BHQK = setting.normal(*shape, dtype=torch.bfloat16)
    mask, kernels = KeyMask(), Kernels(setting.choice)
    seen_BHQK = softmax_torch.visible(scores_BHQK.shape, mask, setting.device)
    added_BHQK = torch.zeros(seen_BHQK.shape, device=setting.device).masked_fill(~seen_BHQK, -torch.inf).bfloat16()

    def error() -> float:
        part_BHQK = scores_BHQK[:_CHECKED_SEQUENCES]
        found_BHQK = masked_softmax(part_BHQK, scale=scale, mask=mask, kernels=kernels)
        return error_of([(found_BHQK, softmax_torch.masked_softmax(part_BHQK.double(), scale, mask))])

    def ours() -> torch.Tensor:
        return masked_softmax(scores_BHQK, scale=scale, mask=mask, kernels=kernels)

    def plain() -> torch.Tensor:
        return (scores_BHQK * scale + added_BHQK).softmax(-1, dtype=torch.float32).bfloat16()

    return Case(
        ours=ours,
        plain=plain,
        max_error=error,
        tolerance=2**-8,
        num_bytes=2 * scores_BHQK.numel() * 3 // 2,  # of the scores half is read, of the result all is written
        device=setting.device,
        size=f"{' x '.join(map(str, shape))} bfloat16, causal",
        against="scale, add a mask, softmax",
        picked=kernels.picked("masked_softmax", scores_BHQK),
    )
