"""Training the top layers alone."""

import pytest
import torch

from tunesmith.base.core.errors import ModelError
from tunesmith.engine.models.loaded import freeze_lower_layers
from tunesmith.engine.models.logprob import token_logps
from tunesmith.engine.models.tiny import FAMILIES, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_last_layer_and_the_final_norm_take_gradients(family):
    model = tiny_model(family).model
    freeze_lower_layers(model, 1)
    ids_BS = torch.arange(12).view(2, 6)
    scores = token_logps(model, ids_BS, torch.tensor([6, 5]), prompt_lengths_B=torch.tensor([2, 1]))
    scores.logp_BT.sum().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained
    assert all(".1." in name or "norm" in name or "ln_f" in name for name in trained)
    assert any(("norm" in name and ".1." not in name) or "ln_f" in name for name in trained)


def test_none_trains_everything_and_too_many_layers_are_refused():
    model = tiny_model("llama").model
    freeze_lower_layers(model, None)
    assert all(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(ModelError, match="is 3, but the model has 2 layers"):
        freeze_lower_layers(model, 3)
