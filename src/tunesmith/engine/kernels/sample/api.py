"""Draws one token for each row of logits, in C++, in Triton or in torch.

Shape legend: B rows, V vocabulary, N biased tokens of all rows, S slots.
"""

import ctypes

import torch

from tunesmith.base.core.errors import InputError
from tunesmith.engine.kernels.arguments import picked_library, require_rows, with_dense_rows
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.kernels.sample import torch_impl
from tunesmith.engine.kernels.sample.torch_impl import NoiseKeys, Sampled, SampleSettings, Seen

_COMPLAINTS = {1: torch_impl.NOT_FINITE, 2: torch_impl.NOTHING_LEFT, 3: torch_impl.INFINITE}
_POINTERS = (
    *("temperature", "top_p", "min_p", "penalty", "top_k", "seed", "prompt", "sample", "position"),
    *("bias_offset", "bias_token", "bias_value", "seen", "slot"),
    *("token", "logp", "raw_logp", "status"),
)


class _Arguments(ctypes.Structure):
    """`SampleArguments` of cpu.cpp, field by field."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_tokens", "logits_stride", "is_bfloat16", "num_threads")),
        *((name, ctypes.c_void_p) for name in _POINTERS),
    )


def sample(
    logits_BV: torch.Tensor, settings: SampleSettings, keys: NoiseKeys, *, seen: Seen | None = None, kernels: Kernels
) -> Sampled:
    """One token for each row of logits, with its log-probs; `torch_impl.sample` is the definition.

    A row's result is a function of its logits, settings, keys and seen tokens, not of the rows beside it. The kernels
    are exact up to float32 weights: a filter may decide otherwise than the definition for tokens within about 1e-6 of
    its limit. Without `seen` there is no repetition penalty.

    Raises:
        InputError: shapes or dtypes do not fit, or a biased token is outside of the vocabulary.
        TrainingError: a logit is not finite, or bias and penalty leave no token or overflow; the message names the row.
        NativeUnavailableError, TritonUnavailableError: such kernels were chosen and cannot run.
    """
    _check(logits_BV, settings, keys, seen)
    match kernels.picked("sample", logits_BV):
        case "triton":
            return _triton(logits_BV, settings, keys, seen)
        case "native":
            return _native(logits_BV, settings, keys, seen, kernels)
        case "torch":
            dtype = torch.float64 if logits_BV.dtype == torch.float64 else torch.float32
            return torch_impl.sample(logits_BV, settings, keys, seen=seen, dtype=dtype)


@torch.library.custom_op("tunesmith::sample", mutates_args=())
def draw_in_triton(
    logits_BV: torch.Tensor,
    settings_B4: torch.Tensor,
    integers_B6: torch.Tensor,
    changed_BV: torch.Tensor | None,
    seen_SV: torch.Tensor | None,
    filters: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`sample` in Triton: (token_B int64, scores_B2 float32, status_B int32) for each row of logits.

    It does not wait for the device and reads nothing of the host's but shapes, so it can be in a CUDA graph. Scores:
    the log-prob under what was drawn from, and under the model. Status: 0, or why there is no token: 1 a logit is not
    finite, 2 the bias forbids all, 3 bias or penalty overflow.

    `settings_B4` float64: temperature, top_p, min_p, repetition penalty. `integers_B6` int64: top_k (0 is off), row of
    `seen_SV`, and the four noise keys. `changed_BV`: the logits with a bias, or None. `seen_SV`: bool, what the penalty
    applies to, or None. Without `filters` neither top_k nor top_p nor min_p is read.
    """
    from tunesmith.engine.kernels.sample import triton_impl

    changed_BV = None if changed_BV is None else with_dense_rows(changed_BV)
    seen_SV = None if seen_SV is None else with_dense_rows(seen_SV)
    settings_B4, integers_B6 = settings_B4.contiguous(), integers_B6.contiguous()
    return triton_impl.draw(with_dense_rows(logits_BV), settings_B4, integers_B6, changed_BV, seen_SV, filters)


@draw_in_triton.register_fake
def _(logits_BV: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_rows = logits_BV.shape[0]
    return (
        logits_BV.new_empty(num_rows, dtype=torch.int64),
        logits_BV.new_empty((num_rows, 2), dtype=torch.float32),
        logits_BV.new_empty(num_rows, dtype=torch.int32),
    )


def _native(
    logits_BV: torch.Tensor, settings: SampleSettings, keys: NoiseKeys, seen: Seen | None, kernels: Kernels
) -> Sampled:
    num_rows, num_tokens = logits_BV.shape
    logits_BV = logits_BV if logits_BV.stride(-1) == 1 else logits_BV.contiguous()
    logp_B, raw_logp_B = torch.empty(2, num_rows, dtype=torch.float32).unbind()
    result = Sampled(torch.empty(num_rows, dtype=torch.int64), logp_B, raw_logp_B)
    tensors = {
        "temperature": settings.temperature_B,
        "top_p": settings.top_p_B,
        "min_p": settings.min_p_B,
        "penalty": settings.repetition_penalty_B,
        "top_k": settings.top_k_B,
        "seed": keys.seed_B,
        "prompt": keys.prompt_B,
        "sample": keys.sample_B,
        "position": keys.position_B,
        "token": result.token_B,
        "logp": result.logp_B,
        "raw_logp": result.raw_logp_B,
        "status": torch.empty(num_rows, dtype=torch.int32),
    }
    if bias := settings.bias:
        tensors |= {"bias_offset": bias.offset_B1, "bias_token": bias.token_N, "bias_value": bias.value_N}
    if seen:
        tensors |= {"seen": seen.mask_SV, "slot": seen.slot_B}
    # The name holds contiguous copies alive until the call is over.
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    arguments = _Arguments(
        logits=logits_BV.data_ptr(),
        num_rows=num_rows,
        num_tokens=num_tokens,
        logits_stride=logits_BV.stride(0),
        is_bfloat16=int(logits_BV.dtype == torch.bfloat16),
        num_threads=min(torch.get_num_threads(), num_rows),
        **{name: tensor.data_ptr() for name, tensor in contiguous.items()},
    )
    picked_library(kernels, "sample", logits_BV).sample_rows(ctypes.byref(arguments))
    require_drawn(tensors["status"])
    return result


def _triton(logits_BV: torch.Tensor, settings: SampleSettings, keys: NoiseKeys, seen: Seen | None) -> Sampled:
    device, num_tokens = logits_BV.device, logits_BV.shape[1]
    top_k_B = settings.top_k_B.where(settings.top_k_B < num_tokens, 0)  # as many as there are is off
    slot_B = torch.zeros_like(top_k_B) if seen is None else seen.slot_B.to(top_k_B.device)
    numbers = (settings.temperature_B, settings.top_p_B, settings.min_p_B, settings.repetition_penalty_B)
    integers = (top_k_B, slot_B, keys.seed_B, keys.prompt_B, keys.sample_B, keys.position_B)
    filters = bool(((top_k_B > 0) | (settings.top_p_B < 1) | (settings.min_p_B > 0)).any())
    token_B, scores_B2, status_B = draw_in_triton(
        logits_BV,
        torch.stack(numbers, -1).to(device),
        torch.stack(integers, -1).to(device),
        None if settings.bias is None else torch_impl.biased(logits_BV.float(), settings.bias),
        None if seen is None else seen.mask_SV.to(device),
        filters,
    )
    require_drawn(status_B)
    return Sampled(token_B, *scores_B2.unbind(-1))


def require_drawn(status_B: torch.Tensor) -> None:
    """Raise TrainingError for rows whose status, as `draw_in_triton` gives it, says that there is no token."""
    if bool(status_B.any()):
        code = int(status_B[status_B != 0][0])
        torch_impl.require_rows(status_B != code, _COMPLAINTS[code])


def _check(logits_BV: torch.Tensor, settings: SampleSettings, keys: NoiseKeys, seen: Seen | None) -> None:
    require_rows("logits", logits_BV)
    num_rows, num_tokens = logits_BV.shape
    for name, given in (("settings are", len(settings.temperature_B)), ("noise keys are", len(keys.seed_B))):
        if given != num_rows:
            raise InputError(f"{name} for {given} rows and the logits have {num_rows}; give one for each row")
    bias = settings.bias
    if bias is not None and len(bias.token_N) and int(bias.token_N.max()) >= num_tokens:
        raise InputError(f"logit bias for token {int(bias.token_N.max())}; ids must lie in [0, {num_tokens})")
    if seen is None:
        return
    num_slots = len(seen.mask_SV)
    if seen.mask_SV.dtype != torch.bool or seen.mask_SV.shape != (num_slots, num_tokens):
        raise InputError(
            f"seen tokens are {seen.mask_SV.dtype} of shape {tuple(seen.mask_SV.shape)}; "
            f"give bool [slots, {num_tokens}]"
        )
    slot_B = seen.slot_B
    if slot_B.dtype != torch.int64 or slot_B.shape != (num_rows,) or bool(((slot_B < 0) | (slot_B >= num_slots)).any()):
        raise InputError(f"slots of seen tokens are {slot_B.tolist()}; give {num_rows} int64 in [0, {num_slots})")
