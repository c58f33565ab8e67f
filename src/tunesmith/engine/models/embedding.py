"""The embedding of tokens, and its gradient where it shares its weight with the output layer.

Shape legend: T tokens, H hidden, V vocabulary, U different tokens.
"""

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from tunesmith.base.core.errors import ModelError
from tunesmith.engine.models.architecture import Architecture, weight_of


def embedded(architecture: Architecture, ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
    """The input of the first layer, `[T, H]`. Raises ModelError for a token that the embedding has no row for."""
    try:
        x_TH = embed(architecture, ids_T)
    except IndexError as error:
        size = len(weight_of(architecture.embedding))
        if int(ids_T.max()) < size:  # a hook of somebody's own
            raise
        raise ModelError(
            f"the text holds token {int(ids_T.max())}, and the model's embedding has rows for tokens 0 to {size - 1}; "
            "take the tokenizer that belongs to the model, or leave such text out"
        ) from error
    if architecture.embedding_scale != 1:
        x_TH = x_TH * architecture.embedding_scale
    if architecture.positions is not None:
        x_TH = x_TH + architecture.positions(positions_T)
    if torch.is_autocast_enabled(x_TH.device.type) and x_TH.dtype != torch.float64:
        x_TH = x_TH.to(torch.get_autocast_dtype(x_TH.device.type))  # the residual stream too, as with 16-bit weights
    return x_TH


def embed(architecture: Architecture, ids_T: torch.Tensor) -> torch.Tensor:
    """Embeddings of tokens, `[T, H]`; with a sparse gradient where autograd adds it to the output layer's dense one."""
    embedding, output = architecture.embedding, architecture.output
    if (
        type(embedding) is not nn.Embedding
        or output is None
        or not torch.is_grad_enabled()
        or weight_of(output.modules[0]) is not embedding.weight
        or embedding.weight.device.type != "cpu"
        or embedding.max_norm is not None
        or embedding._forward_hooks
        or embedding._forward_pre_hooks
    ):
        return embedding(ids_T)
    return _TiedEmbedding.apply(embedding.weight, ids_T, embedding.padding_idx)  # type: ignore[return-value]


class _TiedEmbedding(torch.autograd.Function):
    """Rows of the output layer's weight. Their dense gradient would be a matrix of the vocabulary's size, nearly all
    zeros, filled and added in every backward pass. The bits of the sum are the same.
    """

    @staticmethod
    def forward(ctx: Any, weight_VH: torch.Tensor, ids_T: torch.Tensor, padding_id: int | None) -> torch.Tensor:
        ctx.save_for_backward(ids_T)
        ctx.shape, ctx.padding_id = weight_VH.shape, -1 if padding_id is None else padding_id
        return functional.embedding(ids_T, weight_VH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x_TH: torch.Tensor) -> Any:
        ids_U, index_T = ctx.saved_tensors[0].unique(return_inverse=True)
        d_rows_UH = torch.ops.aten.embedding_dense_backward(d_x_TH, index_T, len(ids_U), -1, False)
        d_rows_UH[ids_U == ctx.padding_id] = 0
        rows = torch.sparse_coo_tensor(ids_U[None], d_rows_UH, ctx.shape, is_coalesced=True, check_invariants=False)
        return rows, None, None
