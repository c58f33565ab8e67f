"""The rate of floating-point operations that this machine reaches, by a short measurement."""

import functools
import time

import torch

from tunesmith.engine.kernels.linear.exact import product

_LIMIT_S = 0.1
_MAX_TRIES = 8


def matmul_flop_per_s(dtype: torch.dtype, device: torch.device | None = None) -> float:
    """Rate of a matrix product of the kind that dominates a pass: the best of a few tries, in about a tenth of a
    second. Measured once in a process for each dtype, device and number of threads; draws no random numbers.
    """
    return _measured(dtype, device or torch.device("cpu"), torch.get_num_threads())


@functools.cache
def _measured(dtype: torch.dtype, device: torch.device, num_threads: int) -> float:
    rows, inner, columns = (512, 576, 1536) if device.type == "cpu" else (4096, 4096, 4096)
    left = torch.ones(rows, inner, dtype=dtype, device=device)
    right = torch.ones(inner, columns, dtype=dtype, device=device)
    begin_s, best_s = time.perf_counter(), float("inf")
    for _ in range(_MAX_TRIES):
        start_s = time.perf_counter()
        product(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        end_s = time.perf_counter()
        best_s = min(best_s, end_s - start_s)
        if end_s - begin_s > _LIMIT_S:
            break
    return 2 * rows * inner * columns / best_s
