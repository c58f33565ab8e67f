"""The definition of log-prob and entropy, and the same in torch in blocks of rows, which keeps less memory.

Shape legend: N rows, V vocabulary, R rows of a block.
"""

from dataclasses import dataclass
from typing import Any

import torch

from tunesmith.kernels.arguments import without_autocast

_BLOCK_ROWS = 16
"""Rows of logits worked on at a time: at V = 49152 a block in float32 is 3 MB and stays in the CPU's cache."""


def chosen_logp_entropy(
    logits_NV: torch.Tensor, ids_N: torch.Tensor, temperature: float = 1.0, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logp_N, entropy_N) of softmax(logits / temperature) in nats, float32 (float64 for float64); plain autograd.

    With a `softcap` the logits are `softcap * tanh(logits / softcap)`: Gemma 2 (2024).
    """
    if softcap is not None:
        wide_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
        logits_NV = softcap * torch.tanh(wide_NV / softcap)
    logp_NV = _scaled(logits_NV, temperature).log_softmax(-1)
    return logp_NV.gather(-1, ids_N[:, None])[:, 0], -(logp_NV.exp() * logp_NV).sum(-1)


def chosen_logp_entropy_in_blocks(
    logits_NV: torch.Tensor, ids_N: torch.Tensor, temperature: float = 1.0, *, reuse_logits: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`chosen_logp_entropy`, keeping the logits and two numbers per row for the backward pass.

    The plain form keeps two more [N, V] tensors. With `reuse_logits` the gradient is written over the logits.
    """
    return _InBlocks.apply(logits_NV, ids_N, temperature, reuse_logits)  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class BlockSums:
    """The results of `chosen_logp_entropy`, and the log-sum-exp of each row, which the gradient needs."""

    logp_N: torch.Tensor
    entropy_N: torch.Tensor
    lse_N: torch.Tensor


@without_autocast
def sums_in_blocks(logits_NV: torch.Tensor, ids_N: torch.Tensor, temperature: float) -> BlockSums:
    """Log-prob, entropy and log-sum-exp of each row, without autograd."""
    wide = torch.float64 if logits_NV.dtype == torch.float64 else torch.float32
    logp_N, entropy_N, lse_N = logits_NV.new_empty((3, len(logits_NV)), dtype=wide).unbind()
    for start in range(0, len(logits_NV), _BLOCK_ROWS):
        rows = slice(start, start + _BLOCK_ROWS)
        z_RV = _scaled(logits_NV[rows], temperature)
        lse_N[rows] = lse_R = z_RV.logsumexp(-1)
        logp_RV = z_RV - lse_R[:, None]
        logp_N[rows] = logp_RV.gather(-1, ids_N[rows, None])[:, 0]
        # Not lse - sum p z, which saves a step and loses a low entropy to cancellation.
        entropy_N[rows] = -torch.linalg.vecdot(logp_RV.exp(), logp_RV)
    return BlockSums(logp_N, entropy_N, lse_N)


def gradient_in_blocks(
    logits_NV: torch.Tensor,
    ids_N: torch.Tensor,
    sums_N2: torch.Tensor,
    d_logp_N: torch.Tensor | None,
    d_entropy_N: torch.Tensor | None,
    temperature: float,
    out_NV: torch.Tensor,
) -> None:
    """Write the gradient of the logits to `out_NV`, which may be the logits; `sums_N2` are log-sum-exp and entropy.

    With z = logits / temperature and H the entropy: d logp / dz = onehot - p, d H / dz = -p (log p + H). The logits may
    be some columns of the whole: an id outside of them has no column here.
    """
    lse_N, entropy_N = sums_N2.unbind(-1)
    is_here_N = (ids_N >= 0) & (ids_N < logits_NV.shape[1])
    column_N = ids_N.where(is_here_N, 0)
    for start in range(0, len(logits_NV), _BLOCK_ROWS):
        rows = slice(start, start + _BLOCK_ROWS)
        block_RV = _scaled(logits_NV[rows], temperature).sub(lse_N[rows, None])
        factor_RV = torch.zeros_like(lse_N[rows, None]) if d_logp_N is None else d_logp_N[rows, None]
        if d_entropy_N is not None:
            factor_RV = factor_RV + (block_RV + entropy_N[rows, None]).mul_(d_entropy_N[rows, None])
        block_RV.exp_().mul_(factor_RV).neg_()
        if d_logp_N is not None:
            block_RV.scatter_add_(-1, column_N[rows, None], (d_logp_N * is_here_N)[rows, None])
        out_NV[rows] = block_RV if temperature == 1.0 else block_RV.div_(temperature)


class _InBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: torch.Tensor, ids_N: torch.Tensor, temperature: float, reuse_logits: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sums = sums_in_blocks(logits_NV, ids_N, temperature)
        ctx.save_for_backward(logits_NV, ids_N, torch.stack((sums.lse_N, sums.entropy_N), -1))
        ctx.temperature, ctx.reuse_logits = temperature, reuse_logits
        ctx.set_materialize_grads(False)
        return sums.logp_N, sums.entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None]:
        logits_NV, ids_N, sums_N2 = ctx.saved_tensors
        if grads[0] is None and grads[1] is None:
            return None, None, None, None
        grad_NV = logits_NV.detach() if ctx.reuse_logits else torch.empty_like(logits_NV)
        gradient_in_blocks(logits_NV, ids_N, sums_N2, grads[0], grads[1], ctx.temperature, grad_NV)
        return grad_NV, None, None, None


def _scaled(logits_RV: torch.Tensor, temperature: float) -> torch.Tensor:
    wide_RV = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
    return wide_RV if temperature == 1.0 else wide_RV / temperature
