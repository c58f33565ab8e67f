"""The engine for a GPU draws what the native engine draws, several tokens between two visits.

In `make test-gpu` it runs on the GPU, else on the CPU. In float64 both engines differ by rounding alone, so equal noise
gives equal tokens, whatever is asked for.
"""

import copy
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import TrainingError
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Group, SamplingParams
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models.language_model import language_model
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.models.loaded import LoadedModel
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.rollout import weight_check
from tunesmith.engine.rollout.device.engine import DeviceEngine
from tunesmith.engine.rollout.device.steps import STEPS_PER_VISIT
from tunesmith.engine.rollout.factory import open_engine
from tunesmith.engine.rollout.native_engine import NativeEngine
from tunesmith.engine.rollout.transformers_backend import TransformersEngine

DEVICE = "cuda" if os.environ.get("TUNESMITH_TEST_GPU") == "1" else "cpu"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "gemma2", "gemma3")
EVERYTHING = SamplingParams(
    max_new_tokens=25,
    min_new_tokens=3,
    temperature=0.8,
    top_p=0.9,
    top_k=60,
    min_p=0.01,
    repetition_penalty=1.2,
    logit_bias={5: -3.0, 9: float("-inf"), 40: 2.0},
    stop_token_ids=(7, 40),
    stop_strings=("a",),
    seed=4,
)


def prompts(count: int, longest: int = 40, seed: int = 0) -> list[Prompt]:
    """Prompts of 1 to `longest` tokens; a third begin with the same 20."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randint(3, 259, (20,), generator=generator).tolist()
    found: list[Prompt] = []
    for index in range(count):
        length = int(torch.randint(1, longest + 1, (1,), generator=generator))
        ids = torch.randint(3, 259, (length,), generator=generator).tolist()
        found.append(Prompt(str(index), "", token_ids=tuple(shared + ids if index % 3 == 0 else ids)))
    return found


def device_engine(loaded: LoadedModel, **options: object) -> DeviceEngine:
    """The engine of the model, which moves to the device."""
    module = loaded.model.to(DEVICE)  # type: ignore[arg-type]
    return DeviceEngine(language_model(module, Kernels()), loaded.tokenizer, **options)  # type: ignore[arg-type]


def native_engine(loaded: LoadedModel, **options: object) -> NativeEngine:
    """The engine of the model on the CPU; of a copy if the model is elsewhere."""
    if DEVICE != "cpu":
        loaded = replace(loaded, model=copy.deepcopy(loaded.model).cpu())
    return NativeEngine(language_model(loaded.model, Kernels()), loaded.tokenizer, **options)  # type: ignore[arg-type]


def require_same(ours: Sequence[Group], theirs: Sequence[Group], tolerance: float = 1e-5) -> None:
    """The same completions, with log-probs and values that differ by float32's rounding alone."""
    assert [group.prompt.id for group in ours] == [group.prompt.id for group in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert [c.token_ids for c in mine.completions] == [c.token_ids for c in other.completions]
        for a, b in zip(mine.completions, other.completions, strict=True):
            assert (a.text, a.finish_reason) == (b.text, b.finish_reason)
            for one, two in ((a.logps, b.logps), (a.raw_logps, b.raw_logps), (a.values or (), b.values or ())):
                torch.testing.assert_close(torch.tensor(one), torch.tensor(two), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_draws_what_the_native_engine_draws(family: str) -> None:
    loaded = tiny_model(family, dtype=torch.float64)
    sampling = SamplingParams(max_new_tokens=STEPS_PER_VISIT + 5, seed=3)
    ours = device_engine(loaded).generate(prompts(5), 3, sampling)
    require_same(ours, native_engine(loaded).generate(prompts(5), 3, sampling))


@pytest.mark.skipif(DEVICE == "cpu", reason="for a GPU: make test-gpu")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_graph_of_a_step_on_a_gpu_draws_what_the_native_engine_draws(family: str) -> None:
    loaded = tiny_model(family, dtype=torch.float32)
    engine = device_engine(loaded)
    for seed, new in ((3, STEPS_PER_VISIT + 5), (4, 2 * STEPS_PER_VISIT)):
        sampling = SamplingParams(max_new_tokens=new, seed=seed)
        ours = engine.generate(prompts(5), 3, sampling)
        require_same(ours, native_engine(loaded).generate(prompts(5), 3, sampling), tolerance=2e-4)
    assert engine._steps is not None and engine._steps._can_be_captured() and engine._steps._graphs


@pytest.mark.parametrize("num_slots", [1, 5, 64])
def test_every_setting_and_every_way_to_end_is_the_native_engines(num_slots: int) -> None:
    loaded = tiny_model("llama", dtype=torch.float64)
    ours = device_engine(loaded, num_slots=num_slots).generate(prompts(6), 4, EVERYTHING)
    theirs = native_engine(loaded).generate(prompts(6), 4, EVERYTHING)
    require_same(ours, theirs)
    drawn = [completion for group in theirs for completion in group.completions]
    assert {completion.finish_reason for completion in drawn} == {"stop", "length"}
    assert any(completion.token_ids[-1] in EVERYTHING.stop_token_ids for completion in drawn)
    assert any(completion.text and completion.token_ids[-1] not in (7, 40) for completion in drawn)


@settings(max_examples=25, deadline=None)
@given(
    new=st.integers(1, 40),
    least=st.integers(0, 5),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.5]),
    top_p=st.sampled_from([1.0, 0.9]),
    penalty=st.sampled_from([1.0, 1.3]),
    slots=st.integers(1, 9),
    n=st.integers(1, 4),
    count=st.integers(1, 5),
)
def test_requests_of_any_shape_are_drawn_alike(
    new: int, least: int, temperature: float, top_p: float, penalty: float, slots: int, n: int, count: int
) -> None:
    loaded = tiny_model("qwen2", dtype=torch.float64)
    sampling = SamplingParams(
        max_new_tokens=new,
        min_new_tokens=min(least, new),
        temperature=temperature,
        top_p=top_p,
        repetition_penalty=penalty,
        stop_token_ids=tuple(range(3, 40)),
        seed=1,
    )
    ours = device_engine(loaded, num_slots=slots).generate(prompts(count), n, sampling)
    require_same(ours, native_engine(loaded).generate(prompts(count), n, sampling))


def test_an_engine_serves_call_after_call_in_the_room_of_the_first() -> None:
    loaded = tiny_model("llama", dtype=torch.float64)
    engine, other = device_engine(loaded), native_engine(loaded)
    plain = SamplingParams(max_new_tokens=6, seed=0)
    for count, n, sampling in ((6, 2, plain), (2, 1, EVERYTHING), (3, 3, plain), (8, 5, EVERYTHING), (1, 1, plain)):
        require_same(engine.generate(prompts(count), n, sampling), other.generate(prompts(count), n, sampling))


def test_updates_in_place_are_seen_and_nothing_is_copied() -> None:
    loaded = tiny_model("llama", dtype=torch.float64)
    version = 0
    engine = device_engine(loaded, weight_version=lambda: version)
    sampling = SamplingParams(max_new_tokens=10, seed=2)
    before = engine.generate(prompts(3), 2, sampling)
    addresses = [parameter.data_ptr() for parameter in loaded.model.parameters()]
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    version = 1
    after = engine.generate(prompts(3), 2, sampling)
    assert [parameter.data_ptr() for parameter in loaded.model.parameters()] == addresses
    assert [group.weight_version for group in after] == [1, 1, 1]
    assert [g.completions for g in after] != [g.completions for g in before]
    require_same(after, native_engine(loaded, weight_version=lambda: 1).generate(prompts(3), 2, sampling))


def test_weights_that_are_adjacent_already_stay_where_they_are() -> None:
    loaded = tiny_model("qwen2", dtype=torch.float64)  # whose projections have biases too
    device_engine(loaded).generate(prompts(1), 1, SamplingParams(max_new_tokens=2, seed=0))
    addresses = [parameter.data_ptr() for parameter in loaded.model.parameters()]
    device_engine(loaded).generate(prompts(1), 1, SamplingParams(max_new_tokens=2, seed=0))
    assert [parameter.data_ptr() for parameter in loaded.model.parameters()] == addresses


def test_the_kernels_are_compared_with_the_trainers_pass_before_the_first_call_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    differences = iter([0.0, 1.0])
    monkeypatch.setattr(weight_check, "largest_difference", lambda *_: next(differences))
    sampling = SamplingParams(max_new_tokens=2, seed=0)
    engine = device_engine(tiny_model("llama"))
    engine.generate(prompts(1), 1, sampling)
    engine.generate(prompts(1), 1, sampling)
    with pytest.raises(TrainingError, match="are 1 nats from those of one pass"):
        device_engine(tiny_model("llama")).generate(prompts(1), 1, sampling)


def test_weights_that_were_moved_are_found_again() -> None:
    loaded = tiny_model("llama", dtype=torch.float64)
    engine = device_engine(loaded)
    sampling = SamplingParams(max_new_tokens=10, seed=2)
    engine.generate(prompts(3), 2, sampling)
    for parameter in loaded.model.parameters():
        parameter.data = 1.1 * parameter.data
    require_same(engine.generate(prompts(3), 2, sampling), native_engine(loaded).generate(prompts(3), 2, sampling))


def test_shared_weights_train_copy_and_save_as_before(tmp_path: Path) -> None:
    """The views change neither parameters nor optimizer, nor what a copy or a file of the model holds."""
    plain, shared = tiny_model("qwen2"), tiny_model("qwen2")
    plain.model.to(DEVICE)  # type: ignore[arg-type]
    names = [name for name, _ in shared.model.named_parameters()]
    parameters = list(shared.model.parameters())
    device_engine(shared).generate(prompts(1), 1, SamplingParams(max_new_tokens=2))
    assert all(a is b for a, b in zip(parameters, shared.model.parameters(), strict=True))
    assert [name for name, _ in shared.model.named_parameters()] == names
    for model in (plain.model, shared.model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        ids = torch.arange(3, 40, device=model.device)[None]
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    copied = copy.deepcopy(shared.model)
    shared.model.save_pretrained(tmp_path)
    loaded = type(shared.model).from_pretrained(tmp_path)
    expected = dict(plain.model.named_parameters())
    for model in (shared.model, copied, loaded):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, expected[name].to(parameter.device)), name
    with torch.no_grad():
        copied.model.layers[0].self_attn.q_proj.weight.zero_()
    assert shared.model.model.layers[0].self_attn.k_proj.weight.abs().sum() > 0
    assert torch.equal(shared.model.model.layers[0].self_attn.q_proj.weight, expected[q_name(expected)])


def q_name(named: dict[str, torch.nn.Parameter]) -> str:
    return next(name for name in named if "layers.0.self_attn.q_proj.weight" in name)


def test_values_come_with_the_tokens() -> None:
    loaded = tiny_model("llama", dtype=torch.float64)

    class Head(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden[..., :9].sum(-1).float()

    sampling = SamplingParams(max_new_tokens=20, stop_strings=("a", "e", "b"), seed=1)
    ours = device_engine(loaded, value_head=Head()).generate(prompts(5), 3, sampling)
    require_same(ours, native_engine(loaded, value_head=Head()).generate(prompts(5), 3, sampling))
    assert all(len(c.values or ()) == len(c.token_ids) for group in ours for c in group.completions)


@pytest.mark.parametrize("kind", [{}, {"use_dora": True}, {"dropout": 0.5}])
def test_adapters_are_drawn_with_and_their_updates_seen(kind: dict[str, object]) -> None:
    section = ModelSection.model_validate({"name": "tiny:llama", "lora": {"rank": 4, **kind}})
    loaded = load_policy(section, dtype=torch.float64)
    engine = device_engine(loaded)
    sampling = SamplingParams(max_new_tokens=12, seed=0)
    before = engine.generate(prompts(3), 2, sampling)
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            if "lora_B" in name or "magnitude" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    after = engine.generate(prompts(3), 2, sampling)
    require_same(after, native_engine(loaded).generate(prompts(3), 2, sampling))
    assert [group.completions for group in after] != [group.completions for group in before]


@pytest.mark.parametrize("layer", [0, 1])
def test_numbers_that_are_not_finite_name_the_layer_and_leave_nothing_behind(layer: int) -> None:
    loaded = tiny_model("llama")
    engine = device_engine(loaded)
    sampling = SamplingParams(max_new_tokens=4, seed=0)
    good = engine.generate(prompts(2), 2, sampling)
    weight = loaded.model.model.layers[layer].mlp.up_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[3, 3] = torch.nan
    with pytest.raises(TrainingError, match=f"not finite from layer {layer} on"):
        engine.generate(prompts(2), 2, sampling)
    with torch.no_grad():
        weight.copy_(kept)
    assert engine.generate(prompts(2), 2, sampling) == good


def test_a_small_cache_makes_completions_wait_and_changes_none() -> None:
    loaded = tiny_model("llama", max_position_embeddings=32768, dtype=torch.float64)
    asked = [Prompt(str(i), "", token_ids=tuple([7 + i] * 400)) for i in range(3)]
    sampling = SamplingParams(max_new_tokens=20, seed=0)
    small = device_engine(loaded, kv_cache_mb=1).generate(asked, 3, sampling)
    require_same(small, device_engine(loaded).generate(asked, 3, sampling))


def test_unload_keeps_a_small_cache_and_its_graphs_and_frees_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = device_engine(tiny_model("llama"))
    sampling = SamplingParams(max_new_tokens=6, seed=5)
    before = engine.generate(prompts(3), 2, sampling)
    loaded = engine._steps
    engine.unload()
    assert engine._steps is loaded and loaded is not None
    monkeypatch.setattr(engine, "_memory", lambda: (2**40, loaded.buffers.storage.nbytes))
    engine.unload()
    assert engine._steps is None
    assert engine.generate(prompts(3), 2, sampling) == before


def test_it_is_the_engine_of_a_model_that_is_not_on_a_cpu() -> None:
    loaded = tiny_model("llama")
    assert isinstance(open_engine(loaded.model.to("meta"), loaded.tokenizer), DeviceEngine)
    other = tiny_model("llama").model
    other.register_forward_hook(lambda *_: None)
    assert isinstance(open_engine(other.to("meta"), loaded.tokenizer), TransformersEngine)
