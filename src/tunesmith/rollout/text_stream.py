"""Completions as they are drawn, for a reader who watches: their text piece by piece, and how many have ended."""

from collections.abc import Sequence as Series

from tunesmith.rollout.engine import OnProgress, OnText
from tunesmith.rollout.sequence import UNFINISHED, Decode, Sequence


class TextStream:
    """Gives the text of a completion piece by piece; the pieces joined are the completion's text.

    A piece has whole characters only, and never what may yet turn out to be the beginning of a stop string: that is
    held back until it is settled. Work per token does not grow with the completion.

    Example: with the stop string "END", the tokens "all", " EN" and "OUGH" give "all", " " and "ENOUGH".
    """

    def __init__(self, decode: Decode, stop_strings: tuple[str, ...] = ()) -> None:
        self._decode = decode
        self._stop_strings = stop_strings
        self._held = ""
        self._num_given = 0
        self._first = 0  # tokens decode differently at a beginning, so the last piece is decoded with the new one
        self._settled = 0
        self._before = ""  # text of the tokens from `_first` to `_settled`

    def push(self, token_ids: Series[int]) -> str:
        """The text that is new and settled; to be called with all ids of the completion after each one that is drawn,
        but for the one that ends it.
        """
        text = self._decode(list(token_ids[self._first :]))
        if len(text) <= len(self._before) or text.endswith(UNFINISHED):
            return ""
        self._held += text[len(self._before) :]
        self._first, self._settled = self._settled, len(token_ids)
        self._before = self._decode(list(token_ids[self._first :]))
        cut = len(self._held) - self._num_open()
        piece, self._held = self._held[:cut], self._held[cut:]
        self._num_given += len(piece)
        return piece

    def finish(self, text: str) -> str:
        """What `text`, the whole text of the ended completion, has beyond the pieces that were given."""
        rest = text[self._num_given :]
        self._num_given = max(self._num_given, len(text))
        return rest

    def _num_open(self) -> int:
        """Characters at the end that are the beginning of a stop string."""
        return max(
            (
                length
                for stop in self._stop_strings
                for length in range(1, min(len(stop), len(self._held) + 1))
                if self._held.endswith(stop[:length])
            ),
            default=0,
        )


class Watch:
    """Tells who watches what was drawn, and how many of `num_rows` completions have ended."""

    def __init__(self, num_rows: int, on_progress: OnProgress | None, on_text: OnText | None) -> None:
        self._num_rows = num_rows
        self._num_ended = 0
        self._on_progress = on_progress
        self._on_text = on_text
        self._streams: dict[tuple[int, int], TextStream] = {}

    def note(self, row: Sequence) -> None:
        """To be called after each token of `row`."""
        if self._on_text:
            self._tell(row, self._on_text)
        if row.finish_reason:
            self._num_ended += 1
            if self._on_progress:
                self._on_progress(self._num_ended, self._num_rows)

    def _tell(self, row: Sequence, on_text: OnText) -> None:
        key = (row.request, row.sample)
        if key not in self._streams:
            self._streams[key] = TextStream(row.decode, row.limits.stop_strings)
        stream = self._streams[key]
        new = stream.finish(row.text) if row.finish_reason else stream.push(row.token_ids)
        if new:
            on_text(row.request, row.sample, new)
        if row.finish_reason:
            del self._streams[key]
