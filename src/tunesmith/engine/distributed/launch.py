"""Starts the processes of a training on this machine, or joins those that `torchrun` started; ends them together."""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from multiprocessing.process import BaseProcess
from typing import TypeVar

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous

from tunesmith.base.config.recipe import Recipe
from tunesmith.base.config.scale_sections import ScaleSection
from tunesmith.base.core.child import end_with
from tunesmith.base.core.errors import ConfigError, InputError, LostRankError, TrainingError
from tunesmith.engine.distributed.ranks import Ranks, is_lost, joined
from tunesmith.engine.distributed.stages import Stages

RecipeT = TypeVar("RecipeT", bound=Recipe)

_LOST = 3
"""Exit code of a rank that ended because another did."""

_START_LIMIT = timedelta(minutes=10)
"""Time in which all ranks have imported their modules."""

_LOADED = "tunesmith.learn.trainers.run"
"""The module, with all that it imports, that is loaded once for all ranks that are started here."""

_GRACE_S = 10.0
"""Seconds in which a rank that broke a connection is seen to have ended."""


def from_torchrun() -> bool:
    """True if `torchrun`, or what sets the same variables, started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ and "MASTER_ADDR" in os.environ


def leads() -> bool:
    """True unless `torchrun` started this process with a rank above 0."""
    return not from_torchrun() or os.environ["RANK"] == "0"


def ranks_here(section: ScaleSection) -> int:
    """Number of ranks on this machine, which share its cores."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if from_torchrun() else section.ranks


def as_started(recipe: RecipeT) -> RecipeT:
    """`recipe` with torchrun's number of ranks, if it started this process.

    Raises:
        ConfigError: the recipe cannot be trained by several ranks.
    """
    if not from_torchrun():
        return recipe
    given = recipe.model_dump()
    count = int(os.environ["WORLD_SIZE"])
    try:
        return type(recipe).model_validate({**given, "scale": {**given["scale"], "ranks": count}})
    except ValidationError as error:
        raise ConfigError(*(problem["msg"] for problem in error.errors())) from error


@contextmanager
def ranks_of(section: ScaleSection, follow: Callable[[], object]) -> Iterator[None]:
    """A block whose work is divided among the ranks that the recipe asks for, or that `torchrun` started.

    This process is rank 0 and starts the others, each of which calls `follow`; they end with the block. Under
    `torchrun` it is the rank that it was given, and nothing is started.

    Raises:
        InputError: what the other ranks need cannot be sent to them.
        TrainingError: another rank ended or did not arrive at a collective, naming it.
    """
    limit = timedelta(seconds=section.rank_timeout_s)
    if from_torchrun():
        store, rank, count = next(iter(rendezvous("env://")))
        group = _group(section, Ranks(rank, count, store), limit, device=int(os.environ.get("LOCAL_RANK", rank)))
        with group, _ignoring_signals() if rank > 0 else nullcontext():
            yield
    elif section.ranks == 1:
        yield
    else:
        yield from _starting(section, limit, follow)


@contextmanager
def _ignoring_signals() -> Iterator[None]:
    """A block in which SIGINT and SIGTERM do nothing: rank 0 decides when to stop."""
    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield
        return
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _starting(section: ScaleSection, limit: timedelta, follow: Callable[[], object]) -> Iterator[None]:
    store = TCPStore("127.0.0.1", 0, section.ranks, is_master=True, timeout=limit, wait_for_workers=False)
    processes = _start(section, store.port, limit, follow)
    try:
        end = time.monotonic() + _START_LIMIT.total_seconds()
        while missing := [key for key in _here(section.ranks) if not store.check([key])]:
            if any(process.exitcode is not None for process in processes):
                raise LostRankError("a rank ended before it began")
            if time.monotonic() > end:
                ranks = ", ".join(key.replace("here/", "rank ") for key in missing)
                raise TrainingError(f"{ranks} did not start within {_START_LIMIT}; does the process hang in an import?")
            time.sleep(0.02)
        with _group(section, Ranks(0, section.ranks, store), limit, device=0):
            yield
    except (LostRankError, RuntimeError) as error:
        if not is_lost(error):
            raise
        raise TrainingError(_why(processes, store) or str(error)) from error
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _start(section: ScaleSection, port: int, limit: timedelta, follow: Callable[[], object]) -> Sequence[BaseProcess]:
    context = multiprocessing.get_context("forkserver")  # imports once for all ranks, and unlike fork suits a GPU
    context.set_forkserver_preload([_LOADED])
    processes = [
        context.Process(
            target=_run,
            args=(rank, section, port, limit, follow, os.getpid()),
            name=f"tunesmith rank {rank}",
            daemon=True,
        )
        for rank in range(1, section.ranks)
    ]
    try:
        for process in processes:
            process.start()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(
            f"what was given from Python cannot be sent to the other ranks ({error}); give functions that a module "
            "holds, for example the reward as ./file.py:name"
        ) from error
    return processes


@_ignoring_signals()
def _run(
    rank: int, section: ScaleSection, port: int, limit: timedelta, follow: Callable[[], object], leader: int
) -> None:
    """The life of a rank that rank 0, the process `leader`, started.

    It ends with that one at once: to find out by a connection that breaks, or cannot be made, may take minutes.
    """
    end_with(leader)
    count = section.ranks
    store = TCPStore("127.0.0.1", port, count, is_master=False, timeout=limit)
    store.set(_here(count)[rank - 1], "")
    store.wait(_here(count), _START_LIMIT)
    try:
        with _group(section, Ranks(rank, count, store), limit, device=rank):
            follow()
    except BaseException as error:
        if is_lost(error):
            sys.exit(_LOST)
        store.set(f"error/{rank}", f"{type(error).__name__}: {error}")
        raise


def _here(count: int) -> list[str]:
    """Keys of the store that say that the ranks above 0 have started."""
    return [f"here/{rank}" for rank in range(1, count)]


@contextmanager
def _group(section: ScaleSection, ranks: Ranks, limit: timedelta, device: int) -> Iterator[None]:
    """The process group of all ranks, for as long as the block runs."""
    if dist.is_initialized():
        raise InputError("this process has a torch.distributed group already; train in a process of its own")
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(device % torch.cuda.device_count())
    # A group is named by the number of those before it, also those that failed, which new ranks did not have.
    dist.distributed_c10d._world.group_count = 0
    with ranks.collective("start"):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if has_gpu else "gloo",
            store=PrefixStore("group", ranks.store),
            rank=ranks.index,
            world_size=ranks.count,
            timeout=limit,
        )
    try:
        kind = "stage" if section.pipeline > 1 else "tensor"
        if section.pipeline > 1:
            first = ranks.index // section.pipeline * section.pipeline
            ranks.stages = Stages(ranks.index - first, section.pipeline, first)
        ranks.tensor = section.tensor
        if section.shards_parameters or ranks.stages is not None:
            shape = (ranks.num_data, ranks.num_together)
            ranks.mesh = init_device_mesh("cuda" if has_gpu else "cpu", shape, mesh_dim_names=("data", kind))
        with joined(ranks):
            yield
    finally:
        dist.destroy_process_group()


def _why(processes: Sequence[BaseProcess], store: Store) -> str:
    """Why the first rank ended that did so by itself; empty if none is seen to end."""
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline:
        for rank, process in enumerate(processes, start=1):
            if process.exitcode in (None, _LOST):
                continue
            if process.exitcode < 0:
                ended = f"was ended by {signal.Signals(-process.exitcode).name}"
            elif store.check([f"error/{rank}"]):
                ended = f"ended: {store.get(f'error/{rank}').decode()}"
            else:
                ended = f"ended with exit code {process.exitcode}"
            return (
                f"rank {rank} {ended}. The checkpoints of the run are whole: `tunesmith resume` goes on from the last"
            )
        time.sleep(0.05)
    return ""
