"""The processes of one training, and what they exchange.

Every rank knows the whole batch of a step and computes a share of it: `share_of` divides micro-batches or prompts,
`gathered` gives every rank the results of all, in the order of the batch. So advantages, denominators and metrics are
those of one process, and only gradients are summed in an order of their own. Rank 0 leads: it decides what comes next
(`tell`), and the others follow (`orders`). In one process everything here returns what it was given.
"""

import io
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh, Store  # pyright: ignore[reportPrivateImportUsage]

from tunesmith.base.core.errors import LostRankError
from tunesmith.engine.distributed.stages import Stages

T = TypeVar("T")

_GRACE_S = 5.0
"""Seconds in which every rank that runs has noticed that a collective failed."""

END = "end"
"""The order after which the other ranks leave."""


def is_lost(error: BaseException) -> bool:
    """True if another rank is the reason: one of our collectives failed, or one of torch within a model's pass."""
    return isinstance(error, LostRankError) or (
        isinstance(error, RuntimeError) and any(name in str(error) for name in ("gloo", "NCCL"))
    )


@dataclass(slots=True)
class Ranks:
    """This process among `count` of one training; `index` 0 leads.

    `tensor` neighbours compute the same micro-batches together, each a part of every linear map; or those of one of
    `stages` do, each some of the layers. `mesh` has the dimensions `data`, and `tensor` or `stage`; None where a rank
    has all parameters.

    `store` holds the collective that each rank reached last, and which ranks saw one fail, so that a rank that never
    comes or that stops in the middle can be named. While `announcer` is set it has a micro-batch and another rank has
    none, which it tells of the `passes` to join.
    """

    index: int
    count: int
    store: Store
    tensor: int = 1
    stages: Stages | None = None
    mesh: DeviceMesh | None = None
    num_collectives: int = 0
    passes: list[Callable[[], torch.Tensor]] = field(default_factory=list[Callable[[], torch.Tensor]])
    announcer: int | None = None

    @property
    def num_together(self) -> int:
        """Number of ranks that compute the same micro-batches."""
        return self.tensor if self.stages is None else self.stages.count

    @property
    def num_data(self) -> int:
        """Number of ranks, or groups of ranks, that compute different micro-batches."""
        return self.count // self.num_together

    @property
    def data(self) -> int:
        """The number of this rank among those, from 0."""
        return self.index // self.num_together

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks with the same part of the linear maps as this one; None for all ranks."""
        return None if self.mesh is None else self.mesh.get_group("data")

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Note that this rank has reached the collective `name`; raises LostRankError, naming the ranks that have not,
        if it fails.
        """
        self.num_collectives += 1
        try:
            self.store.set(f"reached/{self.index}", f"{self.num_collectives} {name}")
            yield
        except RuntimeError as error:
            try:
                self.store.set(f"failed/{self.index}", "")
                lost = "; ".join(self._behind() or self._silent()) or "all ranks arrived, and one of them left"
            except RuntimeError:  # the store is in rank 0
                lost = "rank 0 has ended"
            raise LostRankError(f"rank {self.index} waited in `{name}` in vain: {lost}") from error

    def _behind(self) -> list[str]:
        """The ranks that have not reached this collective, with the last one that each has reached."""
        behind: list[str] = []
        for rank in range(self.count):
            known = self.store.check([f"reached/{rank}"])
            number, name = self.store.get(f"reached/{rank}").decode().split(" ", 1) if known else ("0", "nothing")
            if int(number) < self.num_collectives:
                behind.append(f"rank {rank} did not arrive, its last was `{name}` ({number})")
        return behind

    def _silent(self) -> list[str]:
        """The ranks that do not say within `_GRACE_S` that the collective failed: where one fails, all do."""
        deadline = time.monotonic() + _GRACE_S
        silent = range(self.count)
        while silent and time.monotonic() < deadline:
            time.sleep(0.05)
            silent = [rank for rank in silent if not self.store.check([f"failed/{rank}"])]
        return [f"rank {rank} arrived and answers no more: it has ended or is stopped" for rank in silent]


_RANKS: ContextVar[Ranks | None] = ContextVar("ranks", default=None)


@contextmanager
def joined(ranks: Ranks) -> Iterator[Ranks]:
    """Divide the work of the block among `ranks`."""
    token = _RANKS.set(ranks)
    try:
        yield ranks
    finally:
        _RANKS.reset(token)


def num_ranks() -> int:
    """Number of processes of this training; 1 outside of `joined`."""
    ranks = _RANKS.get()
    return 1 if ranks is None else ranks.count


def rank() -> int:
    """The number of this process, from 0."""
    ranks = _RANKS.get()
    return 0 if ranks is None else ranks.index


def num_data() -> int:
    """Number of ranks that compute different micro-batches; those of one tensor-parallel group count once."""
    ranks = _RANKS.get()
    return 1 if ranks is None else ranks.num_data


def data_rank() -> int:
    """The number of this process among those that compute different micro-batches, from 0."""
    ranks = _RANKS.get()
    return 0 if ranks is None else ranks.data


@contextmanager
def together(name: str) -> Iterator[None]:
    """A block in which torch lets the ranks exchange something; as `Ranks.collective`."""
    ranks = _RANKS.get()
    with nullcontext() if ranks is None else ranks.collective(name):
        yield


def share_of(items: Sequence[T], *, all_ranks: bool = False) -> Sequence[T]:
    """The part of `items` that this rank computes: consecutive ones, as many as each other rank's but for one.

    Ranks of one tensor-parallel group have the same part; with `all_ranks` each has its own.

    >>> share_of([1, 2, 3])
    [1, 2, 3]
    """
    ranks = _RANKS.get()
    if ranks is None:
        return items
    place, count = (ranks.index, ranks.count) if all_ranks else (ranks.data, ranks.num_data)
    bounds = [len(items) * i // count for i in range(count + 1)]
    own = items[bounds[place] : bounds[place + 1]]
    return own if all_ranks or not ranks.passes else _Rounds(own, [b - a for a, b in pairwise(bounds)], ranks)


class _Rounds(Sequence[T]):
    """The share of a rank whose models are divided: a pass over one needs all ranks, so that while it is iterated,
    ranks that have one item less join the passes of the others with an empty one.
    """

    def __init__(self, own: Sequence[T], sizes: Sequence[int], ranks: Ranks) -> None:
        self._own, self._sizes, self._ranks = own, sizes, ranks

    def __len__(self) -> int:
        return len(self._own)

    def __getitem__(self, index: Any) -> Any:
        return self._own[index]

    def __iter__(self) -> Iterator[T]:
        # Shares differ by one item at most, so that only in the last round some ranks have none. Which passes it has,
        # and whether with gradients, is known to the code that iterates alone: a rank that has an item announces each,
        # and only in that round, because an announcement is a collective that all rounds before would wait for.
        most, announcer = max(self._sizes), self._sizes.index(max(self._sizes))
        for number, item in enumerate(self._own, start=1):
            if number == most and min(self._sizes) < most:
                self._ranks.announcer = announcer
            yield item
        if self._ranks.announcer is not None:
            announce(None)
            self._ranks.announcer = None
        elif len(self._own) < most:
            self._follow(announcer)

    def _follow(self, announcer: int) -> None:
        outputs: list[torch.Tensor] = []
        while (order := _told(self._ranks, announcer)) is not None:
            place, with_gradient = order
            with torch.set_grad_enabled(with_gradient):
                if place == _BACKWARD:
                    torch.stack(outputs).sum().backward()
                    outputs.clear()
                elif (output := self._ranks.passes[place]()).requires_grad:
                    outputs.append(output)


_BACKWARD = -1

_Order = tuple[int, bool] | None
"""The pass to join, or `_BACKWARD`, and whether gradients are enabled; None after the last."""


def announce(place: int | None) -> None:
    """Before pass number `place` of `add_pass`, None after the last: tell ranks that have nothing to compute."""
    ranks = _RANKS.get()
    if ranks is not None and ranks.announcer is not None:
        _told(ranks, ranks.announcer, None if place is None else (place, torch.is_grad_enabled()))


def announce_backward() -> None:
    """As `announce`, before a backward pass."""
    announce(_BACKWARD)


def _told(ranks: Ranks, announcer: int, order: _Order = None) -> _Order:
    told = [order]
    with ranks.collective("next pass"):
        dist.broadcast_object_list(told, group_src=announcer, group=ranks.data_group)
    return told[0]


def add_pass(empty_pass: Callable[[], torch.Tensor]) -> int:
    """The number of a model whose passes all ranks make together; `empty_pass` is one without an effect."""
    ranks = _RANKS.get()
    assert ranks is not None, "one process divides nothing"
    ranks.passes.append(empty_pass)
    return len(ranks.passes) - 1


def mesh() -> DeviceMesh | None:
    """The ranks by `data` and `tensor`; None unless they divide parameters."""
    ranks = _RANKS.get()
    return None if ranks is None or ranks.stages is not None else ranks.mesh


def in_group() -> bool:
    """True if several ranks compute the same micro-batches, whose sums then have an order of their own."""
    ranks = _RANKS.get()
    return ranks is not None and ranks.num_together > 1


def forget_passes() -> None:
    """Forget the models of an earlier training of this process."""
    ranks = _RANKS.get()
    if ranks is not None:
        ranks.passes.clear()


def gathered(parts: Sequence[T], name: str = "results", *, all_ranks: bool = False) -> list[T]:
    """The parts of all ranks, one rank's after the other's: the results of `share_of`, in the order of the items.

    Those of a tensor-parallel group count once, and of pipeline stages those of the last, unless `all_ranks`. Tensors
    come back on this rank's device.
    """
    ranks = _RANKS.get()
    if ranks is None:
        return list(parts)
    if ranks.stages is not None and not all_ranks:
        return _gathered(ranks, parts if ranks.stages.is_last else [], name, None)
    return _gathered(ranks, parts, name, None if all_ranks else ranks.data_group)


def gathered_of_stage(parts: Sequence[T], name: str, *, all_ranks: bool = False) -> list[T]:
    """As `gathered`, with the parts of the ranks that hold the same layers as this one."""
    ranks = _RANKS.get()
    if ranks is None:
        return list(parts)
    return _gathered(ranks, parts, name, None if all_ranks and ranks.stages is None else ranks.data_group)


def of_all_stages(parts: Sequence[T], name: str) -> list[T]:
    """The parts of the stages of this rank's pipeline; without one, `parts`."""
    ranks = _RANKS.get()
    if ranks is None or ranks.stages is None or ranks.mesh is None:
        return list(parts)
    return _gathered(ranks, parts, name, ranks.mesh.get_group("stage"))


def stages() -> Stages | None:
    """The pipeline that this rank is a stage of; None if it has all layers."""
    ranks = _RANKS.get()
    return None if ranks is None else ranks.stages


def add_to(owner: int, tensor: torch.Tensor, name: str) -> None:
    """Sum `tensor` over all ranks, in place on the rank `owner`; on the others its contents are undefined."""
    ranks = _RANKS.get()
    if ranks is not None and tensor.numel():
        with ranks.collective(name):
            dist.reduce(tensor, group_dst=owner, group=ranks.data_group)


def copy_from(owner: int, tensor: torch.Tensor, name: str) -> None:
    """Replace `tensor` by that of the rank `owner`."""
    ranks = _RANKS.get()
    if ranks is not None and tensor.numel():
        with ranks.collective(name):
            dist.broadcast(tensor.view(torch.uint8), group_src=owner, group=ranks.data_group)


@dataclass(frozen=True, slots=True)
class Message:
    """A contiguous tensor that goes to the rank `other`, or is filled by it."""

    other: int
    tensor: torch.Tensor

    def post(self, send: Callable[..., Any]) -> dist.P2POp:
        """The operation `dist.isend` or `dist.irecv`."""
        return dist.P2POp(send, self.tensor.view(torch.uint8), self.other)


def exchange(sent: Sequence[Message], received: Sequence[Message], name: str) -> None:
    """Send and receive messages; those of two ranks are in the same order on both. Every rank must call it."""
    ranks = _RANKS.get()
    if ranks is not None:
        posted = [*(one.post(dist.irecv) for one in received), *(one.post(dist.isend) for one in sent)]
        with ranks.collective(name):
            for work in dist.batch_isend_irecv(posted) if posted else ():
                work.wait()


def tell(order: str, *arguments: object) -> None:
    """From rank 0: what all ranks do next. The others hear it from `orders`."""
    ranks = _RANKS.get()
    if ranks is not None and ranks.index == 0:
        with ranks.collective(order):
            dist.broadcast_object_list([(order, arguments)], src=0)


def orders() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Name and arguments of each order of rank 0, `END` the last."""
    ranks = _RANKS.get()
    assert ranks is not None and ranks.index > 0, "rank 0 gives the orders"
    order = ""
    while order != END:
        heard: list[Any] = [None]
        with ranks.collective("the next order"):
            dist.broadcast_object_list(heard, src=0)
        order, arguments = heard[0]
        yield order, arguments


def _gathered(ranks: Ranks, parts: Sequence[T], name: str, group: dist.ProcessGroup | None) -> list[T]:
    buffer = io.BytesIO()
    torch.save(list(parts), buffer)
    received: list[bytes] = [b""] * dist.get_world_size(group)
    with ranks.collective(name):
        dist.all_gather_object(received, buffer.getvalue(), group=group)
    lists = [torch.load(io.BytesIO(one), map_location=_on_this_device, weights_only=False) for one in received]
    return [part for parts in lists for part in parts]


def _on_this_device(storage: Any, location: str) -> Any:
    return storage.cuda() if location.startswith("cuda") else storage
