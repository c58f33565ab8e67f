"""What the demo reaches at several seeds and in each precision, held to its bars.

A completion repeats itself if three words of it come twice. Two demos are not run at once, but times are not compared,
so that other programs may run.
"""

import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.common import Say, benchmark, head, print_table, run
from benchmarks.process import tunesmith
from tunesmith.base.runs.folder import read_jsonl

BARS: Mapping[str, Callable[[float], bool]] = MappingProxyType(
    {
        "kl_per_sequence": lambda nats: nats <= 6.5,
        "num_improved": lambda number: number >= 14,
        "reward_model_accuracy": lambda share: share >= 0.75,
        "num_repeating": lambda number: number == 0,
    }
)
"""The KL to the base model in nats, openings of 15 on which the rater's score rose, the reward model's share of right
answers on held-out votes, and completions of the trained model that repeat themselves."""


def repeats(text: str) -> bool:
    """True if three words come twice, in the same order.

    >>> repeats("a good film, and a good film too"), repeats("a good film")
    (True, False)
    """
    words = text.lower().replace(",", " ").replace(".", " ").split()
    found = list(zip(words, words[1:], words[2:], strict=False))
    return len(set(found)) < len(found)


def demo(algorithm: str, seed: int, dtype: str, *, is_quick: bool) -> dict[str, Any]:
    """The figures of one demo. Raises TrainingError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--algorithm", algorithm, "--seed", seed, "--dtype", dtype, "--out", folder]
        words += ["--quick"] if is_quick else []
        facts = tunesmith("demo", *words, environment={"HF_HUB_OFFLINE": "1"})
        rows: Any = read_jsonl(Path(facts["samples"]))
    facts["num_repeating"] = sum(repeats(row["text_after"]) for row in rows)
    facts["num_repeating_before"] = sum(repeats(row["text_before"]) for row in rows)
    facts["num_samples"] = len(rows)
    return {name: value for name, value in facts.items() if name not in ("report", "samples")}


def measure(options: Namespace, say: Say) -> dict[str, Any]:
    """All figures of the benchmark."""
    rows: list[dict[str, Any]] = []
    for dtype in options.dtype or ("float32", "bfloat16"):
        for seed in range(1 if options.quick else options.seeds):
            row = {"dtype": dtype, **demo(options.algorithm, seed, dtype, is_quick=options.quick)}
            rows.append(row)
            say(", ".join([f"{dtype}, seed {seed}", *(f"{name} {row[name]:.3g}" for name in BARS)]))
    return {
        **head(options, "demo", "quick"),
        "rows": rows,
        "passed": {name: all(holds(row[name]) for row in rows) for name, holds in BARS.items()},
    }


def _show(facts: Mapping[str, Any]) -> None:
    rows = [
        [f"{row['dtype']}, seed {row['seed']}", *(f"{row[name]:.3g}" for name in (*BARS, "minutes"))]
        for row in facts["rows"]
    ]
    print_table(["demo", *BARS, "minutes"], rows)
    for name, passed in facts["passed"].items():
        print(f"{name}: {'passed' if passed else 'NOT PASSED'}")


main = benchmark(
    measure,
    _show,
    "quick",
    algorithm={"choices": ("ppo", "grpo", "best_of_n"), "default": "ppo", "help": "what trains the policy"},
    seeds={"type": int, "default": 5, "metavar": "N", "help": "seeds from 0"},
    dtype={
        "action": "append",
        "choices": ("float32", "bfloat16"),
        "default": None,
        "help": "one precision. Both if left out",
    },
)


if __name__ == "__main__":
    run("demo")
