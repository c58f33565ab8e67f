"""Compares what the decoder makes of fixed tokens with transformers' own numbers, when a model is loaded.

A reader that goes by the names of parts cannot see what a model does with them. This is what makes it safe.

Shape legend: T tokens, H hidden, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from tunesmith.engine.models.architecture import Architecture, UnsupportedArchitecture

_NUM_TOKENS = 24

_ERROR = {torch.bfloat16: 0.05, torch.float16: 0.05, torch.float32: 1e-3, torch.float64: 1e-4}
"""Largest distance from transformers' numbers, as a share of their norm. In float64 too it rounds norms, angles and
routers to float32."""

Compute = Callable[[torch.Tensor, Callable[[str, torch.Tensor], None]], torch.Tensor]
"""Logits `[T, V]` of one sequence, or a trunk's hidden states `[T, H]`; calls its second argument with the name and the
output of each layer."""


@torch.no_grad()
def prove(model: PreTrainedModel, architecture: Architecture, compute: Compute) -> None:
    """Nothing, if `compute` gives the numbers of `model`'s own forward pass. It takes both passes over 24 tokens.

    Numbers that are not finite prove nothing, and are left to those who use the model.

    Raises:
        UnsupportedArchitecture: other numbers; the message names the first layer with another output.
    """
    size: int = architecture.embedding.num_embeddings  # type: ignore[assignment]
    ids_T = torch.tensor([7919 * (i + 1) % size for i in range(min(_NUM_TOKENS, architecture.context_length))])
    ids_T, layers = ids_T.to(architecture.device), dict[str, torch.Tensor]()
    own, ours = _own_forward(model, ids_T), compute(ids_T, layers.__setitem__)
    theirs = own.logits if "logits" in own else own.last_hidden_state
    if not bool(theirs.isfinite().all()) or is_close(ours, theirs[0]):
        return
    states = _own_forward(model, ids_T, output_hidden_states=True).hidden_states
    places = zip(layers, states[1:-1], strict=False)  # the last is after the norm
    place = next((name for name, right in places if not is_close(layers[name], right[0])), "the last layer")
    raise UnsupportedArchitecture(f"its numbers are others than its parts give, from {place} on")


def _own_forward(model: PreTrainedModel, ids_T: torch.Tensor, **wanted: bool) -> Any:
    """The output of `model` in evaluation mode.

    It is computed by the method of its class: a `forward` that accelerate put on the model enters one autocast object,
    which stays on for good if it is entered again from within, and a proof may run within a call of the model.
    """
    mask_T = torch.ones_like(ids_T)
    given = {"attention_mask": mask_T[None], "use_cache": False, "return_dict": True, **wanted}
    with in_evaluation_mode(model):
        return type(model).forward(model, ids_T[None], **given)


@contextmanager
def in_evaluation_mode(model: PreTrainedModel) -> Iterator[None]:
    """A block in which `model` is in evaluation mode; after it each module has the mode that it had."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes.items():
            module.training = is_training


def is_close(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
    """True if both are one computation up to the rounding of `dtype`, by default the narrower one of both."""
    dtype = dtype or min(ours.dtype, theirs.dtype, key=lambda dtype: dtype.itemsize)
    return bool((ours - theirs).double().norm() <= _ERROR[dtype] * theirs.double().norm())
