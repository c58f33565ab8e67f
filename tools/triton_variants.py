"""Every Triton kernel of the package with the types and constants it is compiled with, for `triton_registers.py`.

Import it with Triton's interpreter off (TRITON_INTERPRET unset): the interpreter leaves nothing to compile.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from tunesmith.engine.kernels.advance import triton_impl as advance
from tunesmith.engine.kernels.attention import triton_impl as attention
from tunesmith.engine.kernels.attention.records import AttentionSettings
from tunesmith.engine.kernels.attention.triton_impl import AttentionPlan
from tunesmith.engine.kernels.gae import triton_impl as gae
from tunesmith.engine.kernels.gated import triton_impl as gated
from tunesmith.engine.kernels.launching import LaunchPlan, ceil_div
from tunesmith.engine.kernels.logprob import triton_impl as logprob
from tunesmith.engine.kernels.masked_softmax import triton_impl as softmax
from tunesmith.engine.kernels.policy_loss import triton_impl as policy
from tunesmith.engine.kernels.preference import triton_impl as preference
from tunesmith.engine.kernels.rms_norm import triton_impl as norm
from tunesmith.engine.kernels.rms_norm.torch_impl import LONGEST
from tunesmith.engine.kernels.sample import triton_impl as sampler

CAPABILITIES = (70, 80, 90)
"""V100, A100, H100 and H200: compute capability times ten."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with its types and constants, as one launch compiles it. Names are unique within an operation.

    `signature` gives the type of each argument that is no constant: "*bf16", "*fp16", "*fp32", "*i64" for pointers,
    "i32", "i64", "fp32" for numbers. `constexprs` gives the constants. With `uses_dot` it is compiled for capability
    8.0 and newer only, since it needs tensor cores to be fast. `maxnreg` limits the registers of a thread, as the
    launch does.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    uses_dot: bool = False
    num_stages: int = 3
    maxnreg: int | None = None

    def capabilities(self) -> tuple[int, ...]:
        """The targets that it is compiled for."""
        return tuple(one for one in CAPABILITIES if one >= 80 or not self.uses_dot)


def _advance_variant(*, has_seen: bool, has_value: bool) -> Variant:
    signature: dict[str, str] = {
        **dict.fromkeys(("tokens", "integers", "counts", "new_tokens"), "*i64"),
        **dict.fromkeys(("positions", "lefts", "to_masks", "states", "new_states"), "*i32"),
        **dict.fromkeys(("drawn", "new_scores"), "*fp32"),
        **dict.fromkeys(("is_stop", "seen"), "*i1"),
        "new_values": "*fp32",
        **dict.fromkeys(("num_slots", "drawn_stride", "seen_stride"), "i32"),
    }
    constants = {"HAS_SEEN": has_seen, "HAS_VALUE": has_value, "BLOCK": advance.BLOCK_SLOTS}
    name = f"advance{'_seen' if has_seen else ''}{'_value' if has_value else ''}"
    return Variant(name, advance.advance_kernel, signature, constants)


def _advance() -> list[Variant]:
    return [_advance_variant(has_seen=every, has_value=every) for every in (False, True)]


_QWEN = AttentionSettings(14, 2, 64, 0.125)
_WINDOWED = AttentionSettings(32, 8, 128, 128**-0.5, window=1024, softcap=50.0)
_WIDE = AttentionSettings(8, 4, 256, 0.0625)
_LAYERS = (
    ("bf16", torch.bfloat16, True, (_QWEN, _WINDOWED, _WIDE)),
    ("fp16", torch.float16, True, (_QWEN,)),
    ("fp16", torch.float16, False, (_QWEN, _WINDOWED, _WIDE)),
    ("fp32", torch.float32, False, (_QWEN, _WINDOWED)),
)
"""Type, whether it uses tensor cores, layers: of Qwen2.5-0.5B, of an 8B model with window and softcap, of Gemma 2."""


def _attention_variants(settings: AttentionSettings, dtype: str, plan: AttentionPlan) -> list[Variant]:
    """The kernels of one layer, with prefixes and several splits; `whole` has neither. Kernels without products are
    listed once, for plans without tensor cores."""
    types = dict.fromkeys(("q", "k", "v", "keys", "values", "turned", "out"), f"*{dtype}")
    types |= dict.fromkeys(("positions", "table_rows", "tables", "starts", "members", "lengths"), "*i32")
    types |= dict.fromkeys(("cos", "sin", "largest", "total", "sums"), "*fp32")
    types |= dict.fromkeys(("q_stride", "k_stride", "v_stride", "table_stride", "num_slots", "num_members"), "i32")
    heads = {"HEADS": settings.num_heads, "KV_HEADS": settings.num_kv_heads, "D": settings.head_dim}
    blocks = {
        "BLOCK_C": plan.tile_tokens,
        "BLOCK_D": plan.block_d,
        "BLOCK_H": plan.block_h,
        "BLOCK_S": attention.MERGED_SLOTS,
    }
    scores = {"SCALE": settings.scale, "SOFTCAP": settings.softcap or 0.0, "WINDOW": settings.window or 0}
    cut = {"SPLIT": plan.split_tokens, "HEAD_TILES": plan.head_tiles, "USES_DOT": plan.uses_dot, "WIDEN": False}
    turn = {"HALF": settings.head_dim // 2, "QUERY_PARTS": ceil_div(settings.num_heads, plan.block_h)}
    every = {**heads, **blocks, **scores, **cut, **turn, "HAS_PREFIXES": 1, "IS_WHOLE": False}
    kernels: list[tuple[str, Any, int, int, int | None]] = [
        ("attend", attention.attend_kernel, plan.rows, plan.num_warps, None),
        ("whole", attention.attend_kernel, plan.rows, plan.num_warps, None),
        ("prefix", attention.prefix_kernel, plan.prefix_rows, plan.num_warps, attention.PREFIX_REGISTERS),
    ]
    if not plan.uses_dot:
        kernels += [
            ("write", attention.write_kernel, 0, plan.num_warps, None),
            ("merge", attention.merge_kernel, 0, attention.MERGE_WARPS, None),
        ]
    found: list[Variant] = []
    for title, kernel, rows, num_warps, most in kernels:
        given = {**every, "ROWS": rows, **({"HAS_PREFIXES": 0, "IS_WHOLE": True} if title == "whole" else {})}
        constants = {name: value for name, value in given.items() if name in kernel.arg_names}
        signature = {name: kind for name, kind in types.items() if name in kernel.arg_names}
        name = f"{title}_{settings.head_dim}{'_dot' if plan.uses_dot else ''}_{dtype}"
        launched = (num_warps, plan.uses_dot, plan.num_stages, most)
        found.append(Variant(name, kernel, signature, constants, *launched))
    return found


def _attention() -> list[Variant]:
    return [
        variant
        for name, dtype, dot, layers in _LAYERS
        for settings in layers
        for variant in _attention_variants(settings, name, attention.launch(settings, dtype, 128, uses_dot=dot))
    ]


def _gae_variant(name: str, kind: str, block: int, num_warps: int) -> Variant:
    strides = ("reward_row", "reward_column", "value_row", "value_column", "mask_row", "mask_column")
    signature = {"reward": kind, "value": kind, "mask": "*u8", "advantage": "*fp32", "returns": "*fp32"}
    signature |= {"num_columns": "i32", **dict.fromkeys(strides, "i32"), "gamma": "fp32", "decay": "fp32"}
    return Variant(name, gae.gae_kernel, signature, {"BLOCK": block}, num_warps)


def _gae() -> list[Variant]:
    return [_gae_variant(f"fp32_{block}", "*fp32", block, gae.launch(1, block).num_warps) for block in (512, 2048)]


def _gated() -> list[Variant]:
    plan = gated.launch((8192, 4864), contiguous=False)
    found: list[Variant] = []
    for name, function in product(("bf16", "fp16", "fp32"), ("silu", "gelu_tanh", "softcap")):
        kind = f"*{name}"
        types = {"x": kind, "up": kind, **dict.fromkeys(("num_blocks", "width", "x_stride", "up_stride"), "i32")}
        types |= {"cap": "fp32"}
        back_types = {**types, "d_out": kind, "d_x": kind, "d_up": kind}
        constants = {"FUNCTION": function, "HAS_UP": function != "softcap", "BLOCK": plan.block}
        suffix = f"{function}_{name}"
        found += [
            Variant(f"forward_{suffix}", gated.gated_kernel, {**types, "out": kind}, constants, plan.num_warps),
            Variant(f"backward_{suffix}", gated.gated_gradient_kernel, back_types, constants, plan.num_warps),
        ]
    return found


def _logprob() -> list[Variant]:
    """Each kernel at a vocabulary of 152,000, with and without the soft-cap."""
    floats = {"inverse_temperature": "fp32", "softcap": "fp32"}
    found: list[Variant] = []
    for (name, dtype), capped in product(
        (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)), (False, True)
    ):
        plan = logprob.launch(151936, dtype)
        logits, suffix = f"*{name}", f"{name}{'_capped' if capped else ''}"
        rows = {"logits_ptr": logits, "ids_ptr": "*i64", "sums_ptr": "*fp32", "stride": "i64"} | floats
        forward_types = {"logp_ptr": "*fp32", "entropy_ptr": "*fp32", "num_tokens": "i32"} | rows
        backward_types = {"d_logp_ptr": "*fp32", "d_entropy_ptr": "*fp32", "gradient_ptr": logits} | rows
        backward_types |= {"num_columns": "i32", "gradient_stride": "i64"}
        backward_block, backward_warps = logprob.backward_launch(151936)
        forward_constants = {"CAPPED": capped, "TILES": plan.tiles, "BLOCK": plan.block}
        backward_constants = {"CAPPED": capped, "BLOCK": backward_block}
        found += [
            Variant(f"forward_{suffix}", logprob.forward_kernel, forward_types, forward_constants, plan.num_warps),
            Variant(
                f"backward_{suffix}",
                logprob.backward_kernel,
                backward_types,
                backward_constants,
                backward_warps,
                maxnreg=logprob.BACKWARD_REGISTERS,
            ),
        ]
    return found


def _masked_softmax() -> list[Variant]:
    sizes = dict.fromkeys(("num_rows", "heads", "queries", "num_keys", "offset", "window"), "i32")
    allowed = {"allowed_batch": "i32", "allowed_query": "i32"}
    rules = {"CAUSAL": True, "HAS_KEYS": True}
    found: list[Variant] = []
    for name in ("bf16", "fp16", "fp32"):
        kind = f"*{name}"
        pointers = {"scores": kind, "keys": "*i64", "allowed": "*u8", "out": kind}
        signature = {**pointers, **sizes, **allowed, "scale": "fp32"}
        of_gradient = {"probability": kind, "d_probability": kind, "keys": "*i64", "d_scores": kind, **sizes}
        for title, num_keys in (("", 1024), ("_long", 32768)):
            plan = softmax.launch(1 << 20, num_keys)
            constants = {**rules, "BLOCK_R": plan.block_rows, "BLOCK_K": plan.block}
            of_scores = {**constants, "HAS_ALLOWED": True}
            types = {**of_gradient, "scale": "fp32"}
            found += [
                Variant(f"softmax{title}_{name}", softmax.softmax_kernel, signature, of_scores, plan.num_warps),
                Variant(f"gradient{title}_{name}", softmax.gradient_kernel, types, constants, plan.num_warps),
            ]
    return found


def _policy_variant(name: str, kind: str, **constants: object) -> Variant:
    arrays = ("logp", "old_logp", "advantage", "reference_logp")
    signature = {**dict.fromkeys(arrays, kind), "mask": "*u8", "weight": "*fp32", "d_logp": "*fp32", "sums": "*fp32"}
    signature |= {"num_tokens": "i32", "num_columns": "i32"}
    signature |= dict.fromkeys(("low", "high", "dual", "kl_coef"), "fp32")
    plan = policy.launch(1024)
    whole = {"IS_CISPO": False, "KL": 3, "CORRECTS_KL": False, "PER_ROW": True}
    whole |= {"NUM_SUMS": policy.NUM_SUMS, "BLOCK": plan.block}
    return Variant(name, policy.policy_loss_kernel, signature, whole | constants, plan.num_warps)


def _policy_loss() -> list[Variant]:
    return [
        _policy_variant("clip_k3_fp32", "*fp32"),
        _policy_variant("clip_k3_bf16", "*bf16"),
        _policy_variant("cispo_fp32", "*fp32", IS_CISPO=True, KL=0, PER_ROW=False),
        _policy_variant("clip_corrected_k1_fp32", "*fp32", KL=1, CORRECTS_KL=True),
    ]


def _select_variant(name: str, kind: str, plan: LaunchPlan, *, atomic: bool = False, votes: bool = True) -> Variant:
    numbers = dict.fromkeys(("num_rows", "num_columns", "a_stride", "b_stride", "rows_per_program"), "i32")
    pointers = {"a": kind, "b": kind, "choices": "*fp32", "votes": "*fp32", "selected": kind, "sums": "*fp32"}
    constants = {"HAS_VOTES": votes, "ATOMIC": atomic, "BLOCK_B": plan.block_rows, "BLOCK_N": plan.block}
    return Variant(name, preference.select_kernel, {**pointers, **numbers}, constants, num_warps=plan.num_warps)


def _preference() -> list[Variant]:
    wide, narrow = preference.launch((1 << 20, 512)), preference.launch((1 << 20, 512), block_n=64)
    types = {**dict.fromkeys(("sums", "weights", "updated"), "*fp32"), "num_sums": "i32", "num_columns": "i32"}
    sizes = {"BLOCK_B": preference.FOLD_B, "BLOCK_N": preference.FOLD_N}
    return [
        *(_select_variant(f"select_{name}", f"*{name}", wide) for name in ("bf16", "fp16", "fp32")),
        _select_variant("select_atomic_bf16", "*bf16", wide, atomic=True),
        _select_variant("select_narrow_fp32", "*fp32", narrow),
        Variant("fold_fp32", preference.fold_kernel, {**types, "scale": "fp32"}, sizes),
    ]


def _rms_norm() -> list[Variant]:
    """Rows of one head, of the hidden size of a small model, and the longest."""
    sizes = dict.fromkeys(("num_rows", "width", "inner", "outer_stride", "inner_stride"), "i32")
    found: list[Variant] = []
    for name in ("bf16", "fp16", "fp32"):
        kind = f"*{name}"
        rows = {"weight": kind, "scale": "*fp32", **sizes, "offset": "fp32"}
        ahead = {"x": kind, "residual": kind, "normed": kind, "total": kind, "epsilon": "fp32", **rows}
        back = {"total": kind, "d_normed": kind, "d_total": kind, "d_x": kind, "sums": "*fp32", **rows}
        back |= {"rows_of_program": "i32"}
        for width in (64, 896, LONGEST):
            plan = norm.launch(width)
            tile = {"HAS_OFFSET": width == 64, "BLOCK_R": plan.block_rows, "BLOCK_H": plan.block}
            forward_constants = {"HAS_RESIDUAL": width != 64, **tile}
            backward_constants = {"HAS_D_TOTAL": width != 64, "FOR_WEIGHT": True, **tile}
            found += [
                Variant(f"forward_{width}_{name}", norm.forward_kernel, ahead, forward_constants, plan.num_warps),
                Variant(f"backward_{width}_{name}", norm.backward_kernel, back, backward_constants, plan.num_warps),
            ]
        types = {"sums": "*fp32", "d_weight": kind, "num_sums": "i32", "width": "i32"}
        found.append(Variant(f"fold_{name}", norm.fold_kernel, types, {"BLOCK_P": norm.FOLD_P, "BLOCK_H": norm.FOLD_H}))
    return found


def _sample() -> list[Variant]:
    """Plain and with everything, at a vocabulary of 152,000."""
    types = {
        "num_tokens": "i32",
        "stride": "i64",
        "settings_ptr": "*fp64",
        "integers_ptr": "*i64",
        "token_ptr": "*i64",
        "scores_ptr": "*fp32",
    }
    types |= {
        "status_ptr": "*i32",
        "changed_stride": "i64",
        "seen_stride": "i64",
        "scratch_stride": "i64",
        "seen_ptr": "*u8",
    }
    types |= {"candidate_logit_ptr": "*fp32", "candidate_token_ptr": "*i32"}
    found: list[Variant] = []
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        plan = sampler.launch(151936, dtype)
        sizes = {"TILES": plan.tiles, "BLOCK": plan.block}
        logits = {"logits_ptr": f"*{name}", "changed_ptr": f"*{name}"}
        forms = {"plain": (False, False), "filtered": (True, False)} | (
            {"whole": (True, True)} if name == "fp32" else {}
        )
        for form, (filters, changed) in forms.items():
            constants = sizes | {"CHANGED": changed, "PENALISED": changed, "FILTERS": filters}
            found.append(
                Variant(
                    f"{form}_{name}",
                    sampler.sample_kernel,
                    types | logits,
                    constants,
                    plan.num_warps,
                    maxnreg=sampler.MAX_REGISTERS,
                )
            )
    return found


VARIANTS: Mapping[str, Callable[[], list[Variant]]] = {
    "advance": _advance,
    "attention": _attention,
    "gae": _gae,
    "gated": _gated,
    "logprob": _logprob,
    "masked_softmax": _masked_softmax,
    "policy_loss": _policy_loss,
    "preference": _preference,
    "rms_norm": _rms_norm,
    "sample": _sample,
}
"""By operation: a function that lists the kernels."""
