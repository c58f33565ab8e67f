"""Limits of the control group that the process is in (Linux, versions 1 and 2): processor time and memory."""

import functools
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_GROUPS = Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 60  # version 1 writes a number of about 2 ** 63


def quota_cores() -> float | None:
    """Cores' worth of processor time that the group may use; None without a limit."""
    quotas: list[float] = []
    for folder in _folders("cpu"):
        quota, period = (_read(folder / "cpu.max") or "max 0").split()[:2]
        if quota == "max":
            quota, period = _read(folder / "cpu.cfs_quota_us") or "-1", _read(folder / "cpu.cfs_period_us") or "0"
        if int(quota) > 0 and int(period) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def throttled_s() -> float | None:
    """Seconds that the group was kept from running because its quota was used up; None where nobody counts them."""
    for folder in _folders("cpu"):
        fields = dict(line.split()[:2] for line in _read(folder / "cpu.stat").splitlines())
        for name, per_s in (("throttled_usec", 1e6), ("throttled_time", 1e9)):  # version 2, version 1
            if name in fields:
                return int(fields[name]) / per_s
    return None


def memory_bytes() -> int | None:
    """Limit of the group's memory; None without one."""
    texts = [_read(folder / name) for folder in _folders("memory") for name in ("memory.max", "memory.limit_in_bytes")]
    limits = [int(text) for text in texts if text.isdigit() and int(text) < _NO_LIMIT]
    return min(limits, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


@functools.cache
def _folders(controller: str) -> tuple[Path, ...]:
    """The folders of the process's group and of those around it, the innermost first."""
    found: list[Path] = []
    for line in _read(_GROUPS).splitlines():
        _, names, group = line.split(":", 2)
        if names == "" or controller in names.split(","):
            top = _ROOT / controller if names else _ROOT
            inner = top / group.lstrip("/")
            found += [path for path in (inner, *inner.parents) if path.is_relative_to(top) and path.is_dir()]
    return tuple(found)
