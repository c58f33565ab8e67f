"""What transformers itself offers for drawing tokens, as its user would call it: the benchmarks compare with it.

Nothing is recorded on the way (no log-probs, no text). The library's code runs as it is shipped.
Shape legend: B sequences, T positions.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel, TrainerCallback

from tunesmith.batch.rollout import SamplingParams

_NO_TOKEN = -1  # continuous batching takes this for "no end-of-sequence token"
_PAGE_SIZE = 256  # its default: fewer tokens in a page made no difference


def set_attention(model: PreTrainedModel, attention: str) -> None:
    """Let `model` attend by "sdpa" or "eager"."""
    model.set_attn_implementation(attention)


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    rows: Sequence[Sequence[int]],
    sampling: SamplingParams,
    stop_ids: Sequence[int],
    *,
    batch_size: int,
) -> list[list[int]]:
    """The new tokens of each row by `model.generate`, `batch_size` rows at a time, the longest prompts first.

    Rows of one length stand together, so that little is padded. Without `stop_ids` every row gets `max_new_tokens`.
    """
    config = _generation_config(sampling, stop_ids)
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
    outputs: list[list[int]] = [[] for _ in rows]
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        width = max(len(rows[index]) for index in chosen)
        ids_BT = torch.tensor([[0] * (width - len(rows[i])) + list(rows[i]) for i in chosen])
        mask_BT = torch.tensor([[0] * (width - len(rows[i])) + [1] * len(rows[i]) for i in chosen])
        ids_BT, mask_BT = ids_BT.to(model.device), mask_BT.to(model.device)
        all_BT = model.generate(ids_BT, attention_mask=mask_BT, generation_config=config)  # type: ignore[operator]
        for index, tokens in zip(chosen, all_BT[:, width:].tolist(), strict=True):
            outputs[index] = _cut(tokens, stop_ids)
    return outputs


def generate_continuously(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], sampling: SamplingParams, stop_ids: Sequence[int], seed: int
) -> list[list[int]]:
    """The new tokens of each row by `model.generate_batch`, the library's continuous batching.

    Its cache has room for all rows at once; left alone it fills half of the memory, which on a CPU takes seconds in
    each call. It leaves out a repetition penalty, which it does not know.
    """
    attention = str(model.config._attn_implementation)
    longest = max(map(len, rows)) + sampling.max_new_tokens
    config = ContinuousBatchingConfig(
        page_size=_PAGE_SIZE,
        num_blocks=len(rows) * math.ceil(longest / _PAGE_SIZE) + 1,
        max_batch_tokens=max(2048, longest),
        max_requests_per_batch=len(rows),
        seed=seed,
    )
    try:
        found = model.generate_batch(  # type: ignore[operator]
            [list(row) for row in rows],
            generation_config=_generation_config(sampling, stop_ids or [_NO_TOKEN]),
            continuous_batching_config=config,
            progress_bar=False,
            warmup=False,
        )
    finally:
        model.set_attn_implementation(attention)
    return [_cut(list(output.generated_tokens), stop_ids) for output in found.values()]


def _generation_config(sampling: SamplingParams, stop_ids: Sequence[int]) -> GenerationConfig:
    samples = sampling.temperature > 0
    return GenerationConfig(
        do_sample=samples,
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature if samples else 1.0,
        top_k=sampling.top_k if samples else None,
        top_p=sampling.top_p if samples else 1.0,
        repetition_penalty=sampling.repetition_penalty,
        eos_token_id=list(stop_ids) or None,
        pad_token_id=0,
        num_beams=1,
        use_cache=True,
    )


def _cut(tokens: list[int], stop_ids: Sequence[int]) -> list[int]:
    """`tokens` up to the first that ends a sequence, which stays; what follows is padding and is not counted."""
    end = next((index + 1 for index, token in enumerate(tokens) if token in stop_ids), len(tokens))
    return tokens[:end]


@torch.no_grad()
def greedy_margins(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """By how much the best logit stands above the second at each of `tokens`, which follow `prompt`; float64."""
    ids_BT = torch.tensor([[*prompt, *tokens]])
    logits_TV = model(ids_BT).logits[0, len(prompt) - 1 : -1].double()
    best_T2 = logits_TV.topk(2, dim=-1).values
    return (best_T2[:, 0] - best_T2[:, 1]).tolist()


def step_callback(begin: Callable[[int], None], end: Callable[[int], None]) -> TrainerCallback:
    """A callback for a trainer built on transformers': `begin` before the first step, `end` after each of them.

    Both receive how many tokens the trainer has seen so far.
    """

    class StepCallback(TrainerCallback):
        """Hands the count of tokens on."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Before the first step."""
            begin(int(state.num_input_tokens_seen))

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """After a step."""
            end(int(state.num_input_tokens_seen))

    return StepCallback()
