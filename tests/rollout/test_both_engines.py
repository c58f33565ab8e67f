"""What callers see of the native engine and of the one for a GPU alike: streams, ended groups, Ctrl-C, refusals."""

from collections.abc import Callable

import pytest
import torch

from tunesmith.base.core.errors import InputError
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Group, SamplingParams
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models.language_model import language_model
from tunesmith.engine.models.loaded import LoadedModel
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.rollout.device.engine import DeviceEngine
from tunesmith.engine.rollout.engine import GenerationInterrupted
from tunesmith.engine.rollout.native_engine import NativeEngine

AnyEngine = NativeEngine | DeviceEngine


@pytest.fixture(params=["native", "device"])
def open_engine(request: pytest.FixtureRequest) -> Callable[..., AnyEngine]:
    """A function: one of the engines on a loaded model, on the CPU."""

    def native(loaded: LoadedModel, **options: int) -> AnyEngine:
        return NativeEngine(language_model(loaded.model, Kernels()), loaded.tokenizer, **options)

    def device(loaded: LoadedModel, **options: int) -> AnyEngine:
        return DeviceEngine(language_model(loaded.model, Kernels()), loaded.tokenizer, **options)

    return {"native": native, "device": device}[request.param]


def prompts(count: int) -> list[Prompt]:
    """Prompts of 1 to 40 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 41, (count,), generator=generator).tolist()
    drawn = [torch.randint(3, 259, (length,), generator=generator).tolist() for length in lengths]
    return [Prompt(str(index), "", token_ids=tuple(ids)) for index, ids in enumerate(drawn)]


def test_ctrl_c_gives_what_is_finished(open_engine: Callable[..., AnyEngine]) -> None:
    engine = open_engine(tiny_model("llama"), num_slots=2)

    def interrupt(done: int, total: int) -> None:
        assert total == 12
        if done >= 5:
            raise KeyboardInterrupt

    sampling = SamplingParams(max_new_tokens=5, seed=0)
    with pytest.raises(GenerationInterrupted) as caught:
        engine.generate(prompts(6), 2, sampling, on_progress=interrupt)
    drawn = [completion for group in caught.value.groups for completion in group.completions]
    assert 5 <= len(drawn) < 12 and all(completion.finish_reason for completion in drawn)
    whole = {group.prompt.id: group.completions for group in engine.generate(prompts(6), 2, sampling)}
    for group in caught.value.groups:
        expected = whole[group.prompt.id]
        assert {one.token_ids for one in group.completions} <= {one.token_ids for one in expected}
        if isinstance(engine, NativeEngine):  # log-probs too, to the bit
            assert set(group.completions) <= set(expected)


@pytest.mark.parametrize("stop_strings", [(), ("ab", "q")])
def test_streamed_text_joins_to_the_text_of_each_completion(
    stop_strings: tuple[str, ...], open_engine: Callable[..., AnyEngine]
) -> None:
    pieces: dict[tuple[int, int], str] = {}

    def take(prompt: int, sample: int, text: str) -> None:
        pieces[prompt, sample] = pieces.get((prompt, sample), "") + text

    sampling = SamplingParams(max_new_tokens=40, stop_strings=stop_strings, seed=2)
    groups = open_engine(tiny_model("llama")).generate(prompts(4), 2, sampling, on_text=take)
    assert pieces
    for p, group in enumerate(groups):
        for g, completion in enumerate(group.completions):
            assert pieces.get((p, g), "") == completion.text


def test_groups_are_handed_out_when_they_end(open_engine: Callable[..., AnyEngine]) -> None:
    handed: list[tuple[int, Group]] = []
    engine = open_engine(tiny_model("llama"), num_slots=3)
    groups = engine.generate(
        prompts(5), 2, SamplingParams(max_new_tokens=9, seed=0), on_group=lambda i, group: handed.append((i, group))
    )
    assert sorted(index for index, _ in handed) == list(range(5))
    assert all(groups[index] == group for index, group in handed)


def test_a_cache_too_small_for_one_sequence_is_refused_before_any_work(open_engine: Callable[..., AnyEngine]) -> None:
    loaded = tiny_model("llama", max_position_embeddings=32768)
    long = Prompt("long", "", token_ids=tuple([5] * 20000))
    with pytest.raises(InputError, match=r"budget of the key/value cache is 1\.0 MiB"):
        open_engine(loaded, kv_cache_mb=1).generate([long], 1, SamplingParams(max_new_tokens=8))
