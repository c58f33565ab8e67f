"""Reward functions as people write them."""

import torch

from tunesmith import train


def test_a_reward_may_change_torch_for_itself() -> None:
    """A judge switches gradients off, or sets dtype and threads, for the process. Reported: huggingface/trl#3452."""
    threads = torch.get_num_threads()

    def judge(completions: list[str], **_: object) -> list[float]:
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(threads + 1)
        return [float(len(set(text))) for text in completions]

    run = train.grpo(
        model="tiny:llama",
        prompts=["The film was", "I liked"],
        reward=judge,
        steps=2,
        progress=False,
        rollout={"completions_per_prompt": 4, "prompts_per_step": 2, "max_new_tokens": 6},
    )
    assert [row["refused_steps"] for row in run.metrics if "refused_steps" in row] in ([], [0, 0])
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() is torch.float32
    assert torch.get_num_threads() == threads
