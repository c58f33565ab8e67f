"""Adapters: what they compute, what they share with their base, and folders that PEFT's own loader reads.

The oracles are PEFT itself, and dense weights in float64.
"""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tunesmith.base.config.algorithms.grpo import GRPORecipe
from tunesmith.base.config.algorithms.ppo import PPORecipe
from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import ModelError
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models import lora
from tunesmith.engine.models.adapter_folder import load_adapters, read_base
from tunesmith.engine.models.architecture import adapter_of, base_layer, is_adapted, weight_of
from tunesmith.engine.models.export import ModelCard, save_final, save_merged
from tunesmith.engine.models.heads import Critic
from tunesmith.engine.models.language_model import language_model
from tunesmith.engine.models.load import load_policy, load_reward_model, new_reward_model
from tunesmith.engine.models.loaded import keep_lower_layers
from tunesmith.engine.models.lora import frozen_copy
from tunesmith.engine.models.tiny import FAMILIES

CARD = ModelCard(base_model="tiny:llama", algorithm="GRPO")
LENGTHS = [9, 4, 6]
IDS_T = torch.randint(3, 259, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
KINDS = [{}, {"use_dora": True}, {"use_rslora": True, "alpha": 3.0}]
CASES = [
    *((family, {}) for family in FAMILIES),
    *((family, {"use_dora": True}) for family in ("llama", "qwen2", "gpt2", "gemma2")),
    ("llama", KINDS[2]),
]


def section(family="llama", **lora_keys):
    keys = {"rank": 4, **lora_keys}
    return ModelSection.model_validate({"name": f"tiny:{family}", "lora": keys})


def adapted(family="llama", dtype=torch.float32, **lora_keys):
    """A policy whose adapters do something."""
    loaded = load_policy(section(family, **lora_keys), dtype=dtype)
    disturb(loaded.model)
    return loaded


def disturb(model):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "magnitude" in name:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


def flat_logits(model):
    decoder = language_model(model, Kernels()).decoder
    assert decoder is not None
    return decoder.logits(decoder.hidden_states(IDS_T, LENGTHS))


def plain_logits(model):
    rows = IDS_T.split(LENGTHS)
    return torch.cat([model(row[None]).logits[0] for row in rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_fresh_adapters_change_no_bit_and_no_global_generator(family, kind, dtype):
    before = torch.get_rng_state()
    model = load_policy(section(family, **kind), dtype=dtype).model
    assert torch.equal(torch.get_rng_state(), before)
    base = load_policy(ModelSection(name=f"tiny:{family}"), dtype=dtype).model
    has_bias = family in ("gpt2", "qwen2") and kind.get("use_dora")  # DoRA adds a bias after it has stretched
    if has_bias and dtype == torch.bfloat16:
        assert torch.allclose(flat_logits(model), flat_logits(base), atol=0.05)
    elif has_bias:
        assert torch.allclose(flat_logits(model), flat_logits(base), atol=1e-5)
    else:
        assert torch.equal(flat_logits(model), flat_logits(base))
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained and all("lora_" in name for name in trained)


def test_the_first_adapters_are_a_function_of_their_seed():
    first, again, other = (load_policy(section(seed=seed)).model for seed in (5, 5, 6))
    states = [lora.trained_parameters(model) for model in (first, again, other)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert not all(torch.equal(states[0][key], states[2][key]) for key in states[0])


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_values_and_gradients_are_those_of_dense_weights_in_float64(family, kind):
    model = adapted(family, dtype=torch.float64, **kind).model
    weight_TV = torch.randn(len(IDS_T), 259, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (flat_logits(model) * weight_TV).sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.requires_grad}
    value = flat_logits(model).detach()

    twin, leaves = dense_twin(model)
    logits = flat_logits(twin)
    (logits * weight_TV).sum().backward()
    assert torch.allclose(value, logits, rtol=1e-10, atol=1e-10)
    assert found.keys() == leaves.keys()
    for name, leaf in leaves.items():
        scale = max(1.0, float(leaf.grad.abs().max()))
        assert torch.allclose(found[name] / scale, leaf.grad / scale, rtol=0, atol=1e-10), name


def dense_twin(model):
    """The base with `W + s B A`, or DoRA's `m (W + s B A) / |W + s B A|`, as the weights of its own forward."""
    leaves = {name: p.detach().clone().requires_grad_() for name, p in lora.trained_parameters(model).items()}
    patched = {}
    for name, layer in model.named_modules():
        if not is_adapted(layer):
            continue
        down, up = leaves[f"{name}.lora_A.default.weight"], leaves[f"{name}.lora_B.default.weight"]
        weight_OI = weight_of(base_layer(layer)) + layer.scaling["default"] * (up @ down)
        magnitude = leaves.get(f"{name}.lora_magnitude_vector.default.weight")
        if magnitude is not None:
            weight_OI = weight_OI * (magnitude / weight_OI.detach().norm(dim=1))[:, None]
        patched[name] = weight_OI
    twin = lora.twin(model)
    lora.take_off(twin)
    for name, weight_OI in patched.items():
        module, bias = twin.get_submodule(name), twin.get_submodule(name).bias

        def forward(x, weight_OI=weight_OI, bias=bias):
            return linear(x, weight_OI, bias)

        module.forward = forward
    return twin, leaves


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_peft_itself_loads_the_folder_and_computes_the_same(family, kind, tmp_path):
    loaded = adapted(family, **kind)
    folder = save_final(loaded.model, loaded.tokenizer, tmp_path / "final", CARD)
    base = load_policy(ModelSection(name=f"tiny:{family}"), dtype=torch.float32).model
    theirs = PeftModel.from_pretrained(base, folder).eval()
    assert torch.allclose(plain_logits(theirs), plain_logits(loaded.model), atol=1e-6)
    assert torch.allclose(plain_logits(theirs), flat_logits(loaded.model), atol=2e-5)
    again = load_policy(ModelSection(name=str(folder)), dtype=torch.float32).model
    assert torch.equal(flat_logits(again), flat_logits(loaded.model))
    assert not (folder / "model.safetensors").exists()
    assert "AutoPeftModelForCausalLM" in (folder / "README.md").read_text()


def test_bfloat16_adapters_come_back_bit_for_bit(tmp_path):
    loaded = adapted("qwen2", dtype=torch.bfloat16, use_dora=True)
    folder = save_final(loaded.model, loaded.tokenizer, tmp_path / "final", CARD)
    again = load_policy(ModelSection(name=str(folder)), dtype=torch.bfloat16).model
    assert torch.equal(flat_logits(again), flat_logits(loaded.model))


def test_a_folder_that_peft_wrote_is_read(tmp_path):
    loaded = load_policy(ModelSection(name="tiny:qwen3"), dtype=torch.float32)
    base = save_final(loaded.model, loaded.tokenizer, tmp_path / "base", CARD)
    config = LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config).eval()
    disturb(theirs)
    theirs.save_pretrained(tmp_path / "adapters")
    ours = load_policy(ModelSection(name=str(tmp_path / "adapters")), dtype=torch.float32)
    assert torch.allclose(flat_logits(ours.model), plain_logits(theirs), atol=2e-5)
    assert ours.tokenizer.chat_template == loaded.tokenizer.chat_template


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_base_bit_for_bit_and_no_second_copy(kind, dtype):
    model = load_policy(section(**kind), dtype=dtype).model
    reference = frozen_copy(model)
    disturb(model)
    base = load_policy(ModelSection(name="tiny:llama"), dtype=dtype).model
    assert torch.equal(flat_logits(reference), flat_logits(base))
    assert not torch.equal(flat_logits(model), flat_logits(base))
    frozen = {p.data_ptr() for name, p in model.named_parameters() if "lora_" not in name}
    assert {p.data_ptr() for p in reference.parameters()} == frozen
    assert not any(p.requires_grad for p in reference.parameters())


def test_the_reference_of_adapters_that_were_trained_has_them_too():
    model = adapted().model
    reference, before = frozen_copy(model), flat_logits(model)
    disturb(model)
    assert torch.equal(flat_logits(reference), before)
    assert not any(p.requires_grad for p in reference.parameters())
    assert all(p.requires_grad for p in lora.trained_parameters(model).values())


def test_a_critic_shares_the_base_and_has_adapters_of_its_own():
    model = load_policy(section()).model
    critic = Critic.from_policy(model)
    policy_pointers = {p.data_ptr() for p in model.parameters()}
    trained = {name for name, p in critic.named_parameters() if p.requires_grad}
    assert {"value_head.weight", "value_head.bias"} < trained
    assert not any(p.data_ptr() in policy_pointers for p in critic.parameters() if p.requires_grad)
    assert all(p.data_ptr() in policy_pointers for p in critic.parameters() if not p.requires_grad)


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_merged_adapters_are_a_plain_model_that_does_the_same(family, kind, tmp_path):
    loaded = adapted(family, **kind)
    folder = save_final(loaded.model, loaded.tokenizer, tmp_path / "final", CARD)
    merged = AutoModelForCausalLM.from_pretrained(save_merged(folder, tmp_path / "merged"), dtype=torch.float32).eval()
    assert torch.allclose(plain_logits(merged), flat_logits(loaded.model), atol=5e-5)
    assert not lora.has_adapters(merged)
    with pytest.raises(ModelError, match="holds no adapters"):
        save_merged(tmp_path / "merged", tmp_path / "twice")


@pytest.mark.parametrize("num_layers", [None, 1])
def test_a_reward_model_makes_the_round_trip_with_its_head_and_its_layers(num_layers, tmp_path):
    model = new_reward_model(section("gpt2"), dtype=torch.float32)
    keep_lower_layers(model.model, num_layers)
    disturb(model.model)
    torch.nn.init.normal_(model.model.score.weight)
    assert model.model.score.weight.requires_grad
    folder = save_final(model, model.tokenizer, tmp_path / "final", CARD)
    assert read_base(folder, "it").num_layers == (num_layers or 2)
    ids_BS, lengths_B = IDS_T[:12].view(2, 6), torch.tensor([6, 4])
    expected_B = model(ids_BS, lengths_B)
    for again in (new_reward_model(ModelSection(name=str(folder)), dtype=torch.float32), loaded_reward(folder)):
        assert torch.equal(again(ids_BS, lengths_B), expected_B)
    merged = load_reward_model(str(save_merged(folder, tmp_path / "merged")), dtype=torch.float32)
    assert torch.allclose(merged(ids_BS, lengths_B), expected_B, atol=1e-5)
    if num_layers is None:
        plain = new_reward_model(ModelSection(name="tiny:gpt2"), dtype=torch.float32)
        base = save_final(plain, plain.tokenizer, tmp_path / "base", CARD)
        classifier = AutoModelForSequenceClassification.from_pretrained(base, dtype=torch.float32, num_labels=1)
        theirs = PeftModel.from_pretrained(classifier, folder).eval()
        assert torch.allclose(theirs(ids_BS[:1]).logits[0], expected_B[:1], atol=1e-5)


def loaded_reward(folder):
    return load_reward_model(str(folder), dtype=torch.float32)


def test_a_reward_model_starts_from_the_adapters_of_a_policy(tmp_path):
    loaded = adapted()
    folder = save_final(loaded.model, loaded.tokenizer, tmp_path / "final", CARD)
    model = new_reward_model(ModelSection(name=str(folder)), dtype=torch.float32)
    lora.merge(loaded.model)
    trunk, expected = model.model.base_model.state_dict(), loaded.model.base_model.state_dict()
    assert all(torch.equal(trunk[key], expected[key]) for key in expected)


def test_dropout_is_where_gradients_are_taken_and_nowhere_else():
    model = adapted(dropout=0.5).model
    with torch.no_grad():
        assert torch.equal(flat_logits(model), flat_logits(adapted().model))
    assert not torch.equal(flat_logits(model), flat_logits(model))


@pytest.mark.parametrize("recipe", [PPORecipe, GRPORecipe])
def test_dropout_is_refused_where_two_passes_are_compared(recipe):
    with pytest.raises(ValueError, match=r"model\.lora\.dropout is 0\.1.*set it to 0"):
        recipe.model_validate({"model": {"lora": {"rank": 4, "dropout": 0.1}}})


def test_adapters_and_trainable_layers_exclude_each_other():
    with pytest.raises(ValueError, match="both say what is trained"):
        ModelSection.model_validate({"lora": {"rank": 4}, "num_trainable_layers": 2})


@pytest.mark.parametrize(
    ("targets", "message"),
    [(["query"], "linear layers are .*q_proj"), (["lm_head"], "output layer"), (["embed_tokens"], "cannot have an")],
)
def test_wrong_targets_are_named_with_what_there_is(targets, message):
    with pytest.raises(ModelError, match=message):
        load_policy(section(target_modules=targets))


@pytest.mark.parametrize(
    ("key", "value"),
    [("peft_type", "VERA"), ("lora_bias", True), ("modules_to_save", ["lm_head"]), ("init_lora_weights", "pissa")],
)
def test_other_methods_and_options_of_peft_are_refused(key, value, tmp_path):
    loaded = adapted()
    folder = save_final(loaded.model, loaded.tokenizer, tmp_path / "final", CARD)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(ModelError, match="LoRA and DoRA without further options are known"):
        load_policy(ModelSection(name=str(folder)))


def test_what_does_not_fit_is_refused(tmp_path):
    loaded = adapted()
    folder = save_final(loaded.model, loaded.tokenizer, tmp_path / "final", CARD)
    with pytest.raises(ModelError, match="asks for others"):
        load_policy(ModelSection.model_validate({"name": str(folder), "lora": {"rank": 4}}))
    with pytest.raises(ModelError, match="scores nothing"):
        load_reward_model(str(folder))
    with pytest.raises(ModelError, match="no adapter fits"):
        load_adapters(load_policy(ModelSection(name="tiny:gpt2")).model, folder, "it")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "r": 5}))
    with pytest.raises(ModelError, match="do not fit their base"):
        load_policy(ModelSection(name=str(folder)))
    (folder / "base.json").write_text(json.dumps({"name": str(folder), "seed": 0, "num_layers": None}))
    with pytest.raises(ModelError, match="holds adapters itself"):
        load_policy(ModelSection(name=str(folder)))
    (folder / "base.json").write_text("[]")
    with pytest.raises(ModelError, match="no JSON object"):
        load_policy(ModelSection(name=str(folder)))
    (folder / "base.json").unlink()
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ModelError, match="can run code when read"):
        load_policy(ModelSection(name=str(folder)))


def test_an_adapter_that_is_switched_off_is_not_computed():
    model = adapted().model
    base = load_policy(ModelSection(name="tiny:llama"), dtype=torch.float32).model
    for layer in model.modules():
        if is_adapted(layer):
            layer.enable_adapters(False)
    assert torch.equal(flat_logits(model), flat_logits(base))
    assert all(adapter_of(layer) is None for layer in model.modules())


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [({}, 2.0), ({"alpha": 3}, 0.75), ({"use_rslora": True}, 4.0), ({"use_rslora": True, "alpha": 3}, 1.5)],
)
def test_adapters_are_scaled_as_the_keys_say(keys, scaling):
    """Of rank 4: by alpha / 4, or by alpha / 2."""
    found = [adapter_of(layer) for layer in adapted(**keys).model.modules() if is_adapted(layer)]
    assert found and {adapter.scaling for adapter in found} == {scaling}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_has_lengths_that_were_trained_though_no_direction_was(dtype):
    model = load_policy(section(use_dora=True), dtype=dtype).model
    before = flat_logits(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1.5)
    assert torch.equal(flat_logits(frozen_copy(model)), flat_logits(model))
    assert not torch.equal(flat_logits(model), before)
