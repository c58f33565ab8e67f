"""The state of one completion while it is drawn, its end (a stop id, a stop string, the length), and its text."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

from tunesmith.base.core.errors import InputError
from tunesmith.base.schema.records import FinishReason
from tunesmith.engine.models.call_formats import num_open
from tunesmith.engine.models.tokenizer import text_after

UNFINISHED = "\ufffd"
"""The replacement character, which decoders emit for invalid or incomplete UTF-8."""

_CONTEXTS = (8, 64, 512)
"""Numbers of a prompt's last ids that are tried as the context of its completions."""

_MOST_CONTEXTS = 4096
"""Prompts whose context is kept: an engine may draw for ever."""


@dataclass(frozen=True, slots=True, eq=False)
class Decode:
    """The text of some token ids, without special tokens: `text(ids)`.

    The text of neighbouring `open_ids` is not settled until another token follows (`tokenizer.open_token_ids`).
    `marked_text(ids)` is the text with special tokens, which are `marks`.
    """

    text: Callable[[list[int]], str]
    open_ids: frozenset[int] = frozenset()
    marked_text: Callable[[list[int]], str] | None = None
    marks: frozenset[str] = frozenset()
    _contexts: dict[tuple[int, ...], list[int]] = field(default_factory=dict[tuple[int, ...], list[int]])

    def __call__(self, token_ids: list[int]) -> str:
        """The text of `token_ids`."""
        return self.text(token_ids)

    def with_marks(self) -> "Decode | None":
        """The text with special tokens."""
        return self.marked_text and Decode(self.marked_text, self.open_ids)

    def naming_marks(self, stops: tuple[str, ...]) -> tuple[str, ...]:
        """Those of `stops` that name a special token, so that they occur in the text with special tokens alone."""
        return tuple(stop for stop in stops if any(mark in stop for mark in self.marks))

    def context(self, prompt_ids: tuple[int, ...]) -> list[int]:
        """The last ids of a prompt, behind which a completion has the text that it has behind all of them.

        They begin with a whole character and show some text: a decoder treats the first token with text otherwise.
        """
        if prompt_ids not in self._contexts:
            if len(self._contexts) >= _MOST_CONTEXTS:
                self._contexts.clear()
            tails = (list(prompt_ids[-size:]) for size in _CONTEXTS if size < len(prompt_ids))
            self._contexts[prompt_ids] = next(filter(self._is_text, tails), list(prompt_ids))
        return self._contexts[prompt_ids]

    def _is_text(self, token_ids: list[int]) -> bool:
        text = self.text(token_ids)
        return bool(text.strip()) and UNFINISHED not in text and token_ids[0] not in self.open_ids


@dataclass(frozen=True, slots=True)
class Limits:
    """Stop conditions of a completion.

    A token of `stop_ids` ends it and is its last id; it is masked before `min_new_tokens`. A string of `stop_strings`
    ends it with the token that completes the string, unless fewer than `min_new_tokens` are drawn; the text is cut
    before the string, the ids are kept. A string that names a special token is searched in the text with special
    tokens, any other in the text without.

    Raises:
        InputError: naming the limit, its value and what is allowed.
    """

    max_new_tokens: int = 64
    min_new_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {self.max_new_tokens}; allow at least 1")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise InputError(
                f"min_new_tokens is {self.min_new_tokens}; it must lie between 0 and max_new_tokens, "
                f"{self.max_new_tokens}"
            )
        if isinstance(self.stop_strings, str):
            raise InputError(f"stop strings are given as the one text {self.stop_strings!r}; give a tuple of texts")
        for stop in self.stop_strings:
            if not isinstance(stop, str) or not stop:
                raise InputError(f"{stop!r} is no stop string; give texts of one character or more")
        for stop in self.stop_ids:
            if isinstance(stop, bool) or not isinstance(stop, int) or stop < 0:
                raise InputError(f"{stop!r} is no stop id; give token ids, whole numbers from 0 up")


class IncrementalDecoder:
    """Decodes a completion behind the ids `context` token by token; work per token does not grow with its length.

    A tokenizer decodes a token differently at the beginning of a text than within it, so new tokens are decoded
    together with the piece before them. Tokens that do not yet make whole characters are decoded again with the next.
    """

    def __init__(self, decode: Decode, context: list[int]) -> None:
        self._decode = decode
        self._piece = context  # the last settled ids
        self._num_settled = 0  # tokens whose text is settled
        self._before = decode(context)

    def unsettled(self, token_ids: list[int]) -> str:
        """Text of the tokens after the settled ones; `token_ids` are all ids of the completion."""
        return text_after(self._before, self._decode(self._piece + token_ids[self._num_settled :]))

    def settle(self, token_ids: list[int]) -> bool:
        """Mark all of `token_ids` as settled, and return True; False if their text, which is not empty, may yet change
        with the next ones.
        """
        if token_ids[-1] in self._decode.open_ids:
            return False
        self._piece, self._num_settled = token_ids[self._num_settled :], len(token_ids)
        self._before = self._decode(self._piece)
        return True


class StopSearch:
    """Finds stop strings in a text that grows token by token, also where they span several tokens.

    Of the settled text, only the longest stop string less one character is searched again.
    """

    def __init__(self, decode: Decode, context: list[int], stops: tuple[str, ...]) -> None:
        self._decoder = IncrementalDecoder(decode, context)
        self._stops = stops
        self._num_kept = max(map(len, stops)) - 1
        self._pieces: list[str] = []
        self._tail = ""  # the last `_num_kept` characters of the pieces
        self._num_settled = 0  # characters in the pieces
        self._num_seen = 0  # characters searched, those of unsettled tokens included
        self._window = ""  # the characters that were searched last

    def find(self, token_ids: list[int]) -> int | None:
        """Index, in the text, of the first stop string that the last token completed; None if it completed none.

        Call it with all ids of the completion after each new one.
        """
        text = self._decoder.unsettled(token_ids)
        fresh = text.rstrip(UNFINISHED)
        self._window = window = self._tail + fresh
        offset = self._num_settled - len(self._tail)
        found: list[int] = []
        for stop in self._stops:
            index = window.find(stop, max(0, self._num_seen - offset - len(stop) + 1))
            if index >= 0:
                found.append(offset + index)
        self._num_seen = max(self._num_seen, self._num_settled + len(fresh))
        if text and not text.endswith(UNFINISHED) and self._decoder.settle(token_ids):
            self._pieces.append(fresh)
            self._num_settled += len(fresh)
            self._tail = (self._tail + fresh)[-self._num_kept :] if self._num_kept else ""
        return min(found, default=None)

    @property
    def num_open(self) -> int:
        """Characters at the end of the text that are the beginning of a stop string."""
        return num_open(self._window, self._stops)

    def text(self, end: int, token_ids: list[int]) -> str:
        """The first `end` characters of the text of `token_ids`, the ids that `find` was called with."""
        return ("".join(self._pieces) + self._decoder.unsettled(token_ids))[:end]


@dataclass(slots=True, eq=False)
class Sequence:
    """One completion: sample `sample` of request `request`.

    `logps[t]` is the log-prob in nats of `token_ids[t]` under the distribution that it was drawn from, `raw_logps[t]`
    under the model itself; `values[t]`, from an engine with a value head, is the value of the state before it.
    `finish_reason` is None while it is drawn. `decode` is used for stop strings and for `text`.

    Example: after a prompt of 5 tokens and 2 drawn tokens, `position == 7`. The next token's noise is keyed by (seed,
    prompt, sample, 7) only, so it does not depend on other completions.
    """

    request: int
    sample: int
    prompt_ids: tuple[int, ...]
    limits: Limits
    decode: Decode
    token_ids: list[int] = field(default_factory=list[int])
    logps: list[float] = field(default_factory=list[float])
    raw_logps: list[float] = field(default_factory=list[float])
    values: list[float] = field(default_factory=list[float])
    finish_reason: FinishReason | None = None
    _search: StopSearch | None = field(default=None, init=False, repr=False)
    _marked_search: StopSearch | None = field(default=None, init=False, repr=False)
    _cut: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.limits.stop_strings:
            self._search = StopSearch(self.decode, self.context, self.limits.stop_strings)
            self._marked_search = _marked_search(self.decode, self.context, self.limits.stop_strings)

    @property
    def context(self) -> list[int]:
        """The ids of the prompt that the text of the completion depends on."""
        return self.decode.context(self.prompt_ids)

    @property
    def position(self) -> int:
        """Position, counted from the prompt's first token, of the token that is drawn next."""
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def num_left(self) -> int:
        """Tokens that may yet be drawn."""
        return self.limits.max_new_tokens - len(self.token_ids)

    @property
    def masks_stop_ids(self) -> bool:
        """True while no token of `limits.stop_ids` may be drawn."""
        return len(self.token_ids) < self.limits.min_new_tokens

    @property
    def text(self) -> str:
        """The completion's text behind its prompt: without the stop id, and cut at the stop string."""
        if self._search and self._cut is not None:
            return self._search.text(self._cut, self.token_ids)
        shown = self.token_ids[:-1] if self.finish_reason == "stop" else self.token_ids
        return IncrementalDecoder(self.decode, self.context).unsettled(shown)

    def append(self, token_id: int, logp: float, raw_logp: float) -> bool:
        """Append a token; True if the completion ends with it."""
        is_stop = token_id in self.limits.stop_ids and not self.masks_stop_ids
        self.token_ids.append(token_id)
        self.logps.append(logp)
        self.raw_logps.append(raw_logp)
        cut = self._found() if self._search and not is_stop else None
        if cut is not None and not self.masks_stop_ids:
            self._cut = cut
        if is_stop or self._cut is not None:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.limits.max_new_tokens:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def _found(self) -> int | None:
        """The place to cut the text, if the last token completed a stop string."""
        assert self._search is not None
        cut = self._search.find(self.token_ids)
        marked = self._marked_search.find(self.token_ids) if self._marked_search else None
        if marked is None:
            return cut
        unmarked = self._without_marks(marked)
        return unmarked if cut is None else min(cut, unmarked)

    def _without_marks(self, end: int) -> int:
        """The number of characters, without special tokens, of the first `end` of the text with special tokens."""
        marked = self.decode.with_marks()
        assert marked is not None

        def shown(decode: Decode, count: int) -> str:
            return IncrementalDecoder(decode, self.context).unsettled(self.token_ids[:count]).rstrip(UNFINISHED)

        numbers = range(len(self.token_ids) + 1)
        whole = bisect_right(numbers, end, key=lambda count: len(shown(marked, count))) - 1  # tokens that end before it
        before = len(shown(self.decode, whole))
        return min(before + end - len(shown(marked, whole)), len(shown(self.decode, whole + 1)))

    def extend(self, token_ids: list[int], logps: list[float], raw_logps: list[float], values: list[float]) -> bool:
        """Append consecutive tokens; True if the completion ends with one of them. `values` may be empty.

        Tokens after the end are dropped: a device that draws several in a row does not check stop strings.
        """
        if self._search is not None:
            has_ended = any(map(self.append, token_ids, logps, raw_logps))
            self.values += values[: len(self.token_ids) - len(self.values)]
            return has_ended
        count = min(self.num_left, len(token_ids))
        first = max(0, self.limits.min_new_tokens - len(self.token_ids))
        stop = next((index for index in range(first, count) if token_ids[index] in self.limits.stop_ids), None)
        count = count if stop is None else stop + 1
        self.token_ids += token_ids[:count]
        self.logps += logps[:count]
        self.raw_logps += raw_logps[:count]
        self.values += values[:count]
        if stop is not None:
            self.finish_reason = "stop"
        elif self.num_left == 0:
            self.finish_reason = "length"
        return self.finish_reason is not None


class TextStream:
    """The text of a completion piece by piece; the pieces joined are the completion's text.

    A piece has whole characters only. The beginning of a possible stop string is held back until it is settled.

    Example: with the stop string "END", the tokens "all", " EN" and "OUGH" give "all", " " and "ENOUGH".
    """

    def __init__(self, decode: Decode, context: list[int], stop_strings: tuple[str, ...] = ()) -> None:
        self._decoder = IncrementalDecoder(decode, context)
        self._stop_strings = stop_strings
        self._marked_search = _marked_search(decode, context, stop_strings)
        self._held = ""
        self._num_given = 0

    def push(self, token_ids: list[int]) -> str:
        """The new, settled text; call it with all ids of the completion after each new one but the last."""
        if self._marked_search:
            self._marked_search.find(token_ids)
        text = self._decoder.unsettled(token_ids)
        if not text or text.endswith(UNFINISHED) or not self._decoder.settle(token_ids):
            return ""
        self._held += text
        # Of the beginning of a stop string with special tokens, at most all characters are text.
        num_marked = self._marked_search.num_open if self._marked_search else 0
        cut = max(0, len(self._held) - max(num_open(self._held, self._stop_strings), num_marked))
        piece, self._held = self._held[:cut], self._held[cut:]
        self._num_given += len(piece)
        return piece

    def finish(self, text: str) -> str:
        """The rest of `text`, the whole text of the ended completion, after the pieces that were given."""
        return text[self._num_given :]


def _marked_search(decode: Decode, context: list[int], stops: tuple[str, ...]) -> StopSearch | None:
    """The search for those of `stops` that name a special token; None if none does."""
    marked, naming = decode.with_marks(), decode.naming_marks(stops)
    return StopSearch(marked, context, naming) if marked and naming else None
