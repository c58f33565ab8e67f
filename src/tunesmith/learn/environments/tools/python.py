"""A Python interpreter for a model: each call is a process of its own that sees nothing of this machine."""

import signal
from dataclasses import asdict, dataclass

from tunesmith.base.core.errors import InputError, TunesmithError
from tunesmith.learn.environments.tools.confinement import MAX_OUTPUT, Confinement, ConfinementName, Ended, confinement

_MAX_CODE = 100_000


@dataclass(frozen=True)
class Limits:
    """The limits of one call. More ends it, or fails in its code; the text that it returns says which."""

    time_s: float = 5.0
    """Seconds until all of its processes are killed; each may compute for as long."""

    memory_mb: int = 512
    """Address space of each process, and memory of all together."""

    processes: int = 16
    """Processes and threads at the same time."""

    file_mb: int = 16
    """Size of all its files together."""

    output_chars: int = 4000
    """Length of the text that is returned; what is longer loses its middle."""

    def __post_init__(self) -> None:
        for name, least in (
            ("time_s", 0.1),
            ("memory_mb", 64),
            ("processes", 1),
            ("file_mb", 1),
            ("output_chars", 200),
        ):
            value = getattr(self, name)
            if not value >= least:
                raise InputError(f"{name} is {value}; the Python tool needs at least {least}")


class PythonTool:
    """Runs Python code that a model writes, without files, processes, rights or network of this machine.

    `confinement` names how the code is kept from it: "bwrap" (bubblewrap) or "namespaces" (of Linux, made here); None
    takes the first that works, and "none", or None with `allow_unconfined` where none works, leaves only limits of
    time and memory, an empty folder and an empty environment. Calls may overlap in several threads.

    Raises:
        InputError: No confinement works here, or the one that is named does not.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        confinement: ConfinementName | None = None,
        allow_unconfined: bool = False,
    ) -> None:
        self.limits = Limits() if limits is None else limits
        if confinement == "none" and not allow_unconfined:
            raise InputError(
                'confinement is "none", and the code would have all rights of this process; say '
                '`allow_unconfined=True` beside it, or take "bwrap" or "namespaces"'
            )
        self._confinement = _chosen(confinement, allow_unconfined)
        self.confinement: ConfinementName = self._confinement.name
        self._of_run = {name: value for name, value in asdict(self.limits).items() if name != "output_chars"}

    def python(self, code: str) -> str:
        """
        Run Python code and return what it prints, or the value of the expression on its last line. Each call starts
        anew: nothing of an earlier one is left. Only the standard library is there, and no network.

        Args:
            code: The Python code to run.

        Returns:
            The printed text, or a line that begins with "Error:" and what went wrong.
        """
        if len(code) > _MAX_CODE:
            return f"Error: the code has {len(code):,} characters; at most {_MAX_CODE:,} are allowed"
        ended = self._confinement.run(code, self._of_run, self.limits.output_chars)
        return self._text(ended)

    def _text(self, ended: Ended) -> str:
        error, output = self._error(ended), ended.output.rstrip()
        if not error:
            return _cut(output, ended.num_left_out, self.limits.output_chars) or "(no output)"
        error = _cut(f"Error: {error}", 0, self.limits.output_chars // 2)
        if not output:
            return error
        left = self.limits.output_chars - len(error)
        return f"{error}\nIt had printed:\n{_cut(output, ended.num_left_out, left)}"

    def _error(self, ended: Ended) -> str:
        """The error of a run, or ""."""
        report, limits = ended.report, self.limits
        if ended.num_left_out > MAX_OUTPUT:
            return f"it was stopped because it printed more than {MAX_OUTPUT:,} characters"
        if report is None:
            if ended.failure:  # not for the model, which can do nothing about it
                raise TunesmithError(f"the Python tool could not start ({self.confinement}): {ended.failure}")
            return "its processes were killed"  # by the machine, which ends them before others when memory is short
        reasons = {
            "time": f"it was stopped after {limits.time_s:g} seconds, which is the limit",
            "memory": f"it was stopped because it used more than {limits.memory_mb} MB of memory",
            "processes": f"it was stopped because it had more than {limits.processes} processes and threads",
            "files": "it was stopped because it had too many files",
        }
        if report["limit"]:
            return reasons[str(report["limit"])]
        if report["error"]:
            return str(report["error"])
        status = int(str(report["status"]))
        if status == -signal.SIGXCPU:
            return reasons["time"]
        if status < 0:
            return f"it was killed by signal {-status}"
        return f"it exited with status {status}" if status else ""


def _chosen(name: ConfinementName | None, allow_unconfined: bool) -> Confinement:
    try:
        return confinement(name)
    except InputError:
        if name is None and allow_unconfined:
            return confinement("none")
        raise


def _cut(text: str, num_left_out: int, most: int) -> str:
    """`text`, from whose middle `num_left_out` characters are missing already, with at most about `most` characters."""
    if len(text) <= most and not num_left_out:
        return text
    half = most // 2
    missing = len(text) - 2 * half + num_left_out
    return f"{text[:half]}\n... [{missing:,} characters left out] ...\n{text[-half:]}"
