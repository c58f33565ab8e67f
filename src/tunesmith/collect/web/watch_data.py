"""Data of the watch page, read from `metrics.jsonl`, `runs.db` and `votes.db`. All functions run in worker threads."""

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from tunesmith.base.runs.folder import finite
from tunesmith.collect.store.metric_log import MetricLog
from tunesmith.collect.store.records import Heartbeat, Metric, PolicyVersion
from tunesmith.collect.store.runs import RunReader, is_only_tried
from tunesmith.collect.store.vote_watch import VoteWatch
from tunesmith.observe.reports.figures import MAIN, PICTURES, REPLY, WAITING, labels

if TYPE_CHECKING:
    from tunesmith.collect.statistics.rater_report import CrowdReport

MAX_LINES = 8
"""Most lines of one chart, the number of colours; further metrics are in the table only."""

_STAGE = re.compile(r"time/(?!step_s)([^/]+)_s")

SILENT_S = 60.0
"""Age of a heartbeat after which a trainer counts as silent if its process lives on this machine, as dead if it ran
on another one."""

MAX_ROWS = 5_000
"""Most metrics of one event of the stream."""

MAX_BEHIND = 50_000
"""A client that lags behind by more metrics is told to fetch thinned series instead."""

_ENDS = {"finished": "finished", "stopped": "stopped", "ended": "stopped", "failed": "stopped", "died": "dead"}
_PARTS_OF_COST = 10  # a cached value that took a second is kept for ten

Json = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class News:
    """Metrics after a cursor, and the new cursor, the id of the last one.

    `is_reset`: too many to send, or another file, so the client must fetch thinned series. `is_behind`: there are more.
    """

    rows: Sequence[Metric]
    cursor: int
    is_reset: bool = False
    is_behind: bool = False


class Cached(Generic[T]):
    """`make` with its value reused for `max_age_s`, and for at least ten times as long as it took, so that a value that
    is slow to make leaves the processor to the pages. Thread-safe: one caller at a time renews it.
    """

    def __init__(self, make: Callable[[], T], max_age_s: float) -> None:
        self._make = make
        self._max_age_s = max_age_s
        self._lock = threading.Lock()
        self._found: tuple[float, T] | None = None  # until when it is reused, and the value

    def __call__(self) -> T:
        """The value, renewed if it is too old."""
        with self._lock:
            start_s = time.monotonic()
            if self._found is None or start_s > self._found[0]:
                value, cost_s = self._make(), time.monotonic() - start_s
                self._found = (start_s + max(self._max_age_s, _PARTS_OF_COST * cost_s), value)
            return self._found[1]


class Standings:
    """A function that computes the standings by `votes` again after a new vote between two versions or models. With
    `crowd` a leaderboard also has win rates by votes that count by what it says of their raters.
    """

    def __init__(self, votes: VoteWatch, crowd: "Callable[[], CrowdReport] | None" = None) -> None:
        self._votes = votes
        self._crowd = crowd
        self._state = -1
        self._found: list[Json] = []

    def __call__(self, base: str | None = None) -> list[Json]:
        """All versions and models that votes compare: against `base`, or as a leaderboard, the strongest first."""
        # Imported here because numpy takes 0.1 s to load.
        from tunesmith.collect.statistics.bradley_terry import leaderboard, standings
        from tunesmith.collect.statistics.rater_report import known_weights

        state, contests = self._votes.contests()
        if state != self._state:
            if base is None:
                found = leaderboard(contests, known_weights(self._crowd()) if self._crowd else None)
            else:
                found = standings(contests, base)
            self._found, self._state = [asdict(one) for one in found], state
        return self._found


class WatchData:
    """Versions, votes, metrics and the trainer's state. Safe to call from any number of threads.

    `heartbeat` is that of the trainer, by default the one in `runs`.
    """

    def __init__(
        self,
        metrics: MetricLog,
        runs: RunReader,
        votes: VoteWatch,
        heartbeat: Callable[[], Heartbeat | None] | None = None,
    ) -> None:
        self._metrics = metrics
        self._heartbeat = heartbeat or runs.heartbeat
        self._runs = runs
        self._votes = votes
        self._standings = Standings(votes)
        self._cached_state = Cached(self._state, max_age_s=0.4)
        self.versions = Cached(self._versions, max_age_s=1.0)
        """`versions`, oldest first: the trainer's record, its `measured` win rate and the estimate `from_votes`."""
        self.votes_per_minute = Cached(self._votes_per_minute, max_age_s=0.5)
        """`per_minute`: (minutes from now, votes) of the last hour; `total`; the mean over the `last_minutes`."""

    def names(self) -> Json:
        """`cursor`, the sorted `names` of all metrics, the charts (`pictures`) of them, and `recent`: the last step and
        value of each recently written one.
        """
        cursor, names, lately = self._metrics.last_id(), self._metrics.names(), self._metrics.recent(MAX_ROWS)
        return {
            "cursor": cursor,
            "names": names,
            "pictures": pictures(names, {name: one.value for name, one in lately.items()}),
            "recent": {name: [one.step, one.value] for name, one in lately.items()},
        }

    def series(self, names: Sequence[str], after: int, points: int) -> Json:
        """`series`: for each name the thinned `points` (id, step, time, value or null) with an id above `after`."""
        cursor = self._metrics.last_id()
        found: list[Json] = []
        for name in dict.fromkeys(names):
            line = self._metrics.series(name, after, points)
            found.append(
                {
                    "name": name,
                    "points": [[one.id, one.step, one.time, one.value] for one in line.points],
                    "num_points": line.num_points,
                    "is_sampled": line.is_sampled,
                    "last_id": line.last_id,
                }
            )
        return {"cursor": cursor, "series": found}

    def news(self, cursor: int) -> News:
        """At most `MAX_ROWS` metrics after `cursor`, or those of one step."""
        rows, num_left = self._metrics.after(cursor, MAX_ROWS)
        last = self._metrics.last_id()
        if num_left > MAX_BEHIND or cursor > last:  # a resumed run has cut the file back while no server looked
            return News((), last, is_reset=True)
        return News(rows, rows[-1].id if rows else cursor, is_behind=num_left > 0)

    def state(self) -> Json:
        """`kind` (none, running, silent, dead, stopped, finished), the trainer's activity (`doing`), its last `step`,
        and `age_s`, seconds since its last heartbeat."""
        found = self._cached_state()
        age_s = None if found["beat"] is None else round(max(0.0, time.time() - found["beat"]), 1)
        return {**found, "age_s": age_s}

    def _versions(self) -> Json:
        versions = self._runs.versions()
        base = versions[0].version if versions else 0
        standings = {one["name"]: one for one in self._standings(f"v{base}")}
        return {"base": base, "versions": [_version(one, standings.get(f"v{one.version}")) for one in versions]}

    def _votes_per_minute(self) -> Json:
        counts = self._votes.per_minute(time.time())
        return {
            "per_minute": [[index - len(counts) + 1, count] for index, count in enumerate(counts)],
            "total": self._votes.total,
            "last_minutes": sum(counts[-5:]) / 5,
        }

    def _state(self) -> Json:
        beat = self._heartbeat()
        kind = kind_of(beat, time.time())
        doing = beat.state if beat is not None and kind in ("running", "silent") and beat.state != "running" else ""
        return {
            "kind": kind,
            "doing": doing,
            "step": self._metrics.last_step(),
            "beat": None if beat is None else beat.time,
        }


def kind_of(beat: Heartbeat | None, now: float) -> str:
    """State of the trainer at `now` by its heartbeat: none, running, silent, dead, stopped or finished."""
    if beat is None:
        return "none"
    if beat.state in _ENDS:
        return _ENDS[beat.state]
    is_late = now - beat.time > SILENT_S
    if beat.host != socket.gethostname():
        return "dead" if is_late else "running"
    if not _is_alive(beat.pid):
        return "dead"
    return "silent" if is_late else "running"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _version(one: PolicyVersion, standing: Json | None) -> Json:
    facts = cast(Json, finite(asdict(one)))
    rate, low, high = (facts.pop(name) for name in ("win_rate", "win_rate_low", "win_rate_high"))
    for name in ("path", "last_vote_id", "last_feedback_id", "last_request_id"):
        del facts[name]
    measured = None if rate is None else {"win_rate": rate, "low": low, "high": high}
    return {**facts, "measured": measured, "from_votes": standing, "is_only_tried": is_only_tried(one)}


def pictures(names: Sequence[str], recent: Mapping[str, float | None] = MappingProxyType({})) -> list[Json]:
    """The charts that have at least one of the metrics `names`, main ones first. Of the stages those that take longest
    by `recent` values are shown.

    Each has `id`, `title`, `unit`, `lines` (name and label) and `is_main`: always visible, not in a collapsed section.
    """
    found: list[Json] = []
    for one in sorted(PICTURES, key=lambda one: one.id not in MAIN):
        matching = [name for name in names if re.fullmatch(one.pattern, name)][:MAX_LINES]
        found.append(_picture(one.id, one.title, one.unit, one.id in MAIN, labels(matching)))
    stages = {stage[0]: stage[1] for name in names if (stage := _STAGE.fullmatch(name))}
    if REPLY in names:
        stages[REPLY] = f"{WAITING} (in rollout)"
    longest = sorted(stages, key=lambda name: -(recent.get(name) or 0.0))[:MAX_LINES]
    found.append(_picture("stages", "Time of each stage", "seconds", True, {name: stages[name] for name in longest}))
    return [one for one in found if one["lines"]]


def _picture(id: str, title: str, unit: str, is_main: bool, labels: Mapping[str, str]) -> Json:
    lines = [{"name": name, "label": label} for name, label in labels.items()]
    return {"id": id, "title": title, "unit": unit, "is_main": is_main, "lines": lines}
