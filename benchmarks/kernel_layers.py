"""Cases of `benchmarks.kernels` from a model's layers: norms, gated activations, attention of a decoding step.

Shapes: R rows, H hidden, I intermediate size, C tokens of a context, N blocks, K key/value heads, D head width.
"""

from dataclasses import replace

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import liger
from benchmarks.kernel_case import Case, Setting, error_of
from tunesmith.kernels.attention import torch_impl as attention_torch
from tunesmith.kernels.attention.api import attend
from tunesmith.kernels.attention.records import BLOCK_TOKENS, AttentionSettings, Places, Rope, SharedPrefixes
from tunesmith.kernels.gated import torch_impl as gated_torch
from tunesmith.kernels.gated.api import gated
from tunesmith.kernels.native import Kernels
from tunesmith.kernels.rms_norm import torch_impl as norm_torch
from tunesmith.kernels.rms_norm.api import add_rms_norm

_EPSILON = 1e-6
_CHECKED_ROWS = 256
_FILLED_TOKENS = 2048
_WIDTH = 64
_ONE_ULP = 2**-7
"""Of a bfloat16 number near the top of its range, relative to it."""


def rms_norm_case(setting: Setting, num_rows: int | None = None, *, with_gradients: bool = False) -> Case:
    """The residual stream of 2,240 tokens added up and normed, against torch's operations."""
    num_rows, width = num_rows or setting.sized(2240, 8, 65536), setting.sized(576, 32, 896)
    x_RH, residual_RH, d_RH = (setting.normal(num_rows, width, dtype=torch.bfloat16, stream=i) for i in range(3))
    weight_H = (1 + 0.1 * setting.normal(width, stream=3)).bfloat16()
    leaves = [tensor.requires_grad_(with_gradients) for tensor in (x_RH, residual_RH, weight_H)]
    kernels = Kernels(setting.choice)

    def finished(of: list[torch.Tensor], normed: norm_torch.Normed) -> list[torch.Tensor]:
        out = [normed.normed_RH, normed.sum_RH]
        grads = [d_RH[: len(of[0])].to(of[0].dtype)] * 2
        return [*out, *(torch.autograd.grad(out, of, grads) if with_gradients else ())]

    def ours(of: list[torch.Tensor] = leaves) -> list[torch.Tensor]:
        return finished(of, add_rms_norm(of[0], of[1], of[2], _EPSILON, kernels=kernels))

    def plain(of: list[torch.Tensor] = leaves) -> list[torch.Tensor]:
        return finished(of, norm_torch.add_rms_norm(of[0], of[1], of[2], _EPSILON))

    def error() -> float:
        some = [x_RH[:_CHECKED_ROWS], residual_RH[:_CHECKED_ROWS], weight_H]
        found, exact = (
            [tensor.detach().to(dtype).requires_grad_(with_gradients) for tensor in some]
            for dtype in (torch.bfloat16, torch.float64)
        )
        return error_of(zip(ours(found), plain(exact), strict=True))

    passes = 8 if with_gradients else 4  # x, residual, normed, sum; sum, both their gradients, and x's
    return Case(
        ours=ours,
        plain=plain,
        max_error=error,
        tolerance=2 * _ONE_ULP,
        num_bytes=passes * 2 * num_rows * width,
        device=setting.device,
        size=f"{num_rows} x {width} bfloat16{', with gradients' if with_gradients else ''}",
        against="addition, float32, mean of squares, products",
        picked=kernels.picked("rms_norm", x_RH),
        liger=None if with_gradients else liger.add_rms_norm(x_RH, residual_RH, weight_H, _EPSILON),
    )


def gated_case(setting: Setting, num_rows: int | None = None, *, with_gradients: bool = False) -> Case:
    """silu(gate) x up of 2,240 tokens, against torch's operations as transformers has them."""
    num_rows, width = num_rows or setting.sized(2240, 8, 32768), setting.sized(1536, 64, 4864)
    inputs = [setting.normal(num_rows, width, dtype=torch.bfloat16, stream=i) for i in range(3)]
    leaves, d_RI = [tensor.requires_grad_(with_gradients) for tensor in inputs[:2]], inputs[2]
    kernels = Kernels(setting.choice)

    def finished(of: list[torch.Tensor], out_RI: torch.Tensor) -> list[torch.Tensor]:
        grad_RI = d_RI[: len(out_RI)].to(out_RI.dtype)
        return [out_RI, *(torch.autograd.grad(out_RI, of, grad_RI) if with_gradients else ())]

    def ours(of: list[torch.Tensor] = leaves) -> list[torch.Tensor]:
        return finished(of, gated(of[0], of[1], "silu", kernels=kernels))

    def plain() -> list[torch.Tensor]:
        return finished(leaves, torch.nn.functional.silu(leaves[0]) * leaves[1])

    def error() -> float:
        found, exact = (
            [tensor[:_CHECKED_ROWS].detach().to(dtype).requires_grad_(with_gradients) for tensor in leaves]
            for dtype in (torch.bfloat16, torch.float64)
        )
        return error_of(zip(ours(found), finished(exact, gated_torch.gated(exact[0], exact[1], "silu")), strict=True))

    return Case(
        ours=ours,
        plain=plain,
        max_error=error,
        tolerance=_ONE_ULP,
        num_bytes=(8 if with_gradients else 3) * 2 * num_rows * width,
        device=setting.device,
        size=f"{num_rows} x {width} bfloat16, silu{', with gradients' if with_gradients else ''}",
        against="silu and a product",
        picked=kernels.picked("gated", inputs[0]),
        liger=None if with_gradients else liger.gated(leaves[0], leaves[1]),
    )


def attention_case(setting: Setting, context: int | None = None, num_rows: int | None = None) -> Case:
    """One layer of a decoding step, from blocks that lie anywhere, against sdpa over a cache in one piece.

    64 sequences of 512 tokens with the heads of SmolLM2-135M; on a GPU 256 of 1,024 with those of Qwen2.5-0.5B, if not
    told otherwise. The bytes are the keys and values of all tokens, the queries and the output.
    """
    context = context or setting.sized(512, 40, 1024)
    num_rows = num_rows or setting.sized(64, 2, 256)
    heads, kv_heads = setting.sized(9, 4, 14), setting.sized(3, 2, 2)
    settings = AttentionSettings(heads, kv_heads, _WIDTH, _WIDTH**-0.5)
    widths = [settings.query_width, settings.key_width, settings.key_width]
    q_RX, k_RY, v_RY = setting.normal(num_rows, sum(widths), dtype=torch.bfloat16).split(widths, dim=1)
    per_row = -(-context // BLOCK_TOKENS)
    tables_RN = setting.normal(num_rows * per_row, stream=1).argsort().int().view(num_rows, per_row)
    row_R = torch.arange(num_rows, dtype=torch.int32, device=setting.device)
    places = Places(torch.full_like(row_R, context - 1), row_R, tables_RN)
    cache_2NW = setting.normal(2, num_rows * per_row, BLOCK_TOKENS * settings.key_width, dtype=torch.bfloat16, stream=2)
    dense = [setting.normal(num_rows, kv_heads, context, _WIDTH, dtype=torch.bfloat16, stream=3 + i) for i in range(2)]
    rope, kernels = _rope(setting, context), Kernels(setting.choice)

    def plain() -> torch.Tensor:
        q_RH1D = q_RX.unflatten(1, (heads, 1, _WIDTH))
        return scaled_dot_product_attention(q_RH1D, dense[0], dense[1], enable_gqa=True)

    keys = 2 * 2 * num_rows * context * settings.key_width
    return Case(
        ours=lambda: attend(q_RX, k_RY, v_RY, rope, places, cache_2NW, settings, kernels=kernels),
        plain=plain,
        max_error=lambda: _attention_error(setting, settings, context, kernels),
        tolerance=4 * _ONE_ULP,  # keys are rounded when they are written
        num_bytes=keys + 2 * 2 * num_rows * settings.query_width,
        device=setting.device,
        size=f"{num_rows} sequences of {context} tokens, {heads} heads over {kv_heads}, bfloat16",
        against="sdpa over a cache in one piece, without rotation and writing",
        picked=kernels.picked("attention", q_RX),
        num_flops=4 * num_rows * context * settings.query_width,
    )


def shared_prefix_case(setting: Setting) -> Case:
    """The same for groups of 8 sequences that begin with one prompt, whose blocks they share, against reading it for
    each of them. The bytes are those of a prompt that is read once for its group.
    """
    group, prompt, own = setting.sized(8, 2), setting.sized(512, 32, 1024), setting.sized(128, 16, 256)
    num_groups = setting.sized(8, 2, 32)
    settings = AttentionSettings(setting.sized(9, 4, 14), setting.sized(3, 2, 2), _WIDTH, _WIDTH**-0.5)
    num_rows, widths = num_groups * group, [settings.query_width, settings.key_width, settings.key_width]
    q_RX, k_RY, v_RY = setting.normal(num_rows, sum(widths), dtype=torch.bfloat16).split(widths, dim=1)
    of_prompts, of_rows = num_groups * prompt // BLOCK_TOKENS, num_rows * own // BLOCK_TOKENS
    blocks = torch.arange(of_prompts + of_rows, dtype=torch.int32, device=setting.device)
    shared_RN = blocks[:of_prompts].view(num_groups, -1).repeat_interleave(group, 0)
    tables_RN = torch.cat((shared_RN, blocks[of_prompts:].view(num_rows, -1)), 1)
    row_R = torch.arange(num_rows, dtype=torch.int32, device=setting.device)
    places = Places(torch.full_like(row_R, prompt + own - 1), row_R, tables_RN)
    prefixes = SharedPrefixes(
        row_R.view(num_groups, group), torch.full_like(row_R[:num_groups], prompt), torch.full_like(row_R, prompt)
    )
    cache_2NW = setting.normal(2, len(blocks), BLOCK_TOKENS * settings.key_width, dtype=torch.bfloat16, stream=2)
    rope, kernels = _rope(setting, prompt + own), Kernels(setting.choice)

    def attended(prefixes: SharedPrefixes | None) -> torch.Tensor:
        return attend(q_RX, k_RY, v_RY, rope, places, cache_2NW, settings, prefixes=prefixes, kernels=kernels)

    return Case(
        ours=lambda: attended(prefixes),
        plain=lambda: attended(None),
        max_error=lambda: error_of([(attended(prefixes), attended(None))]),
        tolerance=4 * _ONE_ULP,
        num_bytes=2 * 2 * len(blocks) * BLOCK_TOKENS * settings.key_width + 2 * 2 * num_rows * settings.query_width,
        device=setting.device,
        size=f"{num_groups} groups of {group}, prompts of {prompt} tokens and {own} of each sequence, bfloat16",
        against="our kernel without shared prefixes",
        picked=kernels.picked("attention", q_RX),
        num_flops=4 * num_rows * (prompt + own) * settings.query_width,
        compiles=False,
    )


def _attention_error(setting: Setting, settings: AttentionSettings, context: int, kernels: Kernels) -> float:
    """The last token of one sequence that was written piece by piece, against float64."""
    widths = [settings.query_width, settings.key_width, settings.key_width]
    x_CX = setting.normal(context, sum(widths), dtype=torch.bfloat16, stream=7)
    num_blocks, rope = -(-context // BLOCK_TOKENS), _rope(setting, context)
    cache_2NW = x_CX.new_zeros(2, num_blocks, BLOCK_TOKENS * settings.key_width)
    position_C = torch.arange(context, dtype=torch.int32, device=setting.device)
    table_1N = torch.arange(num_blocks, dtype=torch.int32, device=setting.device).flip(0)[None]

    def attended(tokens: slice, settings: AttentionSettings) -> torch.Tensor:
        places = Places(position_C[tokens], torch.zeros_like(position_C[tokens]), table_1N)
        q_TX, k_TY, v_TY = x_CX[tokens].split(widths, dim=1)
        return attend(q_TX, k_TY, v_TY, rope, places, cache_2NW, settings, kernels=kernels)

    for start in range(0, context, _FILLED_TOKENS):  # a window of one token: what is wanted is what is written
        attended(slice(start, min(start + _FILLED_TOKENS, context)), replace(settings, window=1))
    last = slice(context - 1, context)
    exact_CX, exact_rope = x_CX.double().cpu(), Rope(rope.cos_PF.double().cpu(), rope.sin_PF.double().cpu())
    q_CX, k_CY, v_CY = exact_CX.split(widths, dim=1)
    k_CKD = attention_torch.rotated(k_CY.unflatten(1, (-1, _WIDTH)), position_C.cpu().long(), exact_rope)
    exact_2NW = exact_CX.new_zeros(cache_2NW.shape)
    tokens_2CY = exact_2NW.view(2, num_blocks * BLOCK_TOKENS, settings.key_width)
    tokens_2CY[0, :context], tokens_2CY[1, :context] = k_CKD.flatten(1), v_CY
    whole = Places(
        position_C[last].cpu(), torch.zeros(1, dtype=torch.int32), torch.arange(num_blocks, dtype=torch.int32)[None]
    )
    exact = attention_torch.attend(q_CX[last], k_CY[last], v_CY[last], exact_rope, whole, exact_2NW, settings)
    return error_of([(attended(last, settings).cpu(), exact)])


def _rope(setting: Setting, context: int) -> Rope:
    frequency_F = 10000 ** (-torch.arange(_WIDTH // 2, device=setting.device) / (_WIDTH // 2))
    angle_PF = torch.arange(context, device=setting.device)[:, None] * frequency_F
    return Rope(angle_PF.cos(), angle_PF.sin())
