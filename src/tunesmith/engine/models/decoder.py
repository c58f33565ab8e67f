"""A decoder computed over packed tokens: one definition for the trainer and for the rollout engine.

The tokens of all sequences are concatenated, without padding. The caller supplies the linear maps and the attention
(`Ops`): the trainer the model's own modules, with gradients; the engine packed weights and a paged cache. Everything
else is the same code and the same kernels, and no row's result depends on the other rows. So in bfloat16 and float32 on
a CPU the engine's log-probs equal the trainer's to the bit.

Shape legend: T tokens, H hidden, X query width, Y key width, N picked rows, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tunesmith.base.core.errors import InputError
from tunesmith.engine.kernels.attention.api import attend_packed
from tunesmith.engine.kernels.attention.records import Packing, Segments
from tunesmith.engine.kernels.gated.api import activate, gated, softcap
from tunesmith.engine.kernels.linear.exact import is_exact, linear
from tunesmith.engine.kernels.linear.grouped import grouped_linear
from tunesmith.engine.kernels.logprob.head import OutputLayer
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.kernels.rms_norm.api import add_rms_norm
from tunesmith.engine.models.adapter import Adapter, add_low_rank, dora_scale, low_rank, stretch
from tunesmith.engine.models.architecture import (
    Architecture,
    Block,
    Experts,
    Mlp,
    Norm,
    Projection,
    Stack,
    UnsupportedArchitecture,
    activation_bytes,
    weight_of,
)
from tunesmith.engine.models.embedding import embedded
from tunesmith.engine.models.fingerprint import parts_of, same_parts
from tunesmith.engine.models.int8_base import base_outputs, int8_map_of, is_int8
from tunesmith.engine.models.loaded import layers_of
from tunesmith.engine.models.mixture import Linear, LinearOfExperts, mixture
from tunesmith.engine.models.proof import prove
from tunesmith.engine.models.reader import describe
from tunesmith.engine.models.rope import RopeTables

_TESTED_TYPES = {"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt2"}
"""Models of transformers whose numbers our own tests compare in every detail: they are not proved again at load."""

OnLayer = Callable[[str, torch.Tensor], None]
"""Called with the name of a layer and its output `[T, H]`."""


Attend = Callable[[int, Block, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of one layer over all tokens, `[T, X]`: called with the layer's number and block, and its queries `[T, X]`,
keys and values `[T, Y]`, not rotated yet.
"""


def _call(_: int, compute: Callable[..., Any], *arguments: Any) -> Any:
    return compute(*arguments)


@dataclass(frozen=True, slots=True)
class Ops:
    """The operations of one pass over a decoder. `on_layer` locates the layer of the first non-finite number.

    The backward pass computes the activations of the first `num_recomputed` layers again. `in_layer` calls the function
    that computes a layer, given the layer's number and the function's arguments.
    """

    linear: Linear
    experts: LinearOfExperts
    attend: Attend
    kernels: Kernels
    num_recomputed: int = 0
    on_layer: OnLayer | None = None
    in_layer: Callable[..., Any] = _call


def hidden_states(architecture: Architecture, ids_T: torch.Tensor, positions_T: torch.Tensor, ops: Ops) -> torch.Tensor:
    """Hidden states after the final norm, `[T, H]`, as the output layer takes them."""
    return from_layer(0, architecture, embedded(architecture, ids_T, positions_T), ops)


def from_layer(first: int, architecture: Architecture, x_TH: torch.Tensor, ops: Ops) -> torch.Tensor:
    """As `hidden_states`, from the input of layer `first`."""
    x_TH, residual_TH = after_layers(architecture, range(first, len(architecture.blocks)), x_TH, ops)
    return normed(architecture, x_TH, residual_TH, ops)


def after_layers(
    architecture: Architecture, layers: range, x_TH: torch.Tensor, ops: Ops
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output of the last of `layers` for the input of the first, and the residual stream, not added yet."""
    residual_TH: torch.Tensor | None = None
    for layer in layers:
        compute = partial(_block, layer, architecture.blocks[layer], ops)
        if layer < ops.num_recomputed and torch.is_grad_enabled():
            compute = partial(checkpoint, compute, use_reentrant=False)
        x_TH, residual_TH = ops.in_layer(layer, compute, x_TH, residual_TH)
        if ops.on_layer:
            ops.on_layer(f"layer {layer}", x_TH if residual_TH is None else x_TH + residual_TH)
    return x_TH, residual_TH


def normed(architecture: Architecture, x_TH: torch.Tensor, residual_TH: torch.Tensor | None, ops: Ops) -> torch.Tensor:
    """Hidden states after the final norm, `[T, H]`, from what `after_layers` gives."""
    return _scaled(_norm(architecture.final_norm, x_TH, residual_TH, ops)[0], architecture.output_scale)


def logits(architecture: Architecture, hidden_NH: torch.Tensor, ops: Ops) -> torch.Tensor:
    """Logits of some rows of `hidden_states`, `[N, V]`."""
    (logits_NV,) = ops.linear(architecture.head, hidden_NH)
    cap = architecture.final_softcap
    return logits_NV if cap is None else softcap(logits_NV, cap, kernels=ops.kernels)


def _block(
    layer: int, block: Block, ops: Ops, x_TH: torch.Tensor, residual_TH: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's output and the residual stream, which the next norm adds in the same kernel."""
    normed_TH, residual_TH = _norm(block.norm_attention, x_TH, residual_TH, ops)
    q_TX, k_TY, v_TY = _queries_keys_values(block, normed_TH, ops)
    (x_TH,) = ops.linear(block.out, ops.attend(layer, block, q_TX, k_TY, v_TY))
    x_TH = _scaled(_norm(block.norm_after_attention, x_TH, None, ops)[0], block.residual_scale)
    if block.is_parallel:
        beside_TH = normed_TH if block.norm_mlp is None else _norm(block.norm_mlp, residual_TH, None, ops)[0]
        return x_TH + _mlp(block, beside_TH, ops), residual_TH
    normed_TH, residual_TH = _norm(block.norm_mlp, x_TH, residual_TH, ops)
    return _mlp(block, normed_TH, ops), residual_TH


def _queries_keys_values(
    block: Block, normed_TH: torch.Tensor, ops: Ops
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    outputs = ops.linear(block.qkv, normed_TH)
    if len(outputs) == 1:  # head by head
        outputs = [x_THD.flatten(1) for x_THD in outputs[0].unflatten(1, (-1, 3, block.attention.head_dim)).unbind(2)]
    q_TX, k_TY, v_TY = outputs
    if block.q_norm is not None and block.k_norm is not None:
        q_TX, k_TY = _norm_heads(block.q_norm, q_TX, ops), _norm_heads(block.k_norm, k_TY, ops)
    if block.num_neighbours:
        q_TX, k_TY = _apart(block, q_TX), _apart(block, k_TY)
    return q_TX, k_TY, v_TY


def _apart(block: Block, x_TX: torch.Tensor) -> torch.Tensor:
    """The even ones of the turned dimensions of each head, then the odd ones, as our rotary positions need them; the
    products of queries and keys do not change.
    """
    x_TXD = x_TX.unflatten(1, (-1, block.attention.head_dim))
    turned_TXD, rest_TXD = x_TXD.tensor_split((2 * block.num_neighbours,), -1)
    return torch.cat((turned_TXD[..., ::2], turned_TXD[..., 1::2], rest_TXD), -1).flatten(1)


def _mlp(block: Block, normed_TH: torch.Tensor, ops: Ops) -> torch.Tensor:
    """The output of the MLP, `[T, H]`, which is added to the residual stream."""
    if isinstance(block.mlp, Experts):
        x_TH = mixture(block.mlp, normed_TH, ops.linear, ops.experts, ops.kernels)
    else:
        x_TH = _dense(block.mlp, normed_TH, ops)
    return _scaled(_norm(block.norm_after_mlp, x_TH, None, ops)[0], block.residual_scale)


def _dense(mlp: Mlp, x_TH: torch.Tensor, ops: Ops) -> torch.Tensor:
    inner = ops.linear(mlp.gate_up, x_TH)
    if len(inner) == 2:
        inner_TI = gated(inner[0], inner[1], mlp.activation, kernels=ops.kernels)
    else:
        inner_TI = activate(inner[0], mlp.activation, kernels=ops.kernels)
    (x_TH,) = ops.linear(mlp.down, inner_TI)
    return x_TH


def _scaled(x_TH: torch.Tensor, scale: float) -> torch.Tensor:
    return x_TH if scale == 1 else x_TH * scale


def _norm(
    norm: Norm | None, x_TH: torch.Tensor, residual_TH: torch.Tensor | None, ops: Ops
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normed sum of input and residual stream, and the sum; without a norm, the sum twice."""
    if norm is None:
        sum_TH = x_TH if residual_TH is None else x_TH + residual_TH
        return sum_TH, sum_TH
    weight_H: torch.Tensor = norm.module.weight.to(x_TH.dtype)  # type: ignore[operator]
    if norm.kind == "rms":
        done = add_rms_norm(x_TH, residual_TH, weight_H, norm.epsilon, offset=norm.offset, kernels=ops.kernels)
        return done.normed_RH, done.sum_RH
    sum_TH = x_TH if residual_TH is None else x_TH + residual_TH
    bias_H: torch.Tensor | None = getattr(norm.module, "bias", None)
    bias_H = None if bias_H is None else bias_H.to(x_TH.dtype)
    return functional.layer_norm(sum_TH, weight_H.shape, weight_H, bias_H, norm.epsilon), sum_TH


def _norm_heads(norm: Norm, x_TX: torch.Tensor, ops: Ops) -> torch.Tensor:
    """Norm over each head."""
    weight_D: torch.Tensor = norm.module.weight  # type: ignore[assignment]
    width = len(weight_D)
    normed_TKD, _ = _norm(norm, x_TX.unflatten(1, (-1, width)), None, ops)
    return normed_TKD.flatten(1)


class ModelPart(Protocol):
    """This rank's part of a model that ranks divide: layers (`engine/models/pipeline.py`) or shares of its parameters
    (`engine/models/sharding.py`).
    """

    is_last: bool
    """False if a later pipeline stage has the output layer."""
    drawing: Any
    """The language model that completions are drawn from; or None."""

    def refresh(self, version: int, /) -> None:
        """Bring `drawing` to the weights of `version`."""
        ...

    def hidden_states(
        self, architecture: Architecture, ids_T: torch.Tensor, positions_T: torch.Tensor, ops: Ops, /
    ) -> torch.Tensor:
        """As `hidden_states`; `[T, 0]` unless `is_last`."""
        ...


class Decoder:
    """A transformers model as the trainer computes it: packed sequences, gradients to its own parameters.

    `shares_prefixes` tells those who pack rows whether to compute common prefixes once. With gradient checkpointing,
    the last layers whose activations fit in `kept_bytes` are not computed again in the backward pass. `part` is set
    when ranks divide the model.

    Raises:
        UnsupportedArchitecture: the model has a part that is not known, or other logits than transformers gives it.
    """

    is_divided = False
    """True if other ranks compute a part of each layer (`engine/models/tensor_parallel.py`)."""

    def __init__(
        self, model: PreTrainedModel, kernels: Kernels, *, shares_prefixes: bool = True, kept_bytes: int = 0
    ) -> None:
        self.kernels = kernels
        self.shares_prefixes = shares_prefixes
        self.part: ModelPart | None = None
        self._model = model
        self._kept_bytes = kept_bytes
        self._read()

    def _read(self) -> None:
        self._parts = parts_of(self._model)
        self.architecture = describe(self._model)
        self.ropes = RopeTables(self.architecture.ropes)
        self._settle(self._model)

    def refresh(self) -> None:
        """Read the model again if a part of it was replaced, such as a layer, a parameter object, an adapter or the
        rotary frequencies. Then there is a new `architecture`, of which others may keep something. Weights that change
        in place need no refresh, and a model that ranks divide has none.

        Raises:
            UnsupportedArchitecture: it has a part now that is not known.
        """
        if self.part is not None or self.is_divided:
            return
        if not self.ropes.are_current or not same_parts(self._parts, parts_of(self._model)):
            self._read()

    @property
    def output(self) -> OutputLayer:
        """The output layer."""
        return self.architecture.output_layer

    def across(self, ops: Ops) -> Ops:
        """`ops`, and with a divided decoder what the ranks exchange."""
        return ops

    @property
    def num_frozen(self) -> int:
        """Number of the first layers that are not trained: 0 if the embedding is, or if ranks divide the model."""
        architecture = self.architecture
        before = [module for module in (architecture.embedding, architecture.positions) if module is not None]
        if self.part is not None or self.is_divided or any(map(_is_trained, before)):
            return 0
        layers = layers_of(self._model)
        return next((number for number, layer in enumerate(layers) if _is_trained(layer)), len(layers))

    @torch.no_grad()
    def frozen_states(self, ids_T: torch.Tensor, segments: Segments) -> torch.Tensor:
        """States `[T, H]` after the first `num_frozen` layers, from which `hidden_states` goes on, to the same bits."""
        architecture, count, ops = self.architecture, self.num_frozen, self._ops(segments)
        x_TH = embedded(architecture, ids_T, segments.positions(ids_T.device))
        x_TH, residual_TH = after_layers(architecture, range(count), x_TH, ops)
        following = [block.norm_attention for block in architecture.blocks[count:]]
        return _norm((*following, architecture.final_norm)[0], x_TH, residual_TH, ops)[1]

    def hidden_states(
        self,
        ids_T: torch.Tensor,
        lengths: Sequence[int] | Segments,
        *,
        on_layer: OnLayer | None = None,
        frozen: tuple[int, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Hidden states `[T, H]` of concatenated sequences; sequence b has `lengths[b]` tokens.

        With `Segments`, sequences may continue an earlier one: a shared prefix is computed once, with the same bits.
        `frozen` are a number of first layers and the states `[T, H]` after them, which are not computed again.

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
        ops = self._ops(segments, on_layer)
        if frozen is not None:
            return from_layer(frozen[0], self.architecture, frozen[1], ops)
        compute = hidden_states if self.part is None else self.part.hidden_states
        return compute(self.architecture, ids_T, positions_T, ops)

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Logits `[N, V]` of some of the hidden states."""
        return logits(self.architecture, hidden_NH, self._ops(Segments((), ())))

    def _settle(self, model: PreTrainedModel) -> None:
        """Prove the architecture, or the same with the other order of rotary positions."""
        if (rounded := int8_map_of(model)) is not None:  # proved before
            self.architecture = self.architecture.turning_neighbours if rounded.turns_neighbours else self.architecture
            return
        if model.config.model_type in _TESTED_TYPES and type(model).__module__.startswith("transformers."):
            return
        try:
            prove(model, self.architecture, self._numbers)
        except UnsupportedArchitecture as error:
            self.architecture = self.architecture.turning_neighbours
            try:
                prove(model, self.architecture, self._numbers)
            except UnsupportedArchitecture:
                raise error from None

    def _numbers(self, ids_T: torch.Tensor, on_layer: OnLayer) -> torch.Tensor:
        """The logits of one sequence; the hidden states of a trunk."""
        hidden_TH = self.hidden_states(ids_T, [len(ids_T)], on_layer=on_layer)
        return hidden_TH if self.architecture.output is None else self.logits(hidden_TH)

    def _ops(self, segments: Segments, on_layer: OnLayer | None = None) -> Ops:
        packing, num_positions = Packing(segments), max(1, segments.longest)

        def attend(
            layer: int, block: Block, q_TX: torch.Tensor, k_TY: torch.Tensor, v_TY: torch.Tensor
        ) -> torch.Tensor:
            rope = None if block.rope is None else self.ropes.get(block.rope, num_positions)
            return attend_packed(q_TX, k_TY, v_TY, rope, packing, block.attention, kernels=self.kernels)

        num_recomputed = self._num_recomputed(segments.num_tokens)
        return self.across(Ops(module_outputs, expert_outputs, attend, self.kernels, num_recomputed, on_layer))

    def _num_recomputed(self, num_tokens: int) -> int:
        blocks = self.architecture.blocks
        if not num_tokens or not _uses_checkpoints(self._model):
            return 0
        return max(0, len(blocks) - self._kept_bytes // activation_bytes(self.architecture, num_tokens))


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def module_outputs(projection: Projection, x_TH: torch.Tensor) -> Sequence[torch.Tensor]:
    """The outputs of a projection from the model's own modules, with adapters and gradients."""
    if len(x_TH) == 1:  # torch may compute a product of one row with another kernel, with other bits
        return [output_TH[:1] for output_TH in module_outputs(projection, x_TH.expand(2, -1))]
    parts = zip(projection.modules, projection.adapters, strict=True)
    if is_int8(projection):
        outputs = [
            y_TO if adapter is None else _adapted(module, adapter, x_TH, y_TO)
            for (module, adapter), y_TO in zip(parts, base_outputs(projection, x_TH), strict=True)
        ]
    else:
        outputs = [
            _base(module, x_TH) if adapter is None else _adapted(module, adapter, x_TH) for module, adapter in parts
        ]
    return outputs if len(outputs) == len(projection.sizes) else outputs[0].split(projection.sizes, dim=-1)


def expert_outputs(stack: Stack, x_RI: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """The outputs of experts from the model's own parameters, with gradients."""
    return grouped_linear(x_RI, stack.weight_EOI, stack.bias_EO, counts)


def _base(module: nn.Module, x_TH: torch.Tensor) -> torch.Tensor:
    """The output of a linear map without its adapter; one with forward hooks is called, so that they run."""
    weight_OI = weight_of(module)
    if is_exact(x_TH, weight_OI) and not module._forward_hooks and not module._forward_pre_hooks:
        return linear(x_TH, weight_OI, module.bias)  # type: ignore[arg-type]
    return module(x_TH)


def _adapted(
    module: nn.Module, adapter: Adapter, x_TH: torch.Tensor, base_TO: torch.Tensor | None = None
) -> torch.Tensor:
    """The output of a linear map with its adapter; `base_TO` is that without, where it is known."""
    dropped_TH = x_TH if adapter.dropout is None else adapter.dropout(x_TH)
    inner_TR = low_rank(dropped_TH, adapter.down_RI, adapter.scaling)
    if adapter.magnitude_O is None:
        return add_low_rank(_base(module, x_TH) if base_TO is None else base_TO, inner_TR, adapter.up_OR)
    weight_OI, bias_O = weight_of(module), module.bias
    y_TO = add_low_rank(linear(x_TH, weight_OI) if base_TO is None else base_TO, inner_TR, adapter.up_OR)
    return stretch(y_TO, dora_scale(adapter, weight_OI), bias_O)  # type: ignore[arg-type]


def _uses_checkpoints(model: PreTrainedModel) -> bool:
    """True with gradient checkpointing: activations are recomputed in the backward pass."""
    return model.training and any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
