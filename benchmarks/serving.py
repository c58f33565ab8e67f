"""Chats over the OpenAI-compatible API: time to the first token, between tokens, and tokens per second.

A number of chats go on at the same time, each of several turns whose next question follows the answer at once; every
answer has the same length. `tunesmith serve --openai` is started here; `--against NAME=URL` measures other servers that
run already (vLLM's, llama.cpp's), with `--key` as their key and `--served` as their model's name, in alternation with
ours. `--beside` also measures ours while a GRPO training runs on the same cores. Times are those of the client.

    python -m benchmarks.serving --json
    python -m benchmarks.serving --against vllm=http://127.0.0.1:8001/v1 --served smollm2 --json
"""

import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from benchmarks.common import Say, benchmark, head, load_facts, measure_load, print_table, run
from tunesmith.base.core.errors import InputError, RunError

CHATS = (1, 4, 16, 64)
TURNS, ANSWER_TOKENS = 3, 48
QUESTIONS = (
    "What should I cook tonight with rice and tomatoes?",
    "Explain how a bicycle stays upright.",
    "Write two lines about the sea in winter.",
    "Which month has the longest days, and why?",
    "How do I ask for the bill in a restaurant?",
    "Give me a name for a small black dog.",
    "What is a prime number?",
)
START_S = 300.0


@dataclass(frozen=True, slots=True)
class Side:
    """A server: its address, a key, and the name of its model."""

    url: str
    key: str
    model: str


@dataclass(slots=True)
class Times:
    """Seconds of all chats of a round: to the first token of each answer, and between two pieces of text."""

    first_s: list[float] = field(default_factory=list[float])
    between_s: list[float] = field(default_factory=list[float])
    num_tokens: int = 0
    whole_s: float = 0.0

    def facts(self) -> dict[str, float]:
        """The figures of this round."""
        return {
            "first_token_median_s": statistics.median(self.first_s),
            "first_token_p95_s": _p95(self.first_s),
            "between_tokens_median_s": statistics.median(self.between_s),
            "between_tokens_p95_s": _p95(self.between_s),
            "tokens_per_s": self.num_tokens / self.whole_s,
        }


def measure(options: Namespace, say: Say) -> dict[str, object]:
    """The figures of each server for each number of chats.

    Raises:
        InputError: an address is not `NAME=URL`, or a server does not answer.
    """
    others = dict(_named(given) for given in options.against or ())
    chats = options.chats or list(CHATS if not options.quick else CHATS[:2])
    with ExitStack() as stack:
        own = stack.enter_context(served(options.model, options.threads, say))
        sides = {"ours": own, **{name: Side(url, options.key, options.served) for name, url in others.items()}}
        load = measure_load()
        found = _measured(sides, chats, options, say)
        beside = None
        if options.beside:
            stack.enter_context(training(options.model, options.threads, say))
            (beside,) = _measured({"beside a training": own}, chats, options, say).values()
    facts: dict[str, Any] = {**head(options, "serving", "model", "rounds", "quick"), "load": load_facts([load])}
    facts |= {"turns": TURNS, "answer_tokens": ANSWER_TOKENS, "sides": found, "beside": beside}
    return facts


def _measured(sides: Mapping[str, Side], chats: Sequence[int], options: Namespace, say: Say) -> dict[str, Any]:
    """Medians over rounds, by server and number of chats. Servers alternate; the first round of each is not counted."""
    found: dict[str, Any] = {name: {} for name in sides}
    turns = 1 if options.quick else TURNS
    for number in chats:
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for one in range(options.rounds + 1):
            for name, side in sides.items():
                rounds[name].append(asyncio.run(talk(side, number, turns, options.seed + one)).facts())
        for name, (_, *figures) in rounds.items():
            median = {key: statistics.median(one[key] for one in figures) for key in figures[0]}
            found[name][str(number)] = median
            rate, first_s = median["tokens_per_s"], median["first_token_median_s"]
            say(f"{name}, {number} chats: {rate:.0f} tokens/s, first token after {first_s:.2f} s")
    return found


async def talk(side: Side, num_chats: int, turns: int, seed: int) -> Times:
    """All chats of a round, each of `turns` turns."""
    times = Times()
    async with AsyncOpenAI(base_url=side.url, api_key=side.key, max_retries=2, timeout=START_S) as client:
        begun_s = time.perf_counter()
        chats = (_chat(client, side.model, turns, seed * 1000 + number, times) for number in range(num_chats))
        await asyncio.gather(*chats)
        times.whole_s = time.perf_counter() - begun_s
    return times


async def _chat(client: AsyncOpenAI, model: str, turns: int, number: int, times: Times) -> None:
    questions = itertools.islice(itertools.cycle(QUESTIONS), number, None)
    messages: list[Any] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{next(questions)} ({number})"})
        asked_s = last_s = time.perf_counter()
        stream = await client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=ANSWER_TOKENS,
            temperature=0.8,
            seed=number * TURNS + turn,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"min_tokens": ANSWER_TOKENS, "ignore_eos": True},
        )
        text, usage = "", None
        async for event in stream:
            now_s = time.perf_counter()
            piece = event.choices[0].delta.content if event.choices else None
            if piece:
                (times.between_s if text else times.first_s).append(now_s - (last_s if text else asked_s))
                text, last_s = text + piece, now_s
            usage = event.usage or usage
        messages.append({"role": "assistant", "content": text})
        times.num_tokens += ANSWER_TOKENS if usage is None else usage.completion_tokens


@contextmanager
def served(model: str, threads: int, say: Say) -> Iterator[Side]:
    """Our server on a free port, which has loaded `model`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "tunesmith",
            "serve",
            "--openai",
            model,
            "--dir",
            folder,
            "--port",
            "0",
            "--json",
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment(threads))
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RunError(f"the server ended with code {process.wait()}; it says why above")
            facts = json.loads(line)
            say(f"our server is at {facts['api']}")
            yield Side(facts["api"], facts["key"], model)
        finally:
            process.terminate()
            process.wait()


@contextmanager
def training(model: str, threads: int, say: Say) -> Iterator[None]:
    """A GRPO training that goes on meanwhile, after its first step."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", "grpo", "--model", model, "--prompts", "arithmetic", "--run.dir", folder, "--steps", "100000"]
        command = [sys.executable, "-m", "tunesmith", *words]
        process = subprocess.Popen(command, env=_environment(threads), stdout=subprocess.DEVNULL)
        try:
            _await_step(process, Path(folder))
            say("a training runs beside")
            yield
        finally:
            process.kill()
            process.wait()


def _await_step(process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while not any(file.stat().st_size for file in folder.glob("*/metrics.jsonl")):
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RunError(f"the training in {folder} makes no step")
        time.sleep(0.5)


def _environment(threads: int) -> dict[str, str]:
    # Threads that spin while they wait would take the cores from each other.
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "0"}


def _named(given: str) -> tuple[str, str]:
    name, _, url = given.partition("=")
    if not name or not url.startswith("http"):
        raise InputError(f"--against {given} is no NAME=URL; give one such as vllm=http://127.0.0.1:8001/v1")
    return name, url


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))]


def show(facts: Mapping[str, Any]) -> None:
    """Print a table."""
    rows: list[list[str]] = []
    sides = {**facts["sides"], **({"beside a training": facts["beside"]} if facts["beside"] else {})}
    for name, found in sides.items():
        for chats, one in found.items():
            seconds = [f"{one[key]:.3f}" for key in ("first_token_median_s", "between_tokens_median_s")]
            rows.append([name, chats, *seconds, f"{one['tokens_per_s']:.0f}"])
    print_table(("server", "chats", "first token s", "between s", "tokens/s"), rows)


main = benchmark(
    measure,
    show,
    "model",
    "threads",
    "seed",
    "quick",
    rounds={"default": 2},
    against={"action": "append", "metavar": "NAME=URL", "help": "another server that runs; repeatable"},
    chats={"action": "append", "type": int, "metavar": "N", "help": "chats at a time; repeatable"},
    key={"default": "none", "metavar": "KEY", "help": "key of the other servers"},
    served={"default": "smollm2", "metavar": "NAME", "help": "name of the model at the other servers"},
    beside={"action": "store_true", "help": "measure ours also while a training runs"},
)

if __name__ == "__main__":
    run("serving")
