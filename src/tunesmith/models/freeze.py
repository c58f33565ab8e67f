"""Parts of a stack of layers: train the top ones alone, or keep the lowest ones alone as a smaller model."""

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
    layers = _layers(model, num_trainable_layers, "model.num_trainable_layers")
    model.requires_grad_(False)
    for layer in layers[-num_trainable_layers:]:
        layer.requires_grad_(True)
    for name, module in model.base_model.named_children():
        if "norm" in name or name == "ln_f":
            module.requires_grad_(True)


def keep_lower_layers(model: PreTrainedModel, num_layers: int | None) -> None:
    """Drop every transformer layer of `model` above the lowest `num_layers`; None keeps all. The final norm stays on
    top.

    A scalar head needs less depth than a language model: it costs a fraction to train, and to ask.

    Raises:
        ModelError: if the model has fewer layers, or its layers cannot be found.
    """
    if num_layers is None:
        return
    layers = _layers(model, num_layers, "reward_model.num_layers")
    del layers[num_layers:]
    config = model.config.get_text_config()
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]


def _layers(model: PreTrainedModel, num_wanted: int, key: str) -> nn.ModuleList:
    """The stack of transformer layers: the module list of the trunk with the most parameters.

    `key` is the recipe's key that asks for `num_wanted` of them.
    """
    lists = [module for module in model.base_model.children() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise ModelError(f"the layers of {type(model).__name__} cannot be found; leave its layers as they are")
    layers = max(lists, key=lambda stack: sum(p.numel() for p in stack.parameters()))
    if num_wanted > len(layers):
        raise ModelError(
            f"{key} is {num_wanted}, but the model has {len(layers)} layers; "
            f"give 1 to {len(layers)}, or null for all of them"
        )
    return layers
