"""The same promises kept by vLLM itself: a server of its CPU build, in a virtual environment of its own.

`TUNESMITH_VLLM_PYTHON` names the interpreter of that environment; see docs/engines.md.
"""

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from conformance import PROMPTS, every_promise

from benchmarks.vllm import VLLMServer
from tunesmith.base.core.errors import ServerError
from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.models.export import ModelCard, save_final
from tunesmith.engine.models.language_model import language_model
from tunesmith.engine.models.loaded import LoadedModel
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.rollout.remote.connection import VLLM
from tunesmith.engine.rollout.remote.engine import RemoteEngine

PYTHON = os.environ.get("TUNESMITH_VLLM_PYTHON", "")

pytestmark = [
    pytest.mark.slow,  # vLLM takes a minute to start
    pytest.mark.skipif(not PYTHON, reason="TUNESMITH_VLLM_PYTHON is not set; it names a Python that has vLLM"),
]


def model() -> LoadedModel:
    """A tiny Llama of sizes that vLLM's kernels take; its output layer shares the weight of the token embedding."""
    sizes = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
    return tiny_model("llama", **sizes)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    loaded = model()
    folder = save_final(
        loaded.model, loaded.tokenizer, tmp_path_factory.mktemp("vllm") / "model", ModelCard("tiny", "none")
    )
    running = VLLMServer(PYTHON, folder, folder.parent / "vllm.log")
    running.start()
    yield running
    running.kill()


def engine_on(server: VLLMServer, loaded: LoadedModel) -> RemoteEngine:
    return RemoteEngine(language_model(loaded.model), loaded.tokenizer, VLLM(server.url, 300.0))


@every_promise
def test_vllm_keeps_every_promise(promise: Callable[[RemoteEngine, LoadedModel], None], server: VLLMServer) -> None:
    loaded = model()
    promise(engine_on(server, loaded), loaded)


def test_the_output_layer_that_vllms_own_reload_leaves_as_it_was_is_found(server: VLLMServer) -> None:
    loaded = model()
    engine = engine_on(server, loaded)
    engine._connection._way = {"method": "reload_weights"}  # type: ignore[attr-defined] # as without our extension
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight.add_(0.3)
        loaded.model.get_input_embeddings().weight[::2] *= 1.5
    with pytest.raises(ServerError, match="other weights than the trainer"):
        engine.generate(PROMPTS, 1, SamplingParams(max_new_tokens=4, seed=0))


def test_a_vllm_that_is_killed_and_started_again_gets_the_weights_and_draws_the_same(server: VLLMServer) -> None:
    loaded = model()
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(1.1)
    engine = engine_on(server, loaded)
    sampling = SamplingParams(max_new_tokens=12, seed=0)
    before = engine.generate(PROMPTS, 2, sampling)
    server.kill()
    server.start()
    after = engine.generate(PROMPTS, 2, sampling)
    assert [one.token_ids for group in after for one in group.completions] == [
        one.token_ids for group in before for one in group.completions
    ]
