"""Text on a terminal while it is drawn."""

from typing import TextIO

from tunesmith.cli.output import visible


class LiveText:
    """Shows pieces of a text as they come, with what could steer the terminal escaped.

    With `strips`, white space at both ends is left out.
    """

    def __init__(self, stream: TextIO, *, strips: bool = False) -> None:
        self._stream = stream
        self._strips = strips
        self._begun = False
        self._spaces = ""

    def add(self, piece: str) -> None:
        """Show `piece`, but for white space that may turn out to be the end."""
        if self._strips:
            piece = self._spaces + piece
            kept = piece.rstrip()
            self._spaces = piece[len(kept) :]
            piece = kept if self._begun else kept.lstrip()
        if piece:
            self._begun = True
            self._stream.write(visible(piece))
            self._stream.flush()

    def end(self, text: str = "") -> None:
        """Show `text` and end the line."""
        self._stream.write(text + "\n")
        self._stream.flush()
