"""What a folder is good for: kind of file system, and whether a run could be written and locked there."""

import fcntl
import os
import tempfile
from pathlib import Path

import psutil


def file_system(folder: Path) -> str:
    """The kind of file system that `folder` lies on, as the system names it (ext4, nfs4); `unknown` where it cannot be
    told.
    """
    place = folder.resolve()
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    holding = [mount for mount in mounts if place.is_relative_to(mount)]
    return (mounts[max(holding, key=lambda mount: len(mount.parts))] if holding else "") or "unknown"


def why_not_writable(folder: Path) -> str:
    """Why no run could be kept in `folder`, or nothing. A file without a name is written and locked, and is gone."""
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".tunesmith-") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.strerror or str(error)
    return ""
