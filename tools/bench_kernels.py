"""Native kernels against their definitions in torch, at the sizes of a rollout step and of a training step.

Writes benchmarks/kernels.json. Logits have the spread of a language model's: a few hundred likely tokens and a long
tail. With two threads on a busy machine the ratios mean little: look at `uptime` first.

Shape legend: B, R and N rows, V vocabulary, H hidden, I intermediate size.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import get_args

import torch

from measure import Ratio, ratio, write
from tunesmith.kernels.adamw.api import adamw, add_gradient, sums_of_squares
from tunesmith.kernels.adamw.records import AdamWSettings, ParameterUpdate, zero_moments
from tunesmith.kernels.attention.api import attend, attend_packed
from tunesmith.kernels.attention.records import BLOCK_TOKENS, AttentionSettings, Places, Rope
from tunesmith.kernels.gated.api import Activation, gated, softcap
from tunesmith.kernels.logprob.api import chosen_logp_entropy
from tunesmith.kernels.native import Kernels
from tunesmith.kernels.rms_norm.api import add_rms_norm
from tunesmith.kernels.sample.api import sample
from tunesmith.kernels.sample.records import NoiseKeys, SampleSettings, Seen

NUM_ROWS, NUM_TOKENS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, CONTEXT = 64, 49152, 576, 1536, 9, 3, 96
TRAINING_ROWS, SCORED_ROWS = 2240, 512
OPTIONS = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50": {"top_k": 50},
    "T 0.7, top_p 0.9, penalty 1.05": {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.05},
}

Work = Callable[[Kernels], object]


def main() -> int:
    """Exit code 0; prints and writes the ratios."""
    generator = torch.Generator().manual_seed(0)
    ratios = [*_sampler(generator), *_decode(generator), *_attention(generator), *_training(generator)]
    ratios += [*_logits(generator), *_optimizer(generator)]
    print(f"written to {write('kernels', ratios)}")
    return 0


def _sampler(generator: torch.Generator) -> list[Ratio]:
    logits_BV = _likely_logits(NUM_ROWS, generator)
    row_B = torch.arange(NUM_ROWS)
    keys = NoiseKeys(torch.zeros_like(row_B), row_B, torch.zeros_like(row_B), torch.zeros_like(row_B))
    seen = Seen.of(torch.randint(NUM_TOKENS, (NUM_ROWS, 128), generator=generator).tolist(), NUM_TOKENS)
    ratios: list[Ratio] = []
    for name, options in OPTIONS.items():
        settings = SampleSettings.same(NUM_ROWS, **options)
        work = partial(_sample, logits_BV, settings, keys, seen)
        ratios.append(_against_torch(f"sample {NUM_ROWS}x{NUM_TOKENS} {name}", work))
    return ratios


def _decode(generator: torch.Generator) -> list[Ratio]:
    """Element-wise and norm work of one step: each call is repeated, since one takes microseconds."""
    x_RH, x_RX = _normal(generator, NUM_ROWS, HIDDEN), _normal(generator, NUM_ROWS, 2 * INTERMEDIATE)
    works: dict[str, Work] = {
        f"add_rms_norm {NUM_ROWS}x{HIDDEN}": lambda kernels: add_rms_norm(x_RH, x_RH, x_RH[0], 1e-5, kernels=kernels),
        f"rms_norm of heads {NUM_ROWS}x{HEADS}x64": lambda kernels: add_rms_norm(
            x_RH.unflatten(1, (HEADS, 64)), None, x_RH[0, :64], 1e-5, kernels=kernels
        ),
        f"gated silu {NUM_ROWS}x{INTERMEDIATE}": lambda kernels: gated(
            x_RX[:, :INTERMEDIATE], x_RX[:, INTERMEDIATE:], "silu", kernels=kernels
        ),
    }
    return [_against_torch(f"{name}, 100 calls", partial(_repeat, work)) for name, work in works.items()]


def _attention(generator: torch.Generator) -> list[Ratio]:
    """A decoding step over contexts of 96 tokens, and sequences of 70 tokens with gradients; SmolLM2's heads."""
    settings = AttentionSettings(HEADS, KV_HEADS, 64, 0.125)
    angle_PF = torch.arange(CONTEXT)[:, None] * 10000 ** (-torch.arange(32) / 32)
    rope = Rope(angle_PF.cos(), angle_PF.sin())
    widths = (64 * HEADS, 64 * KV_HEADS, 64 * KV_HEADS)
    q_TX, k_TY, v_TY = _normal(generator, NUM_ROWS, sum(widths)).split(widths, dim=1)
    num_blocks = NUM_ROWS * CONTEXT // BLOCK_TOKENS
    cache_2NW = _normal(generator, 2, num_blocks, BLOCK_TOKENS * 64 * KV_HEADS)
    rows_T = torch.arange(NUM_ROWS, dtype=torch.int32)
    tables_RN = torch.arange(num_blocks, dtype=torch.int32).view(NUM_ROWS, -1)
    places = Places(torch.full_like(rows_T, CONTEXT - 1), rows_T, tables_RN)
    leaves = [_normal(generator, 2240, width).requires_grad_() for width in widths]
    d_TX = _normal(generator, 2240, widths[0])

    def packed(kernels: Kernels) -> object:
        out_TX = attend_packed(leaves[0], leaves[1], leaves[2], rope, [70] * 32, settings, kernels=kernels)
        return torch.autograd.grad(out_TX, leaves, d_TX)

    def step(kernels: Kernels) -> object:
        return attend(q_TX, k_TY, v_TY, rope, places, cache_2NW, settings, kernels=kernels)

    return [
        _against_torch(f"attend {NUM_ROWS} rows at {CONTEXT} tokens", step, num_rounds=7),
        _against_torch("attend_packed 32x70, with gradients", packed, num_rounds=7),
    ]


def _training(generator: torch.Generator) -> list[Ratio]:
    """Forward and backward passes over the tokens of a training step."""
    x_RH, residual_RH, d_RH = (_normal(generator, TRAINING_ROWS, HIDDEN) for _ in range(3))
    gate_RI, up_RI, d_RI = (_normal(generator, TRAINING_ROWS, INTERMEDIATE) for _ in range(3))
    weight_H = x_RH[0].clone()
    leaves = [tensor.requires_grad_() for tensor in (x_RH, residual_RH, weight_H, gate_RI, up_RI)]

    def norm(kernels: Kernels) -> object:
        found = add_rms_norm(x_RH, residual_RH, weight_H, 1e-5, kernels=kernels)
        return torch.autograd.grad([found.normed_RH, found.sum_RH], leaves[:3], [d_RH, d_RH])

    def gate(activation: Activation, kernels: Kernels) -> object:
        return torch.autograd.grad(gated(gate_RI, up_RI, activation, kernels=kernels), leaves[3:], d_RI)

    return [
        _against_torch(f"add_rms_norm {TRAINING_ROWS}x{HIDDEN}, with gradients", norm),
        *(
            _against_torch(
                f"gated {activation} {TRAINING_ROWS}x{INTERMEDIATE}, with gradients", partial(gate, activation)
            )
            for activation in get_args(Activation)
        ),
    ]


def _logits(generator: torch.Generator) -> list[Ratio]:
    logits_NV = _likely_logits(SCORED_ROWS, generator)
    ids_N = torch.randint(NUM_TOKENS, (SCORED_ROWS,), generator=generator)
    leaf_NV, d_N = logits_NV.clone().requires_grad_(), torch.randn(SCORED_ROWS, generator=generator)

    def scored(kernels: Kernels) -> object:
        return chosen_logp_entropy(logits_NV, ids_N, 1.0, kernels=kernels)

    def trained(kernels: Kernels) -> object:
        logp_N, _ = chosen_logp_entropy(leaf_NV, ids_N, 1.0, kernels=kernels)
        return torch.autograd.grad(logp_N, leaf_NV, d_N)

    size = f"{SCORED_ROWS}x{NUM_TOKENS}"
    return [
        _against_torch(f"chosen_logp_entropy {size}", scored, num_rounds=7),
        _against_torch(f"chosen_logp_entropy {size}, with gradients", trained, num_rounds=7),
        _against_torch(f"softcap {size}", lambda kernels: softcap(logits_NV, 30.0, kernels=kernels), num_rounds=7),
    ]


def _optimizer(generator: torch.Generator) -> list[Ratio]:
    """A step of AdamW: norm, clipping, update, bfloat16 weights; with 8-bit moments torch is slow, so on one layer."""
    layer = [*[(HIDDEN, HIDDEN)] * 2, *[(64 * KV_HEADS, HIDDEN)] * 2, *[(INTERMEDIATE, HIDDEN)] * 3]
    whole = [_normal(generator, *shape) for shape in [(NUM_TOKENS, HIDDEN), *layer * 8]]
    totals = [gradient.float() for gradient in whole]

    def accumulate(kernels: Kernels) -> None:
        for total, gradient in zip(totals, whole, strict=True):
            add_gradient(total, gradient, kernels=kernels)

    return [
        _against_torch(f"adamw, {_millions(whole)} weights", _adamw_over(whole, coded=False), num_rounds=7),
        _against_torch(
            f"adamw with 8-bit moments, {_millions(whole[-7:])} weights",
            _adamw_over(whole[-7:], coded=True),
            num_rounds=3,
        ),
        _against_torch(f"add_gradient, {_millions(whole)} weights", accumulate, num_rounds=7),
    ]


def _adamw_over(gradients: list[torch.Tensor], *, coded: bool) -> Work:
    masters = [gradient.float() for gradient in gradients]
    weights = [gradient.clone() for gradient in gradients]
    moments = [zero_moments(master, coded=coded) for master in masters]

    def step(kernels: Kernels) -> None:
        norm = sum(sums_of_squares(gradients, kernels=kernels)) ** 0.5
        parts = zip(gradients, masters, weights, moments, strict=True)
        updates = [ParameterUpdate(*part, num_updates=10, learning_rate=1e-5, weight_decay=0.0) for part in parts]
        adamw(updates, AdamWSettings(0.9, 0.95, 1e-8), 1.0 / norm, kernels=kernels)

    return step


def _millions(tensors: list[torch.Tensor]) -> str:
    return f"{sum(tensor.numel() for tensor in tensors) / 1e6:.1f} million"


def _against_torch(name: str, work: Work, num_rounds: int = 15) -> Ratio:
    fast, slow = partial(work, Kernels("native")), partial(work, Kernels("torch"))
    return ratio(name, fast=fast, slow=slow, num_rounds=num_rounds)


def _sample(logits_BV: torch.Tensor, settings: SampleSettings, keys: NoiseKeys, seen: Seen, kernels: Kernels) -> object:
    return sample(logits_BV, settings, keys, seen=seen, kernels=kernels)


def _repeat(work: Work, kernels: Kernels) -> None:
    for _ in range(100):
        work(kernels)


def _normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).bfloat16()


def _likely_logits(num_rows: int, generator: torch.Generator) -> torch.Tensor:
    logits_BV = (2.5 * torch.randn(num_rows, NUM_TOKENS, generator=generator)).bfloat16()
    likely_BK = torch.randint(NUM_TOKENS, (num_rows, 200), generator=generator)
    return logits_BV.scatter_add_(1, likely_BK, (8 + 2 * torch.randn(num_rows, 200, generator=generator)).bfloat16())


if __name__ == "__main__":
    sys.exit(main())
