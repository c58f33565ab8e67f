"""The decoder of a reward model or critic: made once, and always that of the model as it is now."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import tiny_classifier
from torch import nn

from tunesmith.base.config.sections import LoraSection
from tunesmith.engine.models import language_model, lora
from tunesmith.engine.models.heads import Critic, RewardModel
from tunesmith.engine.models.language_model import TrunkDecoder
from tunesmith.engine.models.loaded import keep_lower_layers
from tunesmith.engine.models.tiny import tiny_model

LENGTHS = torch.tensor([7, 3, 10])
IDS_BS = torch.randint(3, 259, (3, 10), generator=torch.Generator().manual_seed(0))


def reward_model(*, adapted: bool = False) -> RewardModel:
    loaded = tiny_classifier("llama", initializer_range=0.1)
    if adapted:
        put_on(loaded.model)
    return RewardModel(loaded.model, loaded.tokenizer)


def put_on(model: Any) -> None:
    """Adapters that do something."""
    lora.add_adapters(model, LoraSection(rank=4), lora.AdapterBase("tiny:llama"))
    disturb(model, "lora_B")


def disturb(model: nn.Module, part: str) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A list that grows with every decoder that is made."""
    found: list[object] = []
    original = language_model.Decoder

    def counted(*arguments: Any, **options: Any) -> object:
        found.append(original(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(language_model, "Decoder", counted)
    return found


@pytest.mark.parametrize("adapted", [False, True])
def test_it_is_made_once_for_all_passes_and_training_steps(adapted: bool, made: list[object]) -> None:
    model = reward_model(adapted=adapted)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        assert model.packs_rows
        model(IDS_BS, LENGTHS).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    critic = Critic.from_policy(tiny_model("qwen2").model)
    for _ in range(3):
        critic(IDS_BS, LENGTHS, prompt_lengths_B=torch.tensor([2, 1, 4])).sum().backward()
    assert len(made) == 2


def replace_parameter(model: Any) -> None:
    layer = model.model.layers[0].self_attn.q_proj
    layer.weight = nn.Parameter(layer.weight.detach() + 0.1)


def replace_module(model: Any) -> None:
    model.model.layers[1].mlp = tiny_classifier("llama", seed=5, initializer_range=0.1).model.model.layers[1].mlp


def load_weights(model: Any) -> None:
    model.load_state_dict(tiny_classifier("llama", seed=5, initializer_range=0.1).model.state_dict())


def assign_weights(model: Any) -> None:
    model.load_state_dict(tiny_classifier("llama", seed=5, initializer_range=0.1).model.state_dict(), assign=True)


def turn_otherwise(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 3


def drop_layers(model: Any) -> None:
    keep_lower_layers(model, 1)


def switch(model: Any, on: bool) -> None:
    for layer in model.modules():
        if "lora_A" in layer._modules:
            layer.enable_adapters(on)


def switch_off(model: Any) -> None:
    switch(model, False)


def scale(model: Any) -> None:
    for layer in model.modules():
        if "lora_A" in layer._modules:
            layer.scaling["default"] *= 3


def replace_adapter(model: Any) -> None:
    layer = model.model.layers[0].self_attn.q_proj.lora_B["default"]
    layer.weight = nn.Parameter(layer.weight.detach() + 0.5)


def merge(model: Any) -> None:
    disturb(model, "lora_B")  # so that merging shows
    lora.merge(model)


@pytest.mark.parametrize(
    ("change", "adapted"),
    [
        *((change, False) for change in (replace_parameter, replace_module, load_weights, assign_weights)),
        *((change, False) for change in (turn_otherwise, drop_layers, put_on)),
        *((change, True) for change in (switch_off, scale, replace_adapter, merge, lora.take_off)),
    ],
)
def test_after_a_change_values_and_gradients_are_those_of_the_model_s_own_forward(
    change: Callable[[Any], None], adapted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = reward_model(adapted=adapted)
    before = model(IDS_BS, LENGTHS).detach()
    change(model.model)
    flat = values_and_gradients(model)
    monkeypatch.setattr(TrunkDecoder, "get", lambda self, trunk: None)
    own = values_and_gradients(model)
    assert not torch.allclose(own[""], before, atol=1e-4)
    assert own.keys() == flat.keys()
    for name, expected in own.items():
        assert torch.allclose(flat[name], expected, atol=1e-4 * max(1.0, float(expected.abs().max()))), name


def values_and_gradients(model: RewardModel) -> dict[str, torch.Tensor]:
    model.zero_grad()
    rewards_B = model(IDS_BS, LENGTHS)
    rewards_B.sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"": rewards_B.detach(), **gradients}


def test_adapters_that_are_switched_off_and_on_again_do_what_they_did() -> None:
    model = reward_model(adapted=True)
    with_adapters = model(IDS_BS, LENGTHS)
    switch(model.model, False)
    without = model(IDS_BS, LENGTHS)
    switch(model.model, True)
    assert torch.equal(model(IDS_BS, LENGTHS), with_adapters)
    assert not torch.equal(without, with_adapters)


def test_a_hook_or_weights_of_two_dtypes_turn_to_the_model_s_own_forward_and_back() -> None:
    model = reward_model()
    expected = model(IDS_BS, LENGTHS)
    calls: list[object] = []
    handle = model.model.model.register_forward_hook(lambda *arguments: calls.append(arguments) or None)
    assert not model.packs_rows
    assert torch.allclose(model(IDS_BS, LENGTHS), expected, atol=1e-5) and len(calls) == 1
    handle.remove()
    assert model.packs_rows
    model.model.model.layers[0].mlp.double()
    assert not model.packs_rows
    model.model.model.layers[0].mlp.float()
    assert torch.equal(model(IDS_BS, LENGTHS), expected)


def test_a_critic_of_other_weights_has_their_values() -> None:
    critic, other = (Critic.from_policy(tiny_model("llama", seed=seed).model) for seed in (0, 1))
    for one in (critic, other):
        nn.init.ones_(one.value_head.weight)
    prompt_lengths_B = torch.tensor([2, 1, 4])
    first = critic(IDS_BS, LENGTHS, prompt_lengths_B=prompt_lengths_B)
    critic.trunk = other.trunk
    second = critic(IDS_BS, LENGTHS, prompt_lengths_B=prompt_lengths_B)
    assert torch.equal(second, other(IDS_BS, LENGTHS, prompt_lengths_B=prompt_lengths_B))
    assert not torch.equal(first, second)
