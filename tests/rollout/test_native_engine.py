"""The native engine against `transformers.generate` and against the trainer: same greedy tokens, same bits."""

import itertools
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import TrainingError
from tunesmith.base.schema.records import Prompt
from tunesmith.base.schema.weights import Weights
from tunesmith.engine.batch.pack import pack, select
from tunesmith.engine.batch.rollout import Group, SamplingParams
from tunesmith.engine.kernels.linear.api import cpu_has_bfloat16
from tunesmith.engine.kernels.linear.exact import is_by_onednn
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.kernels.recording import Recording
from tunesmith.engine.models.language_model import LanguageModel, language_model
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.models.loaded import LoadedModel
from tunesmith.engine.models.logprob import token_logps
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.rollout import runner
from tunesmith.engine.rollout.factory import open_engine
from tunesmith.engine.rollout.native_engine import Native, NativeEngine

DECODERS = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "gemma2", "gemma3")
has_bf16 = cpu_has_bfloat16()
needs_bf16 = pytest.mark.skipif(not has_bf16, reason="this CPU has no bfloat16 instructions, so nothing is exact in it")
has_onednn = is_by_onednn(torch.ones(2, 2), torch.ones(2, 2))
needs_onednn = pytest.mark.skipif(not has_onednn, reason="torch has no oneDNN here, so nothing is exact in float32")
EXACT_DTYPES = [pytest.param(torch.float32, marks=needs_onednn), pytest.param(torch.bfloat16, marks=needs_bf16)]
in_exact_dtypes = pytest.mark.parametrize("dtype", EXACT_DTYPES)


def prompts(count: int, longest: int = 70, seed: int = 0) -> list[Prompt]:
    """Prompts of 1 to `longest` tokens, in random order of length; a third begin with the same 32."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randint(3, 259, (32,), generator=generator).tolist()
    found: list[Prompt] = []
    for index in range(count):
        length = int(torch.randint(1, longest + 1, (1,), generator=generator))
        ids = torch.randint(3, 259, (length,), generator=generator).tolist()
        if index % 3 == 0:
            ids = (shared + ids)[: max(length, 33)]
        found.append(Prompt(str(index), "", token_ids=tuple(ids)))
    return found


def engine_of(loaded: LoadedModel, **options: object) -> tuple[NativeEngine, LanguageModel]:
    model = language_model(loaded.model, Kernels())
    engine = open_engine(model, loaded.tokenizer, **options)  # type: ignore[arg-type]
    assert isinstance(engine, NativeEngine)
    return engine, model


@torch.no_grad()
def near_tie(loaded: LoadedModel, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> bool:
    """True if the model's two best logits behind these ids are at most 1e-4 apart."""
    logits = loaded.model(torch.tensor([[*prompt_ids, *token_ids]])).logits[0, -1]
    best = logits.topk(2).values
    return bool(best[0] - best[1] <= 1e-4)


@pytest.mark.parametrize("family", DECODERS)
def test_greedy_tokens_are_those_of_generate(family: str) -> None:
    loaded = tiny_model(family, dtype=torch.float64)
    asked = prompts(200)
    sampling = SamplingParams(max_new_tokens=12, temperature=0.0)
    # In float64 transformers' eager attention gives NaN for padding that lies outside of a window.
    batch_size = 1 if family == "gemma2" else 64
    num_near_ties = compare_greedily(loaded, asked, sampling, ((1, 5), (7, 30), (200, 200)), batch_size)
    print(f"{num_near_ties} near-ties")
    assert num_near_ties < 10


def compare_greedily(
    loaded: LoadedModel,
    asked: Sequence[Prompt],
    sampling: SamplingParams,
    slots_and_counts: Sequence[tuple[int, int]],
    batch_size: int = 64,
) -> int:
    """How many completions part from those of `generate` at a near-tie; at anything else the test fails."""
    plain = open_engine(loaded.model, loaded.tokenizer, backend="transformers", batch_size=batch_size)
    reference = plain.generate(asked, 1, sampling)
    num_near_ties = 0
    for num_slots, count in slots_and_counts:
        engine, _ = engine_of(loaded, num_slots=num_slots)
        for ours, theirs in zip(engine.generate(asked[:count], 1, sampling), reference, strict=False):
            mine, other = ours.completions[0].token_ids, theirs.completions[0].token_ids
            if mine != other:
                same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(mine, other, strict=False))))
                assert near_tie(loaded, theirs.prompt_token_ids, other[:same])
                num_near_ties += 1
    return num_near_ties


def trained_logps(model: LanguageModel, groups: Sequence[Group], temperature: float, micro: int) -> torch.Tensor:
    """The trainer's log-probs of the completions, with gradients on, `micro` sequences at a time."""
    sequences = pack(groups, pad_id=2)
    parts: list[torch.Tensor] = []
    for start in range(0, len(sequences.lengths_B), micro):
        part = select(sequences, range(start, min(start + micro, len(sequences.lengths_B))))
        scores = token_logps(
            model, part.ids_BS, part.lengths_B, prompt_lengths_B=part.prompt_lengths_B, temperature=temperature
        )
        width = sequences.mask_BT.shape[1] - scores.logp_BT.shape[1]
        parts.append(torch.nn.functional.pad(scores.logp_BT, (0, width)))
    return torch.cat(parts)


@in_exact_dtypes
@pytest.mark.parametrize("weights", ["model", "int8"])
@pytest.mark.parametrize("name", DECODERS)
def test_tokens_and_bits_do_not_depend_on_the_number_of_threads(name: str, weights: Weights, dtype: torch.dtype):
    loaded = tiny_model(name, dtype=dtype)
    found, num_threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3, 4):
            torch.set_num_threads(count)
            engine, _ = engine_of(loaded, backend=Native(weights))
            assert engine.is_exact == (weights == "model")
            groups = engine.generate(prompts(6), 3, SamplingParams(max_new_tokens=12, seed=1))
            found.append([(one.token_ids, one.raw_logps) for group in groups for one in group.completions])
    finally:
        torch.set_num_threads(num_threads)
    assert found[1:] == found[:-1]


@in_exact_dtypes
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", DECODERS)
def test_raw_log_probs_are_the_trainers_to_the_bit(family: str, temperature: float, dtype: torch.dtype) -> None:
    check_exactness(tiny_model(family, dtype=dtype), temperature, (1, 3, 64), num_new=9)


def test_an_end_of_sequence_id_beyond_the_vocabulary_is_never_drawn() -> None:
    loaded = tiny_model("llama")
    sampling = SamplingParams(max_new_tokens=6, min_new_tokens=2, seed=3)
    expected = engine_of(loaded)[0].generate(prompts(2, seed=2), 2, sampling)
    eos: Any = loaded.model.generation_config.eos_token_id
    loaded.model.generation_config.eos_token_id = [*([eos] if isinstance(eos, int) else eos or ()), 100_000]
    assert engine_of(loaded)[0].generate(prompts(2, seed=2), 2, sampling) == expected


def check_exactness(loaded: LoadedModel, temperature: float, slots: Sequence[int], num_new: int) -> None:
    """Batches of 1, 2, 7 and 32 completions, refilled or not, with and without shared prompts; micro-batches too."""
    for (count, n), num_slots in itertools.product(((1, 1), (2, 1), (7, 1), (8, 4)), slots):
        engine, model = engine_of(loaded, num_slots=num_slots)
        sampling = SamplingParams(max_new_tokens=num_new, min_new_tokens=1, temperature=temperature, seed=3)
        groups = engine.generate(prompts(count, seed=count), n, sampling)
        assert engine.is_exact
        raw_BT = pack(groups, pad_id=2).raw_logp_BT
        for micro in (1, 3, 32):
            assert torch.equal(raw_BT, trained_logps(model, groups, temperature, micro))


@in_exact_dtypes
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_replayed_steps_draw_what_computed_ones_draw(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays: list[int] = []
    replay = Recording.replay
    monkeypatch.setattr(Recording, "replay", lambda self, rows: (replays.append(rows), replay(self, rows))[1])
    loaded, sampling = tiny_model(family, dtype=dtype), SamplingParams(max_new_tokens=12, seed=5)

    def drawn() -> list[Group]:
        engine, _ = engine_of(loaded, num_slots=12)
        return engine.generate(prompts(3), 2, sampling) + engine.generate(prompts(7), 3, sampling)

    found = drawn()
    # Rows come and go: steps of many sizes, fewer than were recorded.
    assert len(replays) > 20 and len(set(replays)) > 3
    monkeypatch.setattr(runner, "MOST_ROWS", 0)
    replays.clear()
    assert drawn() == found and not replays


def test_a_larger_cache_takes_the_place_of_the_smaller_one() -> None:
    engine, _ = engine_of(tiny_model("llama"))
    engine.generate(prompts(1), 1, SamplingParams(max_new_tokens=4, seed=0))
    assert engine._cache is not None
    before = weakref.ref(engine._cache.storage)
    engine.generate(prompts(40), 4, SamplingParams(max_new_tokens=40, seed=0))
    assert before() is None


@in_exact_dtypes
def test_exactness_is_known_before_the_first_call_and_kept_while_unloaded(dtype: torch.dtype) -> None:
    engine, _ = engine_of(tiny_model("llama", dtype=dtype))
    assert engine.is_exact
    engine.unload()
    assert engine.is_exact and engine._runner is None
    assert not engine_of(tiny_model("llama", dtype=torch.float64))[0].is_exact


@in_exact_dtypes
def test_filters_and_penalties_leave_the_raw_log_probs_exact(dtype: torch.dtype) -> None:
    loaded = tiny_model("llama", dtype=dtype)
    engine, model = engine_of(loaded)
    sampling = SamplingParams(
        max_new_tokens=20, temperature=0.7, top_p=0.8, top_k=40, min_p=0.02, repetition_penalty=1.2, seed=0
    )
    groups = engine.generate(prompts(6), 3, sampling)
    sequences = pack(groups, pad_id=2)
    assert torch.equal(sequences.raw_logp_BT, trained_logps(model, groups, 0.7, 18))
    assert not torch.equal(sequences.raw_logp_BT, sequences.sampled_logp_BT)


@in_exact_dtypes
def test_a_completion_depends_on_seed_prompt_and_sample_alone(dtype: torch.dtype) -> None:
    loaded = tiny_model("llama", dtype=dtype)
    asked = prompts(9)
    sampling = SamplingParams(max_new_tokens=15, seed=11, repetition_penalty=1.1, top_p=0.95)
    whole = engine_of(loaded)[0].generate(asked, 4, sampling)
    for num_slots, chosen in ((1, asked[4:6]), (3, asked[::-1]), (64, asked[2:3])):
        again = engine_of(loaded, num_slots=num_slots)[0].generate(chosen, 4, sampling)
        for group in again:
            expected = whole[int(group.prompt.id)]
            assert [c.token_ids for c in group.completions] == [c.token_ids for c in expected.completions]
    other = engine_of(loaded)[0].generate(asked[:1], 4, SamplingParams(max_new_tokens=15, seed=12))
    assert other[0].completions[0].token_ids != whole[0].completions[0].token_ids


def test_the_same_prompt_twice_draws_other_completions() -> None:
    engine, _ = engine_of(tiny_model("llama"))
    prompt = prompts(1)[0]
    first, second = engine.generate([prompt, prompt], 3, SamplingParams(max_new_tokens=8, seed=0))
    drawn = {completion.token_ids for group in (first, second) for completion in group.completions}
    assert len(drawn) == 6
    whole = engine.generate([prompt], 6, SamplingParams(max_new_tokens=8, seed=0))[0]
    assert [c.token_ids for c in whole.completions] == [
        c.token_ids for group in (first, second) for c in group.completions
    ]


def test_changed_weights_are_seen_and_the_prompt_cache_is_forgotten() -> None:
    loaded = tiny_model("llama")
    version = 0
    engine, _ = engine_of(loaded, weight_version=lambda: version)
    sampling = SamplingParams(max_new_tokens=10, temperature=0.0)
    asked = prompts(4, longest=60)
    before = engine.generate(asked, 1, sampling)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    version = 1
    after = engine.generate(asked, 1, sampling)
    fresh = engine_of(loaded)[0].generate(asked, 1, sampling)
    assert [g.completions[0].token_ids for g in after] == [g.completions[0].token_ids for g in fresh]
    assert [g.completions[0].token_ids for g in after] != [g.completions[0].token_ids for g in before]
    assert [g.weight_version for g in (before[0], after[0])] == [0, 1]


def test_a_change_that_nobody_counted_is_seen_all_the_same() -> None:
    loaded = tiny_model("llama")
    engine, _ = engine_of(loaded)
    sampling = SamplingParams(max_new_tokens=10, temperature=0.0)
    before = engine.generate(prompts(3), 1, sampling)
    with torch.no_grad():
        loaded.model.model.layers[0].self_attn.o_proj.weight.mul_(-1)
    after = engine.generate(prompts(3), 1, sampling)
    assert after == engine_of(loaded)[0].generate(prompts(3), 1, sampling) != before


def test_packed_weights_that_are_not_the_trained_ones_stop_everything() -> None:
    """What the re-scored prompt is for."""
    loaded = tiny_model("llama")
    version = 0
    engine, _ = engine_of(loaded, weight_version=lambda: version)
    sampling = SamplingParams(max_new_tokens=2)
    engine.generate(prompts(1), 1, sampling)
    assert engine._runner is not None
    engine._runner.repack = lambda weights: None  # type: ignore[method-assign]
    with torch.no_grad():
        loaded.model.model.layers[1].mlp.down_proj.weight.mul_(3.0)
    version = 1
    with pytest.raises(TrainingError, match="packed weights are not the trained"):
        engine.generate(prompts(1), 1, sampling)


def test_unload_frees_cache_and_weights_and_generate_brings_them_back() -> None:
    engine, _ = engine_of(tiny_model("llama"))
    sampling = SamplingParams(max_new_tokens=6, seed=5)
    before = engine.generate(prompts(3), 2, sampling)
    engine.unload()
    assert engine._cache is None and engine._runner is None
    assert engine.generate(prompts(3), 2, sampling) == before


def test_values_are_those_of_the_states_before_the_tokens() -> None:
    loaded = tiny_model("llama")
    head = torch.nn.Linear(32, 1)

    class Head(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return head(hidden.float())[..., 0]

    engine, model = engine_of(loaded, value_head=Head())
    groups = engine.generate(prompts(5), 2, SamplingParams(max_new_tokens=7, seed=1))
    sequences = pack(groups, pad_id=2)
    scores = token_logps(
        model,
        sequences.ids_BS,
        sequences.lengths_B,
        prompt_lengths_B=sequences.prompt_lengths_B,
        value_head=Head(),
    )
    assert sequences.value_BT is not None and scores.value_BT is not None
    torch.testing.assert_close(sequences.value_BT, scores.value_BT, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layer", [0, 1])
def test_numbers_that_are_not_finite_name_the_layer_and_leave_nothing_behind(layer: int) -> None:
    loaded = tiny_model("llama")
    engine, _ = engine_of(loaded)
    sampling = SamplingParams(max_new_tokens=4, seed=0)
    good = engine.generate(prompts(2), 2, sampling)
    weight = loaded.model.model.layers[layer].mlp.up_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[3, 3] = torch.nan
    engine.unload()
    with pytest.raises(TrainingError, match=f"not finite from layer {layer} on"):
        engine.generate(prompts(2), 2, sampling)
    with torch.no_grad():
        weight.copy_(kept)
    assert engine.generate(prompts(2), 2, sampling) == good


def test_a_small_cache_makes_completions_wait_and_changes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny_model("llama", max_position_embeddings=32768)
    asked = [Prompt(str(i), "", token_ids=tuple([7 + i] * 900)) for i in range(4)]
    sampling = SamplingParams(max_new_tokens=4, seed=0)
    large = engine_of(loaded)[0]
    expected = large.generate(asked, 3, sampling)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=4 * 2**20))
    small = engine_of(loaded)[0]  # a quarter of the memory is for its cache
    drawn = small.generate(asked, 3, sampling)
    assert [c.token_ids for g in drawn for c in g.completions] == [c.token_ids for g in expected for c in g.completions]
    assert small._cache is not None and large._cache is not None
    assert small._cache.storage.nbytes <= 2**20 < large._cache.storage.nbytes


def test_a_model_of_another_family_is_drawn_from_by_transformers(caplog: pytest.LogCaptureFixture) -> None:
    loaded = tiny_model("llama")
    loaded.model.register_forward_hook(lambda *_: None)
    with caplog.at_level("INFO", logger="tunesmith"):
        engine = open_engine(loaded.model, loaded.tokenizer)
    assert not isinstance(engine, NativeEngine) and not engine.is_exact
    assert "forward hooks" in caplog.text
    assert len(engine.generate(prompts(2), 2, SamplingParams(max_new_tokens=3))[0].completions) == 2


@pytest.fixture(scope="module")
def smollm2() -> Callable[[torch.dtype], LoadedModel]:
    return lambda dtype: load_policy(ModelSection(name="smollm2"), dtype=dtype)


@pytest.mark.slow
def test_greedy_tokens_of_a_real_model_are_those_of_generate(smollm2: Callable[[torch.dtype], LoadedModel]) -> None:
    loaded = smollm2(torch.float32)
    sampling = SamplingParams(max_new_tokens=16, temperature=0.0)
    num_near_ties = compare_greedily(loaded, prompts(200), sampling, ((3, 12), (50, 60), (200, 200)))
    print(f"{num_near_ties} near-ties in 272 completions")
    assert num_near_ties < 14


@pytest.mark.slow
@in_exact_dtypes
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_raw_log_probs_of_a_real_model_are_the_trainers_to_the_bit(
    smollm2: Callable[[torch.dtype], LoadedModel], temperature: float, dtype: torch.dtype
) -> None:
    check_exactness(smollm2(dtype), temperature, (3, 64), num_new=8)
