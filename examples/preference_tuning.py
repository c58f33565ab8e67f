"""Learns a rater's taste from votes between two outputs, on a CPU or a GPU, with the preference kernels alone.

    python examples/preference_tuning.py
    python examples/preference_tuning.py --device cuda --pairs 1000000 --width 512

Outputs are random vectors, as the hidden states of two answers might be. A simulated rater prefers those along a hidden
direction and now and then calls a tie. `iterative_tuning` moves weights towards what was selected; at the end they
point along that direction, and tell which output of an unseen pair the rater would like.
"""

import argparse
import time

import torch

from tunesmith.kernels import Kernels, PreferenceBatch, iterative_tuning


def votes(num_pairs: int, taste_N: torch.Tensor, seed: int) -> PreferenceBatch:
    """Pairs of random outputs and the rater's choices: 1 is A, 0 is B, 0.5 a tie, where both are nearly alike."""
    draw = torch.Generator(taste_N.device).manual_seed(seed)
    a_BN, b_BN = (
        torch.randn(num_pairs, len(taste_N), generator=draw, device=taste_N.device, dtype=taste_N.dtype)
        for _ in range(2)
    )
    gain_B = ((a_BN - b_BN) @ taste_N).float()
    choices_B = torch.where(gain_B.abs() < 0.1, 0.5, (gain_B > 0).float())
    return PreferenceBatch(a_BN, b_BN, choices_B)


def main() -> None:
    """Print how well the weights know the rater before, and after each epoch."""
    parser = argparse.ArgumentParser(description="Learn a rater's taste from votes between two outputs.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--kernels", default="auto", choices=["auto", "native", "triton", "torch"])
    parser.add_argument("--pairs", type=int, default=10_000, help="votes of an epoch")
    parser.add_argument("--batch", type=int, default=1_000, help="votes of a batch")
    parser.add_argument("--width", type=int, default=128, help="numbers of an output")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    dtype = getattr(torch, options.dtype)
    draw = torch.Generator().manual_seed(0)
    taste_N = torch.nn.functional.normalize(torch.randn(options.width, generator=draw), dim=0)
    taste_N = taste_N.to(options.device, dtype)
    sizes = [min(options.batch, options.pairs - start) for start in range(0, options.pairs, options.batch)]
    batches = [votes(size, taste_N, seed) for seed, size in enumerate(sizes, 1)]
    unseen = votes(2_000, taste_N, seed=0)
    decided_B = unseen.choices_B != 0.5

    weights_N = torch.zeros(options.width, device=options.device)
    kernels = Kernels(options.kernels)
    print(f"{options.pairs} votes, outputs of {options.width} numbers in {options.dtype} on {options.device}")
    for epoch in range(1, options.epochs + 1):
        start_s = time.perf_counter()
        report = iterative_tuning(batches, weights_N, learning_rate=0.1, kernels=kernels)
        used_s = time.perf_counter() - start_s
        likes_a_B = (unseen.outputs_a_BN.float() - unseen.outputs_b_BN.float()) @ weights_N > 0
        right = (likes_a_B == (unseen.choices_B == 1))[decided_B].float().mean().item()
        along = torch.cosine_similarity(weights_N, taste_N.float(), dim=0).item()
        print(
            f"epoch {epoch}: {report.num_votes / used_s:,.0f} votes/s, moved by {report.moved[0]:.3f}, "
            f"{along:.3f} along the taste, {right:.1%} of unseen votes foretold"
        )


if __name__ == "__main__":
    main()
