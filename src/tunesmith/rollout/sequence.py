"""The state of one completion while it is drawn, and where it ends: a stop id, a stop string, or the length."""

from collections.abc import Callable
from dataclasses import dataclass, field

from tunesmith.core.errors import InputError
from tunesmith.schema.records import FinishReason

Decode = Callable[[list[int]], str]
"""The text of some token ids, without special tokens."""

UNFINISHED = "\ufffd"
"""What decoders put for bytes that are no character, or not yet a whole one."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a completion ends.

    A token of `stop_ids` ends it and is its last id; no such token may be drawn before `min_new_tokens` (see
    `Sequence.masks_stop_ids`). A text of `stop_strings` ends it with the token that completes the text, unless fewer
    than `min_new_tokens` are drawn by then; the string and what follows it are cut from the completion's text, the ids
    are kept as they were drawn.

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


class StopSearch:
    """Finds stop strings in a text that grows token by token, also where they span several tokens.

    Work per token does not grow with the completion: what is decoded is the last piece and the new token, and the only
    text searched before that is the longest stop string less one character. A run of tokens that do not yet make whole
    characters is one piece, decoded again until they do.
    """

    def __init__(self, decode: Decode, stops: tuple[str, ...]) -> None:
        self._decode = decode
        self._stops = stops
        self._num_kept = max(map(len, stops)) - 1
        self._pieces: list[str] = []
        self._tail = ""  # the last `_num_kept` characters of the pieces
        self._num_settled = 0  # characters in the pieces
        self._num_seen = 0  # characters searched, those of unsettled tokens included
        self._first = 0  # the last settled piece begins with this token: tokens decode differently at a beginning
        self._settled = 0  # tokens whose text stands in the pieces
        self._before = ""  # text of the tokens from `_first` to `_settled`

    def find(self, token_ids: list[int]) -> int | None:
        """Where the first stop string that the last token completed begins in the text; None if it completed none.

        To be called with all ids of the completion after each one that is drawn.
        """
        text = self._decode(token_ids[self._first :])
        fresh = text[len(self._before) :].rstrip(UNFINISHED)
        window = self._tail + fresh
        offset = self._num_settled - len(self._tail)
        found: list[int] = []
        for stop in self._stops:
            place = window.find(stop, max(0, self._num_seen - offset - len(stop) + 1))
            if place >= 0:
                found.append(offset + place)
        self._num_seen = max(self._num_seen, self._num_settled + len(fresh))
        if len(text) > len(self._before) and not text.endswith(UNFINISHED):
            self._settle(fresh, token_ids)
        return min(found, default=None)

    def text(self, end: int, token_ids: list[int]) -> str:
        """The first `end` characters of the text of `token_ids`, the ids that `find` was called with."""
        unsettled = self._decode(token_ids[self._first :])[len(self._before) :]
        return ("".join(self._pieces) + unsettled)[:end]

    def _settle(self, fresh: str, token_ids: list[int]) -> None:
        self._pieces.append(fresh)
        self._num_settled += len(fresh)
        self._tail = (self._tail + fresh)[-self._num_kept :] if self._num_kept else ""
        self._first, self._settled = self._settled, len(token_ids)
        self._before = self._decode(token_ids[self._first :])


@dataclass(slots=True, eq=False)
class Sequence:
    """One completion: sample `sample` of request `request`.

    `logps[t]` is the log-prob in nats of `token_ids[t]` under the distribution that it was drawn from, `raw_logps[t]`
    under the model itself; `values[t]`, from an engine with a value head, is the value of the state before it.
    `finish_reason` is None while it is drawn. `decode` is used for stop strings and for `text`.

    Example: a prompt of 5 tokens of which 2 more are drawn has `position == 7`: the next token's noise is keyed by
    (seed, request, sample, 7), and nothing else, so it does not matter what else is drawn at the same time.
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
    _cut: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.limits.stop_strings:
            self._search = StopSearch(self.decode, self.limits.stop_strings)

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
        """The completion's text: without the stop id, and cut at the stop string."""
        if self._search and self._cut is not None:
            return self._search.text(self._cut, self.token_ids)
        ended_by_id = self.finish_reason == "stop"
        return self.decode(self.token_ids[:-1] if ended_by_id else self.token_ids)

    def append(self, token_id: int, logp: float, raw_logp: float) -> bool:
        """Take the token that was drawn; True if the completion ends with it."""
        is_stop = token_id in self.limits.stop_ids and not self.masks_stop_ids
        self.token_ids.append(token_id)
        self.logps.append(logp)
        self.raw_logps.append(raw_logp)
        cut = self._search.find(self.token_ids) if self._search and not is_stop else None
        if cut is not None and not self.masks_stop_ids:
            self._cut = cut
        if is_stop or self._cut is not None:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.limits.max_new_tokens:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def extend(self, token_ids: list[int], logps: list[float], raw_logps: list[float]) -> bool:
        """Take tokens that were drawn one after the other; True if the completion ends with one of them.

        Tokens behind the end are dropped: a device that draws several in a row knows nothing of stop strings.
        """
        if self._search is not None:
            return any(map(self.append, token_ids, logps, raw_logps))
        count = min(self.num_left, len(token_ids))
        first = max(0, self.limits.min_new_tokens - len(self.token_ids))
        stop = next((index for index in range(first, count) if token_ids[index] in self.limits.stop_ids), None)
        count = count if stop is None else stop + 1
        self.token_ids += token_ids[:count]
        self.logps += logps[:count]
        self.raw_logps += raw_logps[:count]
        if stop is not None:
            self.finish_reason = "stop"
        elif self.num_left == 0:
            self.finish_reason = "length"
        return self.finish_reason is not None
