"""The case of an experiment: output layer and draw in one kernel, beside a product and the sampler.

Shapes: B rows, H hidden, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import linear

from benchmarks.kernel_case import Case, Setting, error_of
from benchmarks.kernel_logits import on_device, row_keys
from tunesmith.kernels.native import Kernels, has_triton
from tunesmith.kernels.sample import ops
from tunesmith.kernels.sample.api import sample
from tunesmith.kernels.sample.records import NoiseKeys, SampleSettings

_CHECKED_ROWS = 64

Draw = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""Tokens and their log-probs."""


def head_sample_case(setting: Setting, num_rows: int | None = None) -> Case:
    """Tokens of 32 hidden states, or of `num_rows`, by a product and the sampler, against softmax and multinomial.

    Where Triton runs, `one kernel` is the experiment: it is to be kept if it takes less time than ours.
    """
    num_rows = num_rows or setting.sized(32, 4, 256)
    width, num_tokens = setting.sized(576, 32, 896), setting.sized(49152, 300, 151936)
    hidden_BH = setting.normal(num_rows, width, dtype=torch.bfloat16)
    weight_VH = (0.1 * setting.normal(num_tokens, width, stream=1)).bfloat16()
    kernels = Kernels(setting.choice)
    picked = kernels.picked("sample", hidden_BH)
    settings, keys = SampleSettings.same(num_rows), row_keys(num_rows)

    def by_api() -> tuple[torch.Tensor, torch.Tensor]:
        drawn = sample(linear(hidden_BH, weight_VH), settings, keys, kernels=kernels)
        return drawn.token_B, drawn.raw_logp_B

    def plain() -> torch.Tensor:
        return torch.multinomial(linear(hidden_BH, weight_VH).float().softmax(-1), 1)

    ways: dict[str, Draw] = {"ours": by_api}
    if picked == "triton":
        ways = _on_device(hidden_BH, weight_VH, settings, keys)

    def error() -> float:
        exact_BV = (hidden_BH[:_CHECKED_ROWS].double() @ weight_VH.double().t()).log_softmax(-1)
        found = [tuple(tensor[:_CHECKED_ROWS] for tensor in way()) for way in ways.values()]
        return error_of(
            (logp_B, exact_BV.gather(1, token_B[:, None].to(exact_BV.device))[:, 0]) for token_B, logp_B in found
        )

    return Case(
        ours=ways["ours"],
        plain=plain,
        max_error=error,
        tolerance=0.05,  # logits are rounded to bfloat16
        num_bytes=2 * (num_rows + num_tokens) * width,
        device=setting.device,
        size=f"{num_rows} x {num_tokens} from {width} numbers, bfloat16",
        against="a product, softmax and multinomial",
        picked=picked,
        num_flops=2 * num_rows * width * num_tokens,
        variants={name: way for name, way in ways.items() if name != "ours"},
    )


def _on_device(
    hidden_BH: torch.Tensor, weight_VH: torch.Tensor, settings: SampleSettings, keys: NoiseKeys
) -> dict[str, Draw]:
    """Both ways as an engine would call them: nothing is copied, and nothing waits for the device."""
    settings_B4, integers_B6 = on_device(settings, keys, hidden_BH.device)

    def apart() -> tuple[torch.Tensor, torch.Tensor]:
        token_B, scores_B2, _ = ops.sample(linear(hidden_BH, weight_VH), settings_B4, integers_B6, None, None, False)
        return token_B, scores_B2[:, 1]

    def at_once() -> tuple[torch.Tensor, torch.Tensor]:
        from tunesmith.kernels.head_sample.triton_impl import draw

        return draw(hidden_BH, weight_VH, settings_B4, integers_B6)[:2]

    return {"ours": apart, "one kernel": at_once} if has_triton("head_sample") else {"ours": apart}
