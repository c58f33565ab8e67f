"""A model whose parameters are divided among the ranks: FSDP2 over the data-parallel ones, and tensor parallelism.

A layer's weights are gathered when the decoder computes it, freed, and gathered again in the backward pass, whose
gradients are summed in float32 (or float64) and divided again (`torch.distributed.fsdp.fully_shard`). With tensor
parallelism each rank has the rows of the maps that a layer begins with (queries, keys, values, gate, up), so some heads
and some inner features, and the columns of those that it ends with, whose outputs are summed (Shoeybi et al. 2019,
arXiv 1909.08053, section 3). Adapters, routers and heads are whole on every rank.

Shape legend: T tokens, I inputs, O outputs.
"""

import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from transformers.pytorch_utils import Conv1D

from tunesmith.base.core.errors import ModelError
from tunesmith.engine.distributed import ranks
from tunesmith.engine.distributed.shares import whole
from tunesmith.engine.kernels.linear.exact import linear
from tunesmith.engine.models.adapter import add_low_rank, low_rank
from tunesmith.engine.models.architecture import Architecture, Block, Experts, Projection
from tunesmith.engine.models.decoder import Decoder, Ops, hidden_states, module_outputs
from tunesmith.engine.models.heads import Critic, RewardModel
from tunesmith.engine.models.language_model import LanguageModel
from tunesmith.engine.models.loaded import layers_of
from tunesmith.engine.models.lora import twin


def shard(trained: LanguageModel | Critic | RewardModel, *, draws: bool = False) -> None:
    """Divide the parameters of a model that is about to be trained, in place, if the recipe asks for it.

    Copies of it must have been made before. With `draws` a whole copy is kept to draw completions from.

    Raises:
        ModelError: a part that cannot be divided; the message names it.
    """
    mesh = ranks.mesh()
    if mesh is None:
        return
    decoder = trained.decoder
    if decoder is None:
        raise ModelError("scale.shard: parameters needs the packed forward pass of a known model on a CPU")
    if isinstance(trained, LanguageModel):
        root = trained.module
    else:
        root = trained.trunk if isinstance(trained, Critic) else trained.model.base_model
        trained.pin()
    if decoder.architecture.dtype not in (torch.float32, torch.float64):
        raise ModelError("scale.shard: parameters trains in float32; set model.dtype to float32")
    drawing = None
    if draws and isinstance(trained, LanguageModel):
        copy = twin(trained.module).requires_grad_(False)
        own = Decoder(copy, trained.kernels, shares_prefixes=decoder.shares_prefixes)
        drawing = LanguageModel(copy, own, trained.kernels)
    decoder.part = Sharding(root, decoder, mesh, drawing)


class Sharding:
    """The division of one model's parameters, and how its decoder computes with them.

    `drawing` is a copy that is not divided, from which completions are drawn.
    """

    is_last = True

    def __init__(self, root: nn.Module, decoder: Decoder, mesh: DeviceMesh, drawing: LanguageModel | None) -> None:
        self.drawing = drawing
        self._root: Any = root
        self._version = 0
        self._tensor = _TensorParallel(mesh["tensor"])
        if mesh["tensor"].size() > 1:
            decoder.architecture = self._tensor.divide(decoder.architecture)
        self._layers: list[Any] = list(layers_of(root))  # type: ignore[arg-type]
        # Nothing here works in place on what a layer returns.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        kept = set(_kept_whole(root, decoder.architecture))
        parts: list[Any] = [*self._layers, root]
        for module in parts:
            module.within = operator.call
            fully_shard(module, mesh=mesh["data"], ignored_params=kept)
            module.set_gradient_divide_factor(1.0)  # losses have the denominators of the whole batch
            module.set_force_sum_reduction_for_comms(True)  # gloo can do no other
            module.set_reduce_scatter_unused_params(True, recurse=False)
            register_fsdp_forward_method(module, "within")
        self._place = ranks.add_pass(self._empty_pass)
        self._decoder = decoder

    def hidden_states(
        self, architecture: Architecture, ids_T: torch.Tensor, positions_T: torch.Tensor, ops: Ops
    ) -> torch.Tensor:
        """Hidden states after the final norm, `[T, H]`, with each layer's weights gathered while it is computed."""
        ranks.announce(self._place)
        ops = replace(ops, linear=self._tensor.linear, in_layer=self._in_layer)
        # No arguments, because FSDP2 looks for tensors in them, also within records.
        return self._root.within(lambda: hidden_states(architecture, ids_T, positions_T, ops))

    def refresh(self, version: int) -> None:
        """Copy the weights of `version` to `drawing`. All ranks must call it."""
        if self.drawing is None or version == self._version:
            return
        free_gathered(self._root)
        copies = dict(self.drawing.module.named_parameters())
        with torch.no_grad():
            for name, parameter in self._root.named_parameters():
                if parameter.requires_grad:
                    copies[name].copy_(whole(parameter))
        self._version = version

    def _in_layer(self, layer: int, compute: Callable[..., Any], *arguments: Any) -> Any:
        return self._layers[layer].within(compute, *arguments)

    def _empty_pass(self) -> torch.Tensor:
        """A pass of a rank that has nothing to compute, so that the others find it where weights are gathered."""
        ids_T = torch.zeros(1, dtype=torch.int64, device=self._decoder.architecture.device)
        numbers = [self._decoder.hidden_states(ids_T, [1]).sum()]
        if self._decoder.architecture.output is not None:  # else a tied weight had the embedding's sparse gradient
            numbers.append(self._decoder.output.weight_VH[0].sum())
        return 0 * torch.stack(numbers).sum()


class _TensorParallel:
    """The linear maps of one tensor-parallel group, of which each rank has a part."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._kinds: dict[int, str] = {}

    def divide(self, architecture: Architecture) -> Architecture:
        """`architecture` with this rank's heads and inner features; the weights are replaced by its part of them."""
        check_division(architecture, self._mesh.size())
        return replace(architecture, blocks=tuple(self._divided(block) for block in architecture.blocks))

    def linear(self, projection: Projection, x_TI: torch.Tensor) -> Sequence[torch.Tensor]:
        """The outputs of a projection: of this rank's rows of the weights, or summed over the columns of all ranks."""
        kind = self._kinds.get(id(projection))
        if kind is None:
            return module_outputs(projection, x_TI)
        if len(x_TI) == 1:  # as in `module_outputs`
            return [output[:1] for output in self.linear(projection, x_TI.expand(2, -1))]
        compute = self._rows if kind == "rows" else self._columns
        return compute(projection, x_TI)

    def _rows(self, projection: Projection, x_TI: torch.Tensor) -> list[torch.Tensor]:
        own_TI, outputs = self._shared(x_TI), list[torch.Tensor]()
        for module, adapter in zip(projection.modules, projection.adapters, strict=True):
            y_TO = linear(own_TI, _local(module.weight), _local(module.bias))
            if adapter is not None:
                dropped_TI = x_TI if adapter.dropout is None else adapter.dropout(x_TI)
                inner_TR = self._shared(low_rank(dropped_TI, adapter.down_RI, adapter.scaling))
                y_TO = add_low_rank(y_TO, inner_TR, self._part(self._shared(adapter.up_OR), 0))
            outputs.append(y_TO)
        return outputs

    def _columns(self, projection: Projection, x_TI: torch.Tensor) -> list[torch.Tensor]:
        module: Any
        (module,), (adapter,) = projection.modules, projection.adapters
        y_TO = self._summed(linear(x_TI, _local(module.weight)))
        if adapter is not None:
            dropped_TI = x_TI if adapter.dropout is None else adapter.dropout(x_TI)
            down_RI = self._part(self._shared(adapter.down_RI), 1)
            y_TO = add_low_rank(y_TO, self._summed(low_rank(dropped_TI, down_RI, adapter.scaling)), adapter.up_OR)
        return [y_TO if module.bias is None else y_TO + module.bias]

    def _divided(self, block: Block) -> Block:
        size, settings, mlp = self._mesh.size(), block.attention, block.mlp
        assert not isinstance(mlp, Experts), "refused before"
        heads = replace(settings, num_heads=settings.num_heads // size, num_kv_heads=settings.num_kv_heads // size)
        rows, columns = (block.qkv, mlp.gate_up), (block.out, mlp.down)
        for dim, projections in enumerate((rows, columns)):
            for module in (module for one in projections for module in one.modules):
                self._divide(module, dim)
        qkv, gate_up = (replace(one, sizes=tuple(width // size for width in one.sizes)) for one in rows)
        self._kinds |= {id(qkv): "rows", id(gate_up): "rows", id(block.out): "columns", id(mlp.down): "columns"}
        norms = {
            name: replace(norm, module=_OfAllHeads(norm.module, self._shared))
            for name in ("q_norm", "k_norm")
            if (norm := getattr(block, name)) is not None
        }
        return replace(block, qkv=qkv, attention=heads, mlp=replace(mlp, gate_up=gate_up), **norms)

    def _divide(self, module: nn.Module, dim: int) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if name == "bias" and dim == 1:
                continue
            part = DTensor.from_local(self._part(parameter.detach(), dim).clone(), self._mesh, [Shard(dim)])
            setattr(module, name, nn.Parameter(part, requires_grad=parameter.requires_grad))

    def _part(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.chunk(self._mesh.size(), dim)[self._mesh.get_local_rank()]

    def _shared(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, which all ranks have, for computing with a part of the weights: its gradient is summed."""
        spread = DTensor.from_local(tensor, self._mesh, [Replicate()], run_check=False)
        return spread.to_local(grad_placements=[Partial()])

    def _summed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks."""
        part = DTensor.from_local(tensor, self._mesh, [Partial()], run_check=False)
        return part.redistribute(placements=[Replicate()]).to_local()


class _OfAllHeads:
    """The norm of each head, whose weight has gradients from the heads of all ranks."""

    def __init__(self, module: nn.Module, shared: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._module, self._shared = module, shared

    @property
    def weight(self) -> torch.Tensor:
        """Its weight."""
        return self._shared(self._module.weight)  # type: ignore[arg-type]

    @property
    def bias(self) -> torch.Tensor | None:
        """Its bias."""
        bias: Any = getattr(self._module, "bias", None)
        return None if bias is None else self._shared(bias)


def free_gathered(module: nn.Module) -> None:
    """Free weights that are still gathered after a pass without gradients, so that `module` has its own parts again."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def gather(modules: Mapping[str, nn.Module]) -> None:
    """Put the whole parameters into the trained modules of rank 0. All ranks must call it; no pass may follow."""
    for module in modules.values():
        free_gathered(module)
    parts = [part for module in modules.values() for part in module.modules()]
    for part in parts:
        if isinstance(part, FSDPModule):
            part.__class__ = type(part).__bases__[1]  # as it was, which is written into the config
    found: dict[int, nn.Parameter] = {}  # one for those that are tied
    owned = [(part, name, one) for part in parts for name, one in part._parameters.items() if isinstance(one, DTensor)]
    for part, name, parameter in owned:
        if id(parameter) not in found:
            found[id(parameter)] = nn.Parameter(whole(parameter), parameter.requires_grad)
        if ranks.rank() == 0:
            part._parameters[name] = found[id(parameter)]


def _local(tensor: Any) -> Any:
    """This rank's part, with a gradient to it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _kept_whole(root: nn.Module, architecture: Architecture) -> Iterator[nn.Parameter]:
    """Small parameters that records hold by themselves: adapters, routers, attention sinks."""
    for name, parameter in root.named_parameters():
        if ".lora_" in name:
            yield parameter
    for block in architecture.blocks:
        if isinstance(block.attention.sinks_H, nn.Parameter):
            yield block.attention.sinks_H
        if isinstance(block.mlp, Experts):
            yield from block.mlp.router.parameters


def check_division(architecture: Architecture, size: int) -> None:
    """Raise ModelError for the first part that `size` ranks cannot divide."""
    for block in architecture.blocks:
        if problem := _problem(block, size):
            raise ModelError(f"scale.tensor is {size}, but {problem}; set scale.tensor to 1")


def _problem(block: Block, size: int) -> str:
    settings, mlp = block.attention, block.mlp
    if isinstance(mlp, Experts):
        return "the model is a mixture of experts, which is not divided"
    projections = (block.qkv, block.out, mlp.gate_up, mlp.down)
    modules = [module for one in projections for module in one.modules]
    if any(isinstance(module, Conv1D) for module in modules):
        return "the model has transposed weights (GPT-2), which are not divided"
    if len(block.qkv.modules) != 3 or len(mlp.gate_up.modules) != len(mlp.gate_up.sizes):
        return "queries, keys and values, or gate and up, are one matrix, which is not divided"
    if settings.num_heads % size or settings.num_kv_heads % size:
        return f"{settings.num_heads} heads and {settings.num_kv_heads} of keys and values are no multiple of it"
    if any(width % size for width in mlp.gate_up.sizes):
        return f"the {mlp.gate_up.sizes[0]} inner features of its MLP are no multiple of it"
    if settings.sinks_H is not None:
        return "the model has attention sinks, which are not divided"
    norms = [norm for norm in (block.q_norm, block.k_norm) if norm is not None]
    if any(len(norm.module.weight) != settings.head_dim for norm in norms):  # type: ignore[arg-type]
        return "queries and keys are normalised over all heads together"
    adapters = [adapter for one in projections for adapter in one.adapters if adapter is not None]
    if any(adapter.magnitude_O is not None for adapter in adapters):
        return "adapters of DoRA are not divided"
    return ""
