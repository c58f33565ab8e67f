"""What a Triton kernel takes of a GPU, found without one: it is compiled for a target and its machine code is asked.

Each `kernels/<op>/triton_impl.py` lists its kernels in `VARIANTS`, one for each dtype that matters; `variants` finds
them all. Triton's interpreter must be off (TRITON_INTERPRET unset) when the modules are imported: it leaves nothing to
compile.
"""

import importlib
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tunesmith.core.errors import TritonUnavailableError

CAPABILITIES = (70, 80, 90)
"""V100, A100, H100 and H200: compute capability times ten."""

_WARP_SIZE = 32
_TIMEOUT_S = 60
_KERNELS = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with its types and constants filled in, as one launch compiles it.

    `signature` gives the type of each argument that is no constant: "*bf16", "*fp16", "*fp32", "*i64" for pointers,
    "i32", "i64", "fp32" for numbers. `constexprs` gives the constants. A kernel with `tl.dot` needs tensor cores to
    pay, so it is compiled for 8.0 and newer alone. Names are unique within an operation. `maxnreg` is the most
    registers of a thread, of a launch that names it: left alone, the compiler spills a few for the sake of more
    threads at a time.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    uses_dot: bool = False
    num_stages: int = 3
    maxnreg: int | None = None

    def capabilities(self) -> tuple[int, ...]:
        """The targets it is compiled for."""
        return tuple(one for one in CAPABILITIES if one >= 80 or not self.uses_dot)


@dataclass(frozen=True, slots=True)
class Resources:
    """What one thread, and one block, of a compiled variant takes. A stack means that registers were spilled."""

    op: str
    variant: str
    capability: int
    registers: int
    stack_bytes: int
    shared_bytes: int

    @property
    def key(self) -> str:
        """Operation, variant and target as one text."""
        return f"{self.op}/{self.variant}/sm_{self.capability}"


def variants() -> Iterator[tuple[str, Variant]]:
    """(operation, variant) of every Triton kernel of the package, in the order of their names."""
    for path in sorted(_KERNELS.glob("*/triton_impl.py")):
        op = path.parent.name
        module = importlib.import_module(f"tunesmith.kernels.{op}.triton_impl")
        for variant in module.VARIANTS:
            yield op, variant


def compiled(op: str, variant: Variant, capability: int) -> Resources:
    """What the variant takes on a GPU of this capability; pointers are taken to be aligned, as torch's are.

    Raises:
        TritonUnavailableError: Triton cannot say what the code takes, for want of its own tools.
    """
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
    """Registers, stack and local memory in bytes, as NVIDIA's cuobjdump, which Triton brings along, prints them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    found = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", done.stdout)}
    if done.returncode != 0 or set(found) != {"REG", "STACK", "LOCAL"}:
        raise TritonUnavailableError(f"{command[0]} tells nothing of a compiled kernel: {done.stderr.strip()[:200]}")
    return found
