"""Workloads of `benchmarks.rollout`: prompts, number of completions, sampling.

`plain` and `shared` are pieces of a fixed number of tokens from the sixteen instructions in `instructions.txt`.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tunesmith.base.core.errors import InputError, TrainingError
from tunesmith.base.core.seeds import permutation
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.models.loaded import PreTrainedTokenizerBase
from tunesmith.engine.models.tokenizer import encode_prompt

NAMES = ("plain", "seed", "shared")
BATCHES = {f"batch{size}": size for size in (1, 4, 16, 64, 128, 256)}
"""Workloads of so many prompts at a time, for the table of latency and throughput."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Token ids of the prompts, completions of each, and how they are drawn.

    With `is_exact_length` every completion has `max_new_tokens` tokens: its end-of-sequence token is switched off.
    """

    name: str
    prompt_ids: tuple[tuple[int, ...], ...]
    num_completions: int
    sampling: SamplingParams
    is_exact_length: bool

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts with their token ids, for an engine."""
        return [Prompt(f"{self.name}:{i}", "", token_ids=ids) for i, ids in enumerate(self.prompt_ids)]

    @property
    def rows(self) -> list[tuple[int, ...]]:
        """Each prompt as often as it has completions, in the order of an engine's groups."""
        return [ids for ids in self.prompt_ids for _ in range(self.num_completions)]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(map(len, self.prompt_ids))


_FULL = {"plain": (64, 32, 1, 64), "seed": (16, 0, 8, 128), "shared": (1, 512, 32, 32)}
_QUICK = {"plain": (8, 16, 1, 8), "seed": (4, 0, 2, 12), "shared": (1, 64, 4, 8)}
"""Prompts, tokens of a prompt (0: a whole instruction), completions of each, new tokens."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Seconds of a draw, tokens of each completion in the order of `Workload.rows`, and the tokens if kept."""

    seconds: float
    lengths: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...] = ()

    @property
    def num_tokens(self) -> int:
        """New tokens of all completions."""
        return sum(self.lengths)


def checked(work: Workload, seconds: float, tokens: Sequence[Sequence[int]], keeps_tokens: bool) -> Drawn:
    """A contender that does less than requested has no speed."""
    lengths, most = tuple(map(len, tokens)), work.sampling.max_new_tokens
    if len(lengths) != len(work.rows) or min(lengths) < 1 or max(lengths) > most:
        raise TrainingError(
            f"{len(lengths)} completions of {min(lengths)} to {max(lengths)} tokens came for {work.name}"
        )
    if work.is_exact_length and set(lengths) != {most}:
        raise TrainingError(f"completions of {min(lengths)} tokens came, not of {most}")
    return Drawn(seconds, lengths, tuple(map(tuple, tokens)) if keeps_tokens else ())


def instructions() -> list[str]:
    """The sixteen instructions."""
    return Path(__file__).with_name("instructions.txt").read_text(encoding="utf-8").splitlines()


def workload(name: str, tokenizer: PreTrainedTokenizerBase, context: int | None, *, quick: bool) -> Workload:
    """The workload `name`; `quick` makes it small enough for a smoke run on a tiny model.

    Raises:
        InputError: for an unknown name, and for a model whose `context` is too short.
    """
    if name not in NAMES and name not in BATCHES:
        raise InputError(f"there is no workload {name!r}; there are {', '.join((*NAMES, *BATCHES))}")
    of_batch = (BATCHES.get(name, 0), 32, 1, 4 if quick else 24)
    num_prompts, prompt_tokens, num_completions, new_tokens = (_QUICK if quick else _FULL).get(name, of_batch)
    if name == "seed":
        prompt_ids = _chats(tokenizer, num_prompts)
        sampling = SamplingParams(new_tokens, temperature=0.7, top_p=0.9, repetition_penalty=1.05)
    else:
        prompt_ids = _pieces(tokenizer, num_prompts, prompt_tokens)
        sampling = SamplingParams(new_tokens)
    positions = max(map(len, prompt_ids)) + new_tokens
    if context is not None and positions > context:
        raise InputError(
            f"workload {name} needs {positions} positions, but the model's context holds {context}; take "
            "another model, or --quick"
        )
    return Workload(name, prompt_ids, num_completions, sampling, is_exact_length=name != "seed")


def _chats(tokenizer: PreTrainedTokenizerBase, num_prompts: int) -> tuple[tuple[int, ...], ...]:
    """The shortest instructions as chats; as text where the tokenizer has no chat template."""
    chosen = sorted(instructions(), key=len)[:num_prompts]
    texts = [text for text in instructions() if text in chosen]
    has_template = bool(tokenizer.chat_template)
    return tuple(
        encode_prompt(tokenizer, Prompt(str(i), ({"role": "user", "content": text},) if has_template else text + "\n"))
        for i, text in enumerate(texts)
    )


def _pieces(tokenizer: PreTrainedTokenizerBase, num_pieces: int, length: int) -> tuple[tuple[int, ...], ...]:
    """Pieces of `length` tokens, one after the other in a text of the words of all instructions, shuffled.

    No two begin alike, so that an engine that shares prefixes skips no work.
    """
    tokens: list[int] = []
    words = " ".join(instructions()).split()
    for index in itertools.count():
        if len(tokens) >= num_pieces * length:
            break
        text = " ".join(words[i] for i in permutation(0, index, len(words)))
        tokens += tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[operator]
    return tuple(tuple(tokens[i * length : (i + 1) * length]) for i in range(num_pieces))
