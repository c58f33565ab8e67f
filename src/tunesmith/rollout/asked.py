"""What a call of `generate` asks for, checked, and what it gives back: the same for every engine."""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tunesmith.batch.rollout import Completion, Group, SamplingParams
from tunesmith.models.loaded import PreTrainedModel, PreTrainedTokenizerBase, context_length
from tunesmith.models.tokenizer import decode, encode_prompt, stop_token_ids
from tunesmith.rollout.engine import OnGroup, check_prompt_lengths, check_request
from tunesmith.rollout.sequence import Decode, Limits
from tunesmith.rollout.sequence import Sequence as DrawnSequence
from tunesmith.schema.records import Prompt

_UNKNOWN_CONTEXT = 1_000_000
"""Stands for the context length of a model that does not tell its own."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that can be served. `seed` is the request's own, or a fresh one."""

    prompts: Sequence[Prompt]
    prompt_ids: tuple[tuple[int, ...], ...]
    n: int
    limits: Limits
    decode: Decode
    seed: int
    vocabulary_size: int

    @property
    def num_completions(self) -> int:
        """Completions of all prompts."""
        return self.n * len(self.prompts)

    def groups(self, rows: Iterable[DrawnSequence], version: int) -> list[Group]:
        """One group for each prompt, with those of its completions that are in `rows`, which have ended."""
        completions: list[list[Completion]] = [[] for _ in self.prompts]
        for row in rows:
            completions[row.request].append(_completion(row))
        return [
            Group(prompt, ids, tuple(drawn), version)
            for prompt, ids, drawn in zip(self.prompts, self.prompt_ids, completions, strict=True)
        ]


class HandOut:
    """Gives a group to `on_group` as soon as the last of its completions has ended."""

    def __init__(self, asked: Asked, version: int, on_group: OnGroup | None) -> None:
        self._asked = asked
        self._version = version
        self._on_group = on_group
        self._ended: dict[int, list[DrawnSequence]] = {}

    def note(self, rows: Iterable[DrawnSequence]) -> None:
        """To be called with the completions that have ended since the last call."""
        if self._on_group is None:
            return
        for row in rows:
            ended = self._ended.setdefault(row.request, [])
            ended.append(row)
            if len(ended) < self._asked.n:
                continue
            drawn = sorted(self._ended.pop(row.request), key=lambda sequence: sequence.sample)
            prompt, ids = self._asked.prompts[row.request], self._asked.prompt_ids[row.request]
            self._on_group(row.request, Group(prompt, ids, tuple(map(_completion, drawn)), self._version))


def ask(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    n: int,
    sampling: SamplingParams,
) -> Asked:
    """The request as token ids and limits.

    Raises:
        InputError: for a request that cannot be served.
    """
    vocabulary_size = model.config.get_text_config().vocab_size
    check_request(prompts, n, sampling, vocabulary_size=vocabulary_size)
    prompt_ids = tuple(tuple(encode_prompt(tokenizer, prompt)) for prompt in prompts)
    room = context_length(model) or _UNKNOWN_CONTEXT
    check_prompt_lengths(prompts, [len(ids) for ids in prompt_ids], vocabulary_size, room, sampling.max_new_tokens)
    stop_ids = frozenset({*stop_token_ids(model, tokenizer), *sampling.stop_token_ids})
    return Asked(
        prompts,
        prompt_ids,
        n,
        Limits(sampling.max_new_tokens, sampling.min_new_tokens, stop_ids, sampling.stop_strings),
        lambda ids: decode(tokenizer, ids),
        secrets.randbits(62) if sampling.seed is None else sampling.seed,
        vocabulary_size,
    )


def _completion(row: DrawnSequence) -> Completion:
    assert row.finish_reason is not None, "only completions that have ended are given out"
    return Completion(
        tuple(row.token_ids),
        tuple(row.logps),
        tuple(row.raw_logps),
        row.text,
        row.finish_reason,
        tuple(row.values) if row.values else None,
    )
