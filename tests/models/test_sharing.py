"""An update that computes nothing twice against plain padded rows: the same gradients, with fewer tokens.

Dimension letters: B sequences, S positions, T completion tokens.
"""

import math
from collections.abc import Callable

import pytest
import torch
from oracles import tiny_classifier
from transformers import BertConfig, BertForSequenceClassification

from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models import decoder as flat
from tunesmith.engine.models.heads import Critic, RewardModel
from tunesmith.engine.models.language_model import (
    FullForward,
    LanguageModel,
    TrunkDecoder,
    TrunkForward,
    language_model,
)
from tunesmith.engine.models.loaded import keep_lower_layers
from tunesmith.engine.models.logprob import TokenScores, token_logps
from tunesmith.engine.models.reader import describe
from tunesmith.engine.models.tiny import FAMILIES, byte_tokenizer, tiny_model

PROMPTS = torch.tensor([19] * 4 + [33] * 3 + [16, 1])
COMPLETIONS = torch.tensor([8, 1, 15, 20, 3, 30, 2, 9, 4])
LENGTHS = PROMPTS + COMPLETIONS


def rows() -> torch.Tensor:
    """Groups of 4 and 3 completions of a prompt, and two rows alone."""
    generator = torch.Generator().manual_seed(0)
    ids_BS = torch.randint(1, 259, (9, 64), generator=generator)
    ids_BS[1:4, :19], ids_BS[5:7, :33] = ids_BS[0, :19], ids_BS[4, :33]
    # The first tokens differ, so that the prompt is all that is common.
    ids_BS[range(9), PROMPTS] = torch.arange(9)
    return ids_BS


def scores_of(model: LanguageModel) -> TokenScores:
    return token_logps(model, rows(), LENGTHS, prompt_lengths_B=PROMPTS, temperature=0.7)


def gradients(model: LanguageModel) -> dict[str, torch.Tensor]:
    """Of a loss with a weight of its own for each token."""
    model.module.zero_grad()
    scores = scores_of(model)
    weight_BT = torch.linspace(-1, 2, scores.logp_BT.numel()).view_as(scores.logp_BT)
    (scores.logp_BT * weight_BT + 0.3 * scores.entropy_BT).sum().backward()
    return {name: p.grad.clone() for name, p in model.module.named_parameters() if p.grad is not None}


def norm(parts: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(part.double().square().sum()) for part in parts.values()))


@pytest.mark.parametrize("choice", ["auto", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_and_shared_gradients_are_those_of_plain_padded_rows(family: str, choice: str) -> None:
    module = tiny_model(family, initializer_range=0.1).model  # 0.2 is noisier than the bound: float32 errs by as much
    packed = gradients(language_model(module, Kernels(choice)))  # type: ignore[arg-type]
    padded = gradients(LanguageModel(module, FullForward(), Kernels("torch")))
    assert packed.keys() == padded.keys()
    assert norm({name: packed[name] - padded[name] for name in packed}) <= 1e-6 * norm(padded)


def counted(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> int:
    """Tokens that go through the decoder meanwhile."""
    counts: list[int] = []
    original = flat.hidden_states

    def counting(architecture: object, ids_T: torch.Tensor, *rest: object) -> torch.Tensor:
        counts.append(len(ids_T))
        return original(architecture, ids_T, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(flat, "hidden_states", counting)
    call()
    return sum(counts)


def test_a_shared_prompt_is_forwarded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = language_model(tiny_model("llama").model, Kernels())
    num_last = len(LENGTHS)  # nothing follows the last token
    expected = 19 + 33 + 16 + 1 + int(COMPLETIONS.sum()) - num_last
    assert counted(monkeypatch, lambda: scores_of(model)) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_without_the_flat_decoder_the_output_layer_goes_in_chunks_all_the_same(family: str) -> None:
    """The way of GPUs: transformers' trunk over padded rows."""
    module = tiny_model(family, initializer_range=0.1).model
    chunked = gradients(LanguageModel(module, TrunkForward(describe(module).output_layer), Kernels("torch")))
    padded = gradients(LanguageModel(module, FullForward(), Kernels("torch")))
    assert norm({name: chunked[name] - padded[name] for name in chunked}) <= 1e-6 * norm(padded)


def own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers compute trunks, over padded rows."""
    monkeypatch.setattr(TrunkDecoder, "get", lambda self, trunk: None)


def gradients_of(module: torch.nn.Module, value: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
    module.zero_grad()
    values = value()
    (values * torch.linspace(-1, 2, values.numel()).view_as(values)).sum().backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_reward_models_have_the_gradients_of_their_own_padded_forward(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = tiny_classifier(family, initializer_range=0.1)
    model = RewardModel(loaded.model, loaded.tokenizer)
    keep_lower_layers(model.model, 1)
    assert model.packs_rows
    packed = gradients_of(model, lambda: model(rows(), LENGTHS))
    own_forward(monkeypatch)
    padded = gradients_of(model, lambda: model(rows(), LENGTHS))
    assert packed.keys() == padded.keys()
    assert norm({name: packed[name] - padded[name] for name in packed}) <= 1e-6 * norm(padded)


@pytest.mark.parametrize("family", FAMILIES)
def test_critics_have_the_gradients_of_their_own_padded_forward(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    critic = Critic.from_policy(tiny_model(family, initializer_range=0.1).model)
    torch.nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(0))
    packed = gradients_of(critic, lambda: critic(rows(), LENGTHS, PROMPTS))
    own_forward(monkeypatch)
    padded = gradients_of(critic, lambda: critic(rows(), LENGTHS, PROMPTS))
    assert packed.keys() == padded.keys()
    assert norm({name: packed[name] - padded[name] for name in packed}) <= 1e-6 * norm(padded)


def test_reward_models_and_critics_compute_no_padding_and_a_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny_classifier("llama")
    model = RewardModel(loaded.model, loaded.tokenizer)
    own = 19 + 33 + 16 + 1 + int(COMPLETIONS.sum())
    assert counted(monkeypatch, lambda: model(rows(), LENGTHS)) == own
    critic = Critic.from_policy(tiny_model("llama").model)
    assert counted(monkeypatch, lambda: critic(rows(), LENGTHS, PROMPTS)) == own - len(LENGTHS)


def test_a_classifier_of_another_kind_runs_its_own_forward() -> None:
    config = BertConfig(
        vocab_size=259, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model = RewardModel(BertForSequenceClassification(config).eval(), byte_tokenizer(), label=1)
    assert not model.packs_rows
    assert model(rows(), LENGTHS).shape == (9,)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma2"])
def test_in_bfloat16_a_shared_row_has_the_bits_of_a_row_alone(family: str) -> None:
    model = language_model(tiny_model(family, dtype=torch.bfloat16).model, Kernels())
    together = scores_of(model)
    for row in range(len(LENGTHS)):
        one = slice(row, row + 1)
        alone = token_logps(model, rows()[one], LENGTHS[one], prompt_lengths_B=PROMPTS[one], temperature=0.7)
        width = int(COMPLETIONS[row])
        assert torch.equal(together.logp_BT[row, :width], alone.logp_BT[0])


def test_gradients_with_sharing_are_the_same_in_every_run() -> None:
    model = language_model(tiny_model("llama", dtype=torch.bfloat16).model, Kernels())
    first, second = gradients(model), gradients(model)
    assert all(torch.equal(first[name], second[name]) for name in first)
