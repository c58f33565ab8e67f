"""Run one piece of code within limits. A bare Python is given this program by `-c`; Tunesmith does not import it.

    outer       in the caller's namespaces: starts the next, ends it when told to, waits until no process is left
    supervisor  process 1 of namespaces of its own: no rights, watches limits, writes the report to stderr
    payload     the code, whose stdout and stderr are the outer's stdout

The code comes on stdin. Nothing here trusts the payload: it has neither the report's pipe nor a right to look into the
supervisor, and the kernel ends it with the supervisor.
"""

import binascii
import ctypes
import io
import marshal
import os
import resource
import signal
import struct
import sys
import time

# Modules that only the payload needs are imported in its functions: each call waits for the outer, which has none.

_libc = ctypes.CDLL(None, use_errno=True)

# linux/prctl.h, linux/sched.h, linux/mount.h
_PDEATHSIG, _DUMPABLE, _CAPBSET_DROP, _SECCOMP, _SUBREAPER, _NO_NEW_PRIVS, _CAP_AMBIENT = 1, 4, 24, 22, 36, 38, 47
_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC = 0x20000, 0x02000000, 0x04000000, 0x08000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_DETACH = 2

_USER = 65534
"""The user and group that root becomes: `nobody`, who owns nothing."""

_FILE = "<code>"
_POLL_S = 0.02
_MAX_ERROR = 1000
_MAX_FILES = 4096

# Calls that reach parts of the kernel without namespaces, hold memory that no limit counts, or need rights: their
# numbers on x86_64 and on aarch64.
# fmt: off
_REFUSED = {
    "acct": (163, 89), "add_key": (248, 217), "adjtimex": (159, 171), "bpf": (321, 280), "chroot": (161, 51),
    "clock_adjtime": (305, 266), "clock_settime": (227, 112), "delete_module": (176, 106),
    "fanotify_init": (300, 262), "finit_module": (313, 273), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fsopen": (430, 430), "fspick": (433, 433), "init_module": (175, 105), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "io_uring_setup": (425, 425), "ioperm": (173, None), "iopl": (172, None),
    "kcmp": (312, 272), "kexec_file_load": (320, 294), "kexec_load": (246, 104), "keyctl": (250, 219),
    "lookup_dcookie": (212, 18), "memfd_create": (319, 279), "memfd_secret": (447, 447), "modify_ldt": (154, None),
    "mount": (165, 40), "mount_setattr": (442, 442), "move_mount": (429, 429), "msgget": (68, 186),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "open_tree": (428, 428),
    "perf_event_open": (298, 241), "pidfd_getfd": (438, 438), "pivot_root": (155, 41), "process_madvise": (440, 440),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "ptrace": (101, 117), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "reboot": (169, 142), "request_key": (249, 218), "semget": (64, 190),
    "setdomainname": (171, 162), "sethostname": (170, 161), "setns": (308, 268), "settimeofday": (164, 170),
    "shmget": (29, 194), "swapoff": (168, 225), "swapon": (167, 224), "syslog": (103, 116), "umount2": (166, 39),
    "unshare": (272, 97), "userfaultfd": (323, 282),
}
# fmt: on
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_PRLIMIT = {"x86_64": 302, "aarch64": 261}
_CLONE3 = 435
_FIRST_UNKNOWN = 454
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97


def _checked(result: int, action: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{action}: {os.strerror(number)}")


def _prctl(option: int, *values: int) -> int:
    padded = [*values, 0, 0, 0, 0][:4]
    return _libc.prctl(option, *(ctypes.c_ulong(value) for value in padded))


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    result = _libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    _checked(result, f"mount of {source} at {target}")


def _map_user(uid: int, gid: int) -> None:
    """Give the user of a new user namespace a number there, which nobody can change then."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {uid} 1"), ("gid_map", f"1000 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _unshare(as_root: bool) -> None:
    """Enter namespaces of its own, as root with its rights, else with those of a user namespace."""
    uid, gid = os.geteuid(), os.getegid()
    flags = _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS | _NEWCGROUP
    _checked(_libc.unshare(flags if as_root else flags | _NEWUSER), "unshare")
    if not as_root:
        _map_user(uid, gid)
    _libc.sethostname(b"localhost", 9)


def _bind(source: str, target: str, kind: str) -> None:
    if kind == "folder":
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, target, None, _BIND | _REC)
    # A flag that the source's mount has may not be taken away in a user namespace.
    kept = os.statvfs(target).f_flag & _NOEXEC
    flags = _NOSUID | _NOEXEC if kind == "device" else _NOSUID | _NODEV | kept
    _mount("none", target, None, _BIND | _REMOUNT | _RDONLY | flags)


def _build_root(mounts: list[list[str]], file_bytes: int) -> None:
    """Make a root folder that has only `mounts`, `/proc` and an empty `/tmp`, and leave the other behind."""
    _mount("none", "/", None, _REC | _PRIVATE)
    # `/proc` is a folder that every machine has; what this hides is seen again once the new root has moved away.
    _mount("none", "/proc", "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    os.mkdir("/proc/old")
    _checked(_libc.pivot_root(b"/proc", b"/proc/old"), "pivot_root")
    os.chdir("/")
    for source, target, kind in mounts:
        if kind == "empty":
            _mount("none", target, "tmpfs", _RDONLY | _NOSUID | _NODEV, "size=4k")
        else:
            _bind(f"/old{source}", target, kind)
    os.mkdir("/tmp")
    _mount("none", "/tmp", "tmpfs", _NOSUID | _NODEV, f"size={file_bytes},nr_inodes={_MAX_FILES},mode=1777")
    os.symlink("/tmp", "/dev/shm")
    os.mkdir("/proc")
    flags = _RDONLY | _NOSUID | _NODEV | _NOEXEC
    try:
        _mount("none", "/proc", "proc", flags, "subset=pid")
    except OSError:  # Linux before 5.8
        _mount("none", "/proc", "proc", flags)
    _checked(_libc.umount2(b"/old", _DETACH), "umount of the old root")
    os.rmdir("/old")
    _mount("none", "/", None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    os.chdir("/tmp")


def _give_up_rights(as_root: bool) -> bool:
    """Become a user without rights, for good; whether processes are counted for this call alone."""
    counted = True
    if as_root:
        os.setgroups([])
        os.setresgid(_USER, _USER, _USER)
        os.setresuid(_USER, _USER, _USER)
        # Processes are counted for each user of each user namespace.
        _prctl(_DUMPABLE, 1)
        counted = _libc.unshare(_NEWUSER) == 0
        if counted and not os.statvfs("/proc").f_flag & _RDONLY:
            _map_user(_USER, _USER)
    for capability in range(64):
        if _prctl(_CAPBSET_DROP, capability) != 0:
            break
    _prctl(_CAP_AMBIENT, 4)
    header, nothing = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _checked(_libc.capset(header, nothing), "capset")
    _checked(_prctl(_NO_NEW_PRIVS, 1), "no_new_privs")
    # The kernel forgets it when the user changes.
    _prctl(_PDEATHSIG, signal.SIGKILL)
    release = os.uname().release.split(".")
    return counted and (int(release[0]), int(release[1])) >= (5, 14)


def _filter() -> bytes:
    """The program that judges system calls (seccomp): refused ones fail with EPERM."""
    machine = os.uname().machine

    def load(offset: int) -> bytes:
        return struct.pack("HBBI", 0x20, 0, 0, offset)

    def equal(value: int, then: int, otherwise: int) -> bytes:
        return struct.pack("HBBI", 0x15, then, otherwise, value)

    def give(value: int) -> bytes:
        return struct.pack("HBBI", 0x06, 0, 0, value)

    program = [load(4), equal(_AUDIT[machine], 1, 0), give(_KILL), load(0)]
    if machine == "x86_64":  # numbers of the x32 interface, which would pass the comparisons below
        program += [struct.pack("HBBI", 0x35, 0, 1, 0x40000000), give(_ERRNO | _EPERM)]
    # Calls of later kernels do not exist, as on an earlier one.
    program += [struct.pack("HBBI", 0x35, 0, 1, _FIRST_UNKNOWN), give(_ERRNO | _ENOSYS)]
    for numbers in _REFUSED.values():
        number = numbers[0 if machine == "x86_64" else 1]
        program += [] if number is None else [equal(number, 0, 1), give(_ERRNO | _EPERM)]
    # Its arguments cannot be seen, so libraries are told to use `clone`.
    program += [equal(_CLONE3, 0, 1), give(_ERRNO | _ENOSYS)]
    spaces = _NEWNS | _NEWCGROUP | _NEWUTS | _NEWIPC | _NEWUSER | _NEWPID | _NEWNET
    program += [equal(_CLONE[machine], 0, 4), load(16), struct.pack("HBBI", 0x45, 0, 1, spaces)]
    program += [give(_ERRNO | _EPERM), give(_ALLOW)]
    # The limits of itself, not those of the supervisor, which belongs to the same user.
    program += [equal(_PRLIMIT[machine], 0, 4), load(16), equal(0, 1, 0), give(_ERRNO | _EPERM), give(_ALLOW)]
    # Unix, IPv4, IPv6: others (vsock, netlink, alg, packet) belong to no network namespace, or talk to the kernel.
    program += [equal(_SOCKET[machine], 0, 6), load(16), equal(1, 3, 0), equal(2, 2, 0), equal(10, 1, 0)]
    program += [give(_ERRNO | _EAFNOSUPPORT), give(_ALLOW), give(_ALLOW)]
    return b"".join(program)


def _filter_calls() -> None:
    program = _filter()
    buffer = ctypes.create_string_buffer(program, len(program))
    given = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer)))
    _checked(_prctl(_SECCOMP, 2, ctypes.addressof(given)), "seccomp")


def _limit(limits: dict[str, float], count_processes: bool) -> None:
    seconds, file_bytes = int(limits["time_s"]) + 1, int(limits["file_mb"]) << 20
    values = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: int(limits["memory_mb"]) << 20,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 256,
    }
    if count_processes:
        values[resource.RLIMIT_NPROC] = int(limits["processes"]) + 1  # the supervisor is the one more
    for kind, value in values.items():
        hard = resource.getrlimit(kind)[1]
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (allowed, allowed))


class _Counted(io.FileIO):
    """The file of stdout, which knows whether anything was written."""

    written = 0

    def write(self, data, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.written += 1
        return super().write(data) or 0


def _execute(code: bytes, names: dict[str, object], out: io.TextIOWrapper, raw: _Counted) -> None:
    """Run `code` as a script; if it wrote nothing, write the value of the expression that it ends with."""
    import ast
    import linecache

    source = code.decode("utf-8", "surrogatepass")
    linecache.cache[_FILE] = (len(source), None, source.splitlines(keepends=True), _FILE)
    tree = ast.parse(source, _FILE)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, _FILE, "exec"), names)
    if not isinstance(last, ast.Expr):
        return
    value = eval(compile(ast.Expression(last.value), _FILE, "eval"), names)
    out.flush()
    if value is not None and not raw.written:
        out.write(repr(value) + "\n")


def _cut(text: str) -> str:
    half = _MAX_ERROR // 2
    return text if len(text) <= _MAX_ERROR else f"{text[:half]} ... {text[-half:]}"


def _described(error: BaseException) -> str:
    """The error and the last lines of code that led to it."""
    import traceback

    found = traceback.TracebackException.from_exception(error)
    frames = list(found.stack)
    while frames and frames[0].filename != _FILE:
        frames.pop(0)
    *where, message = [part.rstrip("\n") for part in found.format_exception_only()] or ["unknown"]
    lines = [_cut(message)]
    for frame in frames[-4:]:
        place = f"line {frame.lineno}" if frame.filename == _FILE else f"{frame.filename}, line {frame.lineno}"
        lines.append(_cut(f"  {place}, in {frame.name}: {frame.line}".rstrip(": ")))
    return "\n".join([*lines, *map(_cut, where)])


def _run_payload(code: bytes, report: int) -> int:
    """Run `code`; its exit status, and a description of what went wrong in the pipe `report`."""
    raw = _Counted(1, "w", closefd=False)
    out = io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)
    err = io.FileIO(2, "w", closefd=False)
    sys.stdout = sys.__stdout__ = out
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(err, "utf-8", "backslashreplace", write_through=True)
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8")
    sys.argv = [""]
    module = sys.modules["__main__"] = type(sys)("__main__")
    try:
        _execute(code, module.__dict__, out, raw)
        out.flush()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 255
        os.write(report, _cut(f"SystemExit: {error.code}").encode("utf-8", "replace"))
        return 1
    except BaseException as error:  # noqa: BLE001 - the code may raise anything, and its writer is told
        os.write(report, _described(error).encode("utf-8", "replace"))
        return 1
    return 0


def _processes() -> list[tuple[int, int, int, int]]:
    """Process, parent, threads and bytes of memory of its own of all processes that are seen here."""
    found = []
    page = os.sysconf("SC_PAGE_SIZE")
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            with open(f"/proc/{name}/statm", "rb") as file:
                _, resident, shared = file.read().split()[:3]
        except (OSError, ValueError):  # it has ended
            continue
        found.append((int(name), int(fields[1]), int(fields[17]), (int(resident) - int(shared)) * page))
    return found


def _descendants() -> list[tuple[int, int, int, int]]:
    """The descendants of this process, of `_processes`."""
    waiting, left, found = {os.getpid()}, _processes(), []
    while waiting:
        children = [process for process in left if process[1] in waiting]
        found += children
        waiting = {process[0] for process in children}
    return found


def _proportional(pid: int, otherwise: int) -> int:
    """Bytes of a process, in which a page of several processes counts in parts."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            return sum(int(line.split()[1]) << 10 for line in file if line.startswith(b"Pss_Anon:"))
    except (OSError, ValueError):
        return otherwise


def _proportional_of_all() -> int:
    """Bytes of all descendants, in which a page of several processes counts once."""
    return sum(_proportional(one[0], one[3]) for one in _descendants())


def _excess(limits: dict[str, float]) -> str:
    """The name of the limit of all processes together that they exceed."""
    found = _descendants()
    if sum(process[2] for process in found) > limits["processes"]:
        return "processes"
    most = int(limits["memory_mb"]) << 20
    # Looked at twice: processes that end in the meantime leave their parts of a page to those that are read after them.
    if sum(process[3] for process in found) > most and all(_proportional_of_all() > most for _ in range(2)):
        return "memory"
    space = os.statvfs(".")
    return "files" if os.getpid() == 1 and space.f_files - space.f_ffree > _MAX_FILES else ""


def _watch(payload: int, limits: dict[str, float], poll_s: float) -> tuple[str, int]:
    """Wait for `payload`: the limit for which it has to be ended, or "", and its wait status."""
    deadline = time.monotonic() + limits["time_s"]
    while True:
        signal.sigtimedwait([signal.SIGCHLD], poll_s)
        pid, status = os.waitpid(-1, os.WNOHANG)
        while pid:
            if pid == payload:
                return "", status
            pid, status = os.waitpid(-1, os.WNOHANG)
        if time.monotonic() > deadline:
            return "time", 0
        limit = _excess(limits)
        if limit:
            return limit, 0


def _end_descendants() -> None:
    """Kill all that descends from this process, and wait for it."""
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for process in _descendants():
            try:
                os.kill(process[0], signal.SIGKILL)
            except OSError:  # it has ended
                continue
        time.sleep(0.001)


def _supervise(given: dict) -> None:
    """Run the code of stdin in a child, and write to stderr how it ended."""
    limits, confined = given["limits"], given["confined"]
    counted = _give_up_rights(given["as_root"]) if confined else False
    _prctl(_DUMPABLE, 0)
    code = sys.stdin.buffer.read()
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    reading, writing = os.pipe()
    # Process 1 gets only signals that it handles, and Python handles this one.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    os.write(2, b"started\n")
    payload = os.fork()
    if payload == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        os.setsid()
        os.dup2(1, 2)
        os.closerange(3, writing)
        _prctl(_DUMPABLE, 1)
        _prctl(_NO_NEW_PRIVS, 1)
        _limit(limits, counted)
        if confined:
            _filter_calls()
        sys.exit(_run_payload(code, writing))
    os.close(writing)
    # Unconfined, all processes of the machine are looked at each time.
    limit, status = _watch(payload, limits, _POLL_S if confined else 10 * _POLL_S)
    if not confined:
        _end_descendants()
    os.set_blocking(reading, False)
    try:
        error = os.read(reading, 1 << 16).decode("utf-8", "replace")
    except BlockingIOError:
        error = ""
    report = {"limit": limit, "status": os.waitstatus_to_exitcode(status), "error": error}
    os.write(2, ascii(report).encode())
    os._exit(0)


def _start(given: dict, command: list[str]) -> None:
    """The work of the outer's child."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    _prctl(_PDEATHSIG, signal.SIGKILL)
    if command:
        os.execv(command[0], command)
    if given["confined"]:
        _build_root(given["mounts"], int(given["limits"]["file_mb"]) << 20)
    else:
        _prctl(_SUBREAPER, 1)
    _supervise(given)


def _stay_outside(given: dict, command: list[str]) -> None:
    """Start the supervisor, kill it on SIGTERM or when the caller ends, and wait until no process is left."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    _prctl(_SUBREAPER, 1)
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # a machine without memory ends this first, not the training
    except OSError:
        pass
    if given["confined"] and not command:
        _unshare(given["as_root"])
    child = os.fork()
    if child == 0:
        _start(given, command)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    _prctl(_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != given["caller"]:  # it ended before that
        os.kill(child, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    pid = 0
    while pid != child:
        pid, _ = os.waitpid(-1, 0)
    # Orphans that the namespace's end has not reached yet; SIGTERM is for a child that is gone.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_descendants()


def _main() -> None:
    options, *command = sys.argv[1:]
    given = marshal.loads(binascii.a2b_base64(options))
    if given["inside"]:
        _supervise(given)
    _stay_outside(given, command)


_main()
