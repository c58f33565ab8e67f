"""Workers in real processes: the same completions for any number of them, after kills, hangs and copies."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from tunesmith.base.core.errors import InputError, ServerError
from tunesmith.base.core.trace import span, trace
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Group, SamplingParams
from tunesmith.engine.models.heads import ScalarHead
from tunesmith.engine.models.loaded import LoadedModel
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.rollout.engine import GenerationInterrupted
from tunesmith.engine.rollout.factory import open_engine
from tunesmith.engine.rollout.workers.engine import WorkerEngine, Workers, leases_of
from tunesmith.engine.rollout.workers.local import LocalTransport
from tunesmith.engine.rollout.workers.messages import Handle, Tensors

PROMPTS = [Prompt(str(index), f"Prompt {index % 5} of some") for index in range(8)]  # three of them twice
SAMPLING = SamplingParams(max_new_tokens=24, seed=3)


def open_workers(loaded: LoadedModel, count: int, head: nn.Module | None = None, **options: object) -> WorkerEngine:
    workers = Workers(count, **{"lease": 4, **options})  # type: ignore[arg-type]
    engine = open_engine(loaded.model, loaded.tokenizer, backend=workers, value_head=head)
    assert isinstance(engine, WorkerEngine)
    return engine


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def two(loaded: LoadedModel) -> WorkerEngine:
    """An engine of two workers, which several tests use."""
    engine = open_workers(loaded, 2)
    engine.generate(PROMPTS[:1], 1, SAMPLING)
    return engine


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> list[Group]:
    """The completions of one process."""
    return open_engine(loaded.model, loaded.tokenizer).generate(PROMPTS, 3, SAMPLING)


@pytest.mark.parametrize("count", (1, 2, 3, 7))
def test_completions_are_those_of_one_process(loaded: LoadedModel, expected: list[Group], count: int) -> None:
    engine = open_workers(loaded, count)
    assert engine.generate(PROMPTS, 3, SAMPLING) == expected
    assert engine.is_exact
    greedy = SamplingParams(max_new_tokens=9, temperature=0)
    reference = open_engine(loaded.model, loaded.tokenizer).generate(PROMPTS[:2], 9, greedy)
    assert engine.generate(PROMPTS[:2], 9, greedy) == reference, "a group in several leases"


def test_without_exactness_the_bits_do_not_depend_on_the_number_of_workers_either() -> None:
    loaded = tiny_model("llama", dtype=torch.float64)
    one, three = (open_workers(loaded, count).generate(PROMPTS, 3, SAMPLING) for count in (1, 3))
    assert one == three


def test_leases_hold_every_sample_once() -> None:
    for num_prompts, n, size in ((5, 3, 8), (1, 20, 8), (3, 9, 8), (4, 8, 8), (7, 1, 3)):
        leases = leases_of(num_prompts, n, size)
        samples = [(i, lease.first_sample + k) for lease in leases for i in lease.indices for k in range(lease.n)]
        assert sorted(samples) == [(i, k) for i in range(num_prompts) for k in range(n)]
        assert all(lease.n * len(lease.indices) <= size for lease in leases)


@pytest.mark.parametrize(("num_prompts", "expected"), [(4, [8, 8]), (8, [8] * 4), (16, [16] * 4), (32, [16] * 8)])
def test_small_requests_have_small_leases(num_prompts: int, expected: list[int]) -> None:
    assert [lease.n * len(lease.indices) for lease in leases_of(num_prompts, 4, 16)] == expected


def test_callbacks_have_every_completion(two: WorkerEngine, expected: list[Group]) -> None:
    counts: list[int] = []
    groups: dict[int, Group] = {}
    texts: dict[tuple[int, int], str] = {}
    two.generate(
        PROMPTS,
        3,
        SAMPLING,
        on_progress=lambda done, _: counts.append(done),
        on_group=lambda index, group: groups.update({index: group}),
        on_text=lambda index, sample, text: texts.update({(index, sample): text}),
    )
    assert counts == list(range(1, 25))
    assert [groups[index] for index in range(8)] == expected
    assert texts[3, 1] == expected[3].completions[1].text


def test_changed_weights_and_a_value_head_reach_the_workers() -> None:
    loaded, head = tiny_model("qwen3", tie_word_embeddings=False), ScalarHead(32)
    engine = open_workers(loaded, 2, head)
    one_process = open_engine(loaded.model, loaded.tokenizer, value_head=head)
    generator = torch.Generator().manual_seed(0)
    drawn: list[list[Group]] = []
    for _ in range(3):
        drawn.append(engine.generate(PROMPTS, 2, SAMPLING))
        assert drawn[-1] == one_process.generate(PROMPTS, 2, SAMPLING)
        engine.unload()
        with torch.no_grad():
            for parameter in (*loaded.model.parameters(), *head.parameters()):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    assert drawn[0] != drawn[1] != drawn[2]
    assert drawn[1][0].completions[0].values != drawn[0][0].completions[0].values


def at_first_group(act: Callable[[], object]) -> Callable[[int, Group], None]:
    """A callback that calls `act` once, when the first group is there."""
    left = [act]
    return lambda _index, _group: left.pop()() if left else None  # type: ignore[func-returns-value]


def test_a_killed_worker_is_replaced_and_nothing_is_lost(
    two: WorkerEngine, expected: list[Group], caplog: pytest.LogCaptureFixture
) -> None:
    before = [two.process_of(worker) for worker in range(2)]
    with trace() as times, span("rollout"):
        kill = at_first_group(lambda: [os.kill(pid, signal.SIGKILL) for pid in before])
        assert two.generate(PROMPTS, 3, SAMPLING, on_group=kill) == expected
    assert times.metrics()["rollout/worker_restarts"] == 2
    assert "rollout worker 0 ended" in caplog.text and "rollout worker 1 ended" in caplog.text
    assert not {two.process_of(worker) for worker in range(2)} & set(before)


@pytest.mark.slow
def test_a_hundred_random_kills_change_nothing(loaded: LoadedModel, expected: list[Group]) -> None:
    engine, chance, num_kills = open_workers(loaded, 3, lease=2), random.Random(0), 0

    def kill_sometimes(_index: int, _group: Group) -> None:
        nonlocal num_kills
        # One that has answered since it was last lost: those that never answer in between would end the run.
        members = engine._pool._members if engine._pool else {}
        victims = [worker for worker, member in members.items() if not member.num_failures]
        if victims and chance.random() < 0.3:
            num_kills += 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine.process_of(chance.choice(victims)), signal.SIGKILL)

    while num_kills < 100:
        assert engine.generate(PROMPTS, 3, SAMPLING, on_group=kill_sometimes) == expected


def test_leases_of_a_stopped_worker_are_drawn_by_another(two: WorkerEngine, expected: list[Group]) -> None:
    def num_stolen() -> float:
        two.generate(PROMPTS, 3, SAMPLING)  # so that rates are known
        os.kill(two.process_of(0), signal.SIGSTOP)
        try:
            with trace() as times, span("rollout"):
                assert two.generate(PROMPTS, 3, SAMPLING) == expected
        finally:
            os.kill(two.process_of(0), signal.SIGCONT)
        return times.metrics()["rollout/stolen_leases"]

    # None where the worker was stopped within a lease of the call before, which the other one had stolen.
    assert any(num_stolen() == 1 for _ in range(10))


def test_a_worker_that_hangs_is_named_killed_and_replaced(
    loaded: LoadedModel, expected: list[Group], caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_workers(loaded, 1, timeout_s=3.0)
    stop = at_first_group(lambda: os.kill(engine.process_of(0), signal.SIGSTOP))
    assert engine.generate(PROMPTS, 3, SAMPLING, on_group=stop) == expected
    assert "rollout worker 0 gave no answer for 3 s; it is killed" in caplog.text


def test_weights_that_arrive_damaged_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = LocalTransport.publish

    def damage(self: LocalTransport, tensors: Tensors) -> Handle:
        name, tensor = next(iter(tensors.items()))
        return publish(self, {**tensors, name: tensor.detach() * 1.01})

    monkeypatch.setattr(LocalTransport, "publish", damage)
    engine = open_workers(tiny_model("gpt2"), 1)
    with pytest.raises(ServerError, match="loaded other bytes than the weights of edition 1"):
        engine.generate(PROMPTS, 1, SAMPLING)


def test_errors_of_a_worker_are_raised_here(loaded: LoadedModel, two: WorkerEngine, expected: list[Group]) -> None:
    with pytest.raises(InputError, match="temperature is -1"):
        two.generate(PROMPTS, 1, SamplingParams(temperature=-1))
    with pytest.raises(InputError, match="at least 1 worker"):
        Workers(0)
    assert two.generate(PROMPTS, 3, SAMPLING) == expected


def test_ctrl_c_returns_what_had_ended(two: WorkerEngine, expected: list[Group]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(GenerationInterrupted) as caught:
        two.generate(PROMPTS, 3, SAMPLING, on_group=at_first_group(interrupt))
    known = {completion for group in expected for completion in group.completions}
    found = [completion for group in caught.value.groups for completion in group.completions]
    assert found and known.issuperset(found)
    assert two.generate(PROMPTS, 3, SAMPLING) == expected


PARENT = """
import torch
from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.rollout.factory import open_engine
from tunesmith.engine.rollout.workers.engine import Workers
from tunesmith.base.schema.records import Prompt

loaded = tiny_model("llama", max_position_embeddings=4096)
engine = open_engine(loaded.model, loaded.tokenizer, backend=Workers(2))
pids = lambda: [engine.process_of(worker) for worker in range(2)]
engine.generate([Prompt("0", "Once")], 1, SamplingParams(max_new_tokens=1))
print(*pids(), flush=True)
engine.generate([Prompt("0", "Once")] * 4, 4, SamplingParams(max_new_tokens=4000, min_new_tokens=4000))
"""


def test_workers_end_with_the_process_that_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2
    parent.kill()
    parent.wait()
    end = time.monotonic() + 60
    while any(worker.is_running() for worker in workers) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(worker.is_running() for worker in workers)
