"""Low-rank adapters on a transformers model, through PEFT: add, remove, merge, and copy them.

PEFT replaces linear layers inside the model, which keeps its class, configuration and trunk. The base is frozen; only
the adapters are trained, in the dtype of the base, with float32 masters in the optimizer.
"""

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tunesmith.base.config.sections import LoraSection
from tunesmith.base.core.errors import MissingDependencyError, ModelError
from tunesmith.engine.kernels.native import shared
from tunesmith.engine.models.adapter import Adapter, is_idle, merged, row_lengths
from tunesmith.engine.models.architecture import (
    UnsupportedArchitecture,
    adapter_of,
    base_layer,
    is_adapted,
    weight_of,
)
from tunesmith.engine.models.decoder import Decoder
from tunesmith.engine.models.int8_base import has_int8_base, int8_tensors, round_base, unround

ADAPTER = "default"
"""PEFT's name for the one adapter of a model."""

_SCORE = "score"


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """The base of adapters: name and seed as in a recipe, the number of layers kept, and True if it is in 8 bits."""

    name: str
    seed: int = 0
    num_layers: int | None = None
    is_int8: bool = False


def add_adapters(model: PreTrainedModel, section: LoraSection, base: AdapterBase) -> None:
    """Freeze `model` and add fresh adapters to its linear layers; nothing if the section's rank is 0.

    The model's outputs are unchanged to the bit until the first update. Depends on the section alone; the global random
    generator is not used.

    Raises:
        ModelError: `target_modules` names no linear layer, or the output layer.
        MissingDependencyError: PEFT is not installed.
    """
    if not section.rank:
        return
    targets = section.target_modules
    config = peft().LoraConfig(
        r=section.rank,
        lora_alpha=2 * section.rank if section.alpha is None else section.alpha,
        lora_dropout=section.dropout,
        target_modules=targets[0] if targets == ("all-linear",) else list(targets),
        use_dora=section.use_dora,
        use_rslora=section.use_rslora,
        fan_in_fan_out=has_transposed_weights(model),
        task_type="CAUSAL_LM" if model.can_generate() else "SEQ_CLS",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(section.seed)
        inject(model, config, base)
    for adapter, weight_OI in _adapters(model):
        if adapter.magnitude_O is not None:  # rounded as ours, so that the outputs stay the same to the bit
            adapter.magnitude_O.data.copy_(row_lengths(adapter, weight_OI))


def inject(model: PreTrainedModel, config: Any, base: AdapterBase) -> None:
    """Put the adapters of a PEFT `config` into `model` and freeze all else but a reward model's head.

    Raises:
        ModelError: the adapters fit no layer, or one that they may not change.
    """
    dtype = next(model.parameters()).dtype
    if has_adapters(model):
        raise ModelError("the model has adapters already; merge them with `tunesmith export --merge` first")
    if config.target_modules == "all-linear" and not (model.get_output_embeddings() is not None or _has_score(model)):
        raise ModelError("`all-linear` needs a model whose output layer is known; name the modules in target_modules")
    if config.target_modules == "all-linear" and any(parameter.dim() == 3 for parameter in model.parameters()):
        # PEFT would adapt the experts and their router as well, which are no linear layers.
        heads = (model.get_output_embeddings(), getattr(model, _SCORE, None))
        linear = [name for name, part in model.named_modules() if _is_linear(part) and part not in heads]
        config.target_modules = {name.rpartition(".")[2] for name in linear}
    model.requires_grad_(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peft().inject_adapter_in_model(config, model, ADAPTER)
    except ValueError as error:
        names = sorted({name.rpartition(".")[2] for name, part in model.named_modules() if _is_linear(part)})
        raise ModelError(
            f"no adapter fits {list(config.target_modules)!r} ({str(error).splitlines()[0]}); this model's linear "
            f"layers are {', '.join(names)}"
        ) from error
    for name, layer in model.named_modules():
        if is_adapted(layer) and (name.rpartition(".")[2] == _SCORE or not _is_linear(base_layer(layer))):
            raise ModelError(f"{name} cannot have an adapter; leave it out of target_modules")
    if is_adapted(model.get_output_embeddings() or nn.Identity()):
        raise ModelError("the output layer cannot have an adapter; leave it out of target_modules")
    for layer in _adapted_layers(model):
        _normalise(layer, dtype)
    if _has_score(model):
        model.score.requires_grad_(True)
    model.train(model.training)
    model.adapter_base = base  # type: ignore[assignment]


def hold_base_in_int8(model: PreTrainedModel, name: str) -> None:
    """Round the frozen base of the adapters of `model` to 8 bits, in place (`engine/models/int8_base.py`).

    Raises:
        ModelError: there are no adapters, or the model is on a GPU or of a family that transformers alone computes.
    """
    if not has_adapters(model):
        raise ModelError(
            f"model.base is int8, but {name!r} has no adapters, so its weights are trained or drawn from as they are; "
            "set model.lora.rank, or leave model.base out"
        )
    round_weights(model, "model.base", name)
    rounded = int8_tensors(model)
    for parameter in model.parameters():
        if id(parameter) not in rounded:  # one tensor that still lies in the mapped file keeps all of it in memory
            parameter.data = parameter.data.clone()
    model.adapter_base = replace(base_of(model), is_int8=True)  # type: ignore[assignment]


def round_weights(model: PreTrainedModel, key: str, name: str) -> None:
    """Round the linear maps of `model`, which are frozen, to 8 bits, in place; `key` of the recipe asked for it.

    Raises:
        ModelError: the model is on a GPU or of a family that transformers alone computes.
    """
    if has_int8_base(model):
        return
    if model.device.type == "cuda":
        raise ModelError(f"{key} int8 is computed by kernels for CPUs; leave {key} out on a GPU")
    try:
        trunk: Any = model if model.can_generate() else model.base_model
        architecture = Decoder(trunk, shared("auto")).architecture
    except UnsupportedArchitecture as error:
        raise ModelError(f"{key} int8 is not for {name!r}: {error}; leave {key} out") from error
    round_base(model, architecture)


def has_adapters(module: nn.Module) -> bool:
    """True if PEFT put adapters anywhere into `module`."""
    return any(is_adapted(part) for part in module.modules())


def base_of(model: PreTrainedModel) -> AdapterBase:
    """The base of `model`, which has adapters, with its current number of layers."""
    base: AdapterBase = model.adapter_base  # type: ignore[assignment]
    return replace(base, num_layers=model.config.get_text_config().num_hidden_layers)


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of `module` that training changes, by name. A checkpoint stores these: frozen layers and the base
    of adapters are loaded by the model's name.
    """
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def require_gradients(module: nn.Module) -> None:
    """Make all of `module` trainable; of a model with adapters, these alone."""
    if not has_adapters(module):
        module.requires_grad_(True)
    for layer in _adapted_layers(module):
        for parameter in _adapter_parameters(layer):
            parameter.requires_grad_(True)


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of `model`; with adapters, they are copied and the frozen base is shared."""
    shared: dict[int, Any] = {}
    if has_adapters(model):
        shared = {id(parameter): parameter for parameter in model.parameters() if not parameter.requires_grad}
    return copy.deepcopy(model, shared)


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of `model` in evaluation mode without gradients: the reference policy.

    With adapters it is a `twin`; if all are zero they are removed, so it is the base itself.
    """
    reference = twin(model)
    if all(is_idle(adapter, weight_OI) for adapter, weight_OI in _adapters(reference)):
        take_off(reference)
    for parameter in reference.parameters():
        parameter.grad = None
    return reference.requires_grad_(False).eval()


def merge(model: PreTrainedModel) -> None:
    """Merge the adapters into the weights, in place, which gives a plain model; of weights in 8 bits, into what these
    stand for.
    """
    unround(model)
    for adapter, weight_OI in _adapters(model):
        weight_OI.data.copy_(merged(adapter, weight_OI))
    take_off(model)


def take_off(model: PreTrainedModel) -> None:
    """Remove the adapters of `model`, in place, which gives the base."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_adapted(child):
                setattr(parent, name, base_layer(child))
    for attribute in ("peft_config", "adapter_base"):
        if hasattr(model, attribute):
            delattr(model, attribute)


def has_transposed_weights(model: nn.Module) -> bool:
    """True for GPT-2, whose linear layers have transposed weights."""
    return any(isinstance(part, Conv1D) for part in model.modules())


def peft() -> Any:
    """The PEFT library. Raises MissingDependencyError if it is not installed."""
    try:
        import peft as library
    except ImportError as error:
        raise MissingDependencyError("adapters need the peft package; run `pip install 'tunesmith[lora]'`") from error
    return library


class _Dropout(nn.Module):
    """Dropout in passes with gradients only; a reference policy, for example, sees the whole input."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, with a `share` of its numbers zero and the others larger while gradients are taken."""
        return functional.dropout(x, self.share, training=torch.is_grad_enabled())


def _normalise(layer: Any, dtype: torch.dtype) -> None:
    """Cast the adapters to the dtype of the base, and replace their dropout by ours."""
    for parameter in _adapter_parameters(layer):
        parameter.data = parameter.data.to(dtype)
    for name, dropout in layer.lora_dropout.items():
        if isinstance(dropout, nn.Dropout):
            layer.lora_dropout[name] = _Dropout(dropout.p)


def _adapted_layers(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if is_adapted(part)]


def _adapters(module: nn.Module) -> Iterator[tuple[Adapter, torch.Tensor]]:
    """The active adapters, each with the weight that it changes, `[O, I]`."""
    for layer in _adapted_layers(module):
        if (adapter := adapter_of(layer)) is not None:
            yield adapter, weight_of(base_layer(layer))


def _adapter_parameters(layer: Any) -> list[nn.Parameter]:
    return [parameter for name, parameter in layer.named_parameters() if not name.startswith("base_layer.")]


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


def _has_score(model: PreTrainedModel) -> bool:
    return isinstance(getattr(model, _SCORE, None), nn.Linear)
