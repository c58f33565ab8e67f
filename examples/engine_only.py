"""The rollout engine alone, on any causal language model of the transformers library.

    python examples/engine_only.py
    python examples/engine_only.py --model HuggingFaceTB/SmolLM2-135M --new-tokens 64

Prints how many greedy completions are equal to those of `model.generate`, the tokens per second of both, and the
largest difference between the log-probs that the engine recorded and those of the trainer: 0 where the engine is exact.
"""

import argparse
import time
from typing import Any

import torch

import tunesmith as ts

PROMPTS = ("The film was", "Once upon a time", "To make bread you need", "The capital of France is")


def main() -> None:
    """Draw, and compare with the library and with the trainer."""
    parser = argparse.ArgumentParser(description="Draw completions with the rollout engine alone.")
    parser.add_argument("--model", default="tiny:llama", help="hub id, folder, GGUF file, smollm2 or tiny:<family>")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--completions", type=int, default=16, help="samples of each prompt for the last figure")
    options = parser.parse_args()

    # Any `PreTrainedModel` with its tokenizer will do; `load_policy` also reads GGUF files and the built-in names.
    loaded = ts.load_policy(options.model, dtype=torch.float32)
    model, tokenizer = loaded.model, loaded.tokenizer
    engine = ts.open_engine(model, tokenizer)
    prompts = ts.load_prompts(PROMPTS)
    greedy = ts.SamplingParams(max_new_tokens=options.new_tokens, temperature=0.0)
    engine.generate(prompts[:1], 1, greedy)  # packs the weights

    start_s = time.perf_counter()
    groups = engine.generate(prompts, 1, greedy)
    engine_s = time.perf_counter() - start_s
    ours = [group.completions[0].token_ids for group in groups]

    start_s = time.perf_counter()
    theirs = [library_completion(model, group.prompt_token_ids, options.new_tokens) for group in groups]
    library_s = time.perf_counter() - start_s
    num_equal = sum(map(tuple.__eq__, ours, theirs))
    num_tokens = sum(map(len, ours))
    print(f"{num_equal} of {len(prompts)} greedy completions equal model.generate")
    print(f"engine {num_tokens / engine_s:,.0f} tokens/s, model.generate {num_tokens / library_s:,.0f} tokens/s")

    sampling = ts.SamplingParams(max_new_tokens=options.new_tokens, temperature=0.8, top_p=0.9, seed=0)
    sequences = ts.pack(engine.generate(prompts, options.completions, sampling), pad_id=0)
    with torch.no_grad():
        scores = ts.token_logps(
            ts.language_model(model),
            sequences.ids_BS,
            sequences.lengths_B,
            prompt_lengths_B=sequences.prompt_lengths_B,
            temperature=sampling.temperature,
        )
    difference = (scores.logp_BT - sequences.raw_logp_BT).abs().max().item()
    print(f"largest difference of {sequences.num_tokens:,} log-probs from the trainer's: {difference:g} nats")
    print(f"{PROMPTS[0]}{groups[0].completions[0].text!r}")


@torch.no_grad()
def library_completion(model: Any, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """The greedy completion of `prompt` by `model.generate`, as token ids."""
    ids_1S = torch.tensor([prompt])
    found_1S = model.generate(
        ids_1S, attention_mask=torch.ones_like(ids_1S), max_new_tokens=num_tokens, do_sample=False, use_cache=True
    )
    return tuple(found_1S[0, len(prompt) :].tolist())


if __name__ == "__main__":
    main()
