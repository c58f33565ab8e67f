"""A language model and how its log-probs are computed: by the flat decoder, by its trunk, or by its own forward."""

import contextlib
from dataclasses import dataclass

from transformers import PreTrainedModel

from tunesmith.base.config.sections import ModelSection
from tunesmith.engine.kernels.logprob.head import OutputLayer
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models.architecture import UnsupportedArchitecture
from tunesmith.engine.models.decoder import Decoder
from tunesmith.engine.models.fingerprint import parts_of, same_parts
from tunesmith.engine.models.lora import frozen_copy, round_weights


@dataclass(frozen=True, slots=True)
class TrunkForward:
    """The trunk's own forward over padded rows, then our output layer, which never holds all logits."""

    output: OutputLayer


@dataclass(frozen=True, slots=True)
class FullForward:
    """The model's own forward over padded rows, with its own logits. `reason` says why.

    With `is_textbook` it makes the logits of every position, and autograd keeps whatever it likes; without, only those
    that are scored.
    """

    reason: str = ""
    is_textbook: bool = False


Backend = Decoder | TrunkForward | FullForward
"""Implementation that computes log-probs; see `engine/models/logprob.py`."""


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A causal language model with the backend that computes its log-probs."""

    module: PreTrainedModel
    backend: Backend
    kernels: Kernels

    @property
    def decoder(self) -> Decoder | None:
        """The flat decoder; None with another backend."""
        return self.backend if isinstance(self.backend, Decoder) else None

    @property
    def is_elsewhere(self) -> bool:
        """True if a later pipeline stage has its output layer."""
        return self.decoder is not None and self.decoder.part is not None and not self.decoder.part.is_last


def language_model(module: PreTrainedModel, kernels: Kernels | None = None) -> LanguageModel:
    """`module`, a causal language model, with the best backend: on a CPU the flat decoder, if its family is known."""
    return model_of_recipe(module, ModelSection(), kernels)


def model_of_recipe(module: PreTrainedModel, section: ModelSection, kernels: Kernels | None = None) -> LanguageModel:
    """`module`, a causal language model, with the backend and by default the kernels that the recipe's section names.

    A family that is not known has the backend `FullForward`.
    """
    kernels = kernels or Kernels(section.kernels)
    if section.forward == "full":
        return LanguageModel(module, FullForward("model.forward is full", is_textbook=True), kernels)
    try:
        packs = section.forward == "auto" and module.device.type == "cpu"
        decoder = Decoder(module, kernels, shares_prefixes=section.share_prefixes)
        if not packs and (part := decoder.architecture.needs_decoder):
            raise UnsupportedArchitecture(part)
        backend = decoder if packs else TrunkForward(decoder.output)
    except UnsupportedArchitecture as error:
        backend = FullForward(str(error))
    return LanguageModel(module, backend, kernels)


def reference_of(policy: LanguageModel, section: ModelSection) -> LanguageModel:
    """A frozen copy of `policy` as it is now, with the weights that `section.reference` names.

    Raises:
        ModelError: they are to be in 8 bits, and the model is on a GPU or of a family that transformers alone computes.
    """
    module = frozen_copy(policy.module)
    if section.reference == "int8":
        round_weights(module, "model.reference", section.name)
    return model_of_recipe(module, section, policy.kernels)


class TrunkDecoder:
    """The flat decoder of a model without output layer, cached until the model changes.

    Between two passes layers may be dropped, weights replaced, adapters added, switched off or merged. Describing a
    model takes milliseconds, comparing its parts with the cached ones a fraction of one. A trunk whose parameters are
    divided among ranks does not change, and is pinned.
    """

    def __init__(self, section: ModelSection) -> None:
        self._section = section
        self._kernels = Kernels(section.kernels)
        self._parts: list[object] = []
        self._decoder: Decoder | None = None
        self.is_pinned = False

    def get(self, trunk: PreTrainedModel) -> Decoder | None:
        """The decoder of `trunk` as it is now; None where transformers' own forward is used."""
        parts = self._parts if self.is_pinned else parts_of(trunk)
        if not same_parts(parts, self._parts) or (self._decoder is not None and not self._decoder.ropes.are_current):
            self._decoder, self._parts = None, parts
            if self._section.forward == "auto" and trunk.device.type == "cpu":
                with contextlib.suppress(UnsupportedArchitecture):
                    shares = self._section.share_prefixes
                    self._decoder = Decoder(trunk, self._kernels, shares_prefixes=shares)
        return self._decoder
