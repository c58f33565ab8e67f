"""Peak memory of a work, above what was there before."""

from collections.abc import Callable

import torch

from benchmarks.machine import peak_rss_since_reset_gb, reset_peak_rss


def memory_facts(ours: Callable[[], object], plain: Callable[[], object], device: torch.device) -> dict[str, object]:
    """Peak memory of both ways above what was there before, in GB, and ours over the plain way's."""
    ours_gb, plain_gb = peak_gb(ours, device), peak_gb(plain, device)
    ratio = ours_gb / plain_gb if plain_gb else None
    return {"memory_gb": ours_gb, "plain_memory_gb": plain_gb, "memory_ratio": ratio}


def peak_gb(work: Callable[[], object], device: torch.device) -> float:
    """The peak of one call, which is made once before, in GB; on a CPU that of resident memory, 0 if unknown."""
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        rest = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - rest) / 1e9
    if not reset_peak_rss():
        return 0.0
    rest_gb = peak_rss_since_reset_gb()
    work()
    return max(0.0, peak_rss_since_reset_gb() - rest_gb)
