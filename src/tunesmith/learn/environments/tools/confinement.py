"""Keep a process from the machine: bubblewrap, or Linux namespaces, whichever works here."""

import ast
import binascii
import codecs
import json
import marshal
import math
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from tunesmith.base.core.errors import InputError

ConfinementName = Literal["bwrap", "namespaces", "none"]

FLAGS = ("-s", "-S", "-P", "-B", "-X", "utf8")
"""Python's flags: no site-packages, no modules of the working directory, no bytecode written."""

_LOADER = "import binascii, marshal, sys; exec(marshal.loads(binascii.a2b_base64(sys.argv.pop(1))))"

_LIST_LIBRARIES = """
import ctypes, glob, json, os, sys
class Info(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("name", ctypes.c_char_p)]
for path in glob.glob(os.path.join(sys.argv[1], "*.so")):
    if "tkinter" not in path:
        try: ctypes.CDLL(path)
        except OSError: pass
names = []
@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Info), ctypes.c_size_t, ctypes.c_void_p)
def note(info, size, data):
    names.append(os.fsdecode(info.contents.name or b""))
    return 0
ctypes.CDLL(None).dl_iterate_phdr(note, None)
print(json.dumps([sys.path, names]))
"""
"""A program that prints the folders of Python's modules, and the shared libraries that it and they load."""

_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_SHARED = ("/etc/ld.so.cache", "/usr/share/zoneinfo")
_MACHINES = ("x86_64", "aarch64")
MAX_OUTPUT = 10_000_000
"""Characters of output, beside those that are kept, after which code is ended: this process would be busy reading."""

_GRACE_S = 30.0
"""Seconds beyond its limit after which a run that has not ended itself is ended from outside."""

_MAX_REPORT = 1 << 16
_PROBE_LIMITS = {"time_s": 10.0, "memory_mb": 512, "processes": 16, "file_mb": 16}
_PROBE_CODE = "import os, ssl\nprint(os.getppid(), os.listdir('.'), os.environ['HOME'])"
_PROBE_ANSWER = "1 [] /tmp\n"


@dataclass(frozen=True)
class Mount:
    """A place that is seen in a confinement: `source` at `target`, read only; of kind "empty", an empty folder."""

    source: str
    target: str
    kind: Literal["folder", "file", "device", "empty"]


@dataclass(frozen=True)
class Confinement:
    """A way to run a program; `as_root` if root's own rights set it up, otherwise a user namespace gives them."""

    name: ConfinementName
    as_root: bool
    mounts: tuple[Mount, ...]

    def command(self, limits: dict[str, float]) -> list[str]:
        """The program, with arguments, that runs the code on its stdin within `limits`."""
        python = [str(base_python()), *FLAGS, "-c", _LOADER, launcher()]
        given = {
            "inside": False,
            "caller": os.getpid(),
            "confined": self.name != "none",
            "as_root": self.as_root,
            "limits": limits,
            "mounts": [(mount.source, mount.target, mount.kind) for mount in self.mounts],
        }
        inner: list[str] = []
        if self.name == "bwrap":
            options = _encoded({**given, "inside": True, "mounts": []})
            inner = [*_bubblewrap(self, int(limits["file_mb"]) << 20), *python, options]
        return [*python, _encoded(given), *inner]

    def run(self, code: str, limits: dict[str, float], max_chars: int) -> "Ended":
        """Run `code`; no process of it is left when this returns.

        `limits` has time_s, memory_mb, processes and file_mb. Of the output at most about `max_chars` are kept.
        """
        with (
            tempfile.TemporaryFile() as file,
            tempfile.TemporaryDirectory(prefix="tunesmith-", ignore_cleanup_errors=True) as folder,
        ):
            file.write(code.encode("utf-8", "surrogatepass"))
            file.seek(0)
            inside = folder if self.name == "none" else "/tmp"
            env = {"HOME": inside, "TMPDIR": inside, "PYTHONHASHSEED": "0"}
            process = subprocess.Popen(
                self.command(limits),
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder if self.name == "none" else "/",
                env=env,
                start_new_session=True,
            )
            with process:
                try:
                    return _read(process, limits["time_s"] + _GRACE_S, max_chars)
                finally:
                    process.terminate()  # it kills what is left, and waits for it


@dataclass(frozen=True)
class Ended:
    """The end of a run: what it printed, and the characters left out of that.

    `report` says how the code ended; it is None if the code and its supervisor were killed, and if the code could not
    be started, for which `failure` is the reason.
    """

    output: str
    num_left_out: int
    report: dict[str, object] | None
    failure: str


class _Kept:
    """The first and the last characters of a text that comes in parts."""

    def __init__(self, max_chars: int) -> None:
        self._most = max_chars
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._head, self._tail = "", ""
        self.num_left_out = 0

    def add(self, data: bytes) -> None:
        text = self._decoder.decode(data, final=not data)
        room = self._most - len(self._head)
        self._head += text[:room]
        self._tail += text[room:]
        if len(self._tail) > self._most:
            self.num_left_out += len(self._tail) - self._most
            self._tail = self._tail[-self._most :]

    @property
    def text(self) -> str:
        return self._head + self._tail


def _read(process: "subprocess.Popen[bytes]", within_s: float, max_chars: int) -> Ended:
    """Read both pipes of `process` to their ends; it is told to end after `within_s`."""
    assert process.stdout is not None
    assert process.stderr is not None
    output, told = _Kept(max_chars), _Kept(_MAX_REPORT)
    deadline = time.monotonic() + within_s
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        selector.register(process.stderr, selectors.EVENT_READ)
        while selector.get_map():
            if time.monotonic() > deadline:
                process.terminate()
                deadline = math.inf
            for pipe, data in _ready(selector):
                (output if pipe is process.stdout else told).add(data)
            if output.num_left_out > MAX_OUTPUT and deadline < math.inf:
                deadline = 0.0
    process.wait()
    failure, started, told_last = told.text.rpartition("started\n")
    try:
        report = ast.literal_eval(told_last)
    except (ValueError, SyntaxError):
        report = None
    return Ended(output.text, output.num_left_out, report, "" if started else failure or told_last)


def _ready(selector: selectors.BaseSelector) -> Iterator[tuple[object, bytes]]:
    """The pipes that have something within a second, and what; after a pipe's end, which is b"", it is left out."""
    for key, _ in selector.select(1.0):
        data = os.read(key.fd, 1 << 16)
        if not data:
            selector.unregister(key.fileobj)
        yield key.fileobj, data


@cache
def launcher() -> str:
    """The program of `confined.py`, compiled once and not by each process, as an argument of `_LOADER`."""
    text = Path(__file__).with_name("confined.py").read_bytes()
    return _encoded(compile(text, "confined.py", "exec"))


def _encoded(value: object) -> str:
    return binascii.b2a_base64(marshal.dumps(value), newline=False).decode()  # pyright: ignore[reportArgumentType]


@cache
def base_python() -> Path:
    """The interpreter behind the virtual environment that runs this."""
    named = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    return Path(os.path.realpath(named if named.exists() else sys.executable))


@cache
def _mounts() -> tuple[Mount, ...]:
    """The files that Python needs: itself, its standard library, and the shared libraries that these load."""
    modules = next((folder for folder in sys.path if folder.endswith("lib-dynload")), "")
    command = [str(base_python()), *FLAGS, "-c", _LIST_LIBRARIES, modules]
    listed = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env={}, check=True, text=True)
    folders, libraries = json.loads(listed.stdout)
    found: list[Mount] = []
    kept: list[str] = []
    for folder in sorted({os.path.normpath(folder) for folder in folders if os.path.isabs(folder)}):
        if os.path.exists(folder) and not any(folder.startswith(f"{other}/") for other in kept):
            kept.append(folder)
            found.append(_mount(folder))
    for name in ("site-packages", "dist-packages"):
        inside = [os.path.join(folder, name) for folder in kept if os.path.isdir(os.path.join(folder, name))]
        found += [Mount("", folder, "empty") for folder in inside]
    files = {os.path.normpath(name) for name in libraries if os.path.isabs(name)} | {str(base_python()), *_SHARED}
    for file in sorted(files):
        if os.path.exists(file) and not any(file.startswith(f"{folder}/") for folder in kept):
            found.append(_mount(file))
    return (*found, *(Mount(device, device, "device") for device in _DEVICES))


def _mount(path: str) -> Mount:
    return Mount(os.path.realpath(path), path, "folder" if os.path.isdir(path) else "file")


def _bubblewrap(confinement: Confinement, file_bytes: int) -> list[str]:
    options = [shutil.which("bwrap") or "bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    options += ["--unshare-cgroup-try", "--die-with-parent", "--as-pid-1", "--new-session", "--hostname", "localhost"]
    options += ["--cap-drop", "ALL"]
    if confinement.as_root:  # to become another user, once inside
        options += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"]
    else:
        options += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    parents = {parent for mount in confinement.mounts if mount.source for parent in Path(mount.target).parents}
    for parent in sorted(map(str, parents - {Path("/")})):  # those that it makes itself are root's alone
        options += ["--perms", "0755", "--dir", parent]
    for mount in confinement.mounts:
        if mount.kind == "empty":
            options += ["--size", "4096", "--tmpfs", mount.target, "--remount-ro", mount.target]
        else:
            options += ["--dev-bind" if mount.kind == "device" else "--ro-bind", mount.source, mount.target]
    options += ["--proc", "/proc", "--perms", "1777", "--size", str(file_bytes), "--tmpfs", "/tmp"]
    return [*options, "--symlink", "/tmp", "/dev/shm", "--remount-ro", "/", "--chdir", "/tmp"]


@cache
def _failure(name: ConfinementName, as_root: bool) -> str:
    """Why this confinement does not work here, or ""."""
    if sys.platform != "linux" or os.uname().machine not in _MACHINES:
        return f"it needs Linux on {' or '.join(_MACHINES)}"
    if name == "bwrap" and shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    try:
        ended = Confinement(name, as_root, _mounts()).run(_PROBE_CODE, _PROBE_LIMITS, 1000)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    if ended.output == _PROBE_ANSWER and ended.report is not None:
        return ""
    told = ended.failure or str((ended.report or {}).get("error") or ended.output)
    return told.strip().rpartition("\n")[2] or "it ended without a message"


def confinement(name: ConfinementName | None) -> Confinement:
    """The confinement `name`, or the first that works here; each is tried once in this process.

    Raises:
        InputError: It does not work here, or none does.
    """
    if name == "none":
        return Confinement("none", False, ())
    names: tuple[ConfinementName, ...] = ("bwrap", "namespaces") if name is None else (name,)
    reasons: list[str] = []
    for tried in names:
        for as_root in (True, False) if os.geteuid() == 0 else (False,):
            reason = _failure(tried, as_root)
            if not reason:
                return Confinement(tried, as_root, _mounts())
            reasons.append(f"{tried}{' as root' if as_root else ''}: {reason}")
    raise InputError(
        f"the Python tool cannot keep code from this machine ({'; '.join(dict.fromkeys(reasons))}); install "
        "bubblewrap (`apt-get install bubblewrap`) where user namespaces are allowed, or accept with "
        "`allow_unconfined=True` that the code has all rights of this process"
    )
