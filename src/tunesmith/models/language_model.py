"""A language model and the way in which its log-probs are computed."""

from dataclasses import dataclass

from transformers import PreTrainedModel

from tunesmith.core.log import get_logger
from tunesmith.kernels.native import Kernels
from tunesmith.models.architecture import UnsupportedArchitecture
from tunesmith.models.decoder import Decoder

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """`module` with its flat decoder; `decoder` is None where transformers' own forward is used."""

    module: PreTrainedModel
    decoder: Decoder | None
    kernels: Kernels


def language_model(module: PreTrainedModel, kernels: Kernels) -> LanguageModel:
    """`module`, with the flat decoder if it stands on a CPU and is of a family that the decoder knows."""
    if module.device.type != "cpu":
        return LanguageModel(module, None, kernels)
    try:
        return LanguageModel(module, Decoder(module, kernels), kernels)
    except UnsupportedArchitecture as error:
        _log.info("the model is computed by transformers, which is slower than the own decoder: %s", error)
        return LanguageModel(module, None, kernels)
