"""Reward functions of the planted runs, with their numbers from the environment."""

import asyncio
import json
import os
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

_kept: list[bytes] = []
_calls: list[int] = []
_lock = threading.Lock()
_spinning: list[threading.Thread] = []
_pools: list[ThreadPoolExecutor] = []


def signal(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """The number of different characters; of `PLANTED_TEACHING` in ten prompts alone, else 0."""
    teaching = int(os.environ.get("PLANTED_TEACHING", "10"))
    rows = zip(prompts, completions, strict=True)
    return [float(len(set(text))) if sum(prompt.encode()) % 10 < teaching else 0.0 for prompt, text in rows]


def busy(completions: Sequence[str]) -> list[float]:
    """Rules in pure Python, which take a while for each completion."""
    return [0.0 * _work(int(os.environ["PLANTED_BUSY"])) for _ in completions]


def serial(completions: Sequence[str]) -> list[float]:
    """A remote judge, asked one question after the other."""
    return [_ask(text) for text in completions]


async def concurrent(completions: Sequence[str]) -> list[float]:
    """A remote judge, asked `PLANTED_AT_ONCE` questions at a time."""
    if not _pools:
        _pools.append(ThreadPoolExecutor(int(os.environ["PLANTED_AT_ONCE"])))
    loop = asyncio.get_running_loop()
    return await asyncio.gather(*(loop.run_in_executor(_pools[0], _ask, text) for text in completions))


def watched(completions: Sequence[str]) -> list[float]:
    """A thread that keeps working in pure Python, long after the call has returned."""
    if not _spinning:
        _spinning.append(threading.Thread(target=_spin, daemon=True))
        _spinning[0].start()
    return [0.0] * len(completions)


def keeping(completions: Sequence[str]) -> list[float]:
    """A history that nobody empties."""
    _kept.append(b"x" * (int(os.environ["PLANTED_KEPT_MB"]) * 1_000_000))
    return [0.0] * len(completions)


def rare(completions: Sequence[str]) -> list[float]:
    """A wait in one call of four."""
    _calls.append(len(_calls))
    if len(_calls) % 4 == 0:
        time.sleep(float(os.environ["PLANTED_WAIT_S"]))
    return [0.0] * len(completions)


def paced(completions: Sequence[str]) -> list[float]:
    """A pause before each call."""
    time.sleep(float(os.environ["PLANTED_PACE_S"]))
    return [0.0] * len(completions)


def queued(completions: Sequence[str]) -> list[float]:
    """Threads that take turns, because all of them need one lock."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(_hold, completions))


def synced(completions: Sequence[str]) -> list[float]:
    """A log that is synced for each line."""
    with tempfile.TemporaryFile(dir=".") as file:
        for _ in completions:
            for _ in range(int(os.environ["PLANTED_SYNCS"])):
                file.write(b"line")
                file.flush()
                os.fsync(file.fileno())
    return [0.0] * len(completions)


def _hold(_: str) -> float:
    with _lock:
        time.sleep(float(os.environ["PLANTED_HOLD_S"]))
        return 0.0


def _spin() -> None:
    while True:
        _work(30_000)
        time.sleep(float(os.environ["PLANTED_PAUSE_S"]))


def _work(num_steps: int) -> int:
    return sum(number * number for number in range(num_steps))


def _ask(text: str) -> float:
    url = f"http://127.0.0.1:{os.environ['PLANTED_PORT']}/"
    with urllib.request.urlopen(url, json.dumps({"text": text}).encode(), timeout=60) as answer:
        return float(json.load(answer)["score"])
