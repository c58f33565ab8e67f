"""A decoder computed over packed tokens: one definition for the trainer and for the rollout engine.

The tokens of all sequences are concatenated, without padding. The caller supplies the linear maps and the attention
(`Ops`): the trainer the model's own modules, with gradients; the engine packed weights and a paged cache. Everything
else is the same code and the same kernels, and no row's result depends on the other rows. So in bfloat16 and float32 on
a CPU the engine's log-probs equal the trainer's to the bit.

Shape legend: T tokens, H hidden, X query width, Y key width, N picked rows, V vocabulary,
U different tokens.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tunesmith.core.errors import InputError
from tunesmith.kernels.attention.api import attend_packed
from tunesmith.kernels.attention.records import Packing, Rope, Segments
from tunesmith.kernels.gated.api import activate, gated, softcap
from tunesmith.kernels.linear.float32 import is_by_onednn, linear
from tunesmith.kernels.logprob.head import OutputLayer
from tunesmith.kernels.native import Kernels
from tunesmith.kernels.rms_norm.api import add_rms_norm
from tunesmith.models.adapter import Adapter, add_low_rank, dora_scale, low_rank, stretch
from tunesmith.models.architecture import Architecture, Block, Norm, Projection, RopeSource, describe, weight_of

_ROPE_ROWS = 512
"""Rope tables are sized in multiples of this many positions."""

Linear = Callable[[Projection, torch.Tensor], Sequence[torch.Tensor]]
"""The outputs of a projection for an input `[rows, in]`, each `[rows, size]`."""

OnLayer = Callable[[str, torch.Tensor], None]
"""Called with the name of a layer and its output `[T, H]`."""


class Attend(Protocol):
    """Attention of one layer over all tokens."""

    def __call__(
        self, layer: int, block: Block, q_TX: torch.Tensor, k_TY: torch.Tensor, v_TY: torch.Tensor
    ) -> torch.Tensor:
        """Attention output `[T, X]`; queries and keys are not rotated yet."""
        ...


@dataclass(frozen=True, slots=True)
class Ops:
    """The operations of one pass over a decoder. `on_layer` locates the layer of the first non-finite number.

    The backward pass computes the activations of the first `num_recomputed` layers again.
    """

    linear: Linear
    attend: Attend
    kernels: Kernels
    num_recomputed: int = 0
    on_layer: OnLayer | None = None


def hidden_states(architecture: Architecture, ids_T: torch.Tensor, positions_T: torch.Tensor, ops: Ops) -> torch.Tensor:
    """Hidden states after the final norm, `[T, H]`."""
    x_TH = _embed(architecture, ids_T)
    if architecture.positions is not None:
        x_TH = x_TH + architecture.positions(positions_T)
    if torch.is_autocast_enabled(x_TH.device.type) and x_TH.dtype != torch.float64:
        x_TH = x_TH.to(torch.get_autocast_dtype(x_TH.device.type))  # the residual stream too, as with 16-bit weights
    residual_TH: torch.Tensor | None = None
    for layer, block in enumerate(architecture.blocks):
        if layer < ops.num_recomputed and torch.is_grad_enabled():
            x_TH, residual_TH = checkpoint(_block, layer, block, x_TH, residual_TH, ops, use_reentrant=False)
        else:
            x_TH, residual_TH = _block(layer, block, x_TH, residual_TH, ops)
        if ops.on_layer:
            ops.on_layer(f"layer {layer}", x_TH if residual_TH is None else x_TH + residual_TH)
    return _norm(architecture.final_norm, x_TH, residual_TH, ops)[0]


def _embed(architecture: Architecture, ids_T: torch.Tensor) -> torch.Tensor:
    """Embeddings of tokens, `[T, H]`; with a sparse gradient where autograd adds it to the output layer's dense one."""
    embedding, output = architecture.embedding, architecture.output
    if (
        type(embedding) is not nn.Embedding
        or output is None
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


def logits(architecture: Architecture, hidden_NH: torch.Tensor, ops: Ops) -> torch.Tensor:
    """Logits of some rows of `hidden_states`, `[N, V]`."""
    (logits_NV,) = ops.linear(architecture.head, hidden_NH)
    cap = architecture.final_softcap
    return logits_NV if cap is None else softcap(logits_NV, cap, kernels=ops.kernels)


def _block(
    layer: int, block: Block, x_TH: torch.Tensor, residual_TH: torch.Tensor | None, ops: Ops
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's output and the residual stream, which the next norm adds in the same kernel."""
    normed_TH, residual_TH = _norm(block.norm_attention, x_TH, residual_TH, ops)
    q_TX, k_TY, v_TY = ops.linear(block.qkv, normed_TH)
    if block.q_norm is not None and block.k_norm is not None:
        q_TX, k_TY = _norm_heads(block.q_norm, q_TX, ops), _norm_heads(block.k_norm, k_TY, ops)
    (x_TH,) = ops.linear(block.out, ops.attend(layer, block, q_TX, k_TY, v_TY))
    if block.norm_after_attention is not None:
        x_TH, _ = _norm(block.norm_after_attention, x_TH, None, ops)
    normed_TH, residual_TH = _norm(block.norm_mlp, x_TH, residual_TH, ops)
    inner = ops.linear(block.gate_up, normed_TH)
    if len(inner) == 2:
        inner_TI = gated(inner[0], inner[1], block.activation, kernels=ops.kernels)
    else:
        inner_TI = activate(inner[0], block.activation, kernels=ops.kernels)
    (x_TH,) = ops.linear(block.down, inner_TI)
    if block.norm_after_mlp is not None:
        x_TH, _ = _norm(block.norm_after_mlp, x_TH, None, ops)
    return x_TH, residual_TH


def _norm(
    norm: Norm, x_TH: torch.Tensor, residual_TH: torch.Tensor | None, ops: Ops
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normed sum of input and residual stream, and the sum."""
    weight_H: torch.Tensor = norm.module.weight.to(x_TH.dtype)  # type: ignore[operator]
    if norm.kind == "rms":
        done = add_rms_norm(x_TH, residual_TH, weight_H, norm.epsilon, offset=norm.offset, kernels=ops.kernels)
        return done.normed_RH, done.sum_RH
    sum_TH = x_TH if residual_TH is None else x_TH + residual_TH
    bias_H: torch.Tensor = norm.module.bias.to(x_TH.dtype)  # type: ignore[operator]
    return functional.layer_norm(sum_TH, weight_H.shape, weight_H, bias_H, norm.epsilon), sum_TH


def _norm_heads(norm: Norm, x_TX: torch.Tensor, ops: Ops) -> torch.Tensor:
    """Norm over each head."""
    weight_D: torch.Tensor = norm.module.weight  # type: ignore[assignment]
    width = len(weight_D)
    normed_TKD, _ = _norm(norm, x_TX.unflatten(1, (-1, width)), None, ops)
    return normed_TKD.flatten(1)


class RopeTables:
    """Cosines and sines of every position up to the longest requested.

    The angle is rounded to float32 as transformers does. Its cosine is computed in float64, because torch's vectorised
    float32 cosine depends on the element's index in the tensor.
    """

    def __init__(self, sources: Sequence[RopeSource]) -> None:
        self._sources = sources
        self._tables: list[Rope] = []

    def get(self, index: int, num_positions: int) -> Rope:
        """The table of source `index`, with at least `num_positions` rows."""
        if not self._tables or len(self._tables[0].cos_PF) < num_positions:
            rows = -(-num_positions // _ROPE_ROWS) * _ROPE_ROWS
            self._tables = [_rope_table(source, rows) for source in self._sources]
        return self._tables[index]


def _rope_table(source: RopeSource, num_positions: int) -> Rope:
    frequency_F = source.frequency_F.float()
    angle_PF = (torch.arange(num_positions, device=frequency_F.device)[:, None].float() * frequency_F).double()
    return Rope((angle_PF.cos() * source.scaling).float(), (angle_PF.sin() * source.scaling).float())


class Decoder:
    """A transformers model as the trainer computes it: packed sequences, gradients to its own parameters.

    `shares_prefixes` tells those who pack rows whether to compute common prefixes once. With gradient checkpointing,
    the last layers whose activations fit in `kept_bytes` are not computed again in the backward pass.

    Raises:
        UnsupportedArchitecture: the model's family is unknown.
    """

    def __init__(
        self, model: PreTrainedModel, kernels: Kernels, *, shares_prefixes: bool = True, kept_bytes: int = 0
    ) -> None:
        self.architecture = describe(model)
        self.kernels = kernels
        self.shares_prefixes = shares_prefixes
        self.ropes = RopeTables(self.architecture.ropes)
        self._model = model
        self._kept_bytes = kept_bytes

    @property
    def output(self) -> OutputLayer:
        """The output layer."""
        return self.architecture.output_layer

    def hidden_states(
        self, ids_T: torch.Tensor, lengths: Sequence[int] | Segments, *, on_layer: OnLayer | None = None
    ) -> torch.Tensor:
        """Hidden states `[T, H]` of concatenated sequences; sequence b has `lengths[b]` tokens.

        With `Segments`, sequences may continue an earlier one: a shared prefix is computed once, with the same bits.

        Raises:
            InputError: lengths that do not add up to T, or exceed the model's context.
        """
        segments = lengths if isinstance(lengths, Segments) else Segments.alone(lengths)
        context = self.architecture.context_length
        if not segments.lengths or segments.num_tokens != len(ids_T) or segments.longest > context:
            raise InputError(
                f"{len(ids_T)} tokens in sequences of {list(segments.lengths)}, the longest of {segments.longest}; "
                f"lengths must add up, and fit the context of {context}"
            )
        positions_T = segments.positions(ids_T.device)
        return hidden_states(self.architecture, ids_T, positions_T, self._ops(segments, on_layer))

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Logits `[N, V]` of some of the hidden states."""
        return logits(self.architecture, hidden_NH, self._ops(Segments((), ())))

    def _ops(self, segments: Segments, on_layer: OnLayer | None = None) -> Ops:
        packing, num_positions = Packing(segments), max(1, segments.longest)

        def attend(
            layer: int, block: Block, q_TX: torch.Tensor, k_TY: torch.Tensor, v_TY: torch.Tensor
        ) -> torch.Tensor:
            rope = None if block.rope is None else self.ropes.get(block.rope, num_positions)
            return attend_packed(q_TX, k_TY, v_TY, rope, packing, block.attention, kernels=self.kernels)

        return Ops(module_outputs, attend, self.kernels, self._num_recomputed(segments.num_tokens), on_layer)

    def _num_recomputed(self, num_tokens: int) -> int:
        blocks = self.architecture.blocks
        if not num_tokens or not _uses_checkpoints(self._model):
            return 0
        return max(0, len(blocks) - self._kept_bytes // _activation_bytes(self.architecture, num_tokens))


def module_outputs(projection: Projection, x_TH: torch.Tensor) -> Sequence[torch.Tensor]:
    """The outputs of a projection from the model's own modules, with adapters and gradients."""
    if len(x_TH) == 1:  # torch may compute a product of one row with another kernel, with other bits
        return [output_TH[:1] for output_TH in module_outputs(projection, x_TH.expand(2, -1))]
    parts = zip(projection.modules, projection.adapters, strict=True)
    outputs = [_base(module, x_TH) if adapter is None else _adapted(module, adapter, x_TH) for module, adapter in parts]
    return outputs if len(outputs) == len(projection.sizes) else outputs[0].split(projection.sizes, dim=-1)


def _base(module: nn.Module, x_TH: torch.Tensor) -> torch.Tensor:
    """The output of a linear map without its adapter; one with forward hooks is called, so that they run."""
    weight_OI = weight_of(module)
    if is_by_onednn(x_TH, weight_OI) and not module._forward_hooks and not module._forward_pre_hooks:
        return linear(x_TH, weight_OI, module.bias)  # type: ignore[arg-type]
    return module(x_TH)


def _adapted(module: nn.Module, adapter: Adapter, x_TH: torch.Tensor) -> torch.Tensor:
    """The output of a linear map with its adapter."""
    dropped_TH = x_TH if adapter.dropout is None else adapter.dropout(x_TH)
    inner_TR = low_rank(dropped_TH, adapter.down_RI, adapter.scaling)
    if adapter.magnitude_O is None:
        return add_low_rank(_base(module, x_TH), inner_TR, adapter.up_OR)
    weight_OI, bias_O = weight_of(module), module.bias
    y_TO = add_low_rank(linear(x_TH, weight_OI), inner_TR, adapter.up_OR)
    return stretch(y_TO, dora_scale(adapter, weight_OI), bias_O)  # type: ignore[arg-type]


def _activation_bytes(architecture: Architecture, num_tokens: int) -> int:
    """Upper bound of what a layer keeps for its backward pass: inputs and outputs of its linear maps and norms; under
    autocast also its weights, which are cast anew in each pass.
    """
    block, device = architecture.blocks[0], architecture.device.type
    projections = (block.qkv, block.out, block.gate_up, block.down)
    inputs = [weight_of(projection.modules[0]).shape[1] for projection in projections]
    outputs = [sum(projection.sizes) for projection in projections]
    num_numbers = num_tokens * (sum(inputs) + sum(outputs) + 4 * inputs[0])
    if not torch.is_autocast_enabled(device):
        return num_numbers * architecture.dtype.itemsize
    num_weights = sum(map(math.prod, zip(inputs, outputs, strict=True)))
    return (num_numbers + num_weights) * torch.get_autocast_dtype(device).itemsize


def _uses_checkpoints(model: PreTrainedModel) -> bool:
    """True with gradient checkpointing: activations are recomputed in the backward pass."""
    return model.training and any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
