"""The engine of the backend `vllm` on a server with real tokens: what it promises, and faults of the server."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from completions_server import Clock, CompletionsServer
from conformance import BOUND, PROMPTS, every_promise, trained_logps

from tunesmith.base.config.sections import LoraSection
from tunesmith.base.core.errors import InputError, MissingDependencyError, ServerError
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Group, SamplingParams
from tunesmith.engine.models.language_model import language_model
from tunesmith.engine.models.loaded import LoadedModel
from tunesmith.engine.models.lora import AdapterBase, add_adapters
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.rollout.factory import open_engine
from tunesmith.engine.rollout.remote.connection import VLLM
from tunesmith.engine.rollout.remote.engine import RemoteEngine

SAMPLING = SamplingParams(max_new_tokens=8, seed=0)


@pytest.fixture
def loaded() -> LoadedModel:
    """The trainer's model."""
    return tiny_model("llama")


@pytest.fixture
def server() -> Iterator[CompletionsServer]:
    """A server that has started with the trainer's weights."""
    running = CompletionsServer(tiny_model("llama"))
    yield running
    running.stop()


def engine_on(server: CompletionsServer, loaded: LoadedModel, timeout_s: float = 60, **options: Any) -> RemoteEngine:
    return RemoteEngine(language_model(loaded.model), loaded.tokenizer, VLLM(server.url, timeout_s), **options)


def tokens(groups: list[Group]) -> list[tuple[int, ...]]:
    return [one.token_ids for group in groups for one in group.completions]


@torch.no_grad()
def change(loaded: LoadedModel, size: float = 0.05) -> None:
    """An update of all weights, a tenth of it in the direction of the last one."""
    generator = torch.Generator().manual_seed(0)
    for parameter in loaded.model.parameters():
        parameter.add_(size * parameter.std() * torch.randn(parameter.shape, generator=generator))


@every_promise
def test_a_server_with_real_tokens_keeps_every_promise(
    promise: Callable[[RemoteEngine, LoadedModel], None], server: CompletionsServer, loaded: LoadedModel
) -> None:
    promise(engine_on(server, loaded, num_slots=4), loaded)


def test_weights_are_pushed_once_for_each_change_and_groups_carry_their_version(
    server: CompletionsServer, loaded: LoadedModel
) -> None:
    version = 3
    engine = engine_on(server, loaded, weight_version=lambda: version)
    first = engine.generate(PROMPTS, 1, SAMPLING)
    engine.generate(PROMPTS, 1, SAMPLING)
    assert server.calls.count("tunesmith_load") == 1 and server.version.startswith("3-")
    order = [call for call in server.calls if call in ("/pause", "tunesmith_load", "/reset_prefix_cache", "/resume")]
    assert order == ["/pause", "tunesmith_load", "/reset_prefix_cache", "/resume"]
    version = 4
    change(loaded)
    second = engine.generate(PROMPTS, 1, SAMPLING)
    assert server.calls.count("tunesmith_load") == 2
    assert {group.weight_version for group in first} == {3} and {group.weight_version for group in second} == {4}
    assert torch.tensor(second[0].completions[0].logps).sub(trained_logps(loaded, second[0], 0)).abs().max() < BOUND
    assert not engine.is_exact


@pytest.mark.parametrize("keeps", ["", "embed_tokens", "layers.1.mlp"])
@pytest.mark.parametrize("size", [0.05, 3e-4])
def test_old_weights_are_found_wholly_or_in_part(
    keeps: str, size: float, server: CompletionsServer, loaded: LoadedModel
) -> None:
    """Also where one update changes log-probs by less than the bound that holds for any two correct computations."""
    engine = engine_on(server, loaded)
    engine.generate(PROMPTS, 1, SAMPLING)
    server.keeps = (keeps,)
    with pytest.raises(ServerError, match=r"127\.0\.0\.1.*(weights before the|other weights).*pushed 3 times"):
        for _ in range(4):
            change(loaded, size)
            engine.generate(PROMPTS, 1, SAMPLING)


def test_a_model_of_other_weights_that_says_nothing_is_found_at_once(loaded: LoadedModel) -> None:
    server = CompletionsServer(tiny_model("llama", seed=1))
    server.keeps = ("",)
    try:
        with pytest.raises(ServerError, match="other weights than the trainer"):
            engine_on(server, loaded).generate(PROMPTS, 1, SAMPLING)
    finally:
        server.stop()


def test_log_probs_of_another_temperature_are_found(server: CompletionsServer, loaded: LoadedModel) -> None:
    server.is_raw = True
    engine = engine_on(server, loaded)
    engine.generate(PROMPTS, 1, SAMPLING)  # at temperature 1 they are the same
    with pytest.raises(ServerError, match="processed_logprobs"):
        engine.generate(PROMPTS, 1, SamplingParams(max_new_tokens=4, temperature=0.6, seed=0))
    with pytest.raises(ServerError, match="processed_logprobs"):
        engine.generate(PROMPTS, 1, SamplingParams(max_new_tokens=4, top_p=0.6, seed=0))


def test_a_router_whose_servers_are_still_starting_is_waited_for(
    server: CompletionsServer, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.models = []
    clock = Clock()
    clock.sleep = lambda _: server.models.append({"id": "served"})  # type: ignore[method-assign]
    monkeypatch.setattr("tunesmith.engine.rollout.remote.engine.time", clock)
    assert engine_on(server, loaded).generate(PROMPTS, 1, SAMPLING)


FAULTS = ("restart", "twice", "other prompt", "garbage", "overloaded", "hang", "die")


@pytest.mark.parametrize("fault", FAULTS)
def test_after_a_fault_the_completions_are_those_that_it_would_have_given(
    fault: str, server: CompletionsServer, loaded: LoadedModel
) -> None:
    """Draw 0 is that of the proof; the fault is in the middle of six. Weights are not those of its start."""
    change(loaded)
    prompts = [*PROMPTS, *(Prompt(f"more {i}", f"Prompt {i}") for i in range(3))]
    expected = engine_on(server, loaded).generate(prompts, 2, SAMPLING)
    server.stop()
    server.start()
    server.num_draws, server.faults, server.restart_after_s = 0, {3: fault}, 0.3
    engine = engine_on(server, loaded, num_slots=2)  # one request at a time: some come after the fault
    if fault == "hang":
        engine._connection._timeout_s = 2.0  # type: ignore[attr-defined] # of a request; the problem may last longer
    assert tokens(engine.generate(prompts, 2, SAMPLING)) == tokens(expected)
    assert server.num_draws > 7, "something was drawn again"


def test_a_server_that_is_gone_is_named_and_ends_the_wait(
    server: CompletionsServer, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tunesmith.engine.rollout.remote.engine.time", clock := Clock())
    engine = engine_on(server, loaded)
    server.stop()
    with pytest.raises(ServerError, match=rf"{server.url} cannot be used.*waited for 60 s") as caught:
        engine.generate(PROMPTS, 1, SAMPLING)
    assert caught.value.exit_code == 2 and clock.now_s == 60
    server.start()
    assert engine.generate(PROMPTS, 1, SAMPLING), "the engine can go on"


def test_two_engines_on_one_server_do_not_take_each_others_weights(
    server: CompletionsServer, loaded: LoadedModel
) -> None:
    other = tiny_model("llama", seed=1)
    engines = engine_on(server, loaded), engine_on(server, other)
    first, second = (engine.generate(PROMPTS, 1, SAMPLING) for engine in engines)
    assert tokens(first) != tokens(second)
    assert tokens(engines[0].generate(PROMPTS, 1, SAMPLING)) == tokens(first)


def test_a_server_without_the_extension_reloads_and_is_proven_after_each_draw(
    server: CompletionsServer, loaded: LoadedModel
) -> None:
    server.knows = {"reload_weights"}
    engine = engine_on(server, loaded)
    change(loaded)
    (group,) = engine.generate(PROMPTS[:1], 1, SAMPLING)
    assert torch.tensor(group.completions[0].logps).sub(trained_logps(loaded, group, 0)).abs().max() < BOUND
    server.num_draws, server.faults = 0, {2: "restart"}
    assert tokens(engine.generate(PROMPTS, 1, SAMPLING))[:1] == tokens([group])
    assert server.calls.count("reload_weights") == 2


def test_a_server_that_loads_nothing_is_refused_with_what_it_said(
    server: CompletionsServer, loaded: LoadedModel
) -> None:
    server.knows = set()
    with pytest.raises(InputError, match=r"(?s)loads no weights.*worker-extension-cls.*answered 500.*answered 404"):
        engine_on(server, loaded).generate(PROMPTS, 1, SAMPLING)


def test_adapters_are_merged_into_what_is_pushed(server: CompletionsServer, loaded: LoadedModel) -> None:
    adapted = copy.deepcopy(loaded.model)
    add_adapters(adapted, LoraSection(rank=4), AdapterBase("tiny:llama"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    own = LoadedModel(adapted, loaded.tokenizer, loaded.source, loaded.dtype)
    (group,) = engine_on(server, own).generate(PROMPTS[:1], 1, SAMPLING)
    assert torch.tensor(group.completions[0].logps).sub(trained_logps(own, group, 0)).abs().max() < BOUND
    assert torch.tensor(group.completions[0].logps).sub(trained_logps(loaded, group, 0)).abs().max() > 10 * BOUND


def test_callbacks_stop_strings_and_progress_work_as_with_other_engines(
    server: CompletionsServer, loaded: LoadedModel
) -> None:
    texts: dict[tuple[int, int], str] = {}
    handed: list[int] = []
    done: list[tuple[int, int]] = []
    whole = engine_on(server, loaded).generate(PROMPTS, 2, SamplingParams(max_new_tokens=12, seed=4))
    stop = next(text[3:5] for group in whole for one in group.completions if len(text := one.text) > 6)
    sampling = SamplingParams(max_new_tokens=12, stop_strings=(stop,), seed=4)
    groups = engine_on(server, loaded).generate(
        PROMPTS,
        2,
        sampling,
        on_text=lambda prompt, sample, text: texts.__setitem__((prompt, sample), text),
        on_group=lambda index, _: handed.append(index),
        on_progress=lambda *counts: done.append(counts),
    )
    assert handed == [0, 1, 2] and done[-1] == (6, 6)
    drawn = {(p, s): one for p, group in enumerate(groups) for s, one in enumerate(group.completions)}
    assert texts == {key: one.text for key, one in drawn.items() if one.text}
    assert all(stop not in one.text for one in drawn.values())
    assert any(one.finish_reason == "stop" and stop in loaded.tokenizer.decode(one.token_ids) for one in drawn.values())


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (SamplingParams(temperature=0.001), "temperature is 0.001"),
        (SamplingParams(logit_bias={5: float("-inf")}), "logit_bias of token 5"),
        (SamplingParams(max_new_tokens=1000), "context"),
    ],
)
def test_what_vllm_cannot_draw_is_refused(
    sampling: SamplingParams, message: str, server: CompletionsServer, loaded: LoadedModel
) -> None:
    with pytest.raises(InputError, match=message):
        engine_on(server, loaded).generate(PROMPTS, 1, sampling)
    assert not server.calls


def test_an_address_that_is_none_and_a_vllm_that_is_not_installed_are_refused(loaded: LoadedModel) -> None:
    with pytest.raises(InputError, match=r"server_url is 'localhost:8000'; give one such as http"):
        open_engine(loaded.model, loaded.tokenizer, backend=VLLM("localhost:8000"))
    try:
        import vllm  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        with pytest.raises(MissingDependencyError, match=r"vLLM cannot be imported.*rollout\.server_url"):
            open_engine(loaded.model, loaded.tokenizer, backend=VLLM()).generate(PROMPTS, 1, SAMPLING)
