"""The policy loss of PPO and GRPO with its KL and entropy terms, in one pass: in C++, in Triton or in torch.

Shapes: B sequences, T completion tokens, S sums, N numbers.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, cast, get_args

import torch
from torch import Tensor

from tunesmith.core.errors import InputError
from tunesmith.kernels.arguments import FLOATS, INTEGER, POINTER, SINGLE, address, function_of, picked_library
from tunesmith.kernels.masking import Denominator, check_denominator, check_shapes, widened
from tunesmith.kernels.native import Choice, Kernels, shared
from tunesmith.kernels.policy_loss import torch_impl
from tunesmith.kernels.policy_loss.records import Estimator, Level, PolicySums, PolicyTerms, PolicyTokens

NUM_SUMS = len(PolicySums.__dataclass_fields__)
_ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)
_LEVELS: tuple[Level, ...] = get_args(Level)
_ARRAYS = ("logp", "old_logp", "advantage", "mask", "reference_logp", "entropy", "weight", "d_logp", "sums")


class _Arguments(ctypes.Structure):
    """`Arguments` of cpu.cpp, field by field."""

    _fields_ = (
        *((name, POINTER) for name in _ARRAYS),
        *((name, INTEGER) for name in ("num_rows", "num_columns", "is_cispo", "estimator", "corrects_kl")),
        *((name, SINGLE) for name in ("low", "high", "dual", "kl_coef")),
        ("num_threads", INTEGER),
    )


def policy_loss(
    tokens: PolicyTokens,
    terms: PolicyTerms,
    denominator: Denominator,
    entropy_denominator: Denominator = 1.0,
    *,
    kernels: Kernels,
) -> tuple[Tensor, PolicySums]:
    """Scalar loss, float32 (float64 for float64), with gradients to `logp_BT` and `entropy_BT`, and detached sums.

        loss = (sum surrogate + kl_coef sum kl) / denominator - entropy_coef sum entropy / entropy_denominator

    `torch_impl.policy_loss` is the definition. Denominators are those of the whole optimizer step; `denominator` may be
    one number for each row, `[B, 1]`. One pass reads each number once and writes the gradient of the log-probs, so the
    backward pass only scales it; nothing else is kept. Sums are formed in an order that the shape alone decides. The
    kernels know a ratio of each token; for those of a whole completion torch does the work.

    Raises:
        InputError: shapes, dtypes or denominators do not fit; or `native` or `triton` was chosen for a level that they
            do not have.
        NativeUnavailableError, TritonUnavailableError: the chosen kernels cannot run.
    """
    _check(tokens, terms, denominator, entropy_denominator, kernels)
    logp_BT = tokens.logp_BT
    given = [tokens.old_logp_BT, tokens.advantage_BT, tokens.mask_BT]
    given += [_inverse(denominator, logp_BT), _inverse(entropy_denominator, logp_BT)]
    given += [] if tokens.reference_logp_BT is None else [tokens.reference_logp_BT]
    numbers, codes = _numbers(terms)
    loss, sums_S, _ = _policy_loss(
        logp_BT, tokens.entropy_BT, [tensor.detach() for tensor in given], numbers, codes, kernels.choice
    )
    return loss, PolicySums(*sums_S.detach().unbind())


def _check(
    tokens: PolicyTokens,
    terms: PolicyTerms,
    denominator: Denominator,
    entropy_denominator: Denominator,
    kernels: Kernels,
) -> None:
    given = {
        "logp_BT": tokens.logp_BT,
        "old_logp_BT": tokens.old_logp_BT,
        "advantage_BT": tokens.advantage_BT,
        "reference_logp_BT": tokens.reference_logp_BT,
        "entropy_BT": tokens.entropy_BT,
    }
    check_shapes(**given, mask_BT=tokens.mask_BT)
    if tokens.logp_BT.dim() != 2:
        raise InputError(f"logp_BT has shape {tuple(tokens.logp_BT.shape)}; give [sequences, tokens]")
    for name, tensor in given.items():
        if tensor is not None and tensor.dtype not in FLOATS:
            raise InputError(f"{name} is {tensor.dtype}; give floating-point numbers")
    for name, coef, tensor in (
        ("reference_logp_BT", terms.kl_coef, tokens.reference_logp_BT),
        ("entropy_BT", terms.entropy_coef, tokens.entropy_BT),
    ):
        if coef > 0 and tensor is None:
            raise InputError(f"{name} is None and its coefficient {coef}; give the tensor, or a coefficient of 0")
    check_denominator("denominator", denominator)
    check_denominator("entropy_denominator", entropy_denominator)
    if isinstance(denominator, Tensor) and denominator.dim() and denominator.shape != (len(tokens.logp_BT), 1):
        raise InputError(
            f"denominator has shape {tuple(denominator.shape)}; give a number or [{len(tokens.logp_BT)}, 1]"
        )
    if terms.level != "token" and kernels.choice in ("native", "triton"):
        raise InputError(
            f"level is {terms.level!r}, which kernels {kernels.choice!r} do not have; choose auto or torch"
        )


def _inverse(denominator: Denominator, like: Tensor) -> Tensor:
    """One over the denominator as a matrix: of one number, or of one for each row."""
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    if isinstance(denominator, Tensor):
        return denominator.detach().to(wide).reciprocal().reshape(-1, 1)
    return like.new_full((1, 1), 1.0 / denominator, dtype=wide)


@torch.library.custom_op("tunesmith::policy_loss", mutates_args=())
def _policy_loss(
    logp_BT: Tensor,
    entropy_BT: Tensor | None,
    given: Sequence[Tensor],
    numbers: Sequence[float],
    codes: Sequence[int],
    choice: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, sums_S, d_logp_BT). `given` are old log-probs, advantages, mask, one over each of the denominators, and
    the log-probs of the reference if there is one.
    """
    old_logp_BT, advantage_BT, mask_BT, weight_R1, entropy_weight_11, *reference_logps = given
    reference_logp_BT = reference_logps[0] if reference_logps else None
    tokens = PolicyTokens(logp_BT, old_logp_BT, advantage_BT, mask_BT.bool(), reference_logp_BT, entropy_BT)
    terms = _terms(numbers, codes)
    kernels = shared(cast(Choice, choice))
    backend = "torch"
    if terms.level == "token":
        backend = kernels.picked("policy_loss", _widest(tokens), native_dtypes=FLOATS[:3])
    if backend == "native":
        found = _native(kernels, tokens, terms, weight_R1)
    elif backend == "triton":
        from tunesmith.kernels.policy_loss import triton_impl

        found = triton_impl.evaluated(tokens, terms, weight_R1)
    else:
        found = torch_impl.evaluated(tokens, terms, weight_R1)
    wide = widened(logp_BT).dtype
    loss = found.weighted - terms.entropy_coef * entropy_weight_11[0, 0] * found.sums_S[-1]
    return loss.to(wide), found.sums_S, found.d_logp_BT.to(wide).contiguous()


@_policy_loss.register_fake
def _(
    logp_BT: Tensor,
    entropy_BT: Tensor | None,
    given: Sequence[Tensor],
    numbers: Sequence[float],
    codes: Sequence[int],
    choice: str,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = widened(logp_BT).dtype
    sums_S = logp_BT.new_empty(NUM_SUMS, dtype=torch.float64)
    return logp_BT.new_empty((), dtype=wide), sums_S, logp_BT.new_empty(logp_BT.shape, dtype=wide)


def _numbers(terms: PolicyTerms) -> tuple[list[float], list[int]]:
    """The terms as an operator of torch takes them; `_terms` reads them."""
    numbers = [terms.clip_low, terms.clip_high, terms.dual_clip or 0.0, terms.kl_coef, terms.entropy_coef]
    codes = [int(terms.surrogate == "cispo"), _LEVELS.index(terms.level), _ESTIMATORS.index(terms.kl)]
    return numbers, [*codes, int(terms.corrects_kl)]


def _terms(numbers: Sequence[float], codes: Sequence[int]) -> PolicyTerms:
    clip_low, clip_high, dual_clip, kl_coef, entropy_coef = numbers
    surrogate = "cispo" if codes[0] else "clip"
    kl = _ESTIMATORS[codes[2]]
    return PolicyTerms(
        surrogate=surrogate,
        level=_LEVELS[codes[1]],
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip or None,
        kl=kl,
        kl_coef=kl_coef,
        corrects_kl=bool(codes[3]),
        entropy_coef=entropy_coef,
    )


def _widest(tokens: PolicyTokens) -> Tensor:
    """A tensor that decides where the work is done: one in float64 if there is one, which no kernel takes."""
    floats = (tokens.old_logp_BT, tokens.advantage_BT, tokens.reference_logp_BT, tokens.entropy_BT)
    wide = (tensor for tensor in floats if tensor is not None and tensor.dtype == torch.float64)
    return next(wide, tokens.logp_BT)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logp_BT, entropy_BT, given, numbers, _, _ = inputs
    ctx.num_given, ctx.entropy_coef, ctx.dtype = len(given), numbers[4], logp_BT.dtype
    ctx.entropy_dtype = None if entropy_BT is None else entropy_BT.dtype
    ctx.save_for_backward(output[2], given[2], given[4])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_loss: Tensor | None, *_: Tensor | None) -> tuple[object, ...]:
    rest = ([None] * ctx.num_given, None, None, None)
    if d_loss is None:
        return (None, None, *rest)
    d_logp_BT, mask_BT, entropy_weight_11 = ctx.saved_tensors
    d_entropy_BT = None
    if ctx.entropy_dtype is not None:
        each_11 = -ctx.entropy_coef * entropy_weight_11 * d_loss
        d_entropy_BT = torch.where(mask_BT.bool(), each_11, 0.0).to(ctx.entropy_dtype)
    return ((d_logp_BT * d_loss).to(ctx.dtype), d_entropy_BT, *rest)


_policy_loss.register_autograd(_backward, setup_context=_keep)


def _native(kernels: Kernels, tokens: PolicyTokens, terms: PolicyTerms, weight_R1: Tensor) -> torch_impl.Evaluated:
    num_rows, num_columns = tokens.logp_BT.shape
    sums_S = torch.zeros(NUM_SUMS + 1, dtype=torch.float64)
    # The mapping holds contiguous copies alive until the call is over.
    arrays = {
        "logp": _plain(tokens.logp_BT),
        "old_logp": _plain(tokens.old_logp_BT),
        "advantage": _plain(tokens.advantage_BT),
        "mask": tokens.mask_BT.contiguous(),
        "reference_logp": _plain(tokens.reference_logp_BT),
        "entropy": _plain(tokens.entropy_BT),
        "weight": weight_R1.float().expand(num_rows, 1).contiguous(),
        "d_logp": torch.empty(num_rows, num_columns),
        "sums": sums_S,
    }
    arguments = _Arguments(
        **{name: address(tensor) for name, tensor in arrays.items()},
        num_rows=num_rows,
        num_columns=num_columns,
        is_cispo=terms.surrogate == "cispo",
        estimator=_ESTIMATORS.index(terms.kl),
        corrects_kl=terms.corrects_kl,
        low=1 - terms.clip_low,
        high=1 + terms.clip_high,
        dual=terms.dual_clip or float("inf"),
        kl_coef=terms.kl_coef,
        num_threads=torch.get_num_threads(),
    )
    function = function_of(picked_library(kernels, "policy_loss", tokens.logp_BT), "policy_loss", (POINTER,))
    function(ctypes.addressof(arguments))
    return torch_impl.Evaluated(sums_S[-1], sums_S[:-1].clone(), arrays["d_logp"])


def _plain(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float().contiguous()
