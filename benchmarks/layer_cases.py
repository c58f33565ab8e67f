"""Cases of attention, norms, activations, softmax, advantages, policy loss, upload and optimizer (see `cases`).

Shapes: R rows, H hidden, I intermediate size, C tokens of a context, N blocks, K key/value heads, D head width,
B sequences, T tokens, Q queries, K keys.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from benchmarks.cases import ULP, Case, Setting, error_of, liger
from tunesmith.engine.batch.upload import Uploader
from tunesmith.engine.kernels.adamw import torch_impl as adamw_torch
from tunesmith.engine.kernels.adamw.api import adamw
from tunesmith.engine.kernels.adamw.torch_impl import AdamWSettings, FloatMoments, ParameterUpdate
from tunesmith.engine.kernels.attention import torch_impl as attention_torch
from tunesmith.engine.kernels.attention.api import attend
from tunesmith.engine.kernels.attention.records import BLOCK_TOKENS, AttentionSettings, Places, Rope, SharedPrefixes
from tunesmith.engine.kernels.digest import torch_impl as digest_torch
from tunesmith.engine.kernels.digest.api import digests
from tunesmith.engine.kernels.gae import torch_impl as gae_torch
from tunesmith.engine.kernels.gae.api import gae
from tunesmith.engine.kernels.gated import torch_impl as gated_torch
from tunesmith.engine.kernels.gated.api import gated
from tunesmith.engine.kernels.masked_softmax import torch_impl as softmax_torch
from tunesmith.engine.kernels.masked_softmax.api import masked_softmax
from tunesmith.engine.kernels.masked_softmax.torch_impl import KeyMask
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.kernels.policy_loss.api import fused_policy_loss
from tunesmith.engine.kernels.policy_loss.records import PolicyTerms, PolicyTokens
from tunesmith.engine.kernels.rms_norm import torch_impl as norm_torch
from tunesmith.engine.kernels.rms_norm.api import add_rms_norm
from tunesmith.learn.algorithms.kl import penalty
from tunesmith.learn.algorithms.policy_loss import surrogate

_EPSILON = 1e-6
_CHECKED_ROWS, _CHECKED_SEQUENCES = 256, 4
_FILLED_TOKENS = 2048
_WIDTH = 64

Tensors = Sequence[torch.Tensor]
Layer = Callable[..., Tensors]


def rms_norm_case(setting: Setting, num_rows: int | None = None, *, with_gradients: bool = False) -> Case:
    """The residual stream of 2,240 tokens added up and normed, against torch's operations."""
    num_rows, width = num_rows or setting.sized(2240, 8, 65536), setting.sized(576, 32, 896)
    x_RH, residual_RH, d_RH = (setting.normal(num_rows, width, dtype=torch.bfloat16, stream=i) for i in range(3))
    weight_H, kernels = (1 + 0.1 * setting.normal(width, stream=3)).bfloat16(), Kernels(setting.choice)

    def ours(x_RH: torch.Tensor, residual_RH: torch.Tensor, weight_H: torch.Tensor) -> Tensors:
        normed = add_rms_norm(x_RH, residual_RH, weight_H, _EPSILON, kernels=kernels)
        return normed.normed_RH, normed.sum_RH

    def plain(x_RH: torch.Tensor, residual_RH: torch.Tensor, weight_H: torch.Tensor) -> Tensors:
        normed = norm_torch.add_rms_norm(x_RH, residual_RH, weight_H, _EPSILON)
        return normed.normed_RH, normed.sum_RH

    case = _layer_case(setting, (ours, plain, plain), (x_RH, residual_RH, weight_H), d_RH, with_gradients)
    passes = 8 if with_gradients else 4  # x, residual, normed, sum; sum, both their gradients, and x's
    return replace(
        case,
        tolerance=2 * ULP,
        num_bytes=passes * 2 * num_rows * width,
        size=f"{num_rows} x {width} bfloat16{', with gradients' if with_gradients else ''}",
        against="addition, float32, mean of squares, products",
        picked=kernels.picked("rms_norm", x_RH),
        liger=None
        if with_gradients
        else liger(x_RH, lambda of: of.liger_rms_norm(x_RH + residual_RH, weight_H, _EPSILON)),
    )


def gated_case(setting: Setting, num_rows: int | None = None, *, with_gradients: bool = False) -> Case:
    """silu(gate) x up of 2,240 tokens, against torch's operations as transformers has them."""
    num_rows, width = num_rows or setting.sized(2240, 8, 32768), setting.sized(1536, 64, 4864)
    gate_RI, up_RI, d_RI = (setting.normal(num_rows, width, dtype=torch.bfloat16, stream=i) for i in range(3))
    kernels = Kernels(setting.choice)
    ways = (
        lambda gate_RI, up_RI: (gated(gate_RI, up_RI, "silu", kernels=kernels),),
        lambda gate_RI, up_RI: (silu(gate_RI) * up_RI,),
        lambda gate_RI, up_RI: (gated_torch.gated(gate_RI, up_RI, "silu"),),
    )
    return replace(
        _layer_case(setting, ways, (gate_RI, up_RI), d_RI, with_gradients),
        num_bytes=(8 if with_gradients else 3) * 2 * num_rows * width,
        size=f"{num_rows} x {width} bfloat16, silu{', with gradients' if with_gradients else ''}",
        against="silu and a product",
        picked=kernels.picked("gated", gate_RI),
        liger=None if with_gradients else liger(gate_RI, lambda of: of.liger_swiglu(gate_RI, up_RI)),
    )


def _layer_case(
    setting: Setting, ways: tuple[Layer, Layer, Layer], inputs: Tensors, d_RW: torch.Tensor, with_gradients: bool
) -> Case:
    """A case of `ways` (ours, the plain one, the definition), which take the tensors `inputs`; gradients if wanted."""
    leaves = [tensor.requires_grad_(with_gradients) for tensor in inputs]

    def finished(way: Layer, of: Tensors) -> list[torch.Tensor]:
        out = way(*of)
        grads = [d_RW[: len(out[0])].to(out[0].dtype)] * len(out)
        return [*out, *(torch.autograd.grad(out, of, grads) if with_gradients else ())]

    def error() -> float:
        some = [tensor[:_CHECKED_ROWS] if tensor.dim() > 1 else tensor for tensor in inputs]
        found, exact = (
            [tensor.detach().to(dtype).requires_grad_(with_gradients) for tensor in some]
            for dtype in (torch.bfloat16, torch.float64)
        )
        return error_of(zip(finished(ways[0], found), finished(ways[2], exact), strict=True))

    return Case(
        ours=lambda: finished(ways[0], leaves),
        plain=lambda: finished(ways[1], leaves),
        max_error=error,
        tolerance=ULP,
        num_bytes=0,
        size="",
        against="",
        picked="",
    )


def attention_case(setting: Setting, context: int | None = None, num_rows: int | None = None) -> Case:
    """One layer of a decoding step, from blocks anywhere in memory, against sdpa over a cache in one piece.

    64 sequences of 512 tokens with the heads of SmolLM2-135M; on a GPU 256 of 1,024 with those of Qwen2.5-0.5B, unless
    given. The bytes are the keys and values of all tokens, the queries and the output.
    """
    context, num_rows = context or setting.sized(512, 40, 1024), num_rows or setting.sized(64, 2, 256)
    settings, widths = _heads(setting)
    q_RX, k_RY, v_RY = setting.normal(num_rows, sum(widths), dtype=torch.bfloat16).split(widths, dim=1)
    per_row = -(-context // BLOCK_TOKENS)
    tables_RN = setting.normal(num_rows * per_row, stream=1).argsort().int().view(num_rows, per_row)
    row_R = torch.arange(num_rows, dtype=torch.int32, device=setting.device)
    places = Places(torch.full_like(row_R, context - 1), row_R, tables_RN)
    cache_2NW = setting.normal(2, num_rows * per_row, BLOCK_TOKENS * settings.key_width, dtype=torch.bfloat16, stream=2)
    shape = (num_rows, settings.key_width // _WIDTH, context, _WIDTH)
    dense = [setting.normal(*shape, dtype=torch.bfloat16, stream=3 + i) for i in range(2)]
    rope, kernels = _rope(setting, context), Kernels(setting.choice)
    return Case(
        ours=lambda: attend(q_RX, k_RY, v_RY, rope, places, cache_2NW, settings, kernels=kernels),
        plain=lambda: scaled_dot_product_attention(
            q_RX.unflatten(1, (-1, 1, _WIDTH)), dense[0], dense[1], enable_gqa=True
        ),
        max_error=lambda: _attention_error(setting, context, kernels),
        tolerance=4 * ULP,  # keys are rounded when they are written
        num_bytes=2 * 2 * num_rows * (context * settings.key_width + settings.query_width),
        size=f"{num_rows} sequences of {context} tokens, {widths[0] // _WIDTH} heads over {shape[1]}, bfloat16",
        against="sdpa over a cache in one piece, without rotation and writing",
        picked=kernels.picked("attention", q_RX),
        num_flops=4 * num_rows * context * settings.query_width,
    )


def shared_prefix_case(setting: Setting) -> Case:
    """Attention of groups of 8 sequences that share the blocks of a prompt, against reading it for each of them.

    The bytes are those of a prompt that is read once for its group.
    """
    group, prompt, own = setting.sized(8, 2), setting.sized(512, 32, 1024), setting.sized(128, 16, 256)
    num_groups = setting.sized(8, 2, 32)
    num_rows, (settings, widths) = num_groups * group, _heads(setting)
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
        tolerance=4 * ULP,
        num_bytes=2 * 2 * (len(blocks) * BLOCK_TOKENS * settings.key_width + num_rows * settings.query_width),
        size=f"{num_groups} groups of {group}, prompts of {prompt} tokens and {own} of each sequence, bfloat16",
        against="our kernel without shared prefixes",
        picked=kernels.picked("attention", q_RX),
        num_flops=4 * num_rows * (prompt + own) * settings.query_width,
        compiles=False,
    )


def _heads(setting: Setting) -> tuple[AttentionSettings, list[int]]:
    settings = AttentionSettings(setting.sized(9, 4, 14), setting.sized(3, 2, 2), _WIDTH, _WIDTH**-0.5)
    return settings, [settings.query_width, settings.key_width, settings.key_width]


def _attention_error(setting: Setting, context: int, kernels: Kernels) -> float:
    """The last token of one sequence that was written piece by piece, against float64."""
    settings, widths = _heads(setting)
    x_CX = setting.normal(context, sum(widths), dtype=torch.bfloat16, stream=7)
    num_blocks, rope = -(-context // BLOCK_TOKENS), _rope(setting, context)
    cache_2NW = x_CX.new_zeros(2, num_blocks, BLOCK_TOKENS * settings.key_width)
    position_C = torch.arange(context, dtype=torch.int32, device=setting.device)
    table_1N = torch.arange(num_blocks, dtype=torch.int32, device=setting.device).flip(0)[None]

    def attended(tokens: slice, settings: AttentionSettings) -> torch.Tensor:
        places = Places(position_C[tokens], torch.zeros_like(position_C[tokens]), table_1N)
        q_TX, k_TY, v_TY = x_CX[tokens].split(widths, dim=1)
        return attend(q_TX, k_TY, v_TY, rope, places, cache_2NW, settings, kernels=kernels)

    for start in range(0, context, _FILLED_TOKENS):  # only what is written matters, so a window of one token will do
        attended(slice(start, min(start + _FILLED_TOKENS, context)), replace(settings, window=1))
    last = slice(context - 1, context)
    exact_CX, exact_rope = x_CX.double().cpu(), Rope(rope.cos_PF.double().cpu(), rope.sin_PF.double().cpu())
    q_CX, k_CY, v_CY = exact_CX.split(widths, dim=1)
    k_CKD = attention_torch.rotated(k_CY.unflatten(1, (-1, _WIDTH)), position_C.cpu().long(), exact_rope)
    exact_2NW = exact_CX.new_zeros(cache_2NW.shape)
    tokens_2CY = exact_2NW.view(2, num_blocks * BLOCK_TOKENS, settings.key_width)
    tokens_2CY[0, :context], tokens_2CY[1, :context] = k_CKD.flatten(1), v_CY
    table_1N_exact = torch.arange(num_blocks, dtype=torch.int32)[None]
    whole = Places(position_C[last].cpu(), torch.zeros(1, dtype=torch.int32), table_1N_exact)
    exact = attention_torch.attend(q_CX[last], k_CY[last], v_CY[last], exact_rope, whole, exact_2NW, settings)
    return error_of([(attended(last, settings), exact)])


def _rope(setting: Setting, context: int) -> Rope:
    frequency_F = 10000 ** (-torch.arange(_WIDTH // 2, device=setting.device) / (_WIDTH // 2))
    angle_PF = torch.arange(context, device=setting.device)[:, None] * frequency_F
    return Rope(angle_PF.cos(), angle_PF.sin())


def masked_softmax_case(setting: Setting) -> Case:
    """Causal softmax of the scores of 4 sequences, 9 heads and 512 tokens, against a mask that is added first."""
    width = setting.sized(512, 24, 2048)
    shape, scale = (setting.sized(4, 2, 8), setting.sized(9, 2, 14), width, width), 0.125
    scores_BHQK = setting.normal(*shape, dtype=torch.bfloat16)
    mask, kernels = KeyMask(), Kernels(setting.choice)
    seen_BHQK = softmax_torch.visible(scores_BHQK.shape, mask, setting.device)
    added_BHQK = torch.zeros(seen_BHQK.shape, device=setting.device).masked_fill(~seen_BHQK, -torch.inf).bfloat16()

    def error() -> float:
        some_BHQK = scores_BHQK[:_CHECKED_SEQUENCES]
        found_BHQK = masked_softmax(some_BHQK, scale=scale, mask=mask, kernels=kernels)
        return error_of([(found_BHQK, softmax_torch.masked_softmax(some_BHQK.double(), scale, mask))])

    return Case(
        ours=lambda: masked_softmax(scores_BHQK, scale=scale, mask=mask, kernels=kernels),
        plain=lambda: (scores_BHQK * scale + added_BHQK).softmax(-1, dtype=torch.float32).bfloat16(),
        max_error=error,
        tolerance=2**-8,
        num_bytes=2 * scores_BHQK.numel() * 3 // 2,  # of the scores half is read, of the result all is written
        size=f"{' x '.join(map(str, shape))} bfloat16, causal",
        against="scale, add a mask, softmax",
        picked=kernels.picked("masked_softmax", scores_BHQK),
    )


def gae_case(setting: Setting) -> Case:
    """Advantages and returns of 64 sequences of up to 512 tokens, against the loop over columns in torch."""
    shape = (setting.sized(64, 4, 512), setting.sized(512, 32, 1024))
    tensors = (setting.normal(*shape), setting.normal(*shape, stream=1), setting.mask(shape))
    kernels = Kernels(setting.choice)

    def error() -> float:
        reward_BT, value_BT, mask_BT = (one[:64] for one in tensors)
        exact = gae_torch.gae(reward_BT.double(), value_BT.double(), mask_BT, 1.0, 0.95)
        found = gae(*tensors, 1.0, 0.95, kernels=kernels)
        return error_of((one[:64], other) for one, other in zip(found, exact, strict=True))

    return Case(
        ours=lambda: gae(*tensors, 1.0, 0.95, kernels=kernels),
        plain=lambda: gae_torch.gae(*tensors, 1.0, 0.95),
        max_error=error,
        tolerance=1e-5,
        num_bytes=tensors[0].numel() * (4 * 4 + 1),
        size=f"{shape[0]} sequences x {shape[1]} tokens",
        against="the loop over columns in torch",
        picked=kernels.picked("gae", tensors[0]),
        compiles=False,
    )


def digest_case(setting: Setting) -> Case:
    """The number that says which weights a model has: 270 MB, those of SmolLM2 in bfloat16."""
    weight_N = setting.normal(setting.sized(135_000_000, 10_000), dtype=torch.bfloat16)
    kernels = Kernels(setting.choice)
    return Case(
        ours=lambda: digests([weight_N], kernels=kernels),
        plain=lambda: digest_torch.digest(weight_N),
        max_error=lambda: float(digests([weight_N], kernels=kernels) != [digest_torch.digest(weight_N)]),
        tolerance=0,
        num_bytes=weight_N.nbytes,
        size=f"{weight_N.nbytes / 1e6:.1f} MB",
        against="the definition in torch",
        picked="torch" if setting.device.type != "cpu" else kernels.picked("digest", weight_N),
        compiles=False,
    )


def policy_loss_case(setting: Setting) -> Case:
    """Clipped loss of 64 x 512 tokens with its KL term and gradient in one Triton kernel, against autograd in torch."""
    shape = (setting.sized(64, 4, 4096), setting.sized(512, 32, 2048))
    logp_BT = -setting.normal(*shape).abs()
    tokens = PolicyTokens(
        logp_BT.requires_grad_(),
        logp_BT.detach() + 0.2 * setting.normal(*shape, stream=1),
        setting.normal(*shape, stream=2),
        setting.mask(shape),
        logp_BT.detach() + 0.2 * setting.normal(*shape, stream=3),
    )
    terms = PolicyTerms(kl="k3", kl_coef=0.05)
    kernels = Kernels(setting.choice)
    count = float(tokens.mask_BT.sum())

    def plain(of: PolicyTokens = tokens) -> list[torch.Tensor]:
        assert of.reference_logp_BT is not None
        kl_BT = penalty(terms.kl, of.logp_BT, of.reference_logp_BT, of.mask_BT)
        loss = (surrogate(of, terms)[0] + terms.kl_coef * kl_BT).sum() / count
        return [loss, *torch.autograd.grad(loss, of.logp_BT)]

    def ours() -> list[torch.Tensor]:
        fused = fused_policy_loss(tokens, terms, count, kernels=kernels)
        return plain() if fused is None else [fused[0], *torch.autograd.grad(fused[0], tokens.logp_BT)]

    def error() -> float:
        wide = {f.name: getattr(tokens, f.name) for f in fields(tokens) if f.name not in ("mask_BT", "entropy_BT")}
        wide = {name: value.detach().double() for name, value in wide.items()}
        wide["logp_BT"].requires_grad_()
        return error_of(zip(ours(), plain(replace(tokens, **wide)), strict=True))

    return Case(
        ours=ours,
        plain=plain,
        max_error=error,
        tolerance=1e-5,
        num_bytes=logp_BT.numel() * (4 * 4 + 1 + 4),  # read four numbers and the mask, write a gradient
        size=f"{shape[0]} sequences x {shape[1]} tokens, with gradients",
        against="the same by autograd in torch",
        picked=kernels.picked("policy_loss", logp_BT),
    )


def upload_case(setting: Setting) -> Case:
    """The nine fields of a PPO batch of 64 x 512 tokens, against a copy of each."""
    cpu = replace(setting, device=torch.device("cpu"))
    shape = (setting.sized(64, 4), setting.sized(512, 16))
    sent = [cpu.whole(50_000, *shape), cpu.whole(shape[1], shape[0]), cpu.mask(shape)]
    sent += [cpu.normal(*shape, stream=stream) for stream in range(6)]
    uploader = Uploader(setting.device)
    return Case(
        ours=lambda: uploader.tensors(sent),
        plain=lambda: [one.to(setting.device, copy=True) for one in sent],
        max_error=lambda: error_of(zip(uploader.tensors(sent), sent, strict=True)),
        tolerance=0.0,
        num_bytes=2 * sum(one.numel() * one.element_size() for one in sent),
        size=f"{len(sent)} fields of {shape[0]} x {shape[1]}",
        against="field by field",
        picked="one pinned copy" if setting.device.type == "cuda" else "one copy, not pinned",
        compiles=False,
        by_wall=True,
    )


def adamw_case(setting: Setting) -> Case:
    """A step over 28 million bfloat16 weights with float32 masters, against torch's fused AdamW and copies around it.

    The bytes: the gradient read, two moments and the master read and written, the weight written.
    """
    shape, settings = (setting.sized(49152, 64), setting.sized(576, 33)), AdamWSettings(0.9, 0.95, 1e-8)
    gradient, kernels, fused = setting.normal(*shape, dtype=torch.bfloat16), Kernels(setting.choice), Kernels("torch")

    def update(dtype: torch.dtype = torch.float32) -> ParameterUpdate:
        master = setting.normal(*shape, stream=1).to(dtype)
        moments = FloatMoments(torch.zeros_like(master), torch.zeros_like(master))
        return ParameterUpdate(gradient, master, master.bfloat16(), moments, 10, 1e-3, 0.1)

    def error() -> float:
        found, exact = update(), update(torch.float64)
        adamw([found], settings, 0.5, kernels=kernels)
        adamw_torch.adamw(exact, settings, 0.5)
        return error_of([(found.master, exact.master), (found.moments.exp_avg_sq, exact.moments.exp_avg_sq)])

    own, plain = update(), update()
    return Case(
        ours=lambda: adamw([own], settings, 0.5, kernels=kernels),
        plain=lambda: adamw([plain], settings, 0.5, kernels=fused),
        max_error=error,
        tolerance=1e-6,
        num_bytes=(2 + 3 * 8 + 2) * gradient.numel(),
        size=f"{gradient.numel()} weights, bfloat16 with float32 masters",
        against="torch's fused AdamW",
        picked=kernels.picked("adamw", gradient),
        compiles=False,
    )
