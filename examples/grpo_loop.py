"""A GRPO loop of your own, with a loss of your own, from the parts that `tunesmith` exports.

    python examples/grpo_loop.py
    python examples/grpo_loop.py --model smollm2 --prompts films --learning-rate 1e-5 --kl 0.05

Each step draws a group of completions of every prompt, compares the rewards inside each group, and updates the policy
several times. The reward is the share of vowels. Prints reward, loss and KL of each step, then how many prompts have a
higher mean reward than before, with the interval of the difference.

Shapes: P prompts, G completions per prompt, B = P x G sequences, T completion tokens.
"""

import argparse
from collections.abc import Sequence

import torch

import tunesmith as ts

PROMPTS_PER_STEP = 8
PROMPTS = ("The film was", "I liked", "The music", "My day", "She said", "We saw", "It is", "In the end")


def vowels(completions: Sequence[str], **kwargs: object) -> list[float]:
    """Share of vowels in each completion."""
    return [sum(text.count(letter) for letter in "aeiou") / max(1, len(text)) for text in completions]


def clipped_loss(
    logp_BT: torch.Tensor,
    sequences: ts.Sequences,
    advantage_BT: torch.Tensor,
    reference_logp_BT: torch.Tensor,
    kl_coef: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(The loss, a scalar: the clipped surrogate and the KL to the reference, a mean over all tokens; the KL in nats).

    The ratio is clipped to [0.8, 1.28] (DAPO, arXiv 2503.14476); the KL is estimated by k3 (Schulman 2020).
    `ts.policy_loss` has these terms and further ones.
    """
    ratio_BT = torch.exp(logp_BT - sequences.raw_logp_BT)
    surrogate_BT = torch.minimum(ratio_BT * advantage_BT, ratio_BT.clamp(0.8, 1.28) * advantage_BT)
    difference_BT = reference_logp_BT - logp_BT
    kl_BT = torch.exp(difference_BT) - 1 - difference_BT
    loss_BT = (kl_coef * kl_BT - surrogate_BT) * sequences.mask_BT
    return loss_BT.sum() / sequences.num_tokens, (kl_BT.detach() * sequences.mask_BT).sum() / sequences.num_tokens


def logps(model: ts.LanguageModel, sequences: ts.Sequences) -> torch.Tensor:
    """Log-probs of the completion tokens under `model`, `[B, T]`."""
    scores = ts.token_logps(model, sequences.ids_BS, sequences.lengths_B, prompt_lengths_B=sequences.prompt_lengths_B)
    return scores.logp_BT


def main() -> None:
    """Train, and compare the policy with what it was."""
    parser = argparse.ArgumentParser(description="GRPO, written out.")
    parser.add_argument("--model", default="tiny:llama", help="hub id, folder, GGUF file, smollm2 or tiny:<family>")
    parser.add_argument("--prompts", help="a file with a prompt column, or films; eight short openings without it")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--completions", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--updates", type=int, default=2, help="optimizer steps on each rollout")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--kl", type=float, default=0.01, help="coefficient of the KL to the model at the start")
    options = parser.parse_args()

    loaded = ts.load_policy(options.model)
    prompts = ts.load_prompts(options.prompts or PROMPTS)
    policy = ts.language_model(loaded.model)
    reference = ts.language_model(ts.frozen_copy(loaded.model))
    optimizer = ts.MasterAdamW(
        loaded.model,
        ts.OptimizerSection(learning_rate=options.learning_rate),
        total_steps=options.steps * options.updates,
        kernels=policy.kernels,
    )
    # The engine reads the policy's own weights; the version tells it when they have changed.
    engine = ts.open_engine(policy, loaded.tokenizer, weight_version=lambda: optimizer.weight_version)
    scorer = ts.Scorer([vowels])

    for step in range(options.steps):
        first = step * PROMPTS_PER_STEP
        chosen = [prompts[i % len(prompts)] for i in range(first, first + PROMPTS_PER_STEP)]
        sampling = ts.SamplingParams(max_new_tokens=options.new_tokens, seed=step)
        groups = engine.generate(chosen, options.completions, sampling)
        scores = scorer.score(groups)
        advantage_PG = ts.group_relative(scores.total_PG, scores.valid_PG).advantage_PG
        sequences = ts.pack(groups, pad_id=0)
        advantage_BT = advantage_PG.flatten()[:, None] * sequences.mask_BT
        with torch.no_grad():
            reference_logp_BT = logps(reference, sequences)

        for _ in range(options.updates):
            loss, kl = clipped_loss(logps(policy, sequences), sequences, advantage_BT, reference_logp_BT, options.kl)
            optimizer.scaled(loss).backward()
            optimizer.step(loss=loss.item())
        reward = scores.total_PG.mean().item()
        print(f"step {step + 1}: reward {reward:.3f}, loss {loss.item():+.4f}, KL {kl.item():.4f} nats a token")

    result = ts.compare(
        ts.Side.of("before", reference.module, loaded.tokenizer),
        ts.Side.of("after", policy.module, loaded.tokenizer),
        prompts,
        scorer,
        ts.SamplingParams(max_new_tokens=options.new_tokens),
    )
    low, high = result.interval
    print(
        f"mean reward {result.mean_before:.3f} -> {result.mean_after:.3f} [{low:+.3f}, {high:+.3f}], "
        f"{result.num_improved} of {result.num_prompts} prompts improved"
    )


if __name__ == "__main__":
    main()
