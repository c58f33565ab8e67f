"""GRPO with rewards of your own: plain functions, a column of the data as an argument, and a logged figure.

    python examples/custom_reward.py
    python examples/custom_reward.py --model smollm2 --steps 100 --learning-rate 1e-5

`uses_letters` is the share of a completion that consists of the letters in the prompt's row; `is_varied` is an async
function, as one that asks a service would be. Prints both rewards of two given texts, then the mean of each reward over
the first and the last five steps of training, and a completion.
"""

import argparse
import asyncio
from collections.abc import Callable, Sequence
from statistics import fmean

from tunesmith import train

ROWS = [
    {"prompt": "The film was", "letters": "aeiou"},
    {"prompt": "I liked", "letters": "aeiou"},
    {"prompt": "The music", "letters": "aeiouy"},
    {"prompt": "In the end", "letters": "aeiouy"},
]


def uses_letters(
    completions: Sequence[str], letters: Sequence[str], log_metric: Callable[[str, float], None], **kwargs: object
) -> list[float]:
    """Share of each completion that is in its row's `letters`; the share of completions without any is logged."""
    counts = [sum(map(text.count, wanted)) for text, wanted in zip(completions, letters, strict=True)]
    log_metric("without_letters", counts.count(0) / len(counts))
    return [count / max(1, len(text)) for text, count in zip(completions, counts, strict=True)]


async def is_varied(completions: Sequence[str], **kwargs: object) -> list[float]:
    """A twentieth of the share of different characters. All async rewards of a step run at the same time."""
    await asyncio.sleep(0)  # a request to a service would be awaited here
    return [0.05 * len(set(text)) / max(1, len(text)) for text in completions]


def main() -> None:
    """Try the rewards on two texts, then train on their sum."""
    parser = argparse.ArgumentParser(description="GRPO with reward functions of your own.")
    parser.add_argument("--model", default="tiny:llama", help="hub id, folder, GGUF file, smollm2 or tiny:<family>")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--runs", default="runs", help="folder of the run")
    options = parser.parse_args()

    texts = [" banana", " rhythm"]
    shares = uses_letters(texts, letters=["aeiou", "aeiou"], log_metric=lambda name, value: None)
    varied = asyncio.run(is_varied(texts))
    for text, share, bonus in zip(texts, shares, varied, strict=True):
        print(f"{text!r}: uses_letters {share:.3f}, is_varied {bonus:.3f}")

    result = train.grpo(
        model=options.model,
        prompts=ROWS,
        reward=[uses_letters, is_varied],
        steps=options.steps,
        progress=False,
        rollout={"prompts_per_step": 4, "completions_per_prompt": 16, "max_new_tokens": 16},
        optimizer={"learning_rate": options.learning_rate},
        run={"dir": options.runs},
    )
    for name in ("rewards/uses_letters/mean", "rewards/is_varied/mean", "without_letters"):
        values = [row[name] for row in result.metrics]
        print(f"{name}: {fmean(values[:5]):.3f} -> {fmean(values[-5:]):.3f}")
    print(f"The film was{result.generate('The film was', max_new_tokens=16)!r}")


if __name__ == "__main__":
    main()
