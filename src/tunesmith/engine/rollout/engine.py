"""The interface of a rollout engine, and a request, the same for every engine: checks, token ids, callbacks, groups."""

import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from numbers import Real
from typing import Protocol, TypedDict

from tunesmith.base.core.errors import ContextFullError, InputError
from tunesmith.base.core.seeds import LARGEST_SEED
from tunesmith.base.core.trace import went_on
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Completion, Group, SamplingParams
from tunesmith.engine.kernels.sample.torch_impl import SMALLEST_TEMPERATURE, TEMPERATURE_RULE
from tunesmith.engine.models.loaded import PreTrainedModel, PreTrainedTokenizerBase, context_length
from tunesmith.engine.models.tokenizer import (
    decode,
    decode_marked,
    encode_prompt,
    end_token_id,
    open_token_ids,
    skipped_tokens,
    stop_token_ids,
)
from tunesmith.engine.rollout.kv_cache import KVCache, blocks_for
from tunesmith.engine.rollout.sampler import NoiseKey
from tunesmith.engine.rollout.scheduler import PromptRequest, Scheduler
from tunesmith.engine.rollout.sequence import Decode, Limits, TextStream
from tunesmith.engine.rollout.sequence import Sequence as DrawnSequence

_UNKNOWN_CONTEXT = 1_000_000
"""Context length of a model whose configuration names none."""


OnProgress = Callable[[int, int], None]
"""Called with (completions finished, completions in all)."""

OnText = Callable[[int, int, str], None]
"""Called with (index of the prompt, sample, new text) while completions are drawn.

The texts of one completion, joined, are its `Completion.text`. Only whole characters are passed, and no possible
beginning of a stop string.
"""

OnGroup = Callable[[int, Group], None]
"""Called with (index of the prompt, its group) when all completions of the prompt have ended, in the order in which
groups end. The engine waits for it, so it must return at once.
"""


@dataclass(frozen=True, slots=True)
class Continuation:
    """The next turn of a conversation: all ids in front of it, and its tokens at most."""

    prompt_ids: tuple[int, ...]
    max_new_tokens: int


Reply = Future[Continuation | None]
"""The continuation of a turn, None if it was the last, once that is known."""

OnTurn = Callable[[int, Completion], Reply]
"""Called with (index of the prompt, the turn) when a turn ends. It must return at once, and its future must end."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Conversations of several turns: `on_turn` is given each, and replies. At most `max_tokens` stand behind the first
    prompt of a conversation, replies included. `first` has the limit of each first turn, at least that of the call's
    sampling; None if that is all. `keys` has the noise of each conversation, where the call is a part of a larger one.
    """

    on_turn: OnTurn
    max_tokens: int
    first: tuple[int, ...] | None = None
    keys: tuple[NoiseKey, ...] | None = None


class Functions(TypedDict, total=False):
    """The functions that `Engine.generate` calls, by the names of its arguments."""

    on_progress: OnProgress | None
    on_text: OnText | None
    on_group: OnGroup | None


class Engine(Protocol):
    """Draws completions from a model's current weights; opened by `factory.open_engine`.

    `name` is shown: `native`, `device`, `transformers`, `vllm` or `workers`.
    """

    name: str

    @property
    def is_exact(self) -> bool:
        """True if `Completion.raw_logps` are measured to equal the trainer's log-probs to the bit."""
        ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: SamplingParams,
        *,
        on_progress: OnProgress | None = None,
        on_text: OnText | None = None,
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        """One group of `n` completions for each prompt, in the order of the prompts.

        `on_group` has been called with every group when the call returns; an engine may do so only at the end.

        Raises:
            InputError: the request cannot be served; nothing was drawn.
            TrainingError: logits are not finite, or no token is allowed; the engine's log-probs of fixed tokens are
                not the trainer's; or the weights changed meanwhile.
            ModelError: the model was changed into one that the engine does not know.
            GenerationInterrupted: on Ctrl-C, with the completions that had ended.
        """
        ...

    def converse(self, prompts: Sequence[Prompt], sampling: SamplingParams, dialogue: Dialogue) -> int:
        """Draw a conversation of several turns behind each prompt; `dialogue.on_turn` is given all that is drawn.
        Returns the version of the weights.

        `sampling.max_new_tokens` is of the first turns. Sampled ids are kept: the prompt of a turn begins with those of
        the turns before it, unless `on_turn` says otherwise. The tokens do not depend on how long a reply takes.

        Raises:
            As `generate`, and what a reply raises.
        """
        ...

    def unload(self) -> None:
        """Free cache and packed weights; the next `generate` rebuilds them."""
        ...


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C during `generate`; a `KeyboardInterrupt`, so it need not be handled.

    `groups` are the prompts with at least one finished completion, with the finished completions only, in the order of
    the request.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        super().__init__("interrupted while completions were drawn")
        self.groups = tuple(groups)


@dataclass(frozen=True, slots=True)
class Request:
    """A checked call of `generate`: `n` completions of each prompt, at most `num_slots` at a time.

    `seed` is the caller's, or a random one; `version` is stamped on the groups. A conversation has at most `max_tokens`
    behind its prompt, and as many in its first turn as `first` says; None for a request of single completions.
    """

    prompts: Sequence[Prompt]
    prompt_ids: tuple[tuple[int, ...], ...]
    n: int
    limits: Limits
    decode: Decode
    seed: int
    vocabulary_size: int
    num_slots: int
    version: int
    max_tokens: int | None = None
    first: tuple[int, ...] | None = None

    @property
    def num_completions(self) -> int:
        """Completions of all prompts."""
        return self.n * len(self.prompts)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all completions: each prompt counts `n` times."""
        return self.n * sum(map(len, self.prompt_ids))

    @property
    def longest(self) -> int:
        """Upper bound of the tokens of a sequence."""
        return max(map(len, self.prompt_ids)) + self.most_behind

    @property
    def most_behind(self) -> int:
        """Upper bound of the tokens behind a prompt."""
        return self.limits.max_new_tokens if self.max_tokens is None else self.max_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks of the key/value cache with which no completion ever waits for another's."""
        prompt_blocks = blocks_for(max(map(len, self.prompt_ids)))
        # A completion may begin in the middle of a shared block, which it then copies.
        num_held = self.num_slots if self.max_tokens is None else len(self.prompts)  # replies are awaited with blocks
        of_completions = num_held * (blocks_for(self.most_behind) + 2)
        return min(len(self.prompts), 2 * num_held) * prompt_blocks + of_completions

    @property
    def num_tables(self) -> int:
        """Block tables: a completion's and that of a prompt for each slot, and those of conversations that wait."""
        return 2 * self.num_slots + (0 if self.max_tokens is None else len(self.prompts))

    def open_scheduler(self, cache: KVCache, *, prefill_tokens: int) -> Scheduler:
        """A scheduler of all completions of the request."""
        scheduler = Scheduler(
            cache,
            self.decode,
            num_slots=self.num_slots,
            prefill_tokens=prefill_tokens,
            keeps_blocks=self.max_tokens is not None,
        )
        limits = [self.limits] * len(self.prompt_ids)
        if self.first is not None:
            limits = [replace(self.limits, max_new_tokens=length) for length in self.first]
        scheduler.add(PromptRequest(index, ids, self.n, limits[index]) for index, ids in enumerate(self.prompt_ids))
        return scheduler

    def group(self, index: int, sequences: Iterable[DrawnSequence]) -> Group:
        """The group of prompt `index` with these completions, which have ended."""
        return Group(self.prompts[index], self.prompt_ids[index], tuple(map(completion_of, sequences)), self.version)

    def groups(self, sequences: Iterable[DrawnSequence]) -> list[Group]:
        """One group for each prompt, with those of its completions that are in `sequences`, which have ended."""
        of_prompt: list[list[DrawnSequence]] = [[] for _ in self.prompts]
        for sequence in sequences:
            of_prompt[sequence.request].append(sequence)
        return [self.group(index, drawn) for index, drawn in enumerate(of_prompt)]

    def interrupted(self, sequences: Iterable[DrawnSequence]) -> GenerationInterrupted:
        """The error after Ctrl-C, with these completions, which had ended."""
        return GenerationInterrupted([group for group in self.groups(sequences) if group.completions])


class Callbacks:
    """Calls the caller's functions while the completions of `request` are drawn."""

    def __init__(
        self,
        request: Request,
        *,
        on_progress: OnProgress | None = None,
        on_text: OnText | None = None,
        on_group: OnGroup | None = None,
    ) -> None:
        self._request = request
        self.on_progress = on_progress
        self.on_text = on_text
        self.on_group = on_group
        self._num_ended = 0
        self._streams: dict[tuple[int, int], TextStream] = {}
        self._ended: dict[int, list[DrawnSequence]] = {}

    def note(self, drawn: Iterable[DrawnSequence], ended: Iterable[DrawnSequence]) -> None:
        """Report a step: `drawn` are the sequences that got a token, `ended` those of them that ended with it."""
        went_on()
        if self.on_text:
            for sequence in drawn:
                self._send_text(sequence, self.on_text)
        finished = list(ended)
        self._num_ended += len(finished)
        if finished and self.on_progress:  # once for all: of equal length, as many end at a time as there are slots
            self.on_progress(self._num_ended, self._request.num_completions)
        if self.on_group:
            for sequence in finished:
                self._collect(sequence, self.on_group)

    def _send_text(self, sequence: DrawnSequence, on_text: OnText) -> None:
        key = sequence.request, sequence.sample
        if key not in self._streams:
            self._streams[key] = TextStream(sequence.decode, sequence.context, sequence.limits.stop_strings)
        stream = self._streams[key]
        new = stream.finish(sequence.text) if sequence.finish_reason else stream.push(sequence.token_ids)
        if new:
            on_text(*key, new)
        if sequence.finish_reason:
            del self._streams[key]

    def _collect(self, sequence: DrawnSequence, on_group: OnGroup) -> None:
        """Hand out the group whose last completion this is."""
        index = sequence.request
        ended = self._ended.setdefault(index, [])
        ended.append(sequence)
        if len(ended) == self._request.n:
            ended = sorted(self._ended.pop(index), key=lambda one: one.sample)
            on_group(index, self._request.group(index, ended))


def make_request(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    n: int,
    sampling: SamplingParams,
    num_slots: int,
    version: int,
) -> Request:
    """The request as token ids and limits; at most `num_slots` completions at a time, from weights of `version`.

    Raises:
        InputError: the request cannot be served.
    """
    vocabulary_size = model.config.get_text_config().vocab_size
    check_request(prompts, n, sampling, vocabulary_size=vocabulary_size)
    prompt_ids = tuple(tuple(encode_prompt(tokenizer, prompt)) for prompt in prompts)
    context = context_length(model) or _UNKNOWN_CONTEXT
    check_prompt_lengths(prompts, [len(ids) for ids in prompt_ids], vocabulary_size, context, sampling.max_new_tokens)
    own: set[int | None] = set(stop_token_ids(model, tokenizer))
    if any(prompt.is_conversational for prompt in prompts):
        own.add(end_token_id(tokenizer, is_conversational=True))
    drawable = (token for token in own if token is not None and token < vocabulary_size)  # others are never drawn
    stop_ids = frozenset({*drawable, *sampling.stop_token_ids})
    return Request(
        prompts,
        prompt_ids,
        n,
        Limits(sampling.max_new_tokens, sampling.min_new_tokens, stop_ids, sampling.stop_strings),
        decode_of(tokenizer, with_marks=bool(sampling.stop_strings)),
        secrets.randbits(62) if sampling.seed is None else sampling.seed,
        vocabulary_size,
        min(num_slots, n * len(prompts)),
        version,
    )


def decode_of(tokenizer: PreTrainedTokenizerBase, *, with_marks: bool) -> Decode:
    """The text of token ids; `with_marks` for stop strings that may name special tokens."""
    decoding = Decode(lambda ids: decode(tokenizer, ids), open_token_ids(tokenizer))
    if not with_marks:
        return decoding
    marks = skipped_tokens(tokenizer)
    return replace(decoding, marked_text=lambda ids: decode_marked(tokenizer, ids), marks=marks)


def run_request(request: Request, scheduler: Scheduler, draw: Callable[[], None]) -> list[Group]:
    """The groups of `request` after `draw()` has run `scheduler` to its end; its blocks are freed whatever happens.

    The use of its slots goes to the open trace.

    Raises:
        GenerationInterrupted: on Ctrl-C, with the completions that had ended.
    """
    try:
        draw()
    except KeyboardInterrupt as interrupt:
        raise request.interrupted(scheduler.cancel_all()) from interrupt
    finally:
        finished = scheduler.cancel_all()
    scheduler.usage.record(request.prompt_tokens + scheduler.resumed_tokens)
    return request.groups(finished)


def check_request(
    prompts: Sequence[Prompt], n: int, sampling: SamplingParams, *, vocabulary_size: int | None = None
) -> None:
    """Check a request that does not depend on an engine.

    With `vocabulary_size`, stop ids and biased tokens must be ids of the vocabulary.

    Raises:
        InputError: naming the argument, its value and what is allowed.
    """
    if not isinstance(prompts, list | tuple) or not all(isinstance(prompt, Prompt) for prompt in prompts):
        raise InputError("prompts must be a list of Prompt records; tunesmith.load_prompts makes them of texts or rows")
    if not prompts:
        raise InputError("no prompts were given; give at least one")
    if n < 1:
        raise InputError(f"n is {n}; ask for at least 1 completion of each prompt")
    temperature = sampling.temperature
    if not (temperature == 0 or SMALLEST_TEMPERATURE <= temperature < float("inf")):
        raise InputError(f"temperature is {temperature}; it must be {TEMPERATURE_RULE}")
    if not 0 < sampling.top_p <= 1:
        raise InputError(f"top_p is {sampling.top_p}; it must lie in (0, 1], where 1 is off")
    if not 0 <= sampling.min_p < 1:
        raise InputError(f"min_p is {sampling.min_p}; it must lie in [0, 1), where 0 is off")
    if sampling.top_k < 0:
        raise InputError(f"top_k is {sampling.top_k}; it must be 0 (off) or more")
    if not 0 < sampling.repetition_penalty < float("inf"):
        raise InputError(f"repetition_penalty is {sampling.repetition_penalty}; it must be positive, where 1 is off")
    seed = sampling.seed
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= LARGEST_SEED):
        raise InputError(
            f"seed is {seed!r}; it must be a whole number in [0, {LARGEST_SEED}], or None for a random one"
        )
    stop_ids = _stop_ids(sampling)
    # A record that checks itself: both limits of length, and the types of ids and strings.
    Limits(sampling.max_new_tokens, sampling.min_new_tokens, stop_ids, sampling.stop_strings)
    _check_bias(sampling.logit_bias)
    if vocabulary_size is not None:
        _check_ids(stop_ids, sampling.logit_bias, vocabulary_size)


def _stop_ids(sampling: SamplingParams) -> frozenset[int]:
    given = sampling.stop_token_ids
    if isinstance(given, str | int):
        raise InputError(f"stop_token_ids is {given!r}; give a tuple of token ids, and texts as stop_strings")
    return frozenset(given)


def _check_bias(bias: Mapping[int, float]) -> None:
    if not isinstance(bias, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - users may not check types
        raise InputError(f"logit_bias is {bias!r}; give a mapping of token ids to numbers")
    for token, value in bias.items():
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"logit_bias is for {token!r}; its keys must be token ids, whole numbers from 0 up")
        if not isinstance(value, Real) or math.isnan(value) or value == float("inf"):
            raise InputError(f"logit_bias of token {token} is {value!r}; give a finite number, or -inf to forbid it")


def _check_ids(stop_ids: frozenset[int], bias: Mapping[int, float], vocabulary_size: int) -> None:
    for name, ids in (("stop_token_ids", stop_ids), ("logit_bias", bias)):
        if ids and max(ids) >= vocabulary_size:
            raise InputError(f"{name} names token id {max(ids)}; ids must lie in [0, {vocabulary_size})")
    if sum(value == float("-inf") for value in bias.values()) == vocabulary_size:
        raise InputError(
            f"logit_bias forbids all {vocabulary_size} tokens of the vocabulary; leave at least one that can be drawn"
        )


def check_prompt_lengths(
    prompts: Sequence[Prompt], lengths: Sequence[int], vocabulary_size: int, context_length: int, max_new_tokens: int
) -> None:
    """Refuse prompts that are empty, hold ids outside the vocabulary, or leave too little context for `max_new_tokens`.

    Raises:
        InputError: naming the prompt by its id.
    """
    for prompt, length in zip(prompts, lengths, strict=True):
        if length == 0:
            raise InputError(f"prompt {prompt.id} is empty; give at least one token of text")
        if length + max_new_tokens > context_length:
            raise ContextFullError(
                f"prompt {prompt.id} has {length} tokens and {max_new_tokens} are to be drawn, but the model's context "
                f"holds {context_length}; shorten the prompt or lower max_new_tokens"
            )
        bad = [token for token in prompt.token_ids or () if not 0 <= token < vocabulary_size]
        if bad:
            raise InputError(f"prompt {prompt.id} holds token id {bad[0]}; ids must lie in [0, {vocabulary_size})")


def completion_of(sequence: DrawnSequence) -> Completion:
    """The completion that was drawn; `sequence` has ended."""
    assert sequence.finish_reason is not None, "only completions that have ended are returned"
    return Completion(
        tuple(sequence.token_ids),
        tuple(sequence.logps),
        tuple(sequence.raw_logps),
        sequence.text,
        sequence.finish_reason,
        tuple(sequence.values) if sequence.values else None,
    )
