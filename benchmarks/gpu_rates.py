"""What the machine can do: the bandwidth of a copy, and the rate of a bfloat16 matrix product."""

import torch

from benchmarks.gpu_clock import Clock
from benchmarks.gpu_records import Floor, Measured
from benchmarks.kernel_case import Setting


def copy(setting: Setting, clock: Clock) -> Measured:
    """The fastest `copy_` of 1, 2 and 4 GB; bytes are those read and those written."""
    gigabyte = setting.sized(1 << 26, 1 << 16, 1 << 30)
    rates: dict[str, float] = {}
    timings = {}
    for times in (1, 2, 4):
        source = torch.ones(times * gigabyte // 4, device=setting.device)
        target = torch.zeros_like(source)
        works = {"ours": lambda source=source, target=target: target.copy_(source)}
        clock.warm_up(works["ours"])
        timings[times] = clock.measure(works, 2 * times * gigabyte)["ours"]
        rates[f"{times * gigabyte} bytes"] = 2 * times * gigabyte / timings[times].median_s / 1e9
    best = max(timings, key=lambda times: times / timings[times].median_s)
    return Measured(
        size=f"{best * gigabyte} bytes",
        picked="torch",
        against="nothing",
        floors=(Floor(2 * best * gigabyte),),
        timings={"ours": timings[best]},
        facts={"gb_per_s": rates},
    )


def matrix(setting: Setting, clock: Clock) -> Measured:
    """The product of two square matrices of random numbers in bfloat16: zeros would be faster than any data."""
    width = setting.sized(1024, 64, 8192)
    a, b = (setting.normal(width, width, dtype=torch.bfloat16, stream=i) for i in range(2))
    out = torch.empty_like(a)
    works = {"ours": lambda: torch.mm(a, b, out=out)}
    clock.warm_up(works["ours"])
    return Measured(
        size=f"{width} x {width} x {width} bfloat16",
        picked="torch",
        against="nothing",
        floors=(Floor(3 * 2 * width**2, 2 * width**3),),
        timings=clock.measure(works, 3 * 2 * width**2),
    )
