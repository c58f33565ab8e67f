"""A decoder of which neighbouring ranks compute a part of each layer (Shoeybi et al., Megatron-LM, 2019).

`engine/models/layouts.py` divides the weights. Attention and MLP end in a sum over the ranks, the embedding is one too,
and the logits of all ranks are joined. Without gradients: it is for the rollout engine.

Shape legend: T tokens, H hidden, R rows, V vocabulary.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn
from torch.nn import functional

from tunesmith.base.core.errors import InputError
from tunesmith.engine.distributed.group import TensorGroup
from tunesmith.engine.kernels.logprob.head import OutputLayer
from tunesmith.engine.models.architecture import Architecture, Block, Experts, Projection, Stack
from tunesmith.engine.models.decoder import Decoder, Ops
from tunesmith.engine.models.language_model import LanguageModel

MapT = TypeVar("MapT", Projection, Stack)


def tensor_parallel(model: LanguageModel, group: TensorGroup) -> LanguageModel:
    """`model`, which has all its weights yet, as the ranks of `group` compute it once each has its part of them.

    Raises:
        InputError: the model cannot be divided among so many ranks.
    """
    if model.decoder is None:
        raise InputError("only models with a flat decoder can be tensor parallel; set scale.tensor to 1")
    return LanguageModel(model.module, TensorDecoder(model.decoder, group), model.kernels)


class TensorDecoder(Decoder):
    """`whole`, computed by the ranks of `group` together."""

    is_divided = True

    def __init__(self, whole: Decoder, group: TensorGroup) -> None:
        vars(self).update(vars(whole))
        _require_divisible(whole.architecture, group.count)
        embedding = _VocabularyPart(whole.architecture.embedding, group)
        blocks = tuple(_local(block, group) for block in whole.architecture.blocks)
        self.architecture = replace(whole.architecture, embedding=embedding, blocks=blocks)
        self._group = group
        self._summed = {id(one) for block in blocks for one in (block.out, block.mlp.down)}

    @property
    def output(self) -> OutputLayer:
        """None of the ranks has the whole."""
        raise InputError("a tensor parallel decoder draws completions; it scores none")

    def across(self, ops: Ops) -> Ops:
        """`ops` with sums over the ranks, and the logits of all."""
        head = self.architecture.head

        def linear(projection: Projection, x_RI: torch.Tensor) -> Sequence[torch.Tensor]:
            outputs = ops.linear(projection, x_RI)
            if projection is head:
                return [self._group.join(outputs[0], head.sizes[0])]
            return [self._group.sum(outputs[0])] if id(projection) in self._summed else outputs

        def experts(stack: Stack, x_RI: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
            y_RO = ops.experts(stack, x_RI, counts)
            return self._group.sum(y_RO) if id(stack) in self._summed else y_RO

        return replace(ops, linear=linear, experts=experts)


class _VocabularyPart(nn.Module):
    """The embedding of all tokens, of which a rank has consecutive ones."""

    def __init__(self, whole: nn.Module, group: TensorGroup) -> None:
        super().__init__()
        self.whole, self._group = whole, group
        self._start = group.index * -(-len(whole.weight) // group.count)  # type: ignore[arg-type]

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Embeddings `[T, H]`."""
        weight_VH: torch.Tensor = self.whole.weight  # type: ignore[assignment]
        scale = getattr(self.whole, "embed_scale", None)  # of Gemma 3
        index_T = ids_T - self._start
        is_here_T = (index_T >= 0) & (index_T < len(weight_VH))
        x_TH = functional.embedding(index_T.clamp(0, len(weight_VH) - 1), weight_VH) * is_here_T[:, None]
        x_TH = self._group.sum(x_TH)
        return x_TH if scale is None else x_TH * scale.to(x_TH.dtype)


def _local(block: Block, group: TensorGroup) -> Block:
    """The heads and the part of the MLP that this rank has."""
    attention, mlp, count = block.attention, block.mlp, group.count
    local = replace(attention, num_heads=attention.num_heads // count, num_kv_heads=attention.num_kv_heads // count)
    if isinstance(mlp, Experts):
        mlp = replace(mlp, down=_biased_once(mlp.down, group))
    else:
        mlp = replace(mlp, gate_up=_narrow(mlp.gate_up, count), down=_biased_once(mlp.down, group))
    out = _biased_once(block.out, group)
    return replace(block, attention=local, qkv=_narrow(block.qkv, count), out=out, mlp=mlp)


def _narrow(projection: Projection, count: int) -> Projection:
    return replace(projection, sizes=tuple(size // count for size in projection.sizes))


def _biased_once(linear: MapT, group: TensorGroup) -> MapT:
    """`linear` as a part of a sum over the ranks, in which only the first one's bias counts."""
    if group.index == 0:
        return replace(linear)
    if isinstance(linear, Stack):
        return replace(linear, module=_without_bias(linear.module, f"{linear.name}_bias"))
    return replace(linear, modules=tuple(_without_bias(module, "bias") for module in linear.modules))


def _without_bias(module: nn.Module, name: str) -> nn.Module:
    """`module` with the same weights, and zeros for the bias `name`."""
    bias: torch.Tensor | None = getattr(module, name, None)
    if bias is None:
        return module
    twin = copy.copy(module)
    twin._parameters = {**module._parameters, name: nn.Parameter(torch.zeros_like(bias), requires_grad=False)}
    return twin


def _require_divisible(architecture: Architecture, count: int) -> None:
    for block in architecture.blocks:
        attention, mlp = block.attention, block.mlp
        down = mlp.down.weights[0]
        for size, name in ((attention.num_kv_heads, "key/value heads"), (down.shape[1], "inner numbers of an MLP")):
            if size % count:
                raise InputError(f"scale.tensor is {count}, but a layer has {size} {name}; give a divisor of it")
        norms = [norm.module.weight for norm in (block.q_norm, block.k_norm) if norm is not None]
        if count > 1 and any(weight.shape != (attention.head_dim,) for weight in norms):  # type: ignore[union-attr]
            raise InputError(
                "the norms of queries and keys go over all heads, which are divided; set scale.tensor to 1"
            )
        adapters = (*block.out.adapters, *mlp.down.adapters)
        if count > 1 and any(adapter is not None and adapter.magnitude_O is not None for adapter in adapters):
            raise InputError("DoRA needs whole rows of weights, which are divided; set scale.tensor to 1")
