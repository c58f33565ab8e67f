"""Families known by their parts alone: logits, gradients, tokens and bits, training, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tunesmith import train
from tunesmith.base.config.sections import LoraSection
from tunesmith.base.core.errors import InputError
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.pack import pack
from tunesmith.engine.batch.rollout import Group, SamplingParams
from tunesmith.engine.kernels.linear.exact import is_by_onednn
from tunesmith.engine.kernels.linear.grouped import grouped_linear
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models import decoder as flat
from tunesmith.engine.models import tiny
from tunesmith.engine.models.architecture import UnsupportedArchitecture
from tunesmith.engine.models.decoder import Decoder
from tunesmith.engine.models.heads import Critic, RewardModel
from tunesmith.engine.models.language_model import FullForward, LanguageModel, language_model
from tunesmith.engine.models.loaded import LoadedModel
from tunesmith.engine.models.logprob import token_logps
from tunesmith.engine.models.lora import AdapterBase, add_adapters
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.rollout.factory import open_engine
from tunesmith.engine.rollout.native_engine import Native, NativeEngine
from tunesmith.engine.rollout.transformers_backend import TransformersEngine

DENSE = ("gemma", "phi3", "olmo2", "smollm3", "granite", "phi", "gpt_neox", "stablelm", "starcoder2")
MIXTURES = ("mixtral", "olmoe", "qwen3_moe", "gpt_oss")
families = pytest.mark.parametrize("family", DENSE + MIXTURES)
has_onednn = is_by_onednn(torch.ones(2, 2), torch.ones(2, 2))
needs_onednn = pytest.mark.skipif(not has_onednn, reason="torch has no oneDNN here, so nothing is exact in float32")
LENGTHS, PROMPT_LENGTHS = torch.tensor([40, 9, 25]), torch.tensor([3, 2, 20])


def prompts(count: int) -> list[Prompt]:
    """Prompts of 1 to 40 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 41, (count,), generator=generator).tolist()
    drawn = [torch.randint(3, 259, (length,), generator=generator).tolist() for length in lengths]
    return [Prompt(str(index), "", token_ids=tuple(ids)) for index, ids in enumerate(drawn)]


def random_model(family: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """A tiny model of which no weight has a value of its own, such as a norm's 1 or a bias' 0."""
    loaded, generator = tiny_model(family, dtype=dtype), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator).to(dtype)
    loaded.model.config._experts_implementation = "eager"
    return loaded


def native(loaded: LoadedModel, **options: Any) -> tuple[NativeEngine, LanguageModel]:
    model = language_model(loaded.model, Kernels())
    engine = open_engine(model, loaded.tokenizer, **options)
    assert isinstance(engine, NativeEngine), model.backend
    return engine, model


def scores_and_gradients(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    module = getattr(model, "module", model)
    module.zero_grad()
    ids_BS = torch.randint(3, 259, (3, 40), generator=torch.Generator().manual_seed(0))
    scores = token_logps(model, ids_BS, LENGTHS, prompt_lengths_B=PROMPT_LENGTHS, temperature=0.7)
    weight_BT = torch.linspace(-1, 2, scores.logp_BT.numel()).view_as(scores.logp_BT)
    (scores.logp_BT * weight_BT).sum().backward()
    zero = torch.zeros(())
    gradients = {name: zero if one.grad is None else one.grad.clone() for name, one in module.named_parameters()}
    return scores.logp_BT.detach(), gradients


@families
def test_logits_and_gradients_are_transformers_own_in_float64(family: str) -> None:
    loaded = random_model(family, torch.float64)
    ours, theirs = language_model(loaded.model, Kernels()), loaded.model
    assert ours.decoder is not None, ours.backend
    logp_BT, gradients = scores_and_gradients(ours)
    expected_BT, expected = scores_and_gradients(theirs)
    tolerance = 3e-6  # transformers rounds norms, angles and routers to float32
    torch.testing.assert_close(logp_BT, expected_BT, atol=tolerance, rtol=tolerance)
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], atol=tolerance * scale, rtol=1e-5, msg=name)


@families
def test_greedy_tokens_are_those_of_generate(family: str) -> None:
    loaded, sampling = random_model(family, torch.float64), SamplingParams(max_new_tokens=12, temperature=0.0)
    engine, _ = native(loaded, num_slots=5)
    plain = open_engine(loaded.model, loaded.tokenizer, backend="transformers", batch_size=1)
    ours, theirs = (one.generate(prompts(12), 1, sampling) for one in (engine, plain))
    assert [one.completions[0].token_ids for one in ours] == [one.completions[0].token_ids for one in theirs]


def exact_difference(model: LanguageModel, groups: list[Group]) -> float:
    """Largest difference between the log-probs that the engine recorded and the trainer's."""
    rows = pack(groups, pad_id=2)
    scores = token_logps(model, rows.ids_BS, rows.lengths_B, prompt_lengths_B=rows.prompt_lengths_B)
    drawn = [torch.tensor(one.raw_logps) for group in groups for one in group.completions]
    return max(
        float((logp_T - row_T[: len(logp_T)]).abs().max())
        for logp_T, row_T in zip(drawn, scores.logp_BT.detach(), strict=True)
    )


@needs_onednn
@families
def test_log_probs_are_the_trainers_to_the_bit_whatever_is_beside_them(family: str) -> None:
    loaded = random_model(family)
    engine, model = native(loaded, num_slots=7)
    sampling = SamplingParams(max_new_tokens=8, seed=0)
    groups = engine.generate(prompts(6), 3, sampling)
    assert engine.is_exact
    assert exact_difference(model, groups) == 0
    assert engine.generate(prompts(6)[2:3], 3, sampling)[0].completions == groups[2].completions
    assert exact_difference(model, groups[4:5]) == 0


@needs_onednn
@pytest.mark.parametrize("family", ["phi3", "gpt_neox", "granite", "mixtral"])
def test_adapters_are_exact_and_train(family: str) -> None:
    loaded = random_model(family)
    add_adapters(loaded.model, LoraSection(rank=4), AdapterBase(f"tiny:{family}"))
    trained = [parameter for name, parameter in loaded.model.named_parameters() if ".lora_" in name]
    with torch.no_grad():
        for parameter in trained:
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    engine, model = native(loaded, num_slots=7)
    assert exact_difference(model, engine.generate(prompts(4), 2, SamplingParams(max_new_tokens=6, seed=0))) == 0
    scores_and_gradients(model)
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in trained)


def odd(completions: list[str], **_: object) -> list[float]:
    """A reward that differs between most completions."""
    return [sum(map(ord, text)) % 17 / 17 for text in completions]


@families
def test_three_grpo_steps_train(family: str, tmp_path: Path) -> None:
    result = train.grpo(
        model=f"tiny:{family}",
        prompts=["One", "Two two"],
        reward=odd,
        steps=3,
        progress=False,
        **{
            "run": {"dir": str(tmp_path), "num_threads": 1, "checkpoint_every": 0},
            "model.dtype": "float32",
            "rollout.max_new_tokens": 6,
            "rollout.prompts_per_step": 2,
            "rollout.completions_per_prompt": 4,
        },
    )
    assert len(result.metrics) == 3
    assert all(row["rollout/logp_diff_max"] == 0 for row in result.metrics) or not has_onednn
    assert any(row["grad_norm"] > 0 for row in result.metrics)


@pytest.mark.parametrize("family", ["phi3", "olmo2", "gpt_neox", "stablelm", "mixtral"])
def test_reward_models_and_critics_use_the_trunk(family: str) -> None:
    config = tiny._tiny_config(family, {"num_labels": 1, "pad_token_id": 0})
    model = tiny._build(AutoModelForSequenceClassification, config, 0, torch.float32)
    reward_model = RewardModel(model, tiny.byte_tokenizer())
    assert reward_model.decoder is not None
    ids_BS = torch.randint(3, 259, (3, 12), generator=torch.Generator().manual_seed(0))
    lengths_B = torch.tensor([12, 5, 8])
    alone_B = torch.cat([model(ids_BS[b : b + 1, :n]).logits[0] for b, n in enumerate(lengths_B.tolist())])
    torch.testing.assert_close(reward_model(ids_BS, lengths_B), alone_B, atol=1e-5, rtol=1e-4)
    assert Critic.from_policy(tiny_model(family).model).decoder is not None


def with_extra_part(model: Any) -> None:
    model.model.layers[1].mlp.shared = torch.nn.Linear(32, 32)


def with_another_residual(model: Any) -> None:
    layer = model.model.layers[1]
    plain = layer.forward
    layer.forward = lambda x_BSH, *given, **named: plain(x_BSH, *given, **named) + 0.5 * x_BSH


def with_another_norm(model: Any) -> None:
    model.model.norm = torch.nn.Sequential(torch.nn.LayerNorm(32))


def with_another_head(model: Any) -> None:
    plain = model.lm_head.forward
    model.lm_head.forward = lambda x_BSH: plain(x_BSH).sin()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_extra_part, "its part layers.1.mlp.shared is not known"),
        (with_another_residual, "its numbers are others than its parts give, from the last layer on"),
        (with_another_norm, "a norm is a Sequential"),
        (with_another_head, "its numbers are others than its parts give"),
    ],
)
def test_the_part_that_is_not_known_is_the_reason(
    change: Callable[[Any], None], reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat, "_TESTED_TYPES", ())
    loaded = tiny_model("llama")
    change(loaded.model)
    with pytest.raises(UnsupportedArchitecture, match=reason):
        Decoder(loaded.model, Kernels())
    model = language_model(loaded.model)
    assert isinstance(model.backend, FullForward) and reason in model.backend.reason
    with caplog.at_level("INFO", logger="tunesmith"):
        assert isinstance(open_engine(model, loaded.tokenizer), TransformersEngine)
    assert [line for line in caplog.messages if reason in line]
    with pytest.raises(InputError, match="weights are int8, which needs the native engine"):
        open_engine(model, loaded.tokenizer, backend=Native("int8"))


def test_a_layer_in_the_middle_is_named_and_modes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat, "_TESTED_TYPES", ())
    model = tiny_model("llama", num_hidden_layers=4).model
    with_another_residual(model)
    model.train()
    model.model.layers[2].eval()
    with pytest.raises(UnsupportedArchitecture, match="from layer 1 on"):
        Decoder(model, Kernels())
    assert model.training and not model.model.layers[2].training and model.model.layers[3].training


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_groups_of_rows_are_single_products_with_their_gradients(dtype: torch.dtype) -> None:
    generator, counts = torch.Generator().manual_seed(0), (3, 0, 1, 5)
    x_RI, weight_GOI, bias_GO, d_RO = (
        torch.randn(shape, generator=generator).to(dtype).requires_grad_(shape != (9, 6))
        for shape in ((9, 8), (4, 6, 8), (4, 6), (9, 6))
    )
    y_RO = grouped_linear(x_RI, weight_GOI, bias_GO, counts)
    leaves = (x_RI, weight_GOI, bias_GO)
    found = torch.autograd.grad(y_RO, leaves, d_RO)
    parts = zip(x_RI.split(counts), weight_GOI, bias_GO, strict=True)
    wide = torch.cat([x.double() @ weight.double().t() + bias.double() for x, weight, bias in parts])
    expected = torch.autograd.grad(wide, leaves, d_RO.double())
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    torch.testing.assert_close(y_RO.double(), wide, atol=tolerance, rtol=tolerance)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
    assert not found[1][1].any()
