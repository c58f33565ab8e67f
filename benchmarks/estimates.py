"""How long each training, each stage of the demo and each update of the live loop says it will take, and takes.

Each is run by its command, and the lines that begin with `time: about` are read as a user would read them. A stage ends
with the next one, or with the command. Leave the machine alone meanwhile; with smollm2 on two cores it takes about
twelve minutes.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Say, benchmark, head, load_facts, load_warning, measure_load, print_table, run
from tunesmith.base.core.errors import TrainingError

_SAID = re.compile(r"time: about (.+?) for (.+), by a trial")
_STAGE = re.compile(r"\[\d/\d\] ")
_UPDATE = re.compile(r"(update \d+): .* ([\d.]+) s$")
_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}

_WORDS = "a film that I would not see again because its end was slow and good"


def _commands(options: Namespace, folder: Path) -> Mapping[str, Sequence[str]]:
    """The words of each command, by name: all trainers, with a few small steps, the demo and the live loop."""
    completions, pairs = folder / "completions.jsonl", folder / "pairs.jsonl"
    rows = [
        {"prompt": _text(n, 12), "chosen": _text(2 * n, 30), "rejected": _text(3 * n + 1000, 30)} for n in range(64)
    ]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    completions.write_text(
        "".join(json.dumps({"prompt": row["prompt"], "completion": row["chosen"]}) + "\n" for row in rows)
    )
    drawn = ["--prompts", "films", "--rollout.max-new-tokens", "32", "--rollout.prompts-per-step"]
    rewarded = ["--reward", "sentiment", *drawn]
    steps = {"sft": 4, "reward": 4, "dpo": 4, "ppo": 2, "grpo": 2, "best_of_n": 3, "distill": 3}
    given = {
        "sft": ["--demonstrations", str(completions), "--sft.demonstrations-per-step", "8"],
        "reward": ["--pairs", str(pairs), "--reward-model.pairs-per-step", "8"],
        "dpo": ["--pairs", str(pairs), "--dpo.pairs-per-step", "4"],
        "ppo": [*rewarded, "16"],
        "grpo": [*rewarded, "4"],
        "best_of_n": [*rewarded, "4"],
        "distill": [*drawn, "8", "--distill.teachers", f"[{options.model}]"],
    }
    common = ["--model", options.model, "--run.dir", str(folder)]
    live = ["live", "--dir", str(folder / "live"), "--model", options.model, "--simulate", "3", "--duration", "100s"]
    trainings = {
        name: ["train", name, *given[name], *common, "--steps", "2" if options.quick else str(steps[name])]
        for name in steps
    }
    return trainings if options.quick else {**trainings, "demo": ["demo", "--out", str(folder / "demo")], "live": live}


def _text(first: int, num_words: int) -> str:
    words = _WORDS.split()
    return " ".join(words[(first + 7 * n * n) % len(words)] for n in range(num_words)) + f" {first}."


def stages(words: Sequence[str]) -> Iterator[tuple[str, float, float]]:
    """(What for, predicted seconds, measured seconds) of each stage that `tunesmith words` announces a time for.

    Raises:
        TrainingError: the command failed.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "tunesmith", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    said, start_s, lines = None, 0.0, list[str]()
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line)
        found = _SAID.match(line)
        if said and (found or _STAGE.match(line)):
            yield (*said, time.perf_counter() - start_s)
            said = None
        if found:
            said, start_s = (found[2], seconds_of(found[1])), time.perf_counter()
    if process.wait():
        raise TrainingError(f"`tunesmith {' '.join(words)}` failed:\n{''.join(lines[-15:])}")
    if said:
        yield (*said, time.perf_counter() - start_s)


def updates(words: Sequence[str]) -> Iterator[tuple[str, float, float]]:
    """As `stages`, for each update in the log of a live loop, whose folder is named by `words`."""
    list(stages(words))
    said, folder = dict[str, float](), Path(words[words.index("--dir") + 1])
    for line in (folder / "trainer.log").read_text(encoding="utf-8").splitlines():
        if found := _SAID.match(line):
            said[found[2]] = seconds_of(found[1])
        elif (found := _UPDATE.search(line)) and found[1] in said:
            yield found[1], said[found[1]], float(found[2])


def seconds_of(text: str) -> float:
    """Seconds of a duration such as `4 min 05 s`.

    >>> seconds_of("4 min 05 s")
    245.0
    """
    return sum(float(number) * _SECONDS[unit] for number, unit in re.findall(r"([\d.]+) (ms|min|s|h)\b", text))


def measure(options: Namespace, say: Say) -> dict[str, Any]:
    """All figures of the benchmark.

    Raises:
        TrainingError: a command failed.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    found: dict[str, dict[str, float]] = {}
    loads = [measure_load()]
    with tempfile.TemporaryDirectory() as folder:
        chosen = _commands(options, Path(folder))
        for name in options.only or chosen:
            for what, predicted_s, measured_s in (updates if name == "live" else stages)(chosen[name]):
                factor = max(predicted_s / measured_s, measured_s / predicted_s)
                found[f"{name}, {what}"] = {"predicted_s": predicted_s, "measured_s": measured_s, "factor": factor}
                say(f"{name}, {what}: predicted {predicted_s:.1f} s, measured {measured_s:.1f} s, factor {factor:.2f}")
            loads.append(measure_load())
    return {
        **head(options, "estimates", "model", "quick"),
        "stages": found,
        "worst_factor": max(one["factor"] for one in found.values()),
        "load": load_facts(loads),
    }


def _show(facts: Mapping[str, Any]) -> None:
    rows = [
        [name, f"{one['predicted_s']:.1f}", f"{one['measured_s']:.1f}", f"{one['factor']:.2f}"]
        for name, one in facts["stages"].items()
    ]
    print_table(["stage", "predicted s", "measured s", "factor"], rows)
    print(f"worst factor: {facts['worst_factor']:.2f}{load_warning(facts)}")


main = benchmark(
    measure,
    _show,
    *("model", "quick"),
    only={"action": "append", "metavar": "NAME", "help": "one trainer, demo or live; repeatable. All if left out"},
)


if __name__ == "__main__":
    run("estimates")
