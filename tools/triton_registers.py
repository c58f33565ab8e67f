"""Compiles every Triton kernel for the GPUs that Tunesmith supports, without one, and shows what each takes of them.

`python tools/triton_registers.py` prints a table, `--json` one JSON object, `--write` records the registers in
tests/kernels/triton_registers.json, which the tests compare with: a kernel that takes more fails. Needs Triton alone.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tunesmith.kernels.triton_check import Resources

RECORD = Path(__file__).resolve().parent.parent / "tests" / "kernels" / "triton_registers.json"


def measured(op: str | None) -> "list[Resources]":
    """What every variant of one operation, or of all, takes on each of its targets."""
    # Kernels that were decorated for the interpreter cannot be compiled.
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # its default changes from version to version
    from tunesmith.kernels.triton_check import compiled, variants

    chosen = [(found, variant) for found, variant in variants() if op in (None, found)]
    return [compiled(found, variant, target) for found, variant in chosen for target in variant.capabilities()]


def version() -> str:
    """The version of Triton, whose compiler decides on registers."""
    import triton

    return str(triton.__version__)


def main() -> int:
    """Exit code 0; prints or writes what was measured."""
    parser = argparse.ArgumentParser(description="Compile all Triton kernels and show what they take of a GPU.")
    parser.add_argument("--op", help="one operation alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write", action="store_true", help=f"record the registers in {RECORD.name}")
    options = parser.parse_args()
    found = measured(options.op)
    if options.write:
        old = json.loads(RECORD.read_text(encoding="utf-8"))["registers"] if RECORD.exists() and options.op else {}
        registers = {**old, **{one.key: one.registers for one in found}}
        record = {"triton": version(), "registers": dict(sorted(registers.items()))}
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps({"triton": version(), "resources": [{"key": one.key, **asdict(one)} for one in found]}))
        return 0
    width = max((len(one.key) for one in found), default=0)
    for one in found:
        spilled, shared = one.stack_bytes, one.shared_bytes
        print(f"{one.key:<{width}}  {one.registers:>3} registers, {spilled} B spilled, {shared} B shared")
    return 0


if __name__ == "__main__":
    sys.exit(main())
