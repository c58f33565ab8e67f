"""A language model and the way in which its log-probs are computed."""

from dataclasses import dataclass

from transformers import PreTrainedModel

from tunesmith.kernels.native import Kernels
from tunesmith.models.architecture import UnsupportedArchitecture
from tunesmith.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """`module` with its flat decoder. Where transformers' own forward is used it is None, and `reason` says why."""

    module: PreTrainedModel
    decoder: Decoder | None
    kernels: Kernels
    reason: str = ""


def language_model(module: PreTrainedModel, kernels: Kernels) -> LanguageModel:
    """`module`, with the flat decoder if it stands on a CPU and is of a family that the decoder knows."""
    if module.device.type != "cpu":
        return LanguageModel(module, None, kernels, f"the model is on a device of type {module.device.type}")
    try:
        return LanguageModel(module, Decoder(module, kernels), kernels)
    except UnsupportedArchitecture as error:
        return LanguageModel(module, None, kernels, str(error))
