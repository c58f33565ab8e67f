"""The same promises kept by vLLM itself: a server of its CPU build, in a virtual environment of its own.

`TUNESMITH_VLLM_PYTHON` names the interpreter of that environment; see docs/engines.md.
"""

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conformance import PROMPTS, every_promise

import tunesmith
from tunesmith.batch.rollout import SamplingParams
from tunesmith.models.export import ModelCard, save_final
from tunesmith.models.language_model import language_model
from tunesmith.models.loaded import LoadedModel
from tunesmith.models.tiny import tiny_model
from tunesmith.rollout.remote.connection import VLLM
from tunesmith.rollout.remote.engine import RemoteEngine

PYTHON = os.environ.get("TUNESMITH_VLLM_PYTHON", "")

pytestmark = [
    pytest.mark.slow,  # vLLM takes a minute to start
    pytest.mark.skipif(not PYTHON, reason="TUNESMITH_VLLM_PYTHON is not set; it names a Python that has vLLM"),
]


def model() -> LoadedModel:
    """A tiny Llama of sizes that vLLM's kernels take; its output layer shares the weight of the token embedding."""
    sizes = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
    return tiny_model("llama", **sizes)


class VLLMServer:
    """A vLLM server in processes of its own."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        self.log = folder.parent / "vllm.log"

    def start(self) -> None:
        """Start it and wait until it answers."""
        source = str(Path(tunesmith.__file__).parent.parent)
        own = {
            "PYTHONPATH": source,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
        }
        command = [
            *(PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.folder)),
            *("--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", "256", "--logprobs-mode", "processed_logprobs"),
            *("--worker-extension-cls", "tunesmith.rollout.remote.worker.WeightLoader"),
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env={**os.environ, **own}, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            except (OSError, urllib.error.URLError):
                time.sleep(0.5)
        raise AssertionError(f"vLLM did not start: {self.log.read_text()[-4000:]}")

    def kill(self) -> None:
        """Kill it and all its processes."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    loaded = model()
    folder = save_final(
        loaded.model, loaded.tokenizer, tmp_path_factory.mktemp("vllm") / "model", ModelCard("tiny", "none")
    )
    running = VLLMServer(folder)
    running.start()
    yield running
    running.kill()


def engine_on(server: VLLMServer, loaded: LoadedModel) -> RemoteEngine:
    return RemoteEngine(language_model(loaded.model), loaded.tokenizer, VLLM(server.url, 300.0))


@every_promise
def test_vllm_keeps_every_promise(promise: Callable[[RemoteEngine, LoadedModel], None], server: VLLMServer) -> None:
    loaded = model()
    promise(engine_on(server, loaded), loaded)


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
