"""Workers as Ray actors, on the machines of a cluster: the object store carries the weights."""

import os
import signal
import socket
import threading
import time
import warnings
from typing import Any

import torch

from tunesmith.base.core.errors import InputError, MissingDependencyError
from tunesmith.base.core.log import get_logger
from tunesmith.engine.rollout.workers.messages import Handle, Lost, Message, Reply, Setup, Tensors
from tunesmith.engine.rollout.workers.worker import Worker

_log = get_logger(__name__)

_CONNECT_S = 5.0


class Actor:
    """A worker in a process of Ray's."""

    def __init__(self, setup: Setup) -> None:
        self._worker = Worker(setup, fetched)

    def answer(self, message: Message) -> Reply:
        """See `Worker.answer`."""
        return self._worker.answer(message)

    def pid(self) -> int:
        """The id of the process."""
        return os.getpid()


class RayTransport:
    """Workers as actors of the Ray cluster at `address`, of which this machine is one.

    An actor that ended is not started again by Ray, which would not give it its weights, but by the pool.

    Raises:
        InputError: there is no such cluster, or it has too few CPUs.
        MissingDependencyError: Ray is not installed.
    """

    def __init__(self, address: str, num_cpus: int) -> None:
        self._ray = _connected(address)
        self._actors: dict[int, Any] = {}
        self._pids: dict[int, Any] = {}
        self._asked: dict[Any, int] = {}  # worker by the reference of its answer
        available = self._ray.cluster_resources().get("CPU", 0)
        if available < num_cpus:
            raise InputError(
                f"the workers need {num_cpus} CPUs, but the Ray cluster has {available:g}; lower scale.workers, or "
                "join it from more machines with `ray start --address HOST:PORT`"
            )

    def start(self, worker: int, setup: Setup) -> None:
        """See `local.Transport`."""
        self._forget(worker)
        remote = self._ray.remote(Actor).options(num_cpus=setup.num_threads, scheduling_strategy="SPREAD")
        self._actors[worker] = remote.remote(setup)
        self._pids[worker] = self._actors[worker].pid.remote()

    def send(self, worker: int, message: Message) -> None:
        """See `local.Transport`."""
        self._asked[self._actors[worker].answer.remote(message)] = worker

    def receive(self, timeout_s: float) -> list[tuple[int, Reply]]:
        """See `local.Transport`. An actor that ended while it had nothing to do is found when it is asked."""
        if not self._asked:
            time.sleep(timeout_s)
            return []
        self._ray.wait(list(self._asked), timeout=timeout_s)
        ready, _ = self._ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
        return [self._reply(reference) for reference in ready]

    def interrupt(self, worker: int) -> bool:
        """False: an actor cannot be interrupted, and draws what it has to the end."""
        return False

    def kill(self, worker: int) -> None:
        """See `local.Transport`."""
        self._ray.kill(self._actors[worker])

    def publish(self, tensors: Tensors) -> Handle:
        """See `local.Transport`. A machine of the cluster gets its copy when its first worker asks for it."""
        return self._ray.put({name: _bytes_of(tensor) for name, tensor in tensors.items()})

    def discard(self, handle: Handle) -> None:
        """Nothing: Ray frees what nobody refers to."""

    def close(self) -> None:
        """See `local.Transport`."""
        for worker in list(self._actors) if self._ray.is_initialized() else ():
            self._forget(worker)

    def pid(self, worker: int) -> int:
        """See `local.Transport`."""
        return self._ray.get(self._pids[worker])

    def _reply(self, reference: Any) -> tuple[int, Reply]:
        worker = self._asked.pop(reference)
        try:
            return worker, self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            _log.warning("rollout worker %d: %s", worker, str(error).strip().splitlines()[-1])
            return worker, Lost()

    def _forget(self, worker: int) -> None:
        """End what is left of an earlier actor of `worker`, whose answers do not count any more."""
        self._asked = {reference: other for reference, other in self._asked.items() if other != worker}
        if worker in self._actors:
            self._ray.kill(self._actors.pop(worker))


def fetched(handle: Handle) -> Tensors:
    """The tensors that were published under `handle`, in memory that all workers of a machine share; not to be changed.

    Raises:
        OSError: they are gone.
    """
    ray = ray_library()
    try:
        content = ray.get(handle)
    except ray.exceptions.RayError as error:
        raise OSError(str(error)) from error
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # they are read-only, and only read
        return {
            name: torch.from_numpy(flat).view(dtype).reshape(shape) for name, (flat, dtype, shape) in content.items()
        }


def _bytes_of(tensor: torch.Tensor) -> tuple[Any, torch.dtype, tuple[int, ...]]:
    """A tensor as an array of bytes, which Ray neither pickles nor copies where it is read."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat, tensor.dtype, tuple(tensor.shape)


def _connected(address: str) -> Any:
    """Ray, connected to the cluster at `address`, unless this process is connected already."""
    ray = ray_library()
    if ray.is_initialized():
        return ray
    advice = "start one with `ray start --head`, and join it from each machine with `ray start --address HOST:PORT`"
    if address != "auto":
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), _CONNECT_S).close()  # Ray itself would try for minutes
        except OSError as error:
            raise InputError(
                f"scale.address is {address}, but no Ray cluster answers there ({error}); {advice}"
            ) from error
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=True, logging_level="warning")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(f"scale.address is {address}, but Ray cannot connect to it: {error}; {advice}") from error
    if in_main:
        signal.signal(signal.SIGTERM, handler)  # Ray sets its own, by which a run would end without a checkpoint
    return ray


def ray_library() -> Any:
    """The module ray. Raises MissingDependencyError if it cannot be imported."""
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError("scale.address needs Ray; run `pip install 'tunesmith[ray]'`") from error
    return ray
