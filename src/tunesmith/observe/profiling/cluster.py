"""Ranks of a cluster measured against each other: versions, clocks, links to rank 0, disks."""

import os
import platform
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
from torch import distributed as dist

from tunesmith.base.core.errors import InputError
from tunesmith.base.core.version import __version__
from tunesmith.base.runs.environment import cpu_model, usable_cores

_ROUNDS = 20
_BLOCK_BYTES = 16 << 20
_FILE_BYTES = 32 << 20
_TIMEOUT = timedelta(seconds=60)

MAX_CLOCK_S = 1.0
"""Difference of clocks from which on the times in logs of different machines cannot be compared."""

MIN_DISK_MB_PER_S = 50.0
"""Rate of synced writes below which checkpoints take long."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """A rank. `clock_s` is its clock minus that of rank 0, known to `clock_error_s`; `latency_us` is half of a round
    trip to rank 0, `gb_per_s` the rate of a large tensor; of rank 0 itself these are 0. `sees_folder` is false if a
    file that rank 0 wrote into the folder is not there.
    """

    rank: int
    host: str
    versions: Mapping[str, str]
    cores: int
    clock_s: float
    clock_error_s: float
    latency_us: float
    gb_per_s: float
    disk_mb_per_s: float
    free_gb: float
    sees_folder: bool


def measure_cluster(folder: Path) -> list[RankFacts] | None:
    """The facts of all ranks on rank 0, None on the others; for a process that torchrun, or what sets the same
    variables, has started. Writes small files into `folder`, which exists, and removes them.

    Raises:
        InputError: the process is none of several ranks, or `folder` cannot be written.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise InputError(
            "--cluster measures several processes, but WORLD_SIZE is not set or 1; start one on each machine, such as "
            "`torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
            "-m tunesmith doctor --cluster`"
        )
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    try:
        mine = _facts(folder)
        found: list[RankFacts] = [mine] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        return found if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def problems(ranks: list[RankFacts]) -> list[str]:
    """Problems that would trouble a training: one line each, with the rank and what to do."""
    found: list[str] = []
    first = ranks[0]
    for one in ranks:
        name = f"rank {one.rank} ({one.host})"
        for part, version in one.versions.items():
            if version != first.versions[part]:
                advice = "sums may differ in the last bit" if part == "cpu" else "install the same on all machines"
                found.append(f"{name} has {part} {version}, rank 0 has {first.versions[part]}: {advice}")
        if abs(one.clock_s) - one.clock_error_s > MAX_CLOCK_S:
            found.append(f"{name}: its clock is {one.clock_s:+.1f} s off; set it by NTP")
        if one.disk_mb_per_s < MIN_DISK_MB_PER_S:
            found.append(f"{name} writes {one.disk_mb_per_s:.0f} MB/s; take another folder for run.dir")
        if not one.sees_folder:
            found.append(f"{name} does not see what rank 0 writes into the folder; give a shared one with --dir")
    usual = median([one.gb_per_s for one in ranks[1:]])
    found += [
        f"rank {one.rank} ({one.host}): {one.gb_per_s:.2g} GB/s to rank 0, less than half of the usual {usual:.2g}"
        for one in ranks[1:]
        if one.gb_per_s < usual / 2
    ]
    return found


def _facts(folder: Path) -> RankFacts:
    rank, versions = dist.get_rank(), {
        "tunesmith": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": cpu_model(),
    }  # fmt: skip
    link = (0.0, 0.0, 0.0, 0.0)
    for other in range(1, dist.get_world_size()):
        if rank in (0, other):
            link = _link(other)
        dist.barrier()
    sees_folder, disk = _disk(folder)
    free_gb = shutil.disk_usage(folder).free / 1e9
    return RankFacts(rank, socket.gethostname(), versions, usable_cores(), *link, disk, free_gb, sees_folder)


def _link(other: int) -> tuple[float, float, float, float]:
    """Offset of the clock of `other` and its error in seconds, latency in microseconds, GB/s; called on both sides, of
    which rank 0 gets zeros.
    """
    peer, is_other = (0, True) if dist.get_rank() == other else (other, False)
    stamp, block = torch.zeros(2, dtype=torch.float64), torch.zeros(_BLOCK_BYTES, dtype=torch.uint8)
    trips: list[tuple[float, float]] = []
    for _ in range(_ROUNDS):
        if is_other:  # asks rank 0 for its time
            begin_s, begun_at = time.perf_counter(), time.time()
            dist.send(stamp, peer)
            dist.recv(stamp, peer)
            trip_s = time.perf_counter() - begin_s
            trips.append((trip_s, begun_at + trip_s / 2 - float(stamp[0])))
        else:
            dist.recv(stamp, peer)
            dist.send(torch.tensor([time.time(), 0.0], dtype=torch.float64), peer)
    best_s = float("inf")
    for _ in range(3):
        begin_s = time.perf_counter()
        if is_other:
            dist.send(block, peer)
            dist.recv(stamp, peer)
            best_s = min(best_s, time.perf_counter() - begin_s)
        else:
            dist.recv(block, peer)
            dist.send(stamp, peer)
    if not is_other:
        return 0.0, 0.0, 0.0, 0.0
    trip_s, offset_s = min(trips)
    return offset_s, trip_s / 2, 1e6 * trip_s / 2, _BLOCK_BYTES / max(1e-9, best_s - trip_s / 2) / 1e9


def _disk(folder: Path) -> tuple[bool, float]:
    """(True if this rank sees a file of rank 0 in `folder`, MB/s of a synced write)."""
    rank = dist.get_rank()
    names = [f".tunesmith-doctor-{os.getpid()}"]
    dist.broadcast_object_list(names, src=0)
    mark, own = folder / names[0], folder / f"{names[0]}-{rank}"
    problem = ""
    rate = 0.0
    try:
        if rank == 0:
            mark.touch()
        begin_s = time.perf_counter()
        with own.open("wb") as file:
            file.write(bytes(_FILE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        rate = _FILE_BYTES / 1e6 / (time.perf_counter() - begin_s)
    except OSError as error:
        problem = f"rank {rank} ({socket.gethostname()}) cannot write into {folder}: {error.strerror}"
    finally:
        own.unlink(missing_ok=True)
    said: list[str] = [problem] * dist.get_world_size()
    dist.all_gather_object(said, problem)  # after which the mark is written
    sees = mark.exists()
    dist.barrier()
    if rank == 0:
        mark.unlink(missing_ok=True)
    if any(said):
        raise InputError("; ".join(filter(None, said)))
    return sees, rate


def as_rows(ranks: list[RankFacts]) -> list[list[str]]:
    """A table of `ranks`, a header first."""
    header = ["rank", "host", "cores", "clock ms", "latency us", "GB/s", "disk MB/s", "free GB"]
    return [header] + [
        [str(one.rank), one.host, str(one.cores), f"{1e3 * one.clock_s:.1f}", f"{one.latency_us:.0f}",
         f"{one.gb_per_s:.2f}", f"{one.disk_mb_per_s:.0f}", f"{one.free_gb:.0f}"]
        for one in ranks
    ]  # fmt: skip


def as_json(ranks: list[RankFacts]) -> dict[str, object]:
    """`ranks` and their problems."""
    found = problems(ranks)
    return {"ok": not found, "ranks": [asdict(one) for one in ranks], "problems": found}
