"""The definition of log-prob and entropy, and the same in torch in blocks of rows, which keeps less memory.

Shape legend: N rows, V vocabulary, R rows of a block.
"""

import torch

from tunesmith.engine.kernels.arguments import without_autocast
from tunesmith.engine.kernels.masking import widened

_BLOCK_ROWS = 16
"""Rows of logits worked on at a time: at V = 49152 a block in float32 is 3 MB and stays in the CPU's cache."""


def chosen_logp_entropy(
    logits_NV: torch.Tensor, ids_N: torch.Tensor, temperature: float = 1.0, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logp_N, entropy_N) of softmax(logits / temperature) in nats, float32 (float64 for float64); plain autograd.

    With a `softcap` the logits are `softcap * tanh(logits / softcap)`: Gemma 2 (2024).
    """
    if softcap is not None:
        logits_NV = softcap * torch.tanh(widened(logits_NV) / softcap)
    logp_NV = _scaled(logits_NV, temperature).log_softmax(-1)
    return logp_NV.gather(-1, ids_N[:, None])[:, 0], -(logp_NV.exp() * logp_NV).sum(-1)


@without_autocast
def sums_in_blocks(
    logits_NV: torch.Tensor, ids_N: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logp_N, entropy_N, sums_N2), without autograd; NaN where a logit of the row is not finite.

    The sums, which `gradient_in_blocks` needs, are log-sum-exp and entropy.
    """
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
    return logp_N.where(entropy_N.isfinite(), torch.nan), entropy_N, torch.stack((lse_N, entropy_N), -1)


def gradient_in_blocks(
    logits_NV: torch.Tensor,
    ids_N: torch.Tensor,
    sums_N2: torch.Tensor,
    d_logp_N: torch.Tensor | None,
    d_entropy_N: torch.Tensor | None,
    temperature: float,
    out_NV: torch.Tensor,
) -> None:
    """Write the gradient of the logits to `out_NV`, which may be the logits.

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


def _scaled(logits_RV: torch.Tensor, temperature: float) -> torch.Tensor:
    return widened(logits_RV) if temperature == 1.0 else widened(logits_RV) / temperature
