import ctypes
import os
import secrets
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from transformers.utils import get_json_schema

from tests.environments.escapes import ATTEMPTS, ENDED, PRELUDE
from tunesmith.base.core.errors import InputError, TunesmithError
from tunesmith.learn.environments.tools import confinement as confinement_module
from tunesmith.learn.environments.tools.python import Limits, PythonTool

Require = Callable[..., str]


def usable(name: str, require: Require) -> str:
    """`name`, a confinement that this machine has; otherwise the test is skipped."""
    if name == "bwrap":
        require("bwrap")
    try:
        return PythonTool(confinement=name).confinement
    except InputError as error:
        pytest.skip(f"needs a kernel that lets namespaces be made, which is no tool to install: {error}")


@pytest.fixture(scope="module", params=["bwrap", "namespaces"])
def confinement(request: pytest.FixtureRequest, require: Require) -> str:
    """Each confinement that this machine has."""
    return usable(request.param, require)


class Host:
    """What the code must not reach: files, a process, sockets and shared memory of this machine, with a token."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.token = folder, f"token{secrets.token_hex(8)}"
        self.secret = folder / f"{self.token}.txt"
        self.unknown = secrets.token_hex(16)  # the code is not told this half
        text = f"{self.token} {self.unknown}"
        self.secret.write_text(text)
        command = [sys.executable, "-c", "import time; time.sleep(3600)", self.token]
        patch.setenv("TUNESMITH_SECRET", text)
        for name, value in (("PYTHONSTARTUP", self.secret), ("PYTHONPATH", folder), ("LD_PRELOAD", "")):
            patch.setenv(name, str(value))
        (folder / "sitecustomize.py").write_text("print('REACHED sitecustomize')")
        self.bystander = subprocess.Popen(command, env={"TUNESMITH_SECRET": text})
        self.listeners = [socket.socket(), socket.socket(type=socket.SOCK_DGRAM)]
        self.listeners[0].bind(("", 0))
        self.port = self.listeners[0].getsockname()[1]
        self.listeners[1].bind(("", self.port))
        for address in (f"\0{self.token}", str(folder / "socket")):
            self.listeners.append(socket.socket(socket.AF_UNIX))
            self.listeners[-1].bind(address)
        for listener in self.listeners:
            listener.setblocking(False)
            if listener.type == socket.SOCK_STREAM:
                listener.listen()
        self.shared = Path("/dev/shm") / self.token
        self.shared.write_text(text)
        self.shm_key = secrets.randbits(30) + 1
        self._libc = ctypes.CDLL(None)
        self._segment = self._libc.shmget(self.shm_key, 4096, 0o1666)
        self._inherited = os.open(self.secret, os.O_RDONLY)
        os.set_inheritable(self._inherited, True)
        self.path = [path for path in sys.path if path]
        self._others = descendants()
        self.before = self.state()

    def close(self) -> None:
        """Take all of it away."""
        self.bystander.kill()
        self.bystander.wait()
        for listener in self.listeners:
            listener.close()
        os.close(self._inherited)
        self.shared.unlink()
        self._libc.shmctl(self._segment, 0, None)

    def state(self) -> object:
        """What code that got out could have changed."""
        stdlib = Path(sysconfig.get_path("stdlib"))
        limits = Path("/proc/self/limits").read_text()
        folders = [sorted(os.listdir(folder)) for folder in (self.folder, stdlib)]
        folders.append(
            [folder for folder in ("/", "/etc", "/usr", "/dev", "/root", "/var") if Path(folder, "x").exists()]
        )
        return self.secret.read_text(), folders, os.uname().nodename, limits, os.getpriority(os.PRIO_PROCESS, 0)

    def known(self) -> dict[str, object]:
        """What the code is told."""
        return {
            "token": self.token,
            "secret": str(self.secret),
            "folder": str(self.folder),
            "file": __file__,
            "pid": os.getpid(),
            "bystander": self.bystander.pid,
            "port": self.port,
            "address": _own_address(),
            "socket": str(self.folder / "socket"),
            "shm_key": self.shm_key,
            "path": self.path,
            "pid_namespace": os.readlink("/proc/self/ns/pid"),
        }

    def check(self) -> None:
        """Nothing was changed, nobody was called, and no process is left."""
        assert self.bystander.poll() is None
        assert self.state() == self.before
        for listener in self.listeners:
            with pytest.raises(BlockingIOError):
                if listener.type == socket.SOCK_STREAM:
                    listener.accept()
                else:
                    listener.recv(1)
        assert self.left_over() == set()

    def left_over(self) -> set[int]:
        """Processes that descend from this one, and did not when the test began."""
        return descendants() - self._others


def _own_address() -> str:
    """An address of this machine's network, without a packet being sent."""
    with socket.socket(type=socket.SOCK_DGRAM) as one:
        try:
            one.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return one.getsockname()[0]


def descendants() -> set[int]:
    """All processes that descend from this one, ended ones that nobody waited for too."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[int(name)] = int(Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, waiting = set(), {os.getpid()}
    while waiting:
        waiting = {pid for pid, parent in parents.items() if parent in waiting}
        found |= waiting
    return found


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    # A process that loses its parent becomes a child of this one, where the check finds it.
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1)
    made = Host(tmp_path, monkeypatch)
    yield made
    made.close()
    libc.prctl(36, 0)


@pytest.mark.parametrize("name", ATTEMPTS)
def test_code_does_not_get_out(name: str, confinement: str, host: Host) -> None:
    tool = PythonTool(Limits(time_s=60, output_chars=100_000), confinement=confinement)
    answer = tool.python(f"HOST = {host.known()!r}\n{PRELUDE}\n{ATTEMPTS[name]}\nprint('done')")
    assert "REACHED" not in answer
    assert host.unknown not in answer
    assert "done" in answer, answer
    host.check()


@pytest.mark.parametrize("name", ENDED)
def test_code_that_does_not_end_is_ended(name: str, confinement: str, host: Host) -> None:
    tool = PythonTool(Limits(time_s=1), confinement=confinement)
    answer = tool.python(f"HOST = {host.known()!r}\n{PRELUDE}\n{ENDED[name]}\nprint('done')")
    assert answer.startswith("Error: ")
    assert len(answer) < 4200
    assert "REACHED" not in answer
    host.check()
    assert PythonTool(confinement=confinement).python("1 + 1") == "2"


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("1 + 1", "2"),
        ("x = 3\nx", "3"),
        ("'a'", "'a'"),
        ("print(1)\n2", "1"),
        ("None", "(no output)"),
        ("", "(no output)"),
        ("x = 1", "(no output)"),
        ("import sys; print('a'); print('b', file=sys.stderr)", "a\nb"),
        ("print('ä \\ud800')", "ä \\ud800"),
        ("import sys; sys.exit(0)", "(no output)"),
        ("import os; os.listdir('.')", "[]"),
        ("import sys; sys.argv, __name__", "([''], '__main__')"),
        ("hash('a') == hash('a'), __import__('sys').flags.hash_randomization", "(True, 0)"),
        ("import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\nA(1)", "A(x=1)"),
        ("import sqlite3, ssl, zlib, decimal, zoneinfo, multiprocessing\nstr(zoneinfo.ZoneInfo('UTC'))", "'UTC'"),
        ("import threading\nthreading.Thread(target=print, args=(5,)).start()", "5"),
        ("import inspect\ndef f(): return 1\nprint(inspect.getsource(f))", "def f(): return 1"),
        (
            "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(7)'])\nNone",
            "7",
        ),
        ("import multiprocessing as m\nwith m.get_context('fork').Pool(2) as p: print(p.map(abs, [-1, 2]))", "[1, 2]"),
        ("open('a', 'w').write('x'); open('a').read()", "'x'"),
    ],
)
def test_it_returns_what_the_code_prints(code: str, answer: str, confinement: str) -> None:
    assert PythonTool(confinement=confinement).python(code) == answer


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("1 / 0", "Error: ZeroDivisionError: division by zero\n  line 1, in <module>: 1 / 0"),
        (
            "def f():\n    raise ValueError('no')\nprint('before')\nf()",
            "Error: ValueError: no\n  line 4, in <module>: f()\n  line 2, in f: raise ValueError('no')\n"
            "It had printed:\nbefore",
        ),
        ("import sys; sys.exit(3)", "Error: it exited with status 3"),
        ("import sys; sys.exit('bad')", "Error: SystemExit: bad"),
        ("input()", "Error: EOFError: EOF when reading a line\n  line 1, in <module>: input()"),
        ("import os; os.abort()", "Error: it was killed by signal 6"),
    ],
)
def test_it_returns_the_error_of_the_code(code: str, answer: str, confinement: str) -> None:
    assert PythonTool(confinement=confinement).python(code) == answer


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def f(:", "SyntaxError: invalid syntax\n"),
        ("print(1)\0", "null bytes"),
        ("'\ud800'", "surrogates not allowed"),
        ("(" * 10_000, "too many nested parentheses"),
        ("-" * 50_000 + "1", "Error: "),
        ("x" * 100_001, "the code has 100,001 characters; at most 100,000"),
        ("class E(Exception):\n    def __str__(self): raise self\nraise E", "E: <exception str() failed>"),
        ("class E(Exception):\n    def __repr__(self): return 'x' * 10**6\nraise E('y' * 10**6)", " ... "),
        ("class R:\n    def __repr__(self): 1 / 0\nR()", "ZeroDivisionError"),
        ("def f(): f()\nf()", "RecursionError"),
        ("import builtins, sys\nsys.modules.clear(); vars(builtins).clear(); 1 / 0", "Error: "),
        ("import sys; sys.stdout.close(); print(1)", "I/O operation on closed file"),
        ("import os; os.close(1); print(1)", "Bad file descriptor"),
    ],
)
def test_odd_code_is_an_error_of_the_model(code: str, says: str, confinement: str) -> None:
    answer = PythonTool(confinement=confinement).python(code)
    assert answer.startswith("Error: ")
    assert says in answer
    assert len(answer) < 4000


def test_a_long_output_loses_its_middle(confinement: str) -> None:
    tool = PythonTool(Limits(output_chars=200), confinement=confinement)
    answer = tool.python("print('a' * 1_000_000 + 'ö' * 1_000_000)")
    assert answer == "a" * 100 + "\n... [1,999,800 characters left out] ...\n" + "ö" * 100
    assert tool.python("print('a' * 200)") == "a" * 200


def test_output_without_end_is_ended_before_the_time(confinement: str) -> None:
    answer = PythonTool(Limits(time_s=3600), confinement=confinement).python("while True: print('x' * 10_000)")
    assert answer.startswith(
        "Error: it was stopped because it printed more than 10,000,000 characters\nIt had printed:\nx"
    )


def test_nothing_is_left_for_the_next_call(confinement: str) -> None:
    tool = PythonTool(confinement=confinement)
    leave = "import os\nfor p in ('/tmp/x', '/dev/shm/x', 'x2'): open(p, 'w').write('left')\nos.environ['X'] = '1'"
    look = "import os\n[os.listdir('/tmp'), os.listdir('/dev/shm'), os.environ.get('X'), 'left' in globals()]"
    assert tool.python(f"left = 1\n{leave}") == "(no output)"
    assert tool.python(look) == "[[], [], None, False]"


def test_the_memory_of_all_processes_counts(confinement: str) -> None:
    tool = PythonTool(Limits(time_s=60, memory_mb=200), confinement=confinement)
    held = "import os, time\nfor _ in range(2): os.fork()\nheld = b'x' * (100 << 20)\ntime.sleep(600)"
    assert tool.python(held) == "Error: it was stopped because it used more than 200 MB of memory"
    shared = "import os, time\nheld = b'x' * (100 << 20)\nfor _ in range(3): os.fork()\ntime.sleep(0.5)\nprint(1)"
    assert "Error" not in tool.python(shared)


def test_calls_of_several_threads_do_not_meet(confinement: str) -> None:
    tool = PythonTool(Limits(time_s=60, processes=8), confinement=confinement)
    answers: dict[int, str] = {}

    def work(number: int) -> None:
        # Each may have eight processes, however many the others have.
        code = "import subprocess, sys\nopen('x', 'x').write('')\n"
        code += "many = [subprocess.Popen([sys.executable, '-S', '-c', 'input()'], stdin=-1) for _ in range(6)]\n"
        code += f"[one.communicate(b'x') for one in many]\nprint({number})"
        answers[number] = tool.python(code)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: str(number) for number in range(6)}


def test_the_same_code_prints_the_same(confinement: str) -> None:
    tool = PythonTool(confinement=confinement)
    code = "print({chr(97 + n) for n in range(20)}, hash('x'))"
    assert tool.python(code) == tool.python(code)


def test_without_confinement_limits_remain(host: Host) -> None:
    tool = PythonTool(Limits(time_s=60), confinement="none", allow_unconfined=True)
    code = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(600)
    os._exit(0)
os.wait()
print(os.getcwd(), os.listdir('.'), sorted(os.environ))
open('x', 'w').write('')
bytearray(1 << 40)"""
    answer = tool.python(code)
    assert answer.startswith("Error: MemoryError")
    folder = answer.splitlines()[-1].split()[0]
    assert "tunesmith-" in folder
    assert not Path(folder).exists()
    assert f"{folder} [] " in answer
    assert "TUNESMITH_SECRET" not in answer
    host.check()


@pytest.mark.parametrize("name", ["bwrap", "namespaces", "none"])
def test_code_ends_with_the_process_that_called_it(name: str, host: Host, require: Require) -> None:
    if name != "none":
        usable(name, require)
    script = (
        "from tunesmith.learn.environments.tools.python import Limits, PythonTool\n"
        f"tool = PythonTool(Limits(time_s=3600), confinement={name!r}, allow_unconfined=True)\n"
        "print(1, flush=True)\n"
        "tool.python('import time; time.sleep(3600)')"
    )
    env = {"PYTHONPATH": os.pathsep.join(host.path)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        while len(host.left_over()) < 3:  # the caller, the outer process and the supervisor
            time.sleep(0.01)
        process.kill()
    while host.left_over():  # the test's timeout says that something is left
        time.sleep(0.01)
        for pid in host.left_over():  # ended ones, which are children of this process now
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(1e6)"])
def test_without_confinement_code_is_ended(code: str, host: Host) -> None:
    tool = PythonTool(Limits(time_s=1), confinement="none", allow_unconfined=True)
    assert tool.python(code) == "Error: it was stopped after 1 seconds, which is the limit"
    host.check()


def test_without_confinement_it_has_to_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement_module, "_failure", lambda name, as_root: f"no {name}")
    with pytest.raises(InputError, match=r"no bwrap.*no namespaces.*install bubblewrap .*`allow_unconfined=True`"):
        PythonTool()
    with pytest.raises(InputError, match="no bwrap"):
        PythonTool(confinement="bwrap", allow_unconfined=True)
    with pytest.raises(InputError, match="say `allow_unconfined=True` beside it"):
        PythonTool(confinement="none")
    assert PythonTool(allow_unconfined=True).confinement == "none"


def test_a_tool_that_cannot_start_is_no_error_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = PythonTool(confinement="none", allow_unconfined=True)
    monkeypatch.setattr(confinement_module, "launcher", lambda: "bad")
    with pytest.raises(TunesmithError, match="could not start"):
        tool.python("1")


@pytest.mark.parametrize("limit", ["time_s", "memory_mb", "processes", "file_mb", "output_chars"])
def test_a_limit_of_nothing_is_refused(limit: str) -> None:
    with pytest.raises(InputError, match=f"{limit} is 0; the Python tool needs at least"):
        Limits(**{limit: 0})


def test_its_docstring_makes_a_schema() -> None:
    tool = PythonTool(confinement="none", allow_unconfined=True)
    function = get_json_schema(tool.python)["function"]
    assert function["name"] == "python"
    assert function["parameters"]["required"] == ["code"]
    assert "standard library" in function["description"]
