"""A model as bytes, without its parameters; and the parameters, published once for each version, with a digest."""

import io
import pickle
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models.fingerprint import fingerprint_of
from tunesmith.engine.models.lora import trained_parameters
from tunesmith.engine.rollout.workers.messages import Handle, Load, Part, Tensors


def pickled(content: object, parameters: Mapping[str, nn.Parameter]) -> bytes:
    """`content`, which holds modules, as bytes, with a name in the place of each of the `parameters`."""
    names = {id(parameter): name for name, parameter in parameters.items()}

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: object) -> str | None:
            return names.get(id(obj)) if isinstance(obj, nn.Parameter) else None

    stream = io.BytesIO()
    Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(content)
    return stream.getvalue()


def unpickled(content: bytes, parameters: Mapping[str, nn.Parameter]) -> Any:
    """The object that `pickled` was given, with these parameters in place of its own."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: str) -> nn.Parameter:
            return parameters[pid]

    return Unpickler(io.BytesIO(content)).load()


class Publisher:
    """Publishes copies of the parameters of `module`, those that training changes apart from the frozen ones.

    `publish` stores tensors and returns their handle, `discard` frees one. A copy is never changed: the trainer's
    updates in place cannot reach a worker in the middle of its work.
    """

    def __init__(
        self,
        module: nn.Module,
        publish: Callable[[Tensors], Handle],
        discard: Callable[[Handle], None],
        kernels: Kernels,
    ) -> None:
        self._module, self._kernels = module, kernels
        self._publish, self._discard = publish, discard
        self._published: list[Part] = []
        self._replaced: list[Part] = []
        self._edition = 0

    @torch.no_grad()
    def current(self, in_use: Collection[Load] = ()) -> Load:
        """The message with the parameters as they are now; what changed is copied, however that happened. Older copies
        are freed but for `in_use`.
        """
        self._free_but(in_use)
        parameters, trained = dict(self._module.named_parameters()), trained_parameters(self._module)
        weights = fingerprint_of(parameters, kernels=self._kernels)
        parts: list[Part] = []
        for is_frozen in (True, False):
            tensors = {name: one for name, one in parameters.items() if (name not in trained) == is_frozen}
            if tensors:
                parts.append(self._part(tensors, weights.digest(tensors), is_frozen, in_use))
        if parts != self._published:
            self._replaced += [part for part in self._published if part not in parts]
            self._published, self._edition = parts, self._edition + 1
            self._free_but(in_use)
        return Load(self._edition, tuple(parts))

    def _part(self, tensors: Tensors, digest: str, is_frozen: bool, in_use: Collection[Load]) -> Part:
        for part in self._published:
            if part.is_frozen == is_frozen:
                if part.digest == digest:
                    return part
                self._published.remove(part)  # free it before there is another copy, if nobody needs it
                self._replaced.append(part)
                self._free_but(in_use)
        return Part(self._publish(tensors), digest, is_frozen)

    def _free_but(self, in_use: Collection[Load]) -> None:
        for part in list(self._replaced):
            if not any(part in load.parts for load in in_use):
                self._replaced.remove(part)
                self._discard(part.handle)
