"""Arithmetic that a small model cannot do alone, with a calculator: a few demonstrations, then GRPO.

    python examples/calculator_tool.py
    python examples/calculator_tool.py --seed 1 --demonstrations 64 --steps 12

The model is shown how to call the tool by a program's demonstrations, too few to learn it well; GRPO rewards right
answers. Prints the share of right answers to held-out problems without the tool, after the demonstrations, and after
GRPO. With smollm2 on two cores it takes about ten minutes.
"""

import argparse
import random
import re
from collections.abc import Sequence

from transformers.utils.chat_template_utils import get_json_schema

from tunesmith import Prompt, SamplingParams, load_policy, open_engine, train
from tunesmith.learn.environments.tools.calculator import calculator

Problem = tuple[str, str, int]
"""A question, the expression that answers it, and its value."""


def problems(count: int, seed: int) -> list[Problem]:
    """Products of two numbers, some with a third added or taken away."""
    draw = random.Random(seed)
    found: list[Problem] = []
    for _ in range(count):
        a, b, c = draw.randrange(100, 1000), draw.randrange(12, 100), draw.randrange(100, 1000)
        form = draw.randrange(3)
        question = (f"What is {a} times {b}?", f"What is {a} times {b} plus {c}?", f"What is {a} times {b} minus {c}?")
        expression = (f"{a} * {b}", f"{a} * {b} + {c}", f"{a} * {b} - {c}")
        found.append((question[form], expression[form], (a * b, a * b + c, a * b - c)[form]))
    return found


def demonstration(problem: Problem) -> dict[str, object]:
    """How the tool is called for a problem, and its result said."""
    question, expression, value = problem
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": expression}}}
    return {
        "tools": [get_json_schema(calculator)],
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "calculator", "content": str(value)},
            {"role": "assistant", "content": f"The answer is {value}."},
        ],
    }


def is_right(completions: Sequence[object], answer: Sequence[int], **kwargs: object) -> list[float]:
    """1 where the last number of the last message is the answer."""
    rewards: list[float] = []
    for messages, value in zip(completions, answer, strict=True):
        text = str(messages[-1]["content"]) if isinstance(messages, list) else str(messages)
        numbers = re.findall(r"-?\d+", text.replace(",", ""))
        rewards.append(float(bool(numbers) and int(numbers[-1]) == value))
    return rewards


def right_without_tool(model: str, held_out: Sequence[Problem]) -> float:
    """The share of right greedy answers of `model` alone."""
    loaded = load_policy(model)
    prompts = [Prompt(q, ({"role": "user", "content": q},)) for q, _, _ in held_out]
    groups = open_engine(loaded.model, loaded.tokenizer).generate(
        prompts, 1, SamplingParams(max_new_tokens=60, temperature=0, seed=0)
    )
    texts = [group.completions[0].text for group in groups]
    return sum(is_right(texts, [value for _, _, value in held_out])) / len(texts)


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demonstrations", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--held-out", type=int, default=100)
    options = parser.parse_args()
    shared = {"run.seed": options.seed, "model.num_trainable_layers": 10}
    rows = [
        {"prompt": [{"role": "user", "content": question}], "answer": value}
        for question, _, value in problems(400, seed=options.seed)
    ]
    held_out = problems(options.held_out, seed=options.seed + 10_000)
    shown = train.sft(
        model=options.model,
        demonstrations=[demonstration(one) for one in problems(options.demonstrations, seed=options.seed + 20_000)],
        steps=options.demonstrations // 8,
        **{**shared, "sft.demonstrations_per_step": 8, "optimizer.learning_rate": 1e-4},
    )
    run = train.grpo(
        model=str(shown.run_dir / "final"),
        prompts=rows,
        reward=is_right,
        tools=[calculator],
        steps=options.steps,
        environment={"max_turns": 3},
        rollout={"max_new_tokens": 40, "prompts_per_step": 8, "completions_per_prompt": 8},
        grpo={"kl": 0},
        **{
            **shared,
            "optimizer.learning_rate": 1e-4,
            "prompts.heldout_fraction": 0.25,
            "evaluation.correct_at": 1,
            "evaluation.num_prompts": options.held_out,
            "evaluation.completions_per_prompt": 1,
        },
    )
    alone = right_without_tool(options.model, held_out)
    print(f"right answers to held-out problems: {alone:.2f} without the tool, ", end="")
    print(
        f"{run.summary['accuracy_before']:.2f} after the demonstrations, {run.summary['accuracy_after']:.2f} after GRPO"
    )


if __name__ == "__main__":
    main()
