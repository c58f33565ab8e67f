"""The workers of an engine: started, given the current weights, watched, and started again when they are lost."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from tunesmith.base.core.errors import ServerError
from tunesmith.base.core.log import get_logger
from tunesmith.engine.rollout.workers.local import Transport
from tunesmith.engine.rollout.workers.messages import (
    Draw,
    Drawn,
    Failed,
    Load,
    Loaded,
    Lost,
    Message,
    Refused,
    Reply,
    Setup,
    Unload,
)

_log = get_logger(__name__)

_MAX_FAILURES = 3
"""Times in a row that a worker may be lost, before the run ends."""


@dataclass(slots=True)
class _Member:
    """A worker: the edition of its proven weights, the message that it works on and since when, its losses in a row."""

    edition: int = 0
    task: Message | None = None
    since: float = 0.0
    num_failures: int = 0


class Pool:
    """`count` workers over `transport`. `check` is called with each worker's proof of its weights."""

    def __init__(
        self,
        transport: Transport,
        setup: Setup,
        count: int,
        *,
        timeout_s: float,
        check: Callable[[int, Loaded], None],
    ) -> None:
        self._transport, self._setup, self._timeout_s, self._check = transport, setup, timeout_s, check
        self._members = {worker: _Member() for worker in range(count)}
        self._weights = Load(0, ())
        self.num_restarts = 0
        self.load_s = 0.0
        """Seconds, summed over the workers, until they had proven weights."""
        for worker in self._members:
            transport.start(worker, setup)

    def use(self, weights: Load) -> None:
        """Give all workers these weights; those at work get them when they have answered."""
        self._weights = weights
        for worker in self._members:
            self._offer_weights(worker)

    def ready(self) -> list[int]:
        """The workers that have the current weights and nothing to do."""
        return [
            worker
            for worker, member in self._members.items()
            if member.task is None and member.edition == self._weights.edition
        ]

    def send(self, worker: int, message: Message) -> None:
        """Give an idle worker a message; `receive` has the answer to a lease, `Refused` or `Lost` included."""
        member = self._members[worker]
        member.task, member.since = message, time.monotonic()
        self._transport.send(worker, message)

    def receive(self, timeout_s: float) -> list[tuple[int, Draw, Drawn | Refused | Lost]]:
        """Answers to leases, after `timeout_s` at most. Workers that were lost, or hang, are started again.

        Raises:
            ServerError: a worker was lost several times in a row.
            TunesmithError: what a worker could not do.
        """
        answers: list[tuple[int, Draw, Drawn | Refused | Lost]] = []
        for worker, reply in [*self._transport.receive(timeout_s), *self._hanging()]:
            task = self._take_reply(worker, reply)
            if isinstance(task, Draw) and isinstance(reply, Drawn | Refused | Lost):
                answers.append((worker, task, reply))
        return answers

    def settle(self, timeout_s: float) -> None:
        """Interrupt the draws that still run, and wait until they have ended, for `timeout_s` at most. Where they
        cannot be interrupted they go on, and their workers are not ready until then.
        """
        end = time.monotonic() + timeout_s
        ending = {worker for worker in self._drawing() if self._transport.interrupt(worker)}
        while not ending.isdisjoint(self._drawing()) and (left_s := end - time.monotonic()) > 0:
            self.receive(left_s)

    def reset(self, setup: Setup | None = None) -> None:
        """Start all workers again, with `setup` if it is given: after Ctrl-C a half-read answer may be lost."""
        self._setup = setup or self._setup
        for worker in self._members:
            self._transport.kill(worker)
            self._members[worker] = _Member()
            self._transport.start(worker, self._setup)

    def unload(self) -> None:
        """Free caches and packed weights of the workers that have nothing to do."""
        for worker in self.ready():
            self.send(worker, Unload())

    def _drawing(self) -> list[int]:
        return [worker for worker, member in self._members.items() if isinstance(member.task, Draw)]

    def _offer_weights(self, worker: int) -> None:
        member = self._members[worker]
        if member.task is None and member.edition != self._weights.edition:
            member.edition = 0  # until these are proven, which may be after still others are wanted
            self.send(worker, self._weights)

    def _take_reply(self, worker: int, reply: Reply) -> Message | None:
        """The message that `reply` answers. The worker is then free, and gets new weights if there are some."""
        member = self._members[worker]
        task, member.task = member.task, None
        match reply:
            case Loaded() if task == self._weights:
                self._accept(worker, reply)
            case Drawn():
                member.num_failures = 0
            case Failed():
                raise reply.error
            case Lost():
                self._restart(worker, "ended")
            case _:
                pass
        self._offer_weights(worker)
        return task

    def _accept(self, worker: int, reply: Loaded) -> None:
        """The worker has the current weights, if its digests say so."""
        member = self._members[worker]
        self.load_s += time.monotonic() - member.since
        if reply.digests != tuple(part.digest for part in self._weights.parts):
            self._transport.kill(worker)
            self._restart(worker, f"loaded other bytes than the weights of edition {reply.edition}")
            return
        member.edition = reply.edition
        self._check(worker, reply)

    def _hanging(self) -> list[tuple[int, Reply]]:
        now = time.monotonic()
        late = [w for w, member in self._members.items() if member.task and now - member.since > self._timeout_s]
        for worker in late:
            _log.warning("rollout worker %d gave no answer for %g s; it is killed", worker, self._timeout_s)
            self._transport.kill(worker)
        return [(worker, Lost()) for worker in late]

    def _restart(self, worker: int, reason: str) -> None:
        member = self._members[worker]
        member.edition, member.num_failures = 0, member.num_failures + 1
        self.num_restarts += 1
        if member.num_failures > _MAX_FAILURES:
            raise ServerError(
                f"rollout worker {worker} {reason}, for the {member.num_failures}th time without an answer; its "
                "messages are above. Is there memory for all workers? Otherwise lower scale.workers"
            )
        _log.warning("rollout worker %d %s; it is started again, and its lease goes to another", worker, reason)
        self._transport.start(worker, self._setup)
