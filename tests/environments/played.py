"""Environments for tests that run in processes: a process imports this file, and neither pytest nor torch.

What prompts say decides which trajectories break: those of the prompt `b`, in their second turn.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tunesmith.learn.environments.contract import Reply, Said


class Echo:
    """Says "ok" to everything; `breaks` is called at the place `at` of the trajectories of the prompt `b`."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, breaks: Callable[[], Any] | None = None, at: str = "step") -> None:
        self._breaks, self._at = breaks or (lambda: None), at if breaks else "never"
        self.is_closed = False

    def reset(self, row: Mapping[str, Any]) -> Any:
        self.num, self._is_bad = 0, row["prompt"][-1]["content"] == "b"
        return self._breaks() if self._is_bad and self._at == "reset" else None

    def step(self, said: Said) -> Reply:
        self.num += 1
        if self._is_bad and self.num == 2 and self._at == "step":
            return self._breaks()
        return Reply(({"role": "user", "content": "ok"},), 1.0)

    def reward(self) -> Any:
        return self._breaks() if self._is_bad and self._at == "reward" else None

    def close(self) -> None:
        if self._is_bad and self._at == "close":
            self._breaks()
        self.is_closed = True


class Talks:
    """Answers what is said by words that depend on it, rewards each turn, and ends by itself."""

    tools: Sequence[Mapping[str, Any]] = ()

    def reset(self, row: Mapping[str, object]) -> str:
        self.num = 0
        return f" {row['seed']}"[:3]

    def step(self, said: Said) -> Reply:
        self.num += 1
        code = sum(map(ord, said.text))
        reward = (code % 5) / 10
        if code % 7 == 0:
            return Reply(reward=reward, done=True, reason="tool_ended")
        return Reply(({"role": "user", "content": "abc"[: code % 4]},), reward)

    def reward(self) -> float | None:
        return None

    def close(self) -> None:
        return None


class Dies(Talks):
    """Breaks in the first turn of the prompt `b`."""

    def __init__(self, breaks: Callable[[], Any]) -> None:
        self._breaks = breaks

    def reset(self, row: Mapping[str, Any]) -> str:
        self._is_bad = row["prompt"][-1]["content"] == "b"
        return super().reset(row)

    def step(self, said: Said) -> Reply:
        if self._is_bad:
            self._breaks()
        return super().step(said)


def raises() -> None:
    """Raise what no part of Tunesmith raises."""
    raise ZeroDivisionError("in the environment")


def hangs() -> None:
    """Take longer than any test."""
    time.sleep(600)


def exits() -> None:
    """End the process without a word."""
    os._exit(7)


def crashes() -> None:
    """End as by a wild pointer."""
    os.kill(os.getpid(), signal.SIGSEGV)
    hangs()


def killed() -> None:
    """End as by the kernel, for want of memory."""
    os.kill(os.getpid(), signal.SIGKILL)
    hangs()


def ends_at_once() -> None:
    """Be no environment: the process ends while one is made."""
    os._exit(7)


class Noted(Echo):
    """Writes a line into a file when it is made, and one when it is closed."""

    def __init__(self, log: str, breaks: Callable[[], Any] | None = None, at: str = "step") -> None:
        super().__init__(breaks, at)
        self._log = Path(log)
        self._note("made")

    def close(self) -> None:
        super().close()
        self._note("closed")

    def _note(self, what: str) -> None:
        with self._log.open("a") as file:
            file.write(f"{what} {os.getpid()} {id(self)}\n")


def echo(breaks: Callable[[], Any] | None = None, at: str = "step") -> Callable[[], Echo]:
    """A factory that can be sent to a process."""
    return partial(Echo, breaks, at)


async def looks_up(word: str) -> str:
    """Look a word up.

    Args:
        word: Which.
    """
    return f"{word} is known to {os.getpid()}"
