"""The time of the profiled steps, from the events of a trace: by stage, operator and launch, and its gaps.

A gap is time of the main thread in which no operator runs: Python, a wait, or a native call that torch does not see.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tunesmith.observe.profiling.chrome import KERNELS, LAUNCHES, OPERATOR, STAGE, STEP, Event, thread_of

OTHER = "other"
"""The stage of what no span covers."""

MAX_GAPS = 20


@dataclass(slots=True)
class OperatorUse:
    """Calls of one operator in one stage: time with and without the operators that it calls, in s, and GPU launches."""

    stage: str
    operator: str
    calls: int = 0
    total_s: float = 0.0
    self_s: float = 0.0
    launches: int = 0
    kernel_s: float = 0.0


@dataclass(slots=True)
class StageUse:
    """A stage in all profiled steps, times in s.

    `self_s` leaves out the stages inside it. Of that, operators of the stage's own thread run for `operator_s`, in
    `dispatches` calls from outside of torch, and none runs for `gap_s`. `launches` are those of the GPU. Stages of the
    main thread and `other` sum to the steps; `is_main` is false for those that run beside it.
    """

    stage: str
    is_main: bool = True
    calls: int = 0
    total_s: float = 0.0
    self_s: float = 0.0
    operator_s: float = 0.0
    gap_s: float = 0.0
    dispatches: int = 0
    launches: int = 0
    kernel_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Gap:
    """Time without operators in the main thread; both in s, since the first profiled step began."""

    stage: str
    start_s: float
    duration_s: float


@dataclass(slots=True)
class Uses:
    """Stages in the order of their first begin, operators with the most time of their own first, longest gaps."""

    steps: list[tuple[str, float]]
    stages: list[StageUse]
    operators: list[OperatorUse]
    gaps: list[Gap]


@dataclass(slots=True)
class _Open:
    """An event that encloses what is looked at."""

    end_us: float
    stage: StageUse
    operator: OperatorUse | None = None


@dataclass(slots=True)
class _Tables:
    stages: dict[str, StageUse] = field(default_factory=dict[str, StageUse])
    operators: dict[tuple[str, str], OperatorUse] = field(default_factory=dict[tuple[str, str], OperatorUse])

    def stage(self, name: str) -> StageUse:
        return self.stages.setdefault(name, StageUse(name))

    def operator(self, stage: str, name: str) -> OperatorUse:
        return self.operators.setdefault((stage, name), OperatorUse(stage, name))


def analyse(events: Sequence[Event], main_thread: int) -> Uses:
    """The uses in `events`, which are sorted by time, longest first where they begin together."""
    kernels = {event["args"].get("correlation"): event["dur"] / 1e6 for event in events if event.get("cat") in KERNELS}
    threads: dict[int, list[Event]] = {}
    for event in events:
        if event["ph"] == "X" and event["cat"] in (STAGE, STEP, OPERATOR, *LAUNCHES):
            threads.setdefault(thread_of(event), []).append(event)
    tables = _Tables()
    main = threads.pop(main_thread, [])
    _add_thread(main, tables, kernels)
    changes = list(_stage_changes(main))
    for thread in threads.values():  # such as autograd's on a GPU: its operators belong to what the main thread does
        _add_thread(thread, tables, kernels, changes)
    for stage in tables.stages.values():
        stage.gap_s = max(0.0, stage.self_s - stage.operator_s)
    if (other := tables.stages.pop(OTHER, None)) is not None:
        other.total_s = other.self_s
        tables.stages[OTHER] = other
    steps = [(event["name"], event["dur"] / 1e6) for event in main if event["cat"] == STEP]
    operators = sorted(tables.operators.values(), key=lambda use: -use.self_s)
    gaps = sorted(_gaps(main, changes), key=lambda gap: -gap.duration_s)[:MAX_GAPS]
    return Uses(steps, list(tables.stages.values()), operators, gaps)


def _add_thread(
    events: Sequence[Event],
    tables: _Tables,
    kernels: dict[object, float],
    changes: Sequence[tuple[float, str]] | None = None,
) -> None:
    """Add the events of one thread, which enclose or follow each other; `changes` are those of the main thread's stage,
    None for that thread itself.
    """
    enclosing: list[_Open] = []
    for event in events:
        while enclosing and event["ts"] >= enclosing[-1].end_us:
            enclosing.pop()
        parent = enclosing[-1] if enclosing else None
        if event["cat"] in (STAGE, STEP):
            stage = tables.stage(OTHER if event["cat"] == STEP else event["name"])
            stage.is_main = changes is None
            stage.calls += 1
            stage.total_s += event["dur"] / 1e6
            stage.self_s += event["dur"] / 1e6
            if parent is not None:
                parent.stage.self_s -= event["dur"] / 1e6
            enclosing.append(_Open(event["ts"] + event["dur"], stage))
            continue
        stage = parent.stage if parent else tables.stage(_stage_at(changes or (), event["ts"]))
        if event["cat"] == OPERATOR:
            use = _add_operator(event, stage, enclosing, tables, covers=changes is None or parent is not None)
            enclosing.append(_Open(event["ts"] + event["dur"], stage, use))
        elif "Launch" in event["name"]:
            for user in (stage, parent.operator) if parent and parent.operator else (stage,):
                user.launches += 1
                user.kernel_s += kernels.get(event["args"].get("correlation"), 0.0)


def _add_operator(
    event: Event, stage: StageUse, enclosing: Sequence[_Open], tables: _Tables, *, covers: bool
) -> OperatorUse:
    use, seconds = tables.operator(stage.stage, event["name"]), event["dur"] / 1e6
    parent = enclosing[-1].operator if enclosing else None
    use.calls += 1
    use.self_s += seconds
    if not any(outer.operator is use for outer in enclosing):  # an operator may call itself
        use.total_s += seconds
    if parent is not None:
        parent.self_s -= seconds
    else:
        stage.dispatches += 1
        stage.operator_s += seconds if covers else 0.0
    return use


def _stage_changes(events: Sequence[Event]) -> Iterator[tuple[float, str]]:
    """(time in us, the innermost stage from then on) of one thread."""
    enclosing: list[tuple[float, str]] = []
    for event in events:
        if event["cat"] not in (STAGE, STEP):
            continue
        while enclosing and event["ts"] >= enclosing[-1][0]:
            end_us, _ = enclosing.pop()
            yield end_us, enclosing[-1][1] if enclosing else OTHER
        name = OTHER if event["cat"] == STEP else event["name"]
        enclosing.append((event["ts"] + event["dur"], name))
        yield event["ts"], name
    while enclosing:
        end_us, _ = enclosing.pop()
        yield end_us, enclosing[-1][1] if enclosing else OTHER


def _stage_at(changes: Sequence[tuple[float, str]], time_us: float) -> str:
    place = bisect_right(changes, time_us, key=lambda change: change[0])
    return changes[place - 1][1] if place else OTHER


def _gaps(events: Sequence[Event], changes: Sequence[tuple[float, str]]) -> Iterator[Gap]:
    """The times between operators of the main thread, from the first step's begin to the last one's end."""
    steps = [event for event in events if event["cat"] == STEP]
    if not steps:
        return
    end_us, last_us = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
    for event in (*events, {"cat": OPERATOR, "ts": last_us, "dur": 0.0}):
        if event["cat"] != OPERATOR:
            continue
        if event["ts"] > end_us:
            middle_us = (end_us + event["ts"]) / 2
            yield Gap(_stage_at(changes, middle_us), end_us / 1e6, (event["ts"] - end_us) / 1e6)
        end_us = max(end_us, event["ts"] + event["dur"])
