"""Cases of `tunesmith bench kernels` for selection by votes and for masked softmax.

Shapes: B pairs or sequences, N numbers of an output, H heads, Q queries, K keys.
"""

import torch

from tunesmith.kernels.masked_softmax import reference as softmax_reference
from tunesmith.kernels.masked_softmax.api import masked_softmax
from tunesmith.kernels.masked_softmax.records import KeyMask
from tunesmith.kernels.native import Kernels
from tunesmith.kernels.preference import reference as preference_reference
from tunesmith.kernels.preference.api import update_in_place
from tunesmith.kernels.preference.records import PreferenceBatch
from tunesmith.workflows.bench_kernel_case import Case, Setting, error_of


def preference_case(setting: Setting) -> Case:
    """The selected of 65,536 pairs of 512 numbers and the update, against the definition in torch.

    The bytes are those of the selected rows, read and written; the output is memory in use, as a copy's target is.
    """
    num_pairs, width, scale = setting.either(65536, 64), setting.either(512, 33), 1e-3
    outputs = setting.normal(num_pairs, width), setting.normal(num_pairs, width, stream=1)
    batch = PreferenceBatch(*outputs, setting.whole(2, num_pairs).float())
    weights_N, out_BN, kernels = setting.normal(width, stream=2), torch.empty_like(outputs[0]), Kernels("auto")

    def error() -> float:
        found_N = weights_N.clone()
        update_in_place(batch, found_N, scale=scale, out_BN=out_BN, kernels=kernels)
        exact = preference_reference.select_and_update(
            outputs[0].double(), outputs[1].double(), batch.choices_B, weights_N.double(), scale
        )
        return error_of([(out_BN, exact.selected_BN), (found_N, exact.weights_N)])

    updated_N = weights_N.clone()
    return Case(
        ours=lambda: update_in_place(batch, updated_N, scale=scale, out_BN=out_BN, kernels=kernels),
        plain=lambda: preference_reference.select_and_update(*outputs, batch.choices_B, weights_N, scale),
        max_error=error,
        tolerance=1e-5,
        num_bytes=2 * 4 * num_pairs * width,
        device=setting.device,
        size=f"{num_pairs} pairs of {width} numbers, float32",
        against="where, and a product and a sum",
        picked=kernels.picked("preference", outputs[0]),
    )


def masked_softmax_case(setting: Setting) -> Case:
    """Causal softmax of the scores of 4 sequences, 9 heads and 512 tokens, against a mask that is added first."""
    shape, scale = (setting.either(4, 2), setting.either(9, 2), *(2 * [setting.either(512, 24)])), 0.125
    scores_BHQK = setting.normal(*shape, dtype=torch.bfloat16)
    mask, kernels = KeyMask(), Kernels("auto")
    seen_BHQK = softmax_reference.visible(scores_BHQK.shape, mask, setting.device)
    added_BHQK = torch.zeros(seen_BHQK.shape, device=setting.device).masked_fill(~seen_BHQK, -torch.inf).bfloat16()

    def ours() -> torch.Tensor:
        return masked_softmax(scores_BHQK, scale=scale, mask=mask, kernels=kernels)

    def plain() -> torch.Tensor:
        return (scores_BHQK * scale + added_BHQK).softmax(-1, dtype=torch.float32).bfloat16()

    return Case(
        ours=ours,
        plain=plain,
        max_error=lambda: error_of([(ours(), softmax_reference.masked_softmax(scores_BHQK.double(), scale, mask))]),
        tolerance=2**-8,
        num_bytes=2 * scores_BHQK.numel() * 3 // 2,  # of the scores half is read, of the result all is written
        device=setting.device,
        size=f"{' x '.join(map(str, shape))} bfloat16, causal",
        against="scale, add a mask, softmax",
        picked=kernels.picked("masked_softmax", scores_BHQK),
    )
