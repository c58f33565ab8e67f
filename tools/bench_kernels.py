"""Native kernels against their definitions in torch, at the sizes of a rollout step. Writes benchmarks/kernels.json.

Logits have the spread of a language model's: a few hundred likely tokens and a long tail. With two threads on a busy
machine the ratios mean little: look at `uptime` first.

Shape legend: B rows, V vocabulary, R rows, H hidden.
"""

import sys
from functools import partial

import torch

from measure import ratio, write
from tunesmith.kernels.native import Kernels
from tunesmith.kernels.rms_norm.api import add_rms_norm
from tunesmith.kernels.sample.api import sample
from tunesmith.kernels.sample.records import NoiseKeys, SampleSettings, Seen

NUM_ROWS, NUM_TOKENS, HIDDEN = 64, 49152, 576
OPTIONS = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50": {"top_k": 50},
    "T 0.7, top_p 0.9, penalty 1.05": {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.05},
}


def main() -> int:
    """Exit code 0; prints and writes the ratios."""
    native, plain = Kernels("native"), Kernels("torch")
    generator = torch.Generator().manual_seed(0)
    logits_BV = (2.5 * torch.randn(NUM_ROWS, NUM_TOKENS, generator=generator)).bfloat16()
    likely_BK = torch.randint(NUM_TOKENS, (NUM_ROWS, 200), generator=generator)
    logits_BV.scatter_add_(1, likely_BK, (8 + 2 * torch.randn(NUM_ROWS, 200, generator=generator)).bfloat16())
    row_B = torch.arange(NUM_ROWS)
    keys = NoiseKeys(torch.zeros_like(row_B), row_B, torch.zeros_like(row_B), torch.zeros_like(row_B))
    seen = Seen.of(torch.randint(NUM_TOKENS, (NUM_ROWS, 128), generator=generator).tolist(), NUM_TOKENS)
    ratios = []
    for name, options in OPTIONS.items():
        work = partial(sample, logits_BV, SampleSettings.same(NUM_ROWS, **options), keys, seen=seen)
        title = f"sample {NUM_ROWS}x{NUM_TOKENS} {name}"
        ratios.append(ratio(title, fast=partial(work, kernels=native), slow=partial(work, kernels=plain)))
    x_RH = torch.randn(NUM_ROWS, HIDDEN, generator=generator).bfloat16()
    work = partial(add_rms_norm, x_RH, x_RH, x_RH[0], 1e-5)
    fast, slow = partial(_repeat, partial(work, kernels=native)), partial(_repeat, partial(work, kernels=plain))
    ratios.append(ratio(f"add_rms_norm {NUM_ROWS}x{HIDDEN}, 100 calls", fast=fast, slow=slow))
    print(f"written to {write('kernels', ratios)}")
    return 0


def _repeat(work: partial[object]) -> None:
    for _ in range(100):
        work()


if __name__ == "__main__":
    sys.exit(main())
