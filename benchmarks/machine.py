"""What a measured figure depends on: processor, threads, versions, commit, memory and who else uses the cores."""

import gc
import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from tunesmith.core.system import trim_memory
from tunesmith.runs.environment import cpu_model, package_version, peak_rss_gb, usable_cores

_RESET_PEAK = "5"  # proc(5), /proc/<pid>/clear_refs: the high-water mark of resident memory begins again


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the machine was: its load average over a minute, and cores that this program did not use itself."""

    load_average: float
    other_busy_cores: float


def machine_facts(packages: tuple[str, ...] = ("torch", "transformers", "numpy")) -> dict[str, object]:
    """Processor, threads, versions of `packages`, and the commit of this package's sources if they are in a repository.

    `uncommitted_changes` is of `src` and `benchmarks`: with it the commit alone does not say what was measured.
    """
    return {
        "device": cpu_model(),
        "num_cores": usable_cores(),
        "num_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in packages},
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(git("status", "--porcelain", "--", "src", "benchmarks")),
    }


def git(*arguments: str) -> str:
    """What `git <arguments>` prints in the repository of this package's sources; empty where they are in none."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():  # an installed copy may lie inside a repository of something else
        return ""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except OSError:  # no git on this machine
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def measure_load(interval_s: float = 0.3) -> Load:
    """The load while this process sleeps for `interval_s`: whatever is busy then is somebody else."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(usable_cores()))
    psutil.cpu_percent(percpu=True)
    time.sleep(interval_s)
    percent = psutil.cpu_percent(percpu=True)
    busy = sum(percent[core] for core in cores if core < len(percent)) / 100
    return Load(load_average=round(os.getloadavg()[0], 2), other_busy_cores=round(busy, 2))


def reset_peak_rss() -> bool:
    """True if the peak of this process' resident memory now begins anew; free memory is given back before."""
    gc.collect()
    if sys.platform != "linux":
        return False
    trim_memory()  # where the allocator cannot, what it holds back stays counted
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
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
