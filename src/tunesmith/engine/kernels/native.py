"""Choice of kernels; C++ kernels are compiled with the system's compiler at first use, cached, loaded by ctypes.

An operation `<op>` has its source in `engine/kernels/<op>/cpu.cpp`. The library is cached under a hash of that source,
the shared headers, the flags, and what the compiler predefines for this processor, so nothing stale is ever loaded.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

# A library that links an OpenMP of its own would bring a second pool of threads; with torch loaded first, both share
# the one that torch has.
import torch

from tunesmith.base.core.errors import InputError, NativeUnavailableError, TritonUnavailableError
from tunesmith.base.core.log import Once, get_logger
from tunesmith.base.core.system import cache_folder

Choice = Literal["auto", "native", "triton", "torch"]
"""`native`: C++ or an error. `triton`: Triton or an error. `torch`: plain torch. `auto`: C++ on a CPU and Triton on a
GPU, else torch, with one warning."""

Backend = Literal["native", "triton", "torch"]
"""The implementation of an operation."""

Capability = tuple[int, int]
"""Compute capability of an NVIDIA GPU: (7, 0) is a V100, (8, 0) an A100, (9, 0) an H100 or H200."""

NATIVE_DTYPES = (torch.bfloat16, torch.float32)
"""Dtypes that most operations support in C++; others are passed to `Kernels.picked`."""

TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that operations support in Triton."""

LEAST_CAPABILITY: Capability = (7, 0)
"""The oldest GPU that Triton kernels are compiled for in the tests."""

# No -ffast-math: a shared library linked with it switches denormals off for the whole process, in torch too. These two
# change no result; they allow vector code where errno and floating-point traps would forbid it.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
    "-shared",
    "-fPIC",
)

_log = get_logger(__name__)
_COMPILERS = ("c++", "g++", "clang++")
_SOURCES = Path(__file__).parent
_TIMEOUT_S = 300
_MESSAGE_LINES = 6
_TRIES = 3
_KILLED = ("signal terminated program", "due to signal")  # g++ and clang++, of a part of them that was killed
_NO_TRITON = "Triton is not installed; run `pip install 'tunesmith[gpu]'` (torch's builds for CUDA bring it along)"


class Kernels:
    """The choice of backend, and the loaded libraries; each owner, such as an engine, has its own object.

    `sources` is the folder with the operations, and the package's own by default.
    """

    def __init__(self, choice: Choice = "auto", *, sources: Path = _SOURCES) -> None:
        if choice not in get_args(Choice):
            raise InputError(f"kernels are {choice!r}; allowed: {', '.join(get_args(Choice))}")
        self.choice: Choice = choice
        self._sources = sources
        self._libraries: dict[str, ctypes.CDLL | None] = {}

    def picked(self, op: str, tensor: torch.Tensor) -> Backend:
        """The backend of `op` for this tensor's device and dtype; if it is C++, `library` has it loaded.

        `auto` takes C++ on a CPU and Triton on a GPU. It falls back to torch: silently if there is no kernel for the
        operation or dtype, and with one warning if a compiler, Triton or a GPU of `LEAST_CAPABILITY` is missing.

        Raises:
            NativeUnavailableError: `native` was chosen and cannot run on this tensor.
            TritonUnavailableError: `triton` was chosen and cannot run on this tensor.
        """
        return self._picked(op, tensor.device, tensor.dtype)

    def _picked(self, op: str, device: torch.device, dtype: torch.dtype) -> Backend:
        if self.choice == "torch":
            return "torch"
        if self.choice == "triton":
            return self._triton_or_error(op, device, dtype)
        if device.type == "cuda" and self.choice == "auto":
            return self._triton_or_torch(op, device, dtype)
        if dtype not in NATIVE_DTYPES or not has_native(op, sources=self._sources):
            if self.choice == "native":
                raise NativeUnavailableError(_why_not_native(op, dtype, self._sources))
            return "torch"
        return "torch" if self.library(op, device) is None else "native"

    # Files and the environment are looked at here, which torch.compile cannot follow, and the answer stays what it is.
    # This is torch.compiler.assume_constant_result without the second that it takes to import the compiler.
    _picked.__dict__["_dynamo_marked_constant"] = True

    def library(self, op: str, device: torch.device) -> ctypes.CDLL | None:
        """The library of `op`; None to use torch: as chosen, on another device, or because a compiler is missing.

        Raises:
            NativeUnavailableError: `native` was chosen and cannot run; with `auto` this is a warning, said once.
            TritonUnavailableError: `triton` was chosen, for an operation that asks for C++ alone.
        """
        if self.choice == "torch":
            return None
        if self.choice == "triton":
            raise TritonUnavailableError(f"{op} has no Triton kernel; choose auto, native or torch for it")
        if device.type != "cpu":
            if self.choice == "native":
                raise NativeUnavailableError(
                    f"the native kernel {op} runs on the CPU and was given tensors on {device}; choose auto or torch"
                )
            return None
        if op not in self._libraries:
            self._libraries[op] = self._load(op)
        return self._libraries[op]

    def _load(self, op: str) -> ctypes.CDLL | None:
        try:
            return load(op, sources=self._sources)
        except NativeUnavailableError as error:
            if self.choice == "native":
                raise
            said = f"using torch instead of compiled kernels, which is slower: {error}"
            warn_once().warning(said, about="compiler")  # not for each kernel: what is wrong is seldom wrong with one
            return None

    def _triton_or_error(self, op: str, device: torch.device, dtype: torch.dtype) -> Backend:
        if not has_triton(op, sources=self._sources):
            problem = "there is none for this operation; choose auto, native or torch for it"
        elif dtype not in TRITON_DTYPES:
            problem = f"it was given {dtype}; give bfloat16, float16 or float32, or choose auto or torch"
        elif device.type == "cuda":
            problem = why_not_on(device, LEAST_CAPABILITY)
        elif device.type == "cpu" and _interprets():
            problem = "" if _triton_is_installed() else _NO_TRITON
        else:
            problem = (
                f"it runs on a CUDA device and was given tensors on {device}; choose auto or torch. To try it "
                "on a CPU, very slowly, set TRITON_INTERPRET=1 before Python starts"
            )
        if problem:
            raise TritonUnavailableError(f"the Triton kernel {op} cannot run: {problem}")
        return "triton"

    def _triton_or_torch(self, op: str, device: torch.device, dtype: torch.dtype) -> Backend:
        if not has_triton(op, sources=self._sources) or dtype not in TRITON_DTYPES:
            return "torch"
        problem = why_not_on(device, LEAST_CAPABILITY)
        if problem:
            warn_once().warning(f"using torch instead of Triton for {op}, which is slower: {problem}")
        return "torch" if problem else "triton"


@functools.cache
def warn_once() -> Once:
    """The warnings of the process's kernels: each object with kernels of its own would repeat them."""
    return Once(_log)


@functools.cache
def shared(choice: Choice) -> Kernels:
    """The process's kernels of this choice: for custom operators of torch, which take text and not objects."""
    return Kernels(choice)


@functools.cache
def has_native(op: str, *, sources: Path = _SOURCES) -> bool:
    """True if the operation has a C++ kernel."""
    return (sources / op / "cpu.cpp").is_file()


@functools.cache
def has_triton(op: str, *, sources: Path = _SOURCES) -> bool:
    """True if the operation has a Triton kernel."""
    return (sources / op / "triton_impl.py").is_file()


def why_not_on(device: torch.device, least: Capability) -> str:
    """Reason why a Triton kernel that needs capability `least` cannot run on this device, and the remedy; empty if it
    can.
    """
    if not _triton_is_installed():
        return _NO_TRITON
    if not torch.cuda.is_available():
        return "torch sees no CUDA device; choose auto or torch"
    found = torch.cuda.get_device_capability(device)
    if found < least:
        return f"it needs compute capability {_dotted(least)} and this GPU has {_dotted(found)}; choose auto or torch"
    return ""


def _why_not_native(op: str, dtype: torch.dtype, sources: Path) -> str:
    if not has_native(op, sources=sources):
        return f"{op} has no native kernel; choose auto or torch for it"
    return f"the native kernel {op} is for bfloat16 and float32 and was given {dtype}; choose auto or torch"


def _dotted(capability: Capability) -> str:
    return ".".join(map(str, capability))


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _interprets() -> bool:
    """True if Triton runs kernels in its interpreter, read from the environment as Triton does."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


@dataclass(frozen=True, slots=True)
class Pick:
    """The choice of `Kernels("auto")` for an operation on `cpu` or `cuda`; `why` says why it is not faster."""

    op: str
    device: str
    backend: Backend
    why: str = ""


def operations() -> list[str]:
    """The names of all operations, sorted."""
    return sorted(path.parent.name for path in _SOURCES.glob("*/api.py"))


def survey() -> list[Pick]:
    """One pick for each operation on the CPU, and one on the GPU if torch sees one, in the order of their names."""
    why_no_compiler, has_gpu = _why_no_compiler(), torch.cuda.is_available()
    why_no_triton = why_not_on(torch.device("cuda"), LEAST_CAPABILITY) if has_gpu else ""
    picks: list[Pick] = []
    for op in operations():
        why = why_no_compiler if has_native(op) else "has no C++"
        picks.append(Pick(op, "cpu", "torch" if why else "native", why))
        if has_gpu:
            why = why_no_triton if has_triton(op) else "has no Triton kernel"
            picks.append(Pick(op, "cuda", "torch" if why else "triton", why))
    return picks


def _why_no_compiler() -> str:
    """Empty if there is a compiler that takes the flags; Apple's has no OpenMP, for example."""
    try:
        _macros(find_compiler())
    except NativeUnavailableError as error:
        return str(error)
    return ""


def load(op: str, *, sources: Path = _SOURCES) -> ctypes.CDLL:
    """The compiled library of `op`, from the cache or compiled now (seconds). Calls into it release the GIL.

    Raises:
        NativeUnavailableError: no compiler, or it refused the source (its first lines are quoted), or the cache cannot
            be written, or the library cannot be loaded.
    """
    source = sources / op / "cpu.cpp"
    compiler = find_compiler()
    path = cache_folder() / "kernels" / f"{op}-{_key(source, compiler)}.so"
    try:
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            _build(source, compiler, path)
        library = ctypes.CDLL(str(path))
        _loaded.add(library)
        return library
    except OSError as error:
        raise NativeUnavailableError(
            f"cannot write or load the compiled kernel {path}: {error}. Free some space, or set TUNESMITH_CACHE to a "
            "folder that is writable and not mounted noexec"
        ) from error


_loaded: weakref.WeakSet[ctypes.CDLL] = weakref.WeakSet()
"""Libraries in use, for `wrapped`."""


@contextmanager
def wrapped(wrap: Callable[[Any], Any]) -> Generator[None, None, None]:
    """Replace each function that was called before by `wrap(function)` inside the block, as the profiler does."""
    found = [
        (library, name, function)
        for library in _loaded
        for name, function in vars(library).items()
        if isinstance(function, library._FuncPtr)
    ]
    for library, name, function in found:
        setattr(library, name, wrap(function))
    try:
        yield
    finally:
        for library, name, function in found:
            setattr(library, name, function)


def find_compiler() -> tuple[str, ...]:
    """The command of the C++ compiler: `CXX` of the environment if it is set, else the first that is installed.

    Raises:
        NativeUnavailableError: there is none.
    """
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [[name] for name in _COMPILERS]:
        if path := shutil.which(command[0]):
            return (path, *command[1:])
    searched = f"CXX names {named[0]!r}, which is not on PATH" if named else f"none of {', '.join(_COMPILERS)} on PATH"
    raise NativeUnavailableError(f"no C++ compiler: {searched}. Install g++ or clang++, or name one by CXX")


def _key(source: Path, compiler: tuple[str, ...]) -> str:
    """Hash of everything the library depends on: sources, flags, compiler and its version, and the processor."""
    digest = hashlib.sha256()
    for path in (source, *sorted(source.parent.parent.glob("*.hpp"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update("\0".join((*FLAGS, *compiler, _macros(compiler))).encode())
    return digest.hexdigest()[:24]


@functools.cache
def _macros(compiler: tuple[str, ...]) -> str:
    """The predefined macros, which name the compiler's version and each instruction set of this processor."""
    return _run((*compiler, "-march=native", "-fopenmp", "-dM", "-E", "-x", "c++", os.devnull), "is of no use")


def _build(source: Path, compiler: tuple[str, ...], path: Path) -> None:
    """Compile into `path` by a rename: processes that compile at once each publish a whole library, the same one."""
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix=f".{path.stem}-", dir=path.parent) as folder:
        aside = Path(folder) / path.name
        include = f"-I{source.parent.parent}"
        _run((*compiler, *FLAGS, include, str(source), "-o", str(aside)), f"cannot compile {source}")
        aside.replace(path)
    seconds = time.perf_counter() - start_s
    _log.info("compiled the kernel %s in %.1f s, once: it is kept in %s", source.parent.name, seconds, path.parent)


def _run(command: tuple[str, ...], complaint: str) -> str:
    """Run the compiler and return what it prints. One that is killed is run again: with torch's operations in place of
    the kernels a run would have other bits.
    """
    for _ in range(_TRIES):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise NativeUnavailableError(f"{command[0]} {complaint}: no end within {_TIMEOUT_S} s") from error
        except OSError as error:
            raise NativeUnavailableError(f"{command[0]} {complaint}: {error}") from error
        if done.returncode >= 0 and not any(words in done.stderr for words in _KILLED):
            break
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()[:_MESSAGE_LINES] or [f"exit code {done.returncode}, no message"]
        raise NativeUnavailableError("\n  ".join([f"{command[0]} {complaint}:", *lines]))
    return done.stdout
