"""Training the top layers alone: less memory and a shorter backward pass, at some loss of reach."""

from torch import nn
from transformers import PreTrainedModel

from tunesmith.core.errors import ModelError


def freeze_lower_layers(model: PreTrainedModel, num_trainable_layers: int | None) -> None:
    """Leave the last `num_trainable_layers` layers and the final norm of `model` trainable and freeze the rest.

    None trains everything. The embedding and a tied output head are frozen, as are all layers below: the backward pass
    ends where the frozen part begins (the `num_layers_unfrozen` of trlX).

    Raises:
        ModelError: if the model has fewer layers, or its layers cannot be found.
    """
    if num_trainable_layers is None:
        return
    layers = _layers(model)
    if num_trainable_layers > len(layers):
        raise ModelError(
            f"model.num_trainable_layers is {num_trainable_layers}, but the model has {len(layers)} layers; "
            f"give 1 to {len(layers)}, or null for all of it"
        )
    model.requires_grad_(False)
    for layer in layers[-num_trainable_layers:]:
        layer.requires_grad_(True)
    for name, module in model.base_model.named_children():
        if "norm" in name or name == "ln_f":
            module.requires_grad_(True)


def _layers(model: PreTrainedModel) -> nn.ModuleList:
    """The stack of transformer layers: the module list of the trunk with the most parameters."""
    lists = [module for module in model.base_model.children() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise ModelError(
            f"the layers of {type(model).__name__} cannot be found; set model.num_trainable_layers to null"
        )
    return max(lists, key=lambda stack: sum(p.numel() for p in stack.parameters()))
