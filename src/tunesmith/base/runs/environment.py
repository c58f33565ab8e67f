"""Versions, hardware and file system, for `environment.json` and `tunesmith doctor`; imports nothing heavy."""

import fcntl
import functools
import gc
import os
import platform
import re
import resource
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import psutil

from tunesmith.base.core.system import SPIN_VARIABLES, trim_memory
from tunesmith.base.runs import cgroup

PACKAGES = (
    "tunesmith",
    "torch",
    "transformers",
    "safetensors",
    "numpy",
    "pydantic",
    "tyro",
    "vaderSentiment",
    "gguf",
    "trl",
)

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", *SPIN_VARIABLES)


def environment() -> dict[str, object]:
    """Package versions, Python, platform, CPU model and flags, cores, memory, the command line and its folder."""
    return {
        "command": sys.argv,
        "folder": os.getcwd(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu": cpu_model(),
        "num_cores": usable_cores(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "packages": package_versions(),
        "thread_variables": {name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ},
    }


def other_folder(began: object) -> str:
    """A sentence for who reads a run's files in another folder than the run, whose `environment.json` has `began`."""
    if not isinstance(began, str) or began == os.getcwd():
        return ""
    return f"the run was started in {began}; relative paths of its recipe are read from {os.getcwd()} now"


def package_versions() -> dict[str, str | None]:
    """Version of each package that matters to a result; None where it is not installed."""
    return {name: package_version(name) for name in PACKAGES}


@functools.cache
def package_version(name: str) -> str | None:
    """Version of an installed package; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """Name of the processor, as the kernel gives it; the architecture where it gives none."""
    return _cpuinfo().get("model name", platform.processor() or platform.machine())


def cpu_flags() -> frozenset[str]:
    """Instruction-set flags of the processor, in the kernel's spelling; empty where there is no /proc/cpuinfo."""
    return frozenset(_cpuinfo().get("flags", "").split())


def usable_cores() -> int:
    """Cores that this process may use: those of its affinity, at most as many as its control group has time for."""
    cores = len(core_numbers())
    return max(1, int(min(cores, cgroup.quota_cores() or cores)))


def core_numbers() -> set[int]:
    """The numbers of the cores that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


class CoreSeconds(NamedTuple):
    """Seconds of a core since the machine began: used by all processes, and given to others by the hypervisor."""

    busy: float
    stolen: float


def core_seconds() -> list[CoreSeconds]:
    """The seconds of each core, by its number; 0 of what the system does not count."""
    busy = ("user", "system", "nice", "irq", "softirq")
    times = psutil.cpu_times(percpu=True)
    return [CoreSeconds(sum(getattr(core, name, 0.0) for name in busy), getattr(core, "steal", 0.0)) for core in times]


def rss_gb() -> float:
    """Resident memory of this process, in GB (1e9 bytes)."""
    return psutil.Process().memory_info().rss / 1e9


def peak_rss_gb() -> float:
    """Largest resident memory that this process ever had, in GB (1e9 bytes)."""
    # Linux counts ru_maxrss in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def reset_peak_rss() -> bool:
    """True if the peak of this process' resident memory now begins anew; free memory is given back before."""
    gc.collect()
    if sys.platform != "linux":
        return False
    trim_memory()  # where the allocator cannot, what it holds back stays counted
    try:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): the high-water mark of resident memory begins again
    except OSError:
        return False
    return True


def peak_rss_since_reset_gb() -> float:
    """Largest resident memory of this process since `reset_peak_rss` or its start, in GB (1e9 bytes).

    Not `getrusage`: there a child begins with the size of the process that started it.
    """
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) * 1024 / 1e9 if found else peak_rss_gb()


def _cpuinfo() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first = path.read_text().split("\n\n", 1)[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "fuse", "9p", "afs", "lustre", "ceph", "gpfs", "beegfs", "virtiofs")
"""Beginnings of the types of file systems that other machines, or programs, may change too."""


def file_system(folder: Path) -> str:
    """Type of the file system that holds `folder`, such as ext4 or nfs4; `unknown` if it is not listed."""
    place = folder.resolve()
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    holding = [mount for mount in mounts if place.is_relative_to(mount)]
    return (mounts[max(holding, key=lambda mount: len(mount.parts))] if holding else "") or "unknown"


def why_not_writable(folder: Path) -> str:
    """The error of writing and locking a temporary file in `folder`, empty if there is none."""
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".tunesmith-") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.strerror or str(error)
    return ""
