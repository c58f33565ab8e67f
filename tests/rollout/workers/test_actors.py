"""Workers as actors of a Ray cluster on this machine: the same completions, after an actor was killed too."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from tunesmith.batch.rollout import Group, SamplingParams
from tunesmith.config.schema import GRPORecipe
from tunesmith.core.errors import InputError
from tunesmith.models.loaded import LoadedModel
from tunesmith.models.tiny import tiny_model
from tunesmith.rollout.factory import open_engine
from tunesmith.rollout.workers.engine import WorkerEngine, Workers
from tunesmith.schema.records import Prompt

ray = pytest.importorskip("ray")

has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
pytestmark = pytest.mark.skipif(not has_bf16, reason="this CPU has no bfloat16 instructions, so nothing is exact")
PROMPTS = [Prompt(str(index), f"Prompt {index % 5} of some") for index in range(8)]  # three of them twice
SAMPLING = SamplingParams(max_new_tokens=24, seed=3)
HEAD = "start --head --block --num-cpus 2 --object-store-memory 100000000 --include-dashboard false"


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model("llama", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> list[Group]:
    """The completions of one process."""
    return open_engine(loaded.model, loaded.tokenizer).generate(PROMPTS, 3, SAMPLING)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A Ray cluster of one machine with two CPUs."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-m", "ray.scripts.scripts", *HEAD.split(), "--port", str(port)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else Ray writes a token into the home folder
        head = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        yield f"{ray.util.get_node_ip_address()}:{port}"
        ray.shutdown()
        head.terminate()
        head.wait()


@pytest.fixture(scope="module")
def two(loaded: LoadedModel, address: str) -> WorkerEngine:
    """An engine of two actors."""
    handler = signal.getsignal(signal.SIGTERM)
    engine = open_engine(loaded.model, loaded.tokenizer, backend=Workers(2, lease=4, address=address))
    assert isinstance(engine, WorkerEngine)
    assert signal.getsignal(signal.SIGTERM) is handler
    return engine


def test_completions_are_those_of_one_process(two: WorkerEngine, expected: list[Group]) -> None:
    assert two.generate(PROMPTS, 3, SAMPLING) == expected
    assert two.is_exact


def test_changed_weights_reach_the_actors(two: WorkerEngine, loaded: LoadedModel, expected: list[Group]) -> None:
    two.unload()
    parameter = next(iter(loaded.model.parameters()))
    before = parameter.detach().clone()
    with torch.no_grad():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)).bfloat16())
    changed = two.generate(PROMPTS, 3, SAMPLING)
    assert changed == open_engine(loaded.model, loaded.tokenizer).generate(PROMPTS, 3, SAMPLING) != expected
    with torch.no_grad():
        parameter.copy_(before)
    assert two.generate(PROMPTS, 3, SAMPLING) == expected


def test_an_actor_that_is_killed_is_replaced_and_nothing_is_lost(
    two: WorkerEngine, expected: list[Group], caplog: pytest.LogCaptureFixture
) -> None:
    victim, other = two.process_of(0), two.process_of(1)
    left = [victim]

    def kill(_index: int, _group: Group) -> None:
        if left:
            os.kill(left.pop(), signal.SIGKILL)

    assert two.generate(PROMPTS, 3, SAMPLING, on_group=kill) == expected
    assert two.generate(PROMPTS, 3, SAMPLING) == expected, "if it had nothing to do when it was killed"
    assert "rollout worker 0 ended; it is started again" in caplog.text
    assert two.process_of(0) != victim and two.process_of(1) == other


def test_an_address_without_a_cluster_is_refused(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # of other tests
    with pytest.raises(InputError, match=r"nothing answers there .*; start one with `ray start --head`"):
        open_engine(loaded.model, loaded.tokenizer, backend=Workers(1, address="127.0.0.1:9"))
    with pytest.raises(ValueError, match=r"address is 'ray://head'; give HOST:PORT"):
        GRPORecipe.model_validate({"scale": {"workers": 1, "address": "ray://head"}})
    with pytest.raises(ValueError, match=r"scale.workers is 0; set it to the number of actors"):
        GRPORecipe.model_validate({"scale": {"address": "auto"}})
