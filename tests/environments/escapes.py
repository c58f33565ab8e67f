"""Attempts to get out of the Python tool: code that prints REACHED if it got what it may not have.

`HOST` is a dictionary of what the test has on the machine outside. All of them print "done" at their end, unless they
are among `ENDED`.
"""

PRELUDE = """
import ctypes, os, platform, resource, signal, socket, stat, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
# Some of this code kills or fills what it can reach: it does not begin where it could reach the machine.
assert os.readlink("/proc/self/ns/pid") != HOST["pid_namespace"]
def reach(action, *arguments):
    try:
        value = action(*arguments)
    except BaseException as error:
        print("refused:", type(error).__name__, ascii(str(error))[:200])
    else:
        print("REACHED", ascii(value)[:200])
def call(name, *arguments):
    "A call of libc that has to fail."
    ctypes.set_errno(0)
    result = getattr(libc, name)(*arguments)
    if result == -1:
        raise OSError(ctypes.get_errno(), name)
    return name, result
X86 = platform.machine() == "x86_64"
def system(x86, arm, *arguments):
    return call("syscall", x86 if X86 else arm, *arguments)
def opened(path, flags=os.O_RDONLY):
    return os.open(path, flags)
def read(path):
    with open(path, "rb") as file:
        return path, file.read(100)
def has_token(data):
    if HOST["token"].encode() not in data:
        raise OSError("the token is not there")
    return "the token"
"""

ATTEMPTS = {
    "read the machine's accounts": """
for path in ("/etc/passwd", "/etc/shadow", "/etc/hostname", "/etc/machine-id", "/etc/resolv.conf", "/root/.bashrc"):
    reach(read, path)
""",
    "read a file of the user": "reach(read, HOST['secret'])",
    "read the repository": "reach(read, HOST['file']); reach(os.listdir, os.path.dirname(HOST['file']))",
    "list the home folders": """
reach(lambda: [os.listdir("/home"), 1])
here = os.path.expanduser("~")
print(here)
if here != "/tmp": reach(str)
""",
    "look for the token in all files": """
for folder, folders, names in os.walk("/"):
    folders[:] = [name for name in folders if os.path.join(folder, name) != "/proc"]
    for name in names:
        path = os.path.join(folder, name)
        if HOST["token"] in path: reach(str)
        if os.path.isfile(path) and os.path.getsize(path) < 1000 and HOST["token"].encode() in open(path, "rb").read():
            reach(str)
""",
    "follow a symbolic link to outside": """
os.symlink(HOST["secret"], "link"); reach(read, "link")
os.symlink("/proc/1/root", "root"); reach(read, "root" + HOST["secret"])
os.symlink("../" * 30 + HOST["secret"][1:], "up"); reach(read, "up")
""",
    "make a hard link to outside": "reach(os.link, HOST['secret'], 'hard'); reach(os.link, '/etc/passwd', 'hard')",
    "walk up from an open folder": """
folder = os.open(".", os.O_RDONLY)
reach(lambda: os.open("../" * 40 + HOST["secret"][1:], os.O_RDONLY, dir_fd=folder))
""",
    "read environments through /proc": """
for name in filter(str.isdigit, os.listdir("/proc")):
    reach(lambda: has_token(open(f"/proc/{name}/environ", "rb").read()))
reach(lambda: has_token(repr(os.environ).encode()))
allowed = {"HOME", "TMPDIR", "PYTHONHASHSEED", "PWD", "LC_CTYPE"}
if set(os.environ) - allowed: reach(sorted, os.environ)
""",
    "see other processes": """
pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
if set(pids) - {1, os.getpid()}: reach(list, pids)
for pid in pids: reach(lambda: has_token(open(f"/proc/{pid}/cmdline", "rb").read()))
for pid in (HOST["bystander"], HOST["pid"]): reach(os.kill, pid, 0)
""",
    "look into the supervisor": """
for name in ("root", "cwd", "exe", "fd", "ns/net"):
    reach(os.listdir, f"/proc/1/{name}"); reach(os.readlink, f"/proc/1/{name}")
for name in ("mem", "environ", "maps", "auxv"): reach(read, f"/proc/1/{name}")
""",
    "trace the supervisor and others": """
for pid in (1, HOST["bystander"], HOST["pid"]):
    reach(system, 101, 117, 16, pid, 0, 0); reach(system, 101, 117, 0x4206, pid, 0, 0)
    buffer = ctypes.create_string_buffer(16)
    vector = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 16)
    reach(system, 310, 270, pid, vector, 1, vector, 1, 0)
    reach(system, 434, 434, HOST["pid"], 0)
""",
    "kill the supervisor": """
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
    os.kill(1, number)
time.sleep(0.2)
""",
    "kill the test": """
for pid in (HOST["pid"], HOST["bystander"], -HOST["pid"], -HOST["bystander"]): reach(os.kill, pid, signal.SIGKILL)
for pid in range(3, 40_000):
    try: os.kill(pid, signal.SIGKILL); print("REACHED", pid)
    except ProcessLookupError: pass
""",
    "connect to a port of the machine": """
for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (socket.AF_INET, HOST["address"])):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        one = socket.socket(family, kind)
        one.settimeout(2)
        try: one.connect((address, HOST["port"])); one.send(b"x")
        except OSError as error: print(error)
        else:
            if kind == socket.SOCK_STREAM: reach(str)
""",
    "ask for a name and reach the network": """
reach(socket.getaddrinfo, "example.com", 80)
reach(socket.create_connection, ("1.1.1.1", 53), 2)
import urllib.request
reach(urllib.request.urlopen, "http://example.com", None, 2)
""",
    "connect to a Unix socket of the machine": """
for address in ("\\0" + HOST["token"], HOST["socket"], "/run/dbus/system_bus_socket", "/var/run/docker.sock"):
    one = socket.socket(socket.AF_UNIX); one.settimeout(2); reach(one.connect, address)
""",
    "open sockets of other kinds": """
for family, kind in ((2, 3), (10, 3), (17, 3), (17, 2), (16, 3), (38, 5), (40, 1), (40, 2), (44, 3), (29, 3)):
    reach(socket.socket, family, kind)
""",
    "inherit open files": """
for number in range(3, 256):
    for action in (lambda: os.pread(number, 100, 0), lambda: os.read(number, 100), lambda: os.fchdir(number)):
        try: print("REACHED", number, action())
        except OSError: pass
""",
    "open devices": """
for name in ("mem", "kmem", "port", "kmsg", "sda", "vda", "nvme0n1", "loop0", "fuse", "kvm", "tty", "ptmx", "vsock",
             "console", "net/tun", "nvidia0", "nvidiactl", "dri/card0", "snapshot", "userfaultfd", "mapper/control"):
    reach(opened, "/dev/" + name)
print(sorted(os.listdir("/dev")))
""",
    "make devices": """
for kind, device in ((stat.S_IFBLK, (8, 0)), (stat.S_IFCHR, (1, 1)), (stat.S_IFBLK, (254, 0))):
    reach(os.mknod, "device", kind | 0o666, os.makedev(*device))
""",
    "shared memory of the machine": """
from multiprocessing import shared_memory
reach(read, "/dev/shm/" + HOST["token"])
reach(lambda: shared_memory.SharedMemory(HOST["token"]))
reach(system, 29, 194, HOST["shm_key"], 1, 0)
reach(system, 29, 194, 0, 1 << 30, 0o1600)
reach(system, 68, 186, 7, 0o1600)
""",
    "read the kernel's files": """
for path in ("/sys/class", "/sys/kernel", "/sys/fs/cgroup"): reach(os.listdir, path)
for path in ("/proc/kcore", "/proc/kmsg", "/proc/kpagecount", "/proc/1/mem", "/proc/slabinfo"): reach(opened, path)
""",
    "write the kernel's files": """
for path in ("sysrq-trigger", "sys/kernel/core_pattern", "sys/kernel/hostname", "sys/vm/drop_caches",
             "sys/kernel/modprobe", "1/oom_score_adj", "irq/default_smp_affinity", "1/uid_map"):
    reach(opened, "/proc/" + path, os.O_WRONLY)
for name in ("uid_map", "gid_map"):
    for text in (b"0 65534 1", b"0 1000 1", b"0 0 1"):
        reach(lambda: os.write(os.open(f"/proc/self/{name}", os.O_WRONLY), text))
""",
    "keyrings": """
reach(system, 248, 217, b"user", b"name", b"x", 1, -3)
reach(system, 249, 218, b"user", b"name", 0, -3)
reach(system, 250, 219, 0, -4, 1); reach(system, 250, 219, 0, -5, 0); reach(system, 250, 219, 1, 0)
""",
    "mount and unmount": """
os.mkdir("point")
for kind in (b"tmpfs", b"proc", b"sysfs", b"overlay", b"devtmpfs", b"ramfs"):
    reach(call, "mount", b"none", b"point", kind, 0, None)
reach(call, "mount", b"/", b"point", None, 4096, None)
reach(call, "mount", b"none", b"/", None, 32 | 4096, None)
for path in (b"/proc", b"/tmp", b"/", b"/dev/null"): reach(call, "umount2", path, 2)
reach(system, 430, 430, b"tmpfs", 0); reach(system, 428, 428, -100, b"/", 1)
reach(system, 442, 442, -100, b"/", 0, 0, 0)
""",
    "change the root folder": """
os.makedirs("new/old")
reach(os.chroot, "new"); reach(os.chroot, "/proc/1/root"); reach(call, "pivot_root", b"new", b"new/old")
""",
    "make namespaces": """
for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x04000000, 0x08000000, 0x02000000, 0x80, 0x10020000):
    reach(call, "unshare", flag)
    if flag != 0x80: reach(system, 56, 220, flag | 17, 0, 0, 0, 0)
reach(system, 435, 435, (ctypes.c_uint64 * 8)(0x10000000, 0, 0, 0, 17), 64)
""",
    "enter namespaces": """
for pid in (1, "self"):
    for name in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup"):
        reach(lambda: call("setns", os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY), 0))
reach(lambda: call("setns", os.pidfd_open(1), 0x20000))
""",
    "become root": """
for action in (os.setuid, os.setgid, os.seteuid, os.setegid): reach(action, 0)
reach(os.setresuid, 0, 0, 0); reach(os.setgroups, [0]); reach(os.setgroups, [])
header, all_rights = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6)
reach(call, "capset", header, all_rights)
status = open("/proc/self/status").read()
print(status)
for name in ("CapPrm", "CapEff", "CapInh", "CapBnd", "CapAmb"):
    if f"{name}:\\t0000000000000000" not in status: reach(str, name)
if "NoNewPrivs:\\t1" not in status or "Seccomp:\\t2" not in status: reach(str)
if os.getuid() == 0: reach(str)
""",
    "a program with another user's rights": """
import shutil
shutil.copy(sys.executable, "python"); reach(os.chown, "python", 0, 0); os.chmod("python", 0o6755)
answer = subprocess.run(["./python", "-S", "-c", "import os; print(os.geteuid())"], stdout=subprocess.PIPE).stdout
if answer.strip() == b"0": reach(str)
for name in ("sudo", "su", "mount", "newuidmap", "bwrap", "fusermount", "sh"):
    reach(os.execv, "/usr/bin/" + name, [name])
""",
    "calls of the kernel that need rights": """
reach(system, 321, 280, 0, 0, 0); reach(system, 323, 282, 0)
reach(system, 425, 425, 8, ctypes.create_string_buffer(200))
reach(system, 298, 241, ctypes.create_string_buffer(200), 0, -1, -1, 0); reach(system, 169, 142, 0, 0, 0, 0)
reach(system, 175, 105, 0, 0, 0); reach(system, 313, 273, 0, 0, 0); reach(system, 246, 104, 0, 0, 0, 0)
reach(system, 304, 265, -100, 0, 0); reach(system, 300, 262, 0, 0); reach(system, 319, 279, b"x", 0)
reach(system, 103, 116, 3, 0, 0)
for number in range(454, 480): reach(system, number, number, 0, 0, 0, 0, 0, 0)
reach(time.clock_settime, time.CLOCK_REALTIME, time.time())
reach(socket.sethostname, "elsewhere")
""",
    "raise the limits": """
for name in ("AS", "CPU", "NPROC", "FSIZE", "NOFILE", "CORE", "MSGQUEUE", "MEMLOCK"):
    kind = getattr(resource, "RLIMIT_" + name)
    if resource.getrlimit(kind)[1] == resource.RLIM_INFINITY: reach(str, name)
    reach(resource.setrlimit, kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
reach(resource.prlimit, 1, resource.RLIMIT_CPU, (1, 1))
reach(os.nice, -5); reach(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))
""",
    "import what is installed": """
sys.path[:0] = HOST["path"]
import importlib
for name in ("tunesmith", "torch", "numpy", "transformers", "pytest", "pip", "sitecustomize"):
    reach(importlib.import_module, name)
import site
reach(lambda: has_token(repr([os.listdir(path) for path in HOST["path"]]).encode()))
""",
    "change the Python installation": """
folder = os.path.dirname(os.__file__)
for path in (folder, os.path.dirname(sys.executable), "/usr", "/lib", "/etc"):
    reach(opened, os.path.join(path, HOST["token"]), os.O_CREAT | os.O_WRONLY)
for path in (os.__file__, sys.executable, "/etc/ld.so.cache"):
    reach(opened, path, os.O_WRONLY); reach(os.chmod, path, 0o777); reach(os.utime, path); reach(os.remove, path)
reach(os.rename, folder, folder + "2"); reach(os.makedirs, folder + "/site-packages/x")
""",
    "write outside": """
for path in ("/x", "/etc/x", "/usr/x", "/dev/x", "/proc/x", "/root/x", "/var/x", "/home/x"):
    reach(opened, path, os.O_CREAT | os.O_WRONLY)
os.makedirs(HOST["folder"], exist_ok=True)
open(HOST["folder"] + "/written", "w").write("x"); open(HOST["secret"], "w").write("x")
""",
    "a file beyond the limit": """
try:
    with open("large", "wb") as file:
        for _ in range(64): file.write(bytes(1 << 20))
except OSError as error: print(error)
if os.path.getsize("large") > 16 << 20: reach(str)
reach(os.truncate, "large", 1 << 30)
""",
    "files that fill the disk": """
written = 0
try:
    for number in range(64):
        with open(f"/dev/shm/{number}" if number % 2 else str(number), "wb") as file:
            written += file.write(bytes(1 << 20))
except OSError as error: print(error)
if written > 16 << 20: reach(int, written)
""",
    "start programs with code of its own": """
for name in ("sitecustomize", "usercustomize", "wave", "json"):
    open(name + ".py", "w").write("print('REACHED', __name__)")
print(subprocess.run([sys.executable, "-P", "-c", "import json, wave; print('clean')"], stdout=subprocess.PIPE).stdout)
import wave
import json
""",
    "the 32-bit interface": """
if X86:
    import mmap
    page = mmap.mmap(-1, 4096, prot=7); page.write(bytes.fromhex("b814000000cd80c3"))
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    if os.fork() == 0: print("REACHED", ctypes.CFUNCTYPE(ctypes.c_int)(address)()); os._exit(0)
    print(os.wait())
    reach(call, "syscall", 0x40000000 + 39)
""",
    "read the code from stdin again": """
reach(lambda: os.pread(0, 100, 0) or 1 / 0); reach(input); reach(opened, "/dev/tty"); reach(os.ttyname, 0)
""",
    "daemons": """
for number in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for kind in set(range(1, 32)) - {9, 19}: signal.signal(kind, signal.SIG_IGN)
            libc.prctl(1, 0)
            os.closerange(0, 3)
            time.sleep(600)
        os._exit(0)
for _ in range(3): os.wait()
""",
    "a process that holds the output open": """
print("done", flush=True)
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
""",
    "ten programs at once and then more": """
many = []
try:
    for number in range(60): many.append(subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]))
except OSError as error: print(error)
if len(many) > 16: reach(int, len(many))
""",
    "threads without end": """
started = 0
try:
    for _ in range(200): threading.Thread(target=time.sleep, args=(600,), daemon=True).start(); started += 1
except RuntimeError as error: print(error)
if started > 16: reach(int, started)
""",
    "more memory than allowed": """
reach(bytearray, 1 << 30); reach(lambda: [bytes(1 << 20) for _ in range(1 << 12)])
""",
    "forge the report": """
for number in range(2, 256):
    try: os.write(number, b"{'limit': '', 'status': 0, 'error': ''}")
    except OSError: pass
""",
}
"""Name and code."""

ENDED = {
    "kill everything": """
assert os.getppid() == 1  # the supervisor; elsewhere the next line would end the session
os.kill(-1, signal.SIGKILL)
os.kill(0, signal.SIGKILL)
""",
    "a loop without end": "while True: pass",
    "a sleep without end": "time.sleep(1e6)",
    "a loop that ignores signals": """
for kind in set(range(1, 32)) - {9, 19}: signal.signal(kind, signal.SIG_IGN)
while True: pass
""",
    "stop itself": "os.kill(os.getpid(), signal.SIGSTOP)",
    "a fork bomb": """
while True:
    try: os.fork()
    except OSError: pass
""",
    "a fork bomb that lets its parents die": """
if os.fork(): time.sleep(1e6)
os.setsid()
while True:
    try:
        if os.fork(): os._exit(0)
    except OSError: pass
""",
    "memory of many processes": """
for _ in range(6): os.fork()
held = []
while True: held.append(b'x' * (4 << 20))
""",
    "many files": """
import itertools
for number in itertools.count(): open(str(number), "w").close()
""",
    "output without end": "while True: print('x' * 1000)",
    "output without end of a child that goes on": """
if os.fork(): os._exit(3)
while True: os.write(2, b'x' * 1000)
""",
    "crash": "ctypes.string_at(0)",
    "abort": "os.abort()",
    "end with a status": "os._exit(7)",
    "a number with a billion digits": "10 ** 10 ** 9",
}
"""Name and code of those that do not print "done"."""
