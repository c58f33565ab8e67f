"""Kernels in C++: compiled with the system's compiler at first use, cached, loaded by ctypes.

An operation `<op>` has its source in `kernels/<op>/cpu.cpp`. The library is cached under a hash of that source, the
shared headers, the flags, and what the compiler predefines for this processor, so nothing stale is ever loaded.
"""

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Literal, get_args

# A library that links an OpenMP of its own would bring a second pool of threads; with torch loaded first, both share
# the one that torch has.
import torch

from tunesmith.core.cache import cache_folder
from tunesmith.core.errors import InputError, NativeUnavailableError
from tunesmith.core.log import Once, get_logger

Choice = Literal["auto", "native", "torch"]
"""`native`: C++ or an error. `torch`: never C++. `auto`: C++ where it can be had, else torch, which is said once."""

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

_COMPILERS = ("c++", "g++", "clang++")
_SOURCES = Path(__file__).parent
_TIMEOUT_S = 300
_MESSAGE_LINES = 6


class Kernels:
    """Where operations run: in C++ or in torch. One object for each owner, such as an engine; it keeps what it loaded.

    `sources` is the folder with the operations, and the package's own by default.
    """

    def __init__(self, choice: Choice = "auto", *, sources: Path = _SOURCES) -> None:
        if choice not in get_args(Choice):
            raise InputError(f"kernels are {choice!r}; allowed: {', '.join(get_args(Choice))}")
        self.choice: Choice = choice
        self._sources = sources
        self._once = Once(get_logger(__name__))
        self._libraries: dict[str, ctypes.CDLL | None] = {}

    def library(self, op: str, device: torch.device) -> ctypes.CDLL | None:
        """The library of `op`, None where torch is to do the work: as chosen, off the CPU, or for want of a compiler.

        Raises:
            NativeUnavailableError: `native` was chosen and cannot be had; with `auto` this is a warning, said once.
        """
        if self.choice == "torch":
            return None
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
            self._once.warning(f"using torch instead of compiled kernels, which is slower: {error}")
            return None


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
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailableError(
            f"cannot write or load the compiled kernel {path}: {error}. Free some space, or set TUNESMITH_CACHE to a "
            "folder that is writable and not mounted noexec"
        ) from error


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
    """Hash of all that decides what the library is: sources, flags, compiler and its version, and the processor."""
    # With -march=native the predefined macros name the compiler's version and each instruction set of this processor.
    macros = _run((*compiler, "-march=native", "-fopenmp", "-dM", "-E", "-x", "c++", os.devnull), "is of no use")
    digest = hashlib.sha256()
    for path in (source, *sorted(source.parent.parent.glob("*.hpp"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update("\0".join((*FLAGS, *compiler, macros)).encode())
    return digest.hexdigest()[:24]


def _build(source: Path, compiler: tuple[str, ...], path: Path) -> None:
    """Compile into `path` by a rename: processes that compile at once each publish a whole library, the same one."""
    with tempfile.TemporaryDirectory(prefix=f".{path.stem}-", dir=path.parent) as folder:
        aside = Path(folder) / path.name
        include = f"-I{source.parent.parent}"
        _run((*compiler, *FLAGS, include, str(source), "-o", str(aside)), f"cannot compile {source}")
        aside.replace(path)


def _run(command: tuple[str, ...], complaint: str) -> str:
    """What the compiler prints."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailableError(f"{command[0]} {complaint}: no end within {_TIMEOUT_S} s") from error
    except OSError as error:
        raise NativeUnavailableError(f"{command[0]} {complaint}: {error}") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()[:_MESSAGE_LINES] or [f"exit code {done.returncode}, no message"]
        raise NativeUnavailableError("\n  ".join([f"{command[0]} {complaint}:", *lines]))
    return done.stdout
