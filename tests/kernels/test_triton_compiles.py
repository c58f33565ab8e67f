"""Every Triton kernel compiles for the GPUs that Tunesmith supports, without one, and takes no more than it did.

The kernels are compiled in a process of its own, because the tests of this process run them in Triton's interpreter.
After a change that is worth its registers: `python tools/triton_registers.py --write`.
"""

import json
import os
import subprocess
import sys
from functools import cache

import pytest

import triton_registers
from tunesmith.engine.kernels import native

pytest.importorskip("triton", reason="needs Triton, which comes with torch's builds for CUDA")

OPERATIONS = sorted(path.parent.name for path in native._SOURCES.glob("*/triton_impl.py"))
SHARED_LIMIT_BYTES = {70: 96 * 1024, 80: 163 * 1024, 90: 227 * 1024}
MOST_REGISTERS = 255


@cache
def found() -> dict:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, triton_registers.__file__, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def resources(op: str) -> list[dict]:
    return [one for one in found()["resources"] if one["op"] == op]


def recorded() -> dict:
    return json.loads(triton_registers.RECORD.read_text(encoding="utf-8"))


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_kernel_is_compiled_for_each_target_that_it_runs_on(op: str):
    targets: dict[str, set[int]] = {}
    for one in resources(op):
        targets.setdefault(one["variant"], set()).add(one["capability"])
    assert targets
    assert all({80, 90} <= each for each in targets.values()), targets


@pytest.mark.parametrize("op", OPERATIONS)
def test_no_kernel_spills_and_each_fits_the_shared_memory_of_its_target(op: str):
    for one in resources(op):
        assert one["stack_bytes"] == 0, one["key"]
        assert one["shared_bytes"] <= SHARED_LIMIT_BYTES[one["capability"]], one["key"]
        assert 0 < one["registers"] <= MOST_REGISTERS, one["key"]


@pytest.mark.parametrize("op", OPERATIONS)
def test_no_kernel_takes_more_registers_than_recorded(op: str):
    record = recorded()
    if record["triton"] != found()["triton"]:
        pytest.skip(f"recorded with Triton {record['triton']}, this is {found()['triton']}")
    now = {one["key"]: one["registers"] for one in resources(op)}
    known = {name: count for name, count in record["registers"].items() if name.split("/")[0] == op}
    assert set(now) == set(known), "run tools/triton_registers.py --write"
    worse = {name: (known[name], count) for name, count in now.items() if count > known[name]}
    assert not worse, f"(recorded, now): {worse}"


def test_the_record_names_no_operation_that_is_gone():
    assert {name.split("/")[0] for name in recorded()["registers"]} <= set(OPERATIONS)
