"""The lines at which the seconds of the steps went, read from `places.jsonl` of a run; `stacks.py` finds them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunesmith.base.config.yaml_text import is_mapping
from tunesmith.base.runs.folder import PLACES
from tunesmith.base.runs.listing import number, read_rows
from tunesmith.observe.profiling.waits import ADVICE, PHRASES, Kind

_OWN = "/tunesmith/"


@dataclass(frozen=True, slots=True)
class Seen:
    """Seconds at one line within some steps. `others` is what the thread with the lock did meanwhile, with
    `num_threads` threads in all.
    """

    stage: str
    kind: Kind
    file: str
    line: int
    function: str
    text: str
    seconds: float
    inner: str = ""
    others: "Seen | None" = None
    num_threads: int = 1

    @property
    def is_own_work(self) -> bool:
        """True if code of Tunesmith computes there."""
        return self.kind == "computes" and _OWN in self.file

    @property
    def where(self) -> str:
        """The line, as `reward.py:12 in score, time.sleep(4.0)`."""
        text = f", `{self.text}`" if self.text else ""
        return f"{self.file}:{self.line} in {self.function}{text}"

    def __str__(self) -> str:
        threads = f" ({self.num_threads} threads)" if self.num_threads > 1 else ""
        behind = "" if self.others is None else f"; meanwhile another thread {PHRASES[self.others.kind]} at "
        inside = "" if not self.inner or self.kind == "computes" else f", inside of {self.inner}"
        return f"{PHRASES[self.kind]}{threads} at {self.where}{inside}" + (
            f"{behind}{self.others.where}" if self.others is not None else ""
        )


@dataclass(frozen=True, slots=True)
class Window:
    """The places of the steps `first` to `last`. `is_new` marks those of the first step of a process."""

    first: int
    last: int
    is_new: bool
    places: Sequence[Seen]

    def has(self, steps: Collection[int]) -> bool:
        """True if one of `steps` is in it."""
        return any(self.first <= step <= self.last for step in steps)


def read_places(run: Path) -> list[Window]:
    """All rows of a run's `places.jsonl`; damaged ones are left out."""
    return [window for row in read_rows(run / PLACES) if (window := _window(row)) is not None]


def _window(row: Mapping[str, object]) -> Window | None:
    first, last, places = number(row.get("first_step")), number(row.get("step")), row.get("places")
    if first is None or last is None or first > last or not isinstance(places, list):
        return None
    found = [seen for one in places if is_mapping(one) and (seen := _seen(one)) is not None]
    return Window(int(first), int(last), row.get("new") is True, found)


def _seen(row: Mapping[str, object]) -> Seen | None:
    kind, line, others = row.get("kind"), number(row.get("line")), row.get("others")
    if kind not in ADVICE or line is None:
        return None
    return Seen(
        stage=str(row.get("stage") or ""),
        kind=kind,
        file=str(row.get("file") or "?"),
        line=int(line),
        function=str(row.get("function") or "?"),
        text=str(row.get("text") or ""),
        seconds=number(row.get("s")) or 0.0,
        inner=str(row.get("inner") or ""),
        others=_seen(others) if is_mapping(others) else None,
        num_threads=int(number(row.get("threads")) or 1),
    )


def summed(windows: Sequence[Window]) -> list[Seen]:
    """The places of all `windows` with their seconds together, the longest first."""
    found: dict[tuple[object, ...], list[Seen]] = {}
    for window in windows:
        for seen in window.places:
            where = seen.function if seen.kind == "computes" else seen.line
            found.setdefault((seen.stage, seen.kind, seen.file, where), []).append(seen)
    return sorted(map(_total, found.values()), key=lambda seen: -seen.seconds)


def _total(found: Sequence[Seen]) -> Seen:
    most = max(found, key=lambda seen: (seen.others is not None, seen.seconds))
    seconds = sum(seen.seconds for seen in found)
    return Seen(
        most.stage,
        most.kind,
        most.file,
        most.line,
        most.function,
        most.text,
        seconds,
        most.inner,
        most.others,
        max(seen.num_threads for seen in found),
    )


def within(stage: str, path: str) -> bool:
    """True if `stage` is the stage `path` or inside of it; time outside of all stages is `other`, all is `step`."""
    return path == "step" or (stage or "other") == path or stage.startswith(f"{path}/")
