"""One completion at a time with guesses of the next tokens and without, in alternation, for what people ask.

Each workload is a few prompts, which an engine draws in turns, with the same tokens, which is checked.
`ratio` is that of their times. `again` is the second answer to a prompt, with another seed.
With smollm2 it takes some minutes; `--workload chat --weights int8` is a part of it.
"""

import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.common import Say, benchmark, head, in_turns, load_warning, paired, print_table, run, spread_text
from benchmarks.workloads import instructions
from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import InputError, TrainingError
from tunesmith.base.core.trace import span, trace
from tunesmith.base.schema.records import Prompt
from tunesmith.base.schema.weights import Weights
from tunesmith.collect.data.prompts import load_prompts
from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.models.language_model import language_model
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.models.loaded import LoadedModel
from tunesmith.engine.rollout.native_engine import Native, NativeEngine

_TEXTS = (
    "The harbor of Lindholm was build in 1871 for fishing boats. Today the ferry to the islands leave from there twice "
    "a day, and on Saturdays their is a market where farmers from the hole region sells cheese, apples and bread. The "
    "old customs house have been a museum since 1989.",
    "Bees are importent for agriculture because they pollinate about one third of the plants that we eats. In the last "
    "twenty years many colonies has died. Scientists beleive that pesticides, parasites and the lost of wild flowers "
    "is the main reasons. Gardeners can help by planting flowers that blooms at different times of the year.",
    "Our office will be closed on Friday because the heating are repaired. Please take you're laptop home on Thursday "
    "evening. If you expects a delivery, tell the front desk before noon. We is back on Monday at nine o'clock.",
)
_LISTS = (
    "Write a Python class for a bank account with methods to deposit, withdraw and show the balance.",
    "Write a Python function that returns the first n Fibonacci numbers, and tests for it.",
    "List the twelve months of the year with the number of days of each.",
    "Make a Markdown table of ten European countries with capital, language and currency.",
)


@dataclass(frozen=True, slots=True)
class Use:
    """Prompts of one kind, and how they are drawn: `n` completions of each; with `is_again` one was drawn before."""

    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    n: int = 1
    is_again: bool = False


def uses(quick: bool) -> dict[str, Use]:
    """The workloads by name."""
    num_tokens, count = (8, 1) if quick else (128, 6)
    greedy = SamplingParams(num_tokens, temperature=0.0)
    warm = SamplingParams(num_tokens, temperature=0.7, top_p=0.9)
    texts = [text[:60] for text in _TEXTS[:1]] if quick else _TEXTS
    chats = _chats(instructions()[:count])
    quotes = _chats([f"Correct the mistakes in this text and write it again:\n\n{text}" for text in texts])
    summaries = _chats([f"Summarise this text in two sentences:\n\n{text}" for text in texts])
    lists = _chats(_LISTS[:count])
    films = tuple(load_prompts("films")[:count])
    return {
        "chat, T=0": Use(chats, greedy),
        "chat, T=0.7": Use(chats, warm),
        "films, T=1": Use(films, SamplingParams(min(num_tokens, 48), temperature=1.0)),
        "correct, T=0": Use(quotes, greedy),
        "correct, T=0.7": Use(quotes, warm),
        "summary, T=0": Use(summaries, greedy),
        "summary, T=0.7": Use(summaries, warm),
        "lists, T=0": Use(lists, greedy),
        "lists, T=0.7": Use(lists, warm),
        "again, T=0.7": Use(chats, warm, is_again=True),
        "four, T=0.7": Use(chats, warm, n=4),
    }


def _chats(texts: Any) -> tuple[Prompt, ...]:
    return tuple(Prompt(str(index), ({"role": "user", "content": text},)) for index, text in enumerate(texts))


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds, tokens of each completion, steps of the model, guesses, and guesses that were right."""

    seconds: float
    tokens: tuple[tuple[int, ...], ...]
    steps: int
    guessed: int
    right: int


class Drawing:
    """One engine for both sides: packed weights of a second one may lie worse in memory, by a fifth."""

    def __init__(self, loaded: LoadedModel, weights: Weights) -> None:
        self.engine = NativeEngine(language_model(loaded.model), loaded.tokenizer, settings=Native(weights))

    def draw(self, use: Use, index: int, seed: int, *, drafts: bool) -> Answer:
        """Completions of one prompt, whose keys and values are cached; no other text is left from an earlier draw."""
        prompt = use.prompts[index % len(use.prompts)]
        seed += index // len(use.prompts)
        self.engine.has_drafts = drafts
        self.engine.memory.forget()
        before = use.sampling if use.is_again else replace(use.sampling, max_new_tokens=1)
        self.engine.generate([prompt], 1, replace(before, seed=seed + 1000))
        start_s = time.perf_counter()
        with trace() as work, span("draw"):
            (group,) = self.engine.generate([prompt], use.n, replace(use.sampling, seed=seed))
        seconds, made = time.perf_counter() - start_s, self.engine.drafts
        counts = (0, 0) if made is None else (made.num_guessed, made.num_right)
        steps = int(work.sums.get("draw/decode_steps", 0))
        return Answer(seconds, tuple(one.token_ids for one in group.completions), steps, *counts)


def measure(options: Namespace, say: Say) -> dict[str, object]:
    """Figures of each workload.

    Raises:
        InputError: for an unknown workload.
        TrainingError: tokens with guesses are not those without.
    """
    works = uses(options.quick)
    names = [name for name in works if not options.workload or name.split(",")[0] in options.workload]
    if not names:
        known = ", ".join(dict.fromkeys(name.split(",")[0] for name in works))
        raise InputError(f"there is no workload {', '.join(options.workload)}; there are {known}")
    loaded = load_policy(ModelSection(name=options.model, dtype=options.dtype))
    drawing = Drawing(loaded, options.weights)
    facts: dict[str, object] = {}
    for name in names:
        work = works[name]
        say(name)
        answers, load = in_turns(
            {
                label: partial(drawing.draw, work, seed=options.seed, drafts=label == "with")
                for label in ("with", "without")
            },
            options.rounds * len(work.prompts),
            say,
            lambda done: f"{done['without'][-1].seconds / done['with'][-1].seconds:.2f}x",
        )
        facts[name] = {**_figures(name, answers["with"], answers["without"]), "load": load}
    return {**head(options, "drafts", "model", "quick", "weights", "rounds"), "workloads": facts}


def _figures(name: str, drafted: Sequence[Answer], plain: Sequence[Answer]) -> dict[str, float]:
    if any(a.tokens != b.tokens for a, b in zip(drafted, plain, strict=True)):
        raise TrainingError(f"{name}: tokens with guesses are not those without")
    ratio = paired(*([one.seconds for one in side] for side in (plain, drafted)))
    num_tokens = sum(len(ids) for one in drafted for ids in one.tokens)
    seconds, plain_s = (sum(one.seconds for one in side) for side in (drafted, plain))
    steps, guessed = sum(one.steps for one in drafted), sum(one.guessed for one in drafted)
    return {
        **ratio.facts("ratio"),
        "ratio": plain_s / seconds,
        "tokens_per_s": num_tokens / seconds,
        "tokens_per_s_without": num_tokens / plain_s,
        "steps_saved": 1 - steps / max(1, sum(one.steps for one in plain)),
        "guesses_per_step": guessed / max(1, steps),
        "share_right": sum(one.right for one in drafted) / max(1, guessed),
    }


def show(facts: Mapping[str, Any]) -> None:
    """Print a table."""
    rows = [
        (
            name,
            f"{one['ratio']:.2f}x",
            spread_text(one),
            *(f"{one[key]:.0f}" for key in ("tokens_per_s", "tokens_per_s_without")),
            f"{one['steps_saved']:.0%}",
            f"{one['guesses_per_step']:.2f}",
            f"{one['share_right']:.0%}",
        )
        for name, one in facts["workloads"].items()
    ]
    headings = ("", "ratio", "of a prompt (min-max)", "tok/s", "without", "steps saved", "guesses a step", "right")
    print_table(headings, rows)
    print(max(map(load_warning, facts["workloads"].values()), key=len))


main = benchmark(
    measure,
    show,
    *("model", "dtype", "workload", "threads", "rounds", "seed", "quick"),
    weights={"choices": ("model", "int8"), "default": "model", "help": "products of both sides"},
)


if __name__ == "__main__":
    run("drafts")
