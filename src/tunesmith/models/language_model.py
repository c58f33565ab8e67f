"""A language model, or the trunk of one, and the way in which its states and log-probs are computed."""

import operator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tunesmith.kernels.logprob.head import OutputLayer
from tunesmith.kernels.native import Kernels
from tunesmith.models.architecture import UnsupportedArchitecture, describe
from tunesmith.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """`module` with its flat decoder. Where transformers' own forward is used it is None, and `reason` says why.

    Then `output` is the output layer of a family that is known, so that its logits need not be held all at a time.
    """

    module: PreTrainedModel
    decoder: Decoder | None
    kernels: Kernels
    reason: str = ""
    output: OutputLayer | None = None


def language_model(module: PreTrainedModel, kernels: Kernels) -> LanguageModel:
    """`module`, a causal language model, with the flat decoder if it stands on a CPU and its family is known."""
    try:
        if module.device.type == "cpu":
            return LanguageModel(module, Decoder(module, kernels), kernels)
        reason = f"the model is on a device of type {module.device.type}"
        return LanguageModel(module, None, kernels, reason, describe(module).output_layer)
    except UnsupportedArchitecture as error:
        return LanguageModel(module, None, kernels, str(error))


class TrunkDecoder:
    """The flat decoder of a model without output layer, made once, and anew where the model has become another one.

    Between two passes layers may be dropped, weights replaced, adapters put on, switched off or merged. To describe a
    model takes milliseconds, to see that its parts are the same ones a fraction of one.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._parts: list[object] = []
        self._decoder: Decoder | None = None

    def of(self, trunk: PreTrainedModel) -> Decoder | None:
        """The decoder of `trunk` as it is now; None where transformers' own forward is used."""
        parts = _parts(trunk)
        if len(parts) != len(self._parts) or not all(map(operator.is_, parts, self._parts)):
            self._decoder, self._parts = _decoder_of(trunk, self._kernels), parts
        return self._decoder


def _decoder_of(trunk: PreTrainedModel, kernels: Kernels) -> Decoder | None:
    if trunk.device.type != "cpu":
        return None
    try:
        return Decoder(trunk, kernels)
    except UnsupportedArchitecture:
        return None


def _parts(trunk: nn.Module) -> list[object]:
    """What a decoder of `trunk` refers to, or was decided by: modules, tensors, the state of adapters and hooks.

    They are held by whoever keeps the list, so that none can be confused with a later one.
    """
    parts: list[object] = [bool(trunk._forward_hooks), bool(trunk._forward_pre_hooks)]
    waiting: list[nn.Module | None] = [trunk]
    while waiting:
        module = waiting.pop()
        if module is None:
            continue
        parts.append(module)
        for parameter in module._parameters.values():
            parts += (None,) if parameter is None else (parameter, parameter.dtype, parameter.is_cpu)
        parts += module._buffers.values()
        if "lora_A" in module._modules:
            layer: Any = module
            parts += (layer.disable_adapters, layer.merged, *layer.active_adapters, *layer.scaling.values())
        waiting += module._modules.values()
    return parts
