"""What a measured figure depends on: processor, threads, versions, commit, memory and who else uses the cores."""

import os
import platform
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from tunesmith.runs.environment import cpu_model, package_version, usable_cores


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
