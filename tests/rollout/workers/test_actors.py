"""Workers as actors of a Ray cluster on this machine: the same completions and runs, after an actor was killed too."""

import contextlib
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest
import torch

from tunesmith.apps.cli.main import main
from tunesmith.base.config.algorithms.grpo import GRPORecipe
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Group, SamplingParams
from tunesmith.engine.models.loaded import LoadedModel
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.rollout.factory import open_engine
from tunesmith.engine.rollout.workers.engine import WorkerEngine, Workers

ray = pytest.importorskip("ray", reason="needs Ray, which the extra `ray` installs")

PROMPTS = [Prompt(str(index), f"Prompt {index % 5} of some") for index in range(8)]  # three of them twice
SAMPLING = SamplingParams(max_new_tokens=24, seed=3)
SMALL = "--block --object-store-memory 80000000"


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> list[Group]:
    """The completions of one process."""
    return open_engine(loaded.model, loaded.tokenizer).generate(PROMPTS, 3, SAMPLING)


@contextlib.contextmanager
def node(options: str) -> Iterator[psutil.Process]:
    """A node of a Ray cluster, by its first process; none outlives the block."""
    words = [sys.executable, "-m", "ray.scripts.scripts", "start", *SMALL.split(), *options.split()]
    started = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert started.stdout is not None and any(b"Ray runtime started" in line for line in started.stdout)
    process = psutil.Process(started.pid)
    children = process.children(recursive=True)
    try:
        yield process
    finally:
        started.terminate()
        started.wait()
        _, left = psutil.wait_procs(children, timeout=60)
        assert not left


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A Ray cluster of one machine with four CPUs, whatever it has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else Ray writes a token into the home folder
        # Beside other tests an actor of low priority gets no processor, and a service may be silent for long. A driver
        # that has waited too long for a service ends its process, which here is that of the tests.
        patch.setenv("RAY_worker_niceness", "0")
        patch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
        for attempt in range(3):
            with tempfile.TemporaryDirectory(prefix="ray-") as folder:
                port = free_port()
                ports = f"--port {port} --ray-client-server-port {free_port()}"
                quiet = "--disable-usage-stats --include-dashboard false"
                with node(f"--head --num-cpus 4 {ports} {quiet} --temp-dir {folder}"):
                    found = f"{ray.util.get_node_ip_address()}:{port}"
                    if attempt == 2 or can_connect(found):
                        yield found
                        ray.shutdown()
                        return


def can_connect(address: str) -> bool:
    """True if a driver can use the cluster at `address`.

    It runs in a process of its own: when another program took a port that a service of the cluster had chosen, Ray ends
    the driver's process without an exception.
    """
    lines = ["import ray", f"ray.init({address!r}, log_to_driver=False)", "ray.get(ray.remote(int).remote())"]
    return subprocess.run([sys.executable, "-c", "; ".join(lines)]).returncode == 0


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]


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
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
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
    end = time.monotonic() + 120
    while two.process_of(0) == victim and time.monotonic() < end:  # the other may draw all before Ray reports the loss
        assert two.generate(PROMPTS, 3, SAMPLING) == expected
    assert two.generate(PROMPTS, 3, SAMPLING) == expected, "with the actor that replaced it"
    assert "rollout worker 0 ended; it is started again" in caplog.text
    assert two.process_of(0) != victim and two.process_of(1) == other


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_machine_that_is_lost_changes_nothing(
    address: str, loaded: LoadedModel, expected: list[Group], seed: int
) -> None:
    chance = random.Random(seed)
    with node(f"--address {address} --num-cpus 2") as second:
        engine = open_engine(loaded.model, loaded.tokenizer, backend=Workers(2, lease=4, address=address))
        assert isinstance(engine, WorkerEngine)
        assert engine.generate(PROMPTS, 3, SAMPLING) == expected
        machine = [second, *second.children(recursive=True)]
        there = {process.pid for process in machine}
        assert there & {engine.process_of(worker) for worker in range(2)}, "Ray spreads actors"
        when = chance.randrange(len(PROMPTS))  # a random group ends, and an actor is killed as often as the node

        def lose(index: int, _group: Group) -> None:
            if index == when - 1:
                os.kill(engine.process_of(chance.randrange(2)), signal.SIGKILL)
            for process in machine if index == when else ():
                with contextlib.suppress(psutil.NoSuchProcess):  # with the one that started it
                    process.kill()

        assert engine.generate(PROMPTS, 3, SAMPLING, on_group=lose) == expected
        assert engine.generate(PROMPTS, 3, SAMPLING) == expected
        end = time.monotonic() + 120
        while sum(one["Alive"] for one in ray.nodes()) > 1:  # Ray notices after some heartbeats that did not come
            assert time.monotonic() < end, "the node stays alive"
            time.sleep(0.5)
        assert engine.generate(PROMPTS, 3, SAMPLING) == expected
        assert not there & {engine.process_of(worker) for worker in range(2)}


def trained(folder: Path, *flags: str) -> list[Mapping[str, object]]:
    """Samples of two steps, and what they learned, by the command line."""
    words = ["train", "grpo", "--model", "tiny:llama", "--model.dtype", "float32", "--run.dir", str(folder)]
    assert main([*words, "--run.steps", "2", "--run.sample_every", "1", "--run.num_threads", "1", *flags]) == 0
    (run_dir,) = [path.parent for path in folder.rglob("recipe.yaml")]
    weights = hashlib.sha256((run_dir / "final" / "model.safetensors").read_bytes()).hexdigest()
    rows = (run_dir / "samples.jsonl").read_text().splitlines()
    return [{"weights": weights}, *map(json.loads, rows)]


@pytest.mark.usefixtures("own_logging")
def test_a_run_on_actors_is_that_of_local_workers_and_of_one_process(address: str, tmp_path: Path) -> None:
    alone = trained(tmp_path / "alone")
    assert len(alone) > 1
    assert trained(tmp_path / "local", "--scale.workers", "2") == alone
    assert trained(tmp_path / "actors", "--scale.workers", "2", "--scale.address", address) == alone


@pytest.mark.usefixtures("own_logging")
def test_a_cluster_that_cannot_be_used_is_refused(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "grpo", "--model", "tiny:llama", "--run.dir", str(tmp_path), "--scale.workers"]

    def said(workers: int, where: str) -> str:
        assert main([*words, str(workers), "--scale.address", where]) == 2
        return " ".join(capsys.readouterr().err.split())

    assert "the workers need 9 CPUs, but the Ray cluster has 4" in said(9, address)
    assert "give HOST:PORT" in said(1, "ray://head")
    with monkeypatch.context() as patch:
        patch.setattr(ray, "is_initialized", lambda: False)  # other tests use theirs
        assert "no Ray cluster answers there" in (text := said(1, "127.0.0.1:9")) and "`ray start --head`" in text
        patch.setenv("RAY_ADDRESS", "")
        assert "Ray cannot connect to it" in said(1, "auto")
        patch.setitem(sys.modules, "ray", None)
        assert "run `pip install 'tunesmith[ray]'`" in said(1, address)
    with pytest.raises(ValueError, match=r"scale.workers is 0; set it to the number of actors"):
        GRPORecipe.model_validate({"scale": {"address": "auto"}})
