"""What became of the rows of a source: used, or refused for a reason. Nothing is dropped without being counted."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tunesmith.core.errors import DataError
from tunesmith.core.log import get_logger

_log = get_logger(__name__)

Kind = Literal[
    "blank line",
    "not parsed",
    "cut off",
    "not UTF-8",
    "bad character",
    "wrong type",
    "missing column",
    "bad value",
    "empty",
    "same completions",
    "repeated id",
    "too long",
    "too short",
    "refused by the chat template",
]
"""Why a row cannot be used: what a tally counts by. The message of the error says more."""

_NUM_SHOWN = 10


class RowError(DataError):
    """The reason why one row cannot be used. Readers collect these; the caller sees all of them in one `DataError`."""

    def __init__(self, reason: str, kind: Kind = "bad value") -> None:
        super().__init__(reason)
        self.kind: Kind = kind


@dataclass(frozen=True, slots=True)
class Tally:
    """Rows of a source, rows that were used, and why the others were not, by reason.

    Example: `Tally(num_rows=5, num_used=3, reasons={"blank line": 1, "empty": 1})`.
    """

    num_rows: int
    num_used: int
    reasons: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def num_dropped(self) -> int:
        """Rows that were not used."""
        return self.num_rows - self.num_used

    def __str__(self) -> str:
        listed = ", ".join(f"{kind} {count}" for kind, count in self.reasons.items())
        return f"{self.num_used} of {self.num_rows} rows used" + (f"; dropped: {listed}" if listed else "")

    def to_json(self) -> dict[str, object]:
        """The figures as JSON types."""
        return {"num_rows": self.num_rows, "num_used": self.num_used, "reasons": dict(self.reasons)}


class BadRows:
    """The bad rows of one source, collected over all stages that look at its rows, from the parser to the tokenizer.

    Strict, as by default, each stage ends with an error that lists them. With `skip` they are dropped and counted.
    """

    def __init__(self, *, skip: bool = False) -> None:
        self.skip = skip
        self.source = "the list of rows"
        self.num_rows = 0
        self._problems: list[str] = []
        self._kinds: Counter[str] = Counter()

    def opened(self, source: str) -> None:
        """Say what the source is called in messages."""
        self.source = source

    def saw(self, num_rows: int) -> None:
        """Count rows of the source, good or bad. Each is counted once, by the stage that reads it."""
        self.num_rows += num_rows

    def add(self, where: str, error: RowError) -> None:
        """Note that the row at `where` (`pairs.jsonl:7`) cannot be used."""
        self._problems.append(f"{where}: {error}")
        self._kinds[error.kind] += 1

    def check(self) -> None:
        """End a stage. Raises DataError naming and counting the bad rows, unless they are skipped and others are
        left.
        """
        num_bad = len(self._problems)
        if num_bad and (not self.skip or num_bad >= self.num_rows):
            verb, tail = ("row" if num_bad == 1 else "rows"), ""
            if self.skip:
                tail = "; none is left to use"
            raise DataError(
                f"{num_bad} bad {verb} of {self.num_rows} in {self.source}{tail}; correct or remove:\n  {self._shown()}"
                + ("" if self.skip else "\nskip_bad: true drops bad rows and counts them")
            )

    def finish(self) -> Tally:
        """The tally after the last stage; what was dropped is also logged as a warning."""
        kinds = dict(sorted(self._kinds.items(), key=lambda item: (-item[1], item[0])))
        tally = Tally(self.num_rows, self.num_rows - len(self._problems), kinds)
        if self._problems:
            _log.warning("%s: %s\n  %s", self.source, tally, self._shown())
        return tally

    def _shown(self) -> str:
        shown = "\n  ".join(self._problems[:_NUM_SHOWN])
        num_more = len(self._problems) - _NUM_SHOWN
        return shown + (f"\n  and {num_more} more" if num_more > 0 else "")
