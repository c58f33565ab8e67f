"""The cache folder follows the environment; freed memory stays with the process; waiting threads sleep soon."""

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tunesmith.base.core.system import SPIN_COUNT, SPIN_VARIABLES, cache_folder, drop_mapped_pages

PROGRAM = """
import ctypes, sys
from tunesmith.base.core.system import keep_freed_memory

def resident_mb():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

if sys.argv[1] == "keep":
    assert keep_freed_memory()
before = resident_mb()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
block = libc.malloc(200 * 2**20)
ctypes.memset(block, 1, 200 * 2**20)
libc.free(block)
print(resident_mb() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_a_large_block_that_is_freed_stays_only_if_asked() -> None:
    def growth_mb(mode: str) -> float:
        done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True)
        return float(done.stdout)

    assert growth_mb("keep") > 190
    assert growth_mb("leave") < 20


GAPS = """
import ctypes
from tunesmith.base.core.system import keep_freed_memory, trim_memory, unused_heap_gb

assert keep_freed_memory()
blocks = [ctypes.create_string_buffer(2**20) for _ in range(200)]
for block in blocks:
    ctypes.memset(block, 1, 2**20)
used_gb = unused_heap_gb()
del blocks[::2]
gaps_gb = unused_heap_gb() - used_gb
resident = int(open("/proc/self/statm").read().split()[1])
trim_memory()
print(gaps_gb, (resident - int(open("/proc/self/statm").read().split()[1])) * 4096 / 1e9)
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not hasattr(ctypes.CDLL(None), "mallinfo2"),
    reason="only glibc says so, from 2.33 on",
)
def test_what_the_allocator_keeps_between_blocks_in_use_is_counted_and_can_be_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", GAPS], capture_output=True, text=True, check=True)
    gaps_gb, freed_gb = map(float, done.stdout.split())
    assert gaps_gb == pytest.approx(100 * 2**20 / 1e9, rel=0.05)
    assert freed_gb > 0.8 * gaps_gb


IMPORTED = "import {}, {}, logging, os, tunesmith.base.core.system as s; s.warn_of_spinning(); s.warn_of_spinning()"
"""Imports two modules, and prints what OpenMP of this process was told."""


@pytest.mark.parametrize(
    ("first", "second", "variables", "expected", "num_warnings"),
    [
        ("tunesmith", "torch", {}, SPIN_COUNT, 0),
        ("torch", "tunesmith", {}, "None", 1),
        ("torch", "tunesmith", {"GOMP_SPINCOUNT": "7"}, "7", 0),
        pytest.param("tunesmith", "torch", {"OMP_WAIT_POLICY": "active"}, "None", 0, marks=pytest.mark.nightly),
    ],
)
def test_waiting_threads_sleep_soon_if_torch_comes_later_and_the_user_did_not_choose(
    first: str, second: str, variables: dict[str, str], expected: str, num_warnings: int
) -> None:
    inherited = {name: value for name, value in os.environ.items() if name not in SPIN_VARIABLES}
    code = IMPORTED.format(first, second) + "; print(os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=inherited | variables
    )
    assert done.stdout.strip() == expected
    assert done.stderr.count("torch was loaded before tunesmith") == num_warnings


def test_the_cache_is_where_the_environment_says(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setenv("TUNESMITH_CACHE", "/y")
    assert cache_folder() == Path("/y")
    monkeypatch.delenv("TUNESMITH_CACHE")
    assert cache_folder() == Path("/x/tunesmith")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "tunesmith"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say which pages are in memory")
def test_pages_of_a_mapped_file_leave_memory_and_are_read_again(tmp_path):
    numbers = np.random.default_rng(0).integers(0, 255, 1 << 24, dtype=np.uint8)
    numbers.tofile(tmp_path / "numbers")
    mapped = np.memmap(tmp_path / "numbers", dtype=np.uint8, mode="c")
    assert int(mapped.sum()) == int(numbers.sum())
    before = _resident_file_bytes()
    drop_mapped_pages(mapped.ctypes.data, mapped.nbytes)
    assert before - _resident_file_bytes() > 0.9 * mapped.nbytes
    assert np.array_equal(mapped, numbers)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say which pages are in memory")
def test_memory_of_no_file_is_left_alone():
    numbers = np.arange(1 << 20)
    drop_mapped_pages(numbers.ctypes.data, numbers.nbytes)
    assert np.array_equal(numbers, np.arange(1 << 20))


def _resident_file_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssFile:")[1].split()[0])
