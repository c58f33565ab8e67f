"""llama.cpp as a contender of `benchmarks.rollout`: its own `llama-batched-bench`, for completions of one length.

It decodes tokens by chance and samples none, so what it leaves out counts for it. Its times are its own, without the
loading of the model.
"""

import json
import os
import resource
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.process import Contender
from benchmarks.workloads import Drawn, Workload, checked
from tunesmith.base.core.errors import InputError, TrainingError

TYPES = ("bf16", "q8_0")
"""Of the weights: 16 bits as they are, and 8 bits."""

_PROGRAM = "llama-batched-bench"


@dataclass(frozen=True, slots=True)
class LlamaCppSettings:
    """The GGUF file of a model, and threads."""

    file: str
    num_threads: int


def llamacpp_program() -> Path:
    """The program, in the folder that the environment names. Raises InputError if there is none."""
    folder = os.environ.get("LLAMA_CPP")
    program = Path(folder or ".") / _PROGRAM
    if not folder or not program.is_file():
        raise InputError(f"LLAMA_CPP names no folder with {_PROGRAM}; build llama.cpp, see docs/dev/benchmarks.md")
    return program


class LlamaCpp(Contender):
    """llama.cpp, in a process for each draw."""

    def __init__(self, settings: LlamaCppSettings) -> None:
        self._settings = settings
        self._program = llamacpp_program()

    def peak(self) -> float:
        """Peak of resident memory in GB of its processes so far."""
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20

    def draw(self, work: Workload, seed: int, *, setting: None = None) -> Drawn:
        """As many completions as `work` has, each with all of its tokens. Raises InputError for other lengths."""
        if not work.is_exact_length:
            raise InputError(f"{_PROGRAM} has no completions that end by themselves, as those of {work.name} do")
        rows, new, (prompt,) = len(work.rows), work.sampling.max_new_tokens, {len(ids) for ids in work.prompt_ids}
        is_shared = len(work.prompt_ids) == 1 and rows > 1
        positions = prompt + rows * new if is_shared else rows * (prompt + new)
        sizes = {"-c": positions + rows, "-b": 2048, "-ub": 512, "-npp": prompt, "-ntg": new, "-npl": rows}
        sizes |= dict.fromkeys(("-t", "-tb"), self._settings.num_threads)
        flags = [word for name, number in sizes.items() for word in (name, str(number))]
        shared = ["-pps", "-kvu"] if is_shared else []  # one prompt for all, in one cache
        command = [str(self._program), "-m", self._settings.file, *flags, *shared, "--output-format", "jsonl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not found:
            raise TrainingError(f"{_PROGRAM} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
        return checked(work, found[-1]["t"], [[0] * new for _ in range(rows)], keeps_tokens=False)
