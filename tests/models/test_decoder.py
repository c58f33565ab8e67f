"""The flat decoder against transformers' own forward: values and gradients, packed, without padding."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tunesmith.base.core.errors import InputError
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models import decoder as flat
from tunesmith.engine.models.architecture import UnsupportedArchitecture
from tunesmith.engine.models.decoder import Decoder, RopeTables
from tunesmith.engine.models.language_model import LanguageModel, language_model
from tunesmith.engine.models.logprob import token_logps
from tunesmith.engine.models.packed_rows import pack_rows
from tunesmith.engine.models.reader import describe
from tunesmith.engine.models.tiny import FAMILIES, tiny_model

LENGTHS = torch.tensor([20, 9, 15, 12, 41])
PROMPTS = torch.tensor([3, 2, 15, 4, 1])


def batch(num_columns: int = 43) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 259, (5, num_columns), generator=generator)


def scores_and_gradient(model, temperature: float = 0.7) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    module = getattr(model, "module", model)
    module.zero_grad()
    scores = token_logps(model, batch(), LENGTHS, prompt_lengths_B=PROMPTS, temperature=temperature)
    weight_BT = torch.linspace(-1, 2, scores.logp_BT.numel()).view_as(scores.logp_BT)
    (scores.logp_BT * weight_BT + 0.3 * scores.entropy_BT).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    return scores.logp_BT.detach(), scores.entropy_BT.detach(), gradients


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_gradients_equal_those_of_transformers(family: str, kernels: str) -> None:
    loaded = tiny_model(family)
    model = language_model(loaded.model, Kernels(kernels))  # type: ignore[arg-type]
    assert model.decoder is not None
    logp_BT, entropy_BT, ours = scores_and_gradient(model)
    plain_logp_BT, plain_entropy_BT, theirs = scores_and_gradient(loaded.model)
    torch.testing.assert_close(logp_BT, plain_logp_BT, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(entropy_BT, plain_entropy_BT, atol=2e-5, rtol=1e-5)
    assert ours.keys() == theirs.keys()
    scale = max(gradient.abs().max().item() for gradient in theirs.values())
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], atol=2e-5 * scale, rtol=1e-3, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_changes_nothing(family: str) -> None:
    loaded = tiny_model(family)
    model = language_model(loaded.model, Kernels())
    _, _, expected = scores_and_gradient(model)
    loaded.model.gradient_checkpointing_enable()
    loaded.model.train()
    _, _, again = scores_and_gradient(model)
    for name, gradient in again.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize(("num_kept", "passes"), [(0, 4), (1, 3), (2, 2)])
def test_the_last_layers_keep_activations_that_fit(num_kept: int, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, computed = tiny_model("llama"), []
    model = language_model(loaded.model, Kernels())
    _, _, expected = scores_and_gradient(model)
    assert model.decoder is not None
    each = flat.activation_bytes(model.decoder.architecture, pack_rows(batch(), LENGTHS - 1).segments.num_tokens)
    decoder = Decoder(loaded.model, Kernels(), kept_bytes=num_kept * each)
    loaded.model.gradient_checkpointing_enable()
    loaded.model.train()
    block = flat._block
    monkeypatch.setattr(flat, "_block", lambda layer, *rest: (computed.append(layer), block(layer, *rest))[1])
    _, _, again = scores_and_gradient(LanguageModel(loaded.model, decoder, Kernels()))
    assert computed == [0, 1, *reversed(range(2 - num_kept))]
    assert len(computed) == passes
    for name, gradient in again.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_activations_are_not_more_than_their_bound(family: str) -> None:
    loaded, kept = tiny_model(family), []
    decoder = Decoder(loaded.model, Kernels())
    ids_T = torch.arange(3, 203)
    parameters = {one.data_ptr() for one in loaded.model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters and storage.data_ptr() not in {one[0] for one in kept}:
            kept.append((storage.data_ptr(), storage.nbytes(), tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        decoder.hidden_states(ids_T, [200])
    bound = 2 * flat.activation_bytes(decoder.architecture, 200)
    assert 0.5 * bound < sum(size for _, size, _ in kept) <= bound + 4 * 200 * 32 * 4  # and the ends of the model


def test_what_stands_beside_a_sequence_does_not_reach_it() -> None:
    decoder = Decoder(tiny_model("llama").model, Kernels("torch"))
    ids_T = batch()[0, :30]
    alone_TH = decoder.hidden_states(ids_T[10:], [20])
    beside_TH = decoder.hidden_states(ids_T, [10, 20])[10:]
    torch.testing.assert_close(beside_TH, alone_TH, atol=1e-6, rtol=1e-5)


def test_a_single_token_is_computed() -> None:
    loaded = tiny_model("llama")
    decoder = Decoder(loaded.model, Kernels())
    logits_NV = decoder.logits(decoder.hidden_states(torch.tensor([7]), [1]))
    torch.testing.assert_close(logits_NV, loaded.model(torch.tensor([[7]])).logits[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", [[3, 4], [0, 8], [9], []])
def test_lengths_that_do_not_fit_are_refused(lengths: list[int]) -> None:
    with pytest.raises(InputError, match="lengths must"):
        Decoder(tiny_model("llama").model, Kernels("torch")).hidden_states(torch.arange(8), lengths)


def test_rope_tables_keep_their_numbers_when_they_grow() -> None:
    ropes = RopeTables(describe(tiny_model("llama").model).ropes)
    short = ropes.get(0, 10)
    long = ropes.get(0, 5000)
    rows = len(short.cos_PF)
    assert len(long.cos_PF) >= 5000
    assert torch.equal(long.cos_PF[:rows], short.cos_PF) and torch.equal(long.sin_PF[:rows], short.sin_PF)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
        ({"hidden_act": "relu"}, "its activation is 'relu'"),
    ],
)
def test_what_the_decoder_does_not_know_is_named(change: dict[str, object], reason: str) -> None:
    config = LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, **change
    )
    with pytest.raises(UnsupportedArchitecture, match=reason):
        describe(LlamaForCausalLM(config))


def test_adapters_and_mixed_dtypes_are_left_to_transformers() -> None:
    model = tiny_model("llama").model
    model.model.layers[0].mlp.up_proj = torch.nn.Sequential(model.model.layers[0].mlp.up_proj)
    with pytest.raises(UnsupportedArchitecture, match="a linear layer is a Sequential"):
        describe(model)
    model = tiny_model("llama").model
    model.model.norm.to(torch.float64)
    with pytest.raises(UnsupportedArchitecture, match="several dtypes"):
        describe(model)
    assert language_model(model, Kernels()).decoder is None


def test_gpt_neox_has_keys_of_each_head_whatever_number_its_config_names() -> None:
    decoder = Decoder(tiny_model("gpt_neox", num_key_value_heads=2).model, Kernels())  # compares the numbers
    assert decoder.architecture.blocks[0].attention.num_kv_heads == 4
