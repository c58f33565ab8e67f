"""Which weights a model has: the one answer, for everything that is made of them and kept, such as packed copies.

Torch's counters of changes in place miss what goes through `parameter.data`, numpy or other kernels, and an owner's
count misses what others change. So the bytes are looked at, and, for what refers to parts of a model, the parts.
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tunesmith.engine.kernels.digest.api import digests
from tunesmith.engine.kernels.native import Kernels


@dataclass(frozen=True, slots=True)
class TensorId:
    """Shape, dtype, and a digest of the bytes of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    digest: int


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Ids of tensors by name: equal where all names, shapes, dtypes and bytes are."""

    tensors: Mapping[str, TensorId]
    _of_object: Mapping[int, TensorId] = field(compare=False, repr=False)

    def of(self, tensor: torch.Tensor) -> TensorId | None:
        """The id of one of the tensors, given as the object that it was when the fingerprint was taken; else None."""
        return self._of_object.get(id(tensor))

    def digest(self, names: Collection[str]) -> str:
        """One text for the tensors of these names; equal texts for equal ones."""
        parts = [
            (name, *self.tensors[name].shape, str(self.tensors[name].dtype), self.tensors[name].digest)
            for name in sorted(names)
        ]
        return hashlib.sha256(repr(parts).encode()).hexdigest()


def fingerprint(module: nn.Module, *, kernels: Kernels) -> Fingerprint:
    """That of all parameters and buffers of `module`, in one pass over their memory: about the time of one decoding
    step of one sequence.
    """
    parameters = module.named_parameters(remove_duplicate=False)
    return fingerprint_of({**dict(parameters), **dict(module.named_buffers(remove_duplicate=False))}, kernels=kernels)


def fingerprint_of(tensors: Mapping[str, torch.Tensor], *, kernels: Kernels) -> Fingerprint:
    """That of these tensors; one that has several names is read once."""
    place = {name: _place(tensor) for name, tensor in tensors.items()}
    each = {place[name]: tensor for name, tensor in tensors.items()}
    numbers = dict(zip(each, digests(list(each.values()), kernels=kernels), strict=True))
    ids = {name: TensorId(tuple(tensor.shape), tensor.dtype, numbers[place[name]]) for name, tensor in tensors.items()}
    return Fingerprint(ids, {id(tensor): ids[name] for name, tensor in tensors.items()})


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for two tensors that are the same memory, read alike."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def parts_of(module: nn.Module) -> list[object]:
    """Everything but bytes that a decoder of `module` depends on: modules, tensors, the state of adapters and hooks.

    The list keeps them alive, so that `same_parts` cannot confuse a new part with a freed one.
    """
    trunk = getattr(module, "base_model", module)
    parts: list[object] = [bool(one._forward_hooks) or bool(one._forward_pre_hooks) for one in (module, trunk)]
    for part in module.modules():
        parts.append(part)
        for parameter in part._parameters.values():
            parts += (None,) if parameter is None else (parameter, parameter.dtype, parameter.shape, parameter.is_cpu)
        parts += part._buffers.values()
        if "lora_A" in part._modules:
            layer: Any = part
            parts += (layer.disable_adapters, layer.merged, *layer.active_adapters, *layer.scaling.values())
    return parts


def same_parts(parts: list[object], others: list[object]) -> bool:
    """True if these are the same objects, or equal ones where they are no tensors or modules."""
    return len(parts) == len(others) and all(map(_is_same, parts, others))


def _is_same(one: object, other: object) -> bool:
    return one is other or (not isinstance(one, torch.Tensor | nn.Module) and type(one) is type(other) and one == other)
