"""Records of the parts of a decoder, which `engine/models/reader.py` reads and `engine/models/decoder.py` computes.

The records hold the model's own modules, never copies, so every user sees the trained weights.
Shape legend: H hidden, F half of the rotated dimensions of a head.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tunesmith.base.core.errors import ModelError
from tunesmith.engine.kernels.attention.records import AttentionSettings
from tunesmith.engine.kernels.gated.api import Activation
from tunesmith.engine.kernels.logprob.head import OutputLayer
from tunesmith.engine.models.adapter import Adapter, is_dora


class UnsupportedArchitecture(ModelError):
    """The model has a part that the flat decoder does not support; transformers' own code computes it."""


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm with weight `offset + weight` (Gemma's offset is 1), or LayerNorm with a bias."""

    kind: Literal["rms", "layer"]
    module: nn.Module
    epsilon: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Projection:
    """Linear maps of one input. `sizes` are the output widths of the modules, or of the parts of a single module.

    `adapters` has one entry for each module, None without an adapter.
    """

    modules: tuple[nn.Module, ...]
    sizes: tuple[int, ...]
    adapters: tuple[Adapter | None, ...]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of the modules, without adapters."""
        return [parameter for module in self.modules for parameter in module.parameters()]

    @property
    def weights(self) -> list[torch.Tensor]:
        """The weights, `[out, in]` each."""
        return [weight_of(module) for module in self.modules]


@dataclass(frozen=True, slots=True)
class Stack:
    """One linear map for each expert, the parameter `name` of `module`: weights `[E, O, I]`, or `[E, I, O]` if
    `is_transposed`, and biases `[E, O]`.
    """

    module: nn.Module
    name: str
    is_transposed: bool

    adapters: ClassVar[tuple[Adapter, ...]] = ()

    @property
    def weight(self) -> nn.Parameter:
        """The weights of all experts, as the module holds them."""
        return getattr(self.module, self.name)

    @property
    def bias_EO(self) -> nn.Parameter | None:
        """The biases of all experts."""
        return getattr(self.module, f"{self.name}_bias", None)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of all experts."""
        return [self.weight] if self.bias_EO is None else [self.weight, self.bias_EO]

    @property
    def weight_EOI(self) -> torch.Tensor:
        """All weights, a view."""
        return self.weight.transpose(1, 2) if self.is_transposed else self.weight

    @property
    def weights(self) -> list[torch.Tensor]:
        """The weights of each expert, `[O, I]`."""
        return list(self.weight_EOI)


@dataclass(frozen=True, slots=True)
class RopeSource:
    """Angles are position * frequency_F; cosine and sine are multiplied by `scaling`."""

    frequency_F: torch.Tensor
    scaling: float


@dataclass(frozen=True, slots=True)
class Mlp:
    """`gate_up` has two outputs where the activation of the first gates the second, one where there is no gate."""

    gate_up: Projection
    activation: Activation
    down: Projection


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of gated MLPs. Of the router's softmax the `num_chosen` largest weigh the outputs of their experts;
    with `normalises` they are divided by their sum (Jiang et al., Mixtral, 2024).

    Outputs of `gate_up` are gates and then as many others, or alternate if `is_interleaved`. With a `limit` both are
    clamped to it, gates from above alone, and `gate * sigmoid(alpha * gate) * (up + 1)` takes the activation's place
    (gpt-oss).
    """

    router: Projection
    num_chosen: int
    normalises: bool
    gate_up: Stack
    is_interleaved: bool
    activation: Activation
    limit: float | None
    alpha: float
    down: Stack


@dataclass(frozen=True, slots=True)
class Block:
    """One layer. `rope` is an index into `Architecture.ropes`; norms that a model lacks are None.

    With `is_parallel` attention and MLP have the same input, of which the MLP's may have another norm. `qkv` of one
    output has queries, keys and values of the first head, then of the second, and so on. What attention and MLP add to
    the residual stream is multiplied by `residual_scale`. Rotary positions turn dimensions f and F + f
    of a head, or its first `num_neighbours` pairs of neighbours (Cohere).
    """

    norm_attention: Norm | None
    qkv: Projection
    q_norm: Norm | None
    k_norm: Norm | None
    rope: int | None
    attention: AttentionSettings
    out: Projection
    norm_after_attention: Norm | None
    norm_mlp: Norm | None
    mlp: Mlp | Experts
    norm_after_mlp: Norm | None
    is_parallel: bool
    residual_scale: float
    num_neighbours: int = 0

    @property
    def projections(self) -> tuple[Projection | Stack, ...]:
        """All linear maps."""
        router = (self.mlp.router,) if isinstance(self.mlp, Experts) else ()
        return self.qkv, self.out, *router, self.mlp.gate_up, self.mlp.down


@dataclass(frozen=True, slots=True)
class Architecture:
    """A whole decoder. `positions` is the table of learned positions, where a model has one; `output` is the output
    layer, None for a trunk alone, such as that of a reward model.

    Embeddings are multiplied by `embedding_scale`, and the states before the output layer by `output_scale`.
    """

    embedding: nn.Module
    positions: nn.Module | None
    blocks: tuple[Block, ...]
    ropes: tuple[RopeSource, ...]
    final_norm: Norm
    output: Projection | None
    final_softcap: float | None
    context_length: int
    embedding_scale: float
    output_scale: float

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.final_norm.module.weight.dtype  # type: ignore[return-value]

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return self.final_norm.module.weight.device  # type: ignore[return-value]

    @property
    def head(self) -> Projection:
        """The output layer. Raises ModelError for a trunk, which has none."""
        if self.output is None:
            raise ModelError("the model has no output layer; give a causal language model")
        return self.output

    @property
    def turning_neighbours(self) -> "Architecture":
        """The same with rotary positions that turn neighbouring dimensions, which shows in the numbers alone."""
        counts = [0 if block.rope is None else len(self.ropes[block.rope].frequency_F) for block in self.blocks]
        pairs = zip(self.blocks, counts, strict=True)
        return replace(self, blocks=tuple(replace(block, num_neighbours=count) for block, count in pairs))

    @property
    def needs_decoder(self) -> str:
        """The part that the GPU engine, or our output layer after transformers' trunk, does not compute; or nothing."""
        if any(isinstance(block.mlp, Experts) for block in self.blocks):
            return "its experts run on a CPU only"
        if any(block.attention.sinks_H is not None for block in self.blocks):
            return "its attention sinks run on a CPU only"
        return "its logits are scaled, which runs on a CPU only" if self.output_scale != 1 else ""

    @property
    def output_layer(self) -> OutputLayer:
        """The weights that turn hidden states into logits; the model's own."""
        (module,) = self.head.modules
        return OutputLayer(weight_of(module), module.bias, self.final_softcap)  # type: ignore[arg-type]


def activation_bytes(architecture: Architecture, num_tokens: int) -> int:
    """Upper bound of what a layer keeps for its backward pass: inputs and outputs of its linear maps and norms; under
    autocast also its weights, which are cast anew in each pass.
    """
    block, device = architecture.blocks[0], architecture.device.type
    copies = block.mlp.num_chosen if isinstance(block.mlp, Experts) else 1
    sizes = [  # inputs and outputs of a token
        (copies * sum(weight.shape), 0) if isinstance(one, Stack) else (weight.shape[1], sum(one.sizes))
        for one in block.projections
        for weight in one.weights[:1]
    ]
    num_numbers = num_tokens * (sum(map(sum, sizes)) + 4 * sizes[0][0])
    if not torch.is_autocast_enabled(device):
        return num_numbers * architecture.dtype.itemsize
    num_weights = sum(parameter.numel() for one in block.projections for parameter in one.parameters)
    return (num_numbers + num_weights) * torch.get_autocast_dtype(device).itemsize


def base_layer(module: nn.Module) -> nn.Module:
    """The linear map under a PEFT adapter; `module` itself without one."""
    return module.base_layer if is_adapted(module) else module  # type: ignore[return-value]


def is_adapted(module: nn.Module) -> bool:
    """True if PEFT added a LoRA adapter to this layer."""
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def adapter_of(module: Any) -> Adapter | None:
    """The active adapter of a PEFT layer; None in other layers, and if it is disabled.

    Raises:
        UnsupportedArchitecture: several adapters, one that was merged, or one of a kind that is neither LoRA nor DoRA.
    """
    if not is_adapted(module) or module.disable_adapters:
        return None
    names = [name for name in module.active_adapters if name in module.lora_A]
    if not names and not module.merged:
        return None
    magnitudes = getattr(module, "lora_magnitude_vector", {})
    is_plain = len(names) == 1 and not module.merged and module.lora_A[names[0]].weight.dim() == 2
    if (
        not is_plain
        or module.lora_B[names[0]].bias is not None
        or (names[0] in module.lora_variant) != bool(magnitudes)
    ):
        raise UnsupportedArchitecture("it has several adapters, a merged one, or one that is neither LoRA nor DoRA")
    name = names[0]
    magnitude = magnitudes[name].weight if magnitudes else None
    dropout = module.lora_dropout[name]
    return Adapter(
        module.lora_A[name].weight,
        module.lora_B[name].weight,
        float(module.scaling[name]),
        magnitude,
        None if isinstance(dropout, nn.Identity) else dropout,
    )


def output_size(module: nn.Module) -> int:
    """Output width of a linear map; GPT-2's `Conv1D` has a transposed weight."""
    if "weight" not in module._parameters:  # in 8 bits, of which `weight` makes a copy
        return module.out_features  # type: ignore[return-value]
    return module.weight.shape[1] if isinstance(module, Conv1D) else module.weight.shape[0]  # type: ignore[index]


def joined_bias(projection: Projection) -> torch.Tensor | None:
    """The biases of all modules, 0 where there is none; but for those of modules with DoRA, which come later. None if
    no module has one.
    """
    parts = zip(projection.modules, projection.adapters, strict=True)
    biases = [None if is_dora(adapter) else module.bias for module, adapter in parts]
    given = next((bias for bias in biases if bias is not None), None)
    if given is None:
        return None
    filled = [
        given.new_zeros(output_size(module)) if bias is None else bias  # type: ignore[operator]
        for module, bias in zip(projection.modules, biases, strict=True)
    ]
    return torch.cat(filled)  # type: ignore[arg-type]


def weight_of(module: nn.Module) -> torch.Tensor:
    """The weight as `[out, in]`, a view of the module's own."""
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    return weight.t() if isinstance(module, Conv1D) else weight
