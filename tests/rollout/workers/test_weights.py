"""Weights of workers: what is published, and what a worker with other weights answers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tunesmith.base.config.sections import LoraSection
from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models.heads import ScalarHead
from tunesmith.engine.models.lora import AdapterBase, add_adapters
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.rollout.sampler import NoiseKey
from tunesmith.engine.rollout.workers import weights
from tunesmith.engine.rollout.workers.messages import Draw, Drawn, Handle, Load, Loaded, Refused, Reply, Setup, Tensors
from tunesmith.engine.rollout.workers.pool import Pool
from tunesmith.engine.rollout.workers.worker import Worker


class Store:
    """Published tensors in a dictionary."""

    def __init__(self) -> None:
        self.tensors: dict[int, Tensors] = {}
        self.num_published = 0

    def publish(self, tensors: Tensors) -> Handle:
        self.num_published += 1
        self.tensors[self.num_published] = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        return self.num_published

    def discard(self, handle: Handle) -> None:
        del self.tensors[handle]

    def fetch(self, handle: Handle) -> Tensors:
        if handle not in self.tensors:
            raise FileNotFoundError(handle)
        return self.tensors[handle]


class Parts:
    """A model with a value head, its publisher, and a worker in this process."""

    def __init__(self, *, rank: int = 0) -> None:
        self.loaded = tiny_model("qwen2")
        add_adapters(self.loaded.model, LoraSection(rank=rank), AdapterBase("tiny:qwen2"))
        head = ScalarHead(32)
        self.module = nn.ModuleDict({"policy": self.loaded.model, "value_head": head})
        self.store = Store()
        self.publisher = weights.Publisher(self.module, self.store.publish, self.store.discard, Kernels())
        content = self.loaded.model, self.loaded.tokenizer, head
        skeleton = weights.pickled(content, dict(self.module.named_parameters()))
        self.worker = Worker(Setup(skeleton, "auto", 1, 8, None, "model", True), self.store.fetch)

    def draw(self, edition: int) -> Draw:
        return Draw(edition, 1, 0, ((5, 6, 7),), (NoiseKey(1, 0),), 2, SamplingParams(max_new_tokens=6, seed=0))

    def trained(self) -> nn.Parameter:
        return next(p for p in self.loaded.model.parameters() if p.requires_grad)


def test_the_skeleton_holds_no_weights() -> None:
    model = tiny_model("qwen2", hidden_size=256, head_dim=64).model
    named = dict(model.named_parameters())
    content = weights.pickled(model, named)
    assert len(content) < 0.2 * sum(parameter.nbytes for parameter in named.values())
    again = weights.unpickled(content, named)
    assert all(mine is its for mine, its in zip(again.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("rank", (0, 2))
def test_each_version_is_published_once_and_frozen_weights_only_at_first(rank: int) -> None:
    parts = Parts(rank=rank)
    first = parts.publisher.current()
    assert len(first.parts) == 1 + bool(rank)
    assert parts.publisher.current() == first and parts.publisher.current() == first, "the same bytes"
    with torch.no_grad():
        parts.trained().data.add_(1.0)  # as a kernel does, without torch's knowledge
    second = parts.publisher.current()
    assert second.edition > first.edition and second.parts[:-1] == first.parts[:-1]
    assert second.parts[-1].digest != first.parts[-1].digest
    assert parts.store.num_published == len(first.parts) + 1 and len(parts.store.tensors) == len(first.parts)


@pytest.mark.parametrize("rank", (0, 2))
def test_a_worker_proves_new_weights_and_draws_from_no_others(rank: int) -> None:
    parts = Parts(rank=rank)
    first = parts.publisher.current()
    assert isinstance(parts.worker.answer(parts.draw(first.edition)), Refused), "before it has weights"
    proof = parts.worker.answer(first)
    assert isinstance(proof, Loaded) and proof.digests == tuple(part.digest for part in first.parts)
    before = parts.worker.answer(parts.draw(first.edition))
    assert isinstance(before, Drawn) and all(one.values for one in before.completions[0])
    with torch.no_grad():
        for parameter in parts.module.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.linspace(0, 0.5, parameter.numel()).reshape(parameter.shape))
    second = parts.publisher.current()
    assert isinstance(parts.worker.answer(parts.draw(second.edition)), Refused), "it has not got them yet"
    assert isinstance(parts.worker.answer(second), Loaded)
    assert isinstance(parts.worker.answer(parts.draw(first.edition)), Refused), "it has them no more"
    after = parts.worker.answer(parts.draw(second.edition))
    assert isinstance(after, Drawn) and after.completions != before.completions
    assert after.completions[0][0].values != before.completions[0][0].values, "the value head's too"


class Delayed:
    """A transport whose workers answer what a test puts into `replies`."""

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.replies: list[tuple[int, Reply]] = []

    def start(self, worker: int, setup: object) -> None:
        pass

    def send(self, worker: int, message: object) -> None:
        self.sent.append(message)

    def receive(self, timeout_s: float) -> list[tuple[int, Reply]]:
        replies, self.replies = self.replies, []
        return replies


def test_a_worker_that_proves_weights_which_are_no_longer_wanted_gets_the_others_again() -> None:
    transport: Any = Delayed()
    pool = Pool(transport, Setup(b"", "auto", 1, 8, None, "model", True), 1, timeout_s=60.0, check=lambda *_: None)
    pool.use(Load(3, ()))
    transport.replies = [(0, Loaded(3, (), True, ()))]
    pool.receive(0.0)
    assert pool.ready() == [0]
    pool.use(Load(4, ()))  # of an evaluation, which ends without this worker
    pool.use(Load(3, ()))
    transport.replies = [(0, Loaded(4, (), True, ()))]  # late
    pool.receive(0.0)
    assert pool.ready() == [] and transport.sent[-1] == Load(3, ())
    transport.replies = [(0, Loaded(3, (), True, ()))]
    pool.receive(0.0)
    assert pool.ready() == [0]


def test_damaged_weights_do_not_prove_and_are_not_drawn_from() -> None:
    parts = Parts()
    message = parts.publisher.current()
    (tensors,) = parts.store.tensors.values()
    next(iter(tensors.values())).view(-1)[0] += 1e-3
    proof = parts.worker.answer(message)
    assert isinstance(proof, Loaded) and proof.digests != tuple(part.digest for part in message.parts)
    assert isinstance(parts.worker.answer(parts.draw(message.edition)), Refused)
    next(iter(tensors.values())).view(-1)[0] = parts.trained().detach().view(-1)[0]
    tensors.update({name: p.detach() for name, p in parts.module.named_parameters()})  # type: ignore[attr-defined]
    assert parts.worker.answer(message).digests == tuple(part.digest for part in message.parts)  # type: ignore[union-attr]


def test_weights_that_are_gone_are_refused() -> None:
    parts = Parts()
    message = parts.publisher.current()
    gone = Load(message.edition, tuple(replace(part, handle=99) for part in message.parts))
    assert isinstance(parts.worker.answer(gone), Refused)
    assert isinstance(parts.worker.answer(message), Loaded)
