"""A language model, or the trunk of one, and the way in which its states and log-probs are computed."""

from dataclasses import dataclass

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


def trunk_decoder(trunk: PreTrainedModel, kernels: Kernels) -> Decoder | None:
    """The flat decoder of a model without output layer; None where transformers' own forward is used."""
    if trunk.device.type != "cpu":
        return None
    try:
        return Decoder(trunk, kernels)
    except UnsupportedArchitecture:
        return None
