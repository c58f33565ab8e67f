"""Measuring two versions of one thing against each other: alternating, in one process, as a ratio with its spread."""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.machine import machine_facts

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times longer `slow` takes than `fast`: median and quartiles over rounds, and both median times in ms."""

    name: str
    median: float
    lower_quartile: float
    upper_quartile: float
    fast_ms: float
    slow_ms: float
    num_rounds: int


def ratio(name: str, fast: Callable[[], object], slow: Callable[[], object], num_rounds: int = 15) -> Ratio:
    """`slow` against `fast`, alternating; the order within a round alternates too, and the first round is left out."""
    pairs: list[tuple[float, float]] = []
    for index in range(num_rounds + 1):
        if index % 2:
            slow_s, fast_s = seconds(slow), seconds(fast)
        else:
            fast_s, slow_s = seconds(fast), seconds(slow)
        pairs.append((fast_s, slow_s))
    kept = pairs[1:]
    lower, median, upper = statistics.quantiles([slow_s / fast_s for fast_s, slow_s in kept], n=4)
    fast_ms, slow_ms = (1e3 * statistics.median(side) for side in zip(*kept, strict=True))
    return Ratio(name, median, lower, upper, fast_ms, slow_ms, num_rounds)


def seconds(work: Callable[[], object]) -> float:
    """Seconds that one call of `work` takes."""
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def write(name: str, ratios: list[Ratio]) -> Path:
    """Write `benchmarks/<name>.json` and return its path; one line for each ratio is printed."""
    path = ROOT / "benchmarks" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        json.dumps({"machine": machine_facts(), "ratios": [asdict(item) for item in ratios]}, indent=1) + "\n"
    )
    for item in ratios:
        spread = f"{item.lower_quartile:.2f}-{item.upper_quartile:.2f}"
        print(f"{item.name}: {item.median:.2f}x ({spread}), {item.slow_ms:.2f} ms against {item.fast_ms:.2f} ms")
    return path
