"""A model as bytes, without its parameters; and the parameters, published once for each version, with a digest."""

import hashlib
import io
import pickle
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from tunesmith.models.lora import trained_parameters
from tunesmith.rollout.workers.messages import Handle, Load, Part, Tensors


def digest(tensors: Tensors) -> str:
    """SHA-256 of the bytes of all tensors, in the order of their names."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(tensors[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


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
        self, module: nn.Module, publish: Callable[[Tensors], Handle], discard: Callable[[Handle], None]
    ) -> None:
        trained = trained_parameters(module)
        frozen = {name: parameter for name, parameter in module.named_parameters() if name not in trained}
        self._parts = [(part, is_frozen) for part, is_frozen in ((frozen, True), (trained, False)) if part]
        self._publish, self._discard = publish, discard
        self._published: list[Part | None] = [None] * len(self._parts)
        self._versions: list[tuple[int, int] | None] = [None] * len(self._parts)
        self._replaced: list[Part] = []
        self._edition = 0

    @torch.no_grad()
    def current(self, version: int, in_use: Collection[Load] = ()) -> Load:
        """The message with the parameters as they are now. They are copied if `version`, the owner's count of changes
        of the trained ones, or torch's own count, is another than last time. Older copies are freed but for `in_use`.
        """
        self._free_but(in_use)
        for index, (part, is_frozen) in enumerate(self._parts):
            # Kernels update memory without torch's knowledge, but not that of frozen parameters.
            now = 0 if is_frozen else version, sum(parameter._version for parameter in part.values())
            if now == self._versions[index]:
                continue
            found, before = digest(part), self._published[index]
            if before is None or found != before.digest:
                if before is not None:
                    self._replaced.append(before)
                    self._free_but(in_use)
                self._published[index] = Part(self._publish(part), found, is_frozen)
                self._edition += 1
            self._versions[index] = now
        return Load(self._edition, tuple(part for part in self._published if part is not None))

    def _free_but(self, in_use: Collection[Load]) -> None:
        for part in list(self._replaced):
            if not any(part in load.parts for load in in_use):
                self._replaced.remove(part)
                self._discard(part.handle)
