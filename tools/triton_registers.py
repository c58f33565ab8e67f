"""Compile every Triton kernel for the supported GPUs, without one, and show its registers and shared memory.

`python tools/triton_registers.py` prints a table, `--json` one JSON object, `--write` records the registers in
tests/kernels/triton_registers.json, which the tests compare
with: a kernel that needs more fails. Needs Triton, but no GPU.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tunesmith.base.core.errors import TritonUnavailableError

if TYPE_CHECKING:
    from triton_variants import Variant

RECORD = Path(__file__).resolve().parent.parent / "tests" / "kernels" / "triton_registers.json"


_WARP_SIZE = 32
_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Resources:
    """Registers of a thread and memory of a block of a compiled variant. A stack means that registers were spilled."""

    op: str
    variant: str
    capability: int
    registers: int
    stack_bytes: int
    shared_bytes: int

    @property
    def key(self) -> str:
        """Operation, variant and target as one string."""
        return f"{self.op}/{self.variant}/sm_{self.capability}"


def measured(op: str | None) -> list[Resources]:
    """Resources of every variant of one operation, or of all, on each of its targets."""
    # Kernels that were decorated for the interpreter cannot be compiled.
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # its default changes from version to version
    from triton_variants import VARIANTS

    chosen = [(found, variant) for found in VARIANTS if op in (None, found) for variant in VARIANTS[found]()]
    return [compiled(found, variant, target) for found, variant in chosen for target in variant.capabilities()]


def compiled(op: str, variant: "Variant", capability: int) -> Resources:
    """Resources of the variant on a GPU of this capability; pointers are assumed to be aligned, as torch's are.

    Raises:
        TritonUnavailableError: Triton's own tools, which report them, are missing.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    # Triton's own CompilationError passes: it quotes the line of the kernel.
    names = variant.kernel.arg_names
    signature = {name: variant.signature.get(name, "constexpr") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, kind in signature.items() if kind[0] == "*"}
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=dict(variant.constexprs), attrs=aligned)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "maxnreg": variant.maxnreg}
    binary = triton.compile(source, target=GPUTarget("cuda", capability, _WARP_SIZE), options=options)
    usage = _usage(binary.asm["cubin"])
    stack_bytes = usage["STACK"] + usage["LOCAL"]
    return Resources(op, variant.name, capability, usage["REG"], stack_bytes, binary.metadata.shared)


def _usage(cubin: bytes) -> dict[str, int]:
    """Registers, stack and local memory in bytes, printed by NVIDIA's cuobjdump, which comes with Triton."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    found = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", done.stdout)}
    if done.returncode != 0 or set(found) != {"REG", "STACK", "LOCAL"}:
        raise TritonUnavailableError(f"{command[0]} printed no resource usage: {done.stderr.strip()[:200]}")
    return found


def version() -> str:
    """The version of Triton, whose compiler decides on registers."""
    import triton

    return str(triton.__version__)


def main() -> int:
    """Exit code 0; prints or writes what was measured."""
    parser = argparse.ArgumentParser(
        description="Compile all Triton kernels and show their registers and shared memory."
    )
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
