"""Cases of `benchmarks.kernels` over a vocabulary: log-probs from hidden states and from logits, and sampling.

Shapes: N and B rows, H hidden, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import linear

from benchmarks import liger
from benchmarks.kernel_case import Case, Setting, error_of
from tunesmith.kernels.logprob import torch_impl as logprob_torch
from tunesmith.kernels.logprob.api import chosen_logp_entropy
from tunesmith.kernels.logprob.head import OutputLayer, head_logp_entropy
from tunesmith.kernels.native import Kernels
from tunesmith.kernels.sample import ops
from tunesmith.kernels.sample import torch_impl as sample_torch
from tunesmith.kernels.sample.api import sample
from tunesmith.kernels.sample.records import NoiseKeys, SampleSettings

_TOP_P = 0.9
_CHECKED_ROWS = 64
"""Rows that are compared with the definition in float64, which takes long."""

_MOST_DIFFERENT = 32
"""One row in so many may draw another token than the definition in float64, where there are many and long ones."""


def logprob_case(setting: Setting) -> Case:
    """Log-probs and entropies of 2,048 tokens of 49,152 from hidden states, against log_softmax and gather."""
    return _from_hidden(setting, with_gradients=False)


def logprob_gradient_case(setting: Setting) -> Case:
    """The same with the gradients of hidden states and weight."""
    return _from_hidden(setting, with_gradients=True)


def head_case(setting: Setting, width: int, num_tokens: int, *, with_gradients: bool) -> Case:
    """The same for another output layer: `num_tokens` of `width` numbers."""
    return _from_hidden(setting, with_gradients=with_gradients, width=width, num_tokens=num_tokens)


def _from_hidden(
    setting: Setting, *, with_gradients: bool, width: int | None = None, num_tokens: int | None = None
) -> Case:
    num_rows = setting.sized(2048, 32, 8192)
    width, num_tokens = width or setting.sized(576, 64, 896), num_tokens or setting.sized(49152, 500, 151936)
    hidden_NH = setting.normal(num_rows, width, dtype=torch.bfloat16).requires_grad_(with_gradients)
    weight_VH = (0.1 * setting.normal(num_tokens, width, stream=1)).bfloat16().requires_grad_(with_gradients)
    ids_N, d_logp_N = setting.whole(num_tokens, num_rows), setting.normal(num_rows, stream=2)
    kernels = Kernels(setting.choice)

    def finished(logp_N: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(logp_N, (hidden_NH, weight_VH), d_logp_N) if with_gradients else (logp_N,)

    def ours() -> tuple[torch.Tensor, ...]:
        return finished(head_logp_entropy(hidden_NH, OutputLayer(weight_VH), ids_N, kernels=kernels)[0])

    def plain() -> tuple[torch.Tensor, ...]:
        logp_NV = linear(hidden_NH, weight_VH).float().log_softmax(-1)
        return finished(logp_NV.gather(1, ids_N[:, None])[:, 0])

    def error() -> float:
        hidden_MH = hidden_NH.detach()[:_CHECKED_ROWS]
        layer = OutputLayer(weight_VH.detach())
        found = head_logp_entropy(hidden_MH, layer, ids_N[:_CHECKED_ROWS], kernels=kernels)
        logits_MV = linear(hidden_MH, layer.weight_VH).double()
        exact = logprob_torch.chosen_logp_entropy(logits_MV, ids_N[:_CHECKED_ROWS])
        pairs = list(zip(found, exact, strict=True))
        if with_gradients:  # both in bfloat16: some units in its last place
            pairs += [(a, b.float()) for a, b in zip(ours(), plain(), strict=True)]
        return error_of(pairs)

    weights = 2 * (num_rows + num_tokens) * width
    return Case(
        ours=ours,
        plain=plain,
        max_error=error,
        # On a GPU a product of other rows may round otherwise.
        tolerance=0.03 if with_gradients or setting.device.type == "cuda" else 1e-4,
        num_bytes=2 * weights if with_gradients else weights,
        device=setting.device,
        size=f"{num_rows} x {num_tokens} from {width} numbers, bfloat16{', with gradients' if with_gradients else ''}",
        against="log_softmax and gather",
        picked=kernels.picked("logprob", hidden_NH),
        measures_memory=True,
        num_flops=(6 if with_gradients else 2) * num_rows * width * num_tokens,
        liger=liger.head_gradients(hidden_NH, weight_VH, ids_N) if with_gradients else None,
    )


def logprob_logits_case(setting: Setting) -> Case:
    """Log-probs and entropies of 2,048 rows of logits that are there, against log_softmax and gather."""
    num_rows, num_tokens = setting.sized(2048, 32, 8192), setting.sized(49152, 500, 151936)
    logits_NV = _likely(setting, num_rows, num_tokens)
    ids_N, kernels = setting.whole(num_tokens, num_rows), Kernels(setting.choice)

    def error() -> float:
        rows = slice(0, _CHECKED_ROWS)
        found = chosen_logp_entropy(logits_NV[rows], ids_N[rows], 1.0, kernels=kernels)
        return error_of(
            zip(found, logprob_torch.chosen_logp_entropy(logits_NV[rows].double(), ids_N[rows]), strict=True)
        )

    return Case(
        ours=lambda: chosen_logp_entropy(logits_NV, ids_N, 1.0, kernels=kernels),
        plain=lambda: logits_NV.float().log_softmax(-1).gather(1, ids_N[:, None]),
        max_error=error,
        tolerance=1e-5,
        num_bytes=2 * logits_NV.numel(),
        device=setting.device,
        size=f"{num_rows} x {num_tokens} bfloat16",
        against="log_softmax and gather, without the entropy",
        picked=kernels.picked("logprob", logits_NV),
        measures_memory=True,
        liger=liger.cross_entropy(logits_NV, ids_N),
    )


def logprob_logits_gradient_case(setting: Setting) -> Case:
    """The same with the gradient of the logits: they are read twice, and the gradient is written."""
    num_rows, num_tokens = setting.sized(2048, 32, 8192), setting.sized(49152, 500, 151936)
    logits_NV = _likely(setting, num_rows, num_tokens).requires_grad_()
    ids_N, d_logp_N = setting.whole(num_tokens, num_rows), setting.normal(num_rows, stream=2)
    kernels = Kernels(setting.choice)

    def ours(rows: slice = slice(None)) -> tuple[torch.Tensor, ...]:
        leaf_MV = logits_NV[rows].detach().requires_grad_()
        logp_M, _ = chosen_logp_entropy(leaf_MV, ids_N[rows], 1.0, kernels=kernels)
        return torch.autograd.grad(logp_M, leaf_MV, d_logp_N[rows])

    def plain() -> tuple[torch.Tensor, ...]:
        logp_N = logits_NV.float().log_softmax(-1).gather(1, ids_N[:, None])[:, 0]
        return torch.autograd.grad(logp_N, logits_NV, d_logp_N)

    def error() -> float:
        rows = slice(0, _CHECKED_ROWS)
        leaf_MV = logits_NV[rows].detach().double().requires_grad_()
        logp_M, _ = logprob_torch.chosen_logp_entropy(leaf_MV, ids_N[rows])
        return error_of(zip(ours(rows), torch.autograd.grad(logp_M, leaf_MV, d_logp_N[rows].double()), strict=True))

    return Case(
        ours=ours,
        plain=plain,
        max_error=error,
        tolerance=2**-7,
        num_bytes=3 * 2 * logits_NV.numel(),
        device=setting.device,
        size=f"{num_rows} x {num_tokens} bfloat16, with the gradient",
        against="log_softmax and gather, without the entropy, by autograd",
        picked=kernels.picked("logprob", logits_NV),
        measures_memory=True,
    )


def sampling_case(setting: Setting, top_p: float = _TOP_P) -> Case:
    """A token of each of 32 rows of logits within top-p 0.9, and its log-prob, against the way that sorts."""
    num_rows, num_tokens = setting.sized(32, 4, 256), setting.sized(49152, 500, 151936)
    logits_BV, kernels = _likely(setting, num_rows, num_tokens), Kernels(setting.choice)
    keys, settings = row_keys(num_rows), SampleSettings.same(num_rows, top_p=top_p)
    # A number within float32's rounding of a limit may fall on its other side; in few rows there is none.
    most_different = num_rows // _MOST_DIFFERENT if setting.large else 0

    def error() -> float:
        rows = min(num_rows, _CHECKED_ROWS)
        some = row_keys(rows), SampleSettings.same(rows, top_p=top_p)
        found = sample(logits_BV[:rows], some[1], some[0], kernels=kernels)
        exact = sample_torch.sample(logits_BV[:rows].cpu(), some[1], some[0], dtype=torch.float64)
        same_B = found.token_B.cpu() == exact.token_B
        if int((~same_B).sum()) > most_different:
            return float("inf")
        pairs = ((found.logp_B, exact.logp_B), (found.raw_logp_B, exact.raw_logp_B))
        return error_of((a.cpu()[same_B], b[same_B]) for a, b in pairs)

    picked = kernels.picked("sample", logits_BV)
    return Case(
        ours=lambda: sample(logits_BV, settings, keys, kernels=kernels),
        plain=lambda: _by_sorting(logits_BV, top_p) if top_p < 1 else _by_multinomial(logits_BV),
        max_error=error,
        tolerance=1e-5,
        num_bytes=2 * logits_BV.numel(),
        device=setting.device,
        size=f"{num_rows} x {num_tokens} bfloat16, top-p {top_p}",
        against="sort, cumsum, scatter and multinomial" if top_p < 1 else "log_softmax and multinomial",
        picked=picked,
        variants={"operator": _operator(logits_BV, settings, keys)} if picked == "triton" else {},
    )


def row_keys(num_rows: int) -> NoiseKeys:
    """Another noise for each row."""
    row_B = torch.arange(num_rows)
    return NoiseKeys(torch.zeros_like(row_B), row_B, torch.zeros_like(row_B), torch.zeros_like(row_B))


def on_device(settings: SampleSettings, keys: NoiseKeys, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Settings and integers of `torch.ops.tunesmith.sample`, as an engine has them: on the device already."""
    numbers = (settings.temperature_B, settings.top_p_B, settings.min_p_B, settings.repetition_penalty_B)
    integers = (settings.top_k_B, keys.seed_B * 0, keys.seed_B, keys.prompt_B, keys.sample_B, keys.position_B)
    return torch.stack(numbers, -1).to(device), torch.stack(integers, -1).to(device)


def _operator(logits_BV: torch.Tensor, settings: SampleSettings, keys: NoiseKeys) -> Callable[[], object]:
    """The kernel as an engine calls it: nothing is copied, and nothing waits for it."""
    settings_B4, integers_B6 = on_device(settings, keys, logits_BV.device)
    filters = bool((settings.top_p_B < 1).any())
    return lambda: ops.sample(logits_BV, settings_B4, integers_B6, None, None, filters)


def _by_multinomial(logits_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logp_BV = logits_BV.float().log_softmax(-1)
    drawn_B1 = torch.multinomial(logp_BV.exp(), 1)
    return drawn_B1, logp_BV.gather(1, drawn_B1)


def _by_sorting(logits_BV: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-p as transformers has it, then a draw and the log-prob of what was drawn."""
    sorted_BV, token_BV = logits_BV.float().sort(descending=False)
    is_out_BV = sorted_BV.softmax(-1).cumsum(-1) <= 1 - top_p
    is_out_BV[:, -1] = False
    kept_BV = logits_BV.float().masked_fill(is_out_BV.scatter(1, token_BV, is_out_BV), -torch.inf)
    logp_BV = kept_BV.log_softmax(-1)
    drawn_B1 = torch.multinomial(logp_BV.exp(), 1)
    return drawn_B1, logp_BV.gather(1, drawn_B1)


def _likely(setting: Setting, num_rows: int, num_tokens: int) -> torch.Tensor:
    """Logits with the spread of a language model's: a few hundred likely tokens and a long tail."""
    logits_NV = (2.5 * setting.normal(num_rows, num_tokens)).bfloat16()
    likely_NK = setting.whole(num_tokens, num_rows, 200)
    return logits_NV.scatter_add_(1, likely_NK, (8 + 2 * setting.normal(num_rows, 200, stream=1)).bfloat16())
