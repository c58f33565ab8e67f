"""Causes that no rule knows in advance: steps that take far longer than the others, and lines at which a run waits.

Both are measured, so what they cost is what could be saved at most.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tunesmith.base.runs.listing import number
from tunesmith.observe.profiling.cause import Cause
from tunesmith.observe.profiling.facts import Facts
from tunesmith.observe.profiling.places import Seen, Window, summed, within
from tunesmith.observe.profiling.tail import Tail
from tunesmith.observe.profiling.waits import ADVICE, PHRASES, Kind

_LEAST_TAIL, _LEAST_WAIT = 0.05, 0.03
_EXPLAINED = 0.3
"""Share of what slow steps lose from which on a line, or a figure, is named as the reason."""

_MAX_STEPS_SHOWN = 6

_WAITS: Mapping[Kind, str] = {
    "lock": "lock",
    "queue": "queue",
    "sleep": "sleep",
    "disk": "disk",
    "network": "network",
    "name_lookup": "name_lookup",
    "process": "child_process",
    "pipe": "pipe",
    "database": "database_lock",
    "file_lock": "file_lock",
    "memory": "memory_pressure",
    "gil": "gil",
}
"""Names of the causes that are a wait. A wait for a GPU is no loss: it computes."""

_EXPECTED: Mapping[Kind, tuple[str, ...]] = {
    **dict.fromkeys(("process", "network", "queue", "pipe"), ("rollout", "update", "reference", "old_policy")),
    "disk": ("checkpoint", "save"),
}
"""Stages that wait by design: for workers, a server, the critic's process; checkpoints have rules of their own."""

_IN_REWARD: Mapping[Kind, str] = {
    "sleep": "; where it stands for a wait for a service, make the function `async def` and wait for all requests at "
    "once with asyncio.gather",
    "process": "; for processes of the reward itself, raise its `workers`",
}


@dataclass(frozen=True, slots=True)
class _Figure:
    """A metric that explains slow steps: by its seconds, or, with `factor`, by being so many times its
    usual value. `stage` is the one that it is about.
    """

    name: str
    symptom: str
    evidence: str
    advice: str
    factor: float = 0.0
    stage: str = "step"


_FIGURES = (
    _Figure(
        "gc/pause_s",
        "Python's garbage collector stops the process.",
        "the collector takes {slow:.3g} s of such a step (gc/pause_s)",
        "make fewer objects that live long, or call gc.freeze() after large tables are loaded",
    ),
    _Figure(
        "cpu/throttled_s",
        "The quota of the control group stops the process.",
        "throttled for {slow:.3g} s of such a step (cpu/throttled_s)",
        "raise the quota of the container, or set run.num_threads to it",
    ),
    _Figure(
        "faults/major",
        "Pages are read back from disk.",
        "{slow:.0f} major page faults in such a step, {usual:.0f} in others (faults/major)",
        ADVICE["memory"],
        factor=10.0,
    ),
    _Figure(
        "completions/max_length",
        "A few completions are far longer than the others.",
        "the longest completion has {slow:.0f} tokens at such a step, {usual:.0f} at others (completions/max_length)",
        "lower rollout.max_new_tokens, which changes what is learnt from the longest completions, or penalize length",
        factor=1.5,
        stage="rollout",
    ),
)

_BY_STAGE: Mapping[str, str] = {
    "reward": "look at what the reward does in these steps, and give it a time limit, `timeout_s`",
    "rollout": "look at the lengths of the completions of these steps in samples.jsonl",
    "checkpoint": "put the run folder on a faster disk, or write checkpoints less often",
    "evaluate": "look at what the evaluation scores in these steps",
    "log": "leave out trackers that are slow, and look at the disk of the run folder",
    "callback": "look at what the callback does in these steps",
    "data": "look at where the data is read from",
}
_ANY_STAGE = "look at what else runs on this machine at these steps (cpu/others, cpu/stolen)"


def tail_causes(facts: Facts) -> Iterator[Cause]:
    """A cause for each stage in which slow steps lose a noticeable share of the run."""
    for tail in facts.tails:
        share = tail.lost_s / facts.run_s
        if share >= _LEAST_TAIL:
            yield _tail_cause(facts, tail, share)


def _tail_cause(facts: Facts, tail: Tail, share: float) -> Cause:
    place, figure = _place_of(facts, tail), _figure_of(facts, tail)
    stage = "all of their stages" if tail.path == "step" else f"`{tail.path}`"
    symptom = f"Some steps take far longer than the others, in {stage}"
    advice = _BY_STAGE.get(tail.path.partition("/")[0], _ANY_STAGE)
    if figure is not None:
        symptom, advice = f"{symptom}. {figure[0].symptom}", figure[0].advice
    elif place is not None:
        symptom, advice = f"{symptom}: it {PHRASES[place.kind]}.", _advice(place)
    else:
        symptom += "."
    usual = f"{tail.usual_s:.2g} s at others: {share:.0%} of the run"
    found = [f"{_steps(tail.steps)} take up to {tail.longest_s:.3g} s there, {usual}"]
    found += [] if figure is None else [figure[1]]
    found += [] if place is None else [str(place)]
    files = "metrics.jsonl, places.jsonl" if place is not None else "metrics.jsonl"
    saved_s = share * facts.mean_step_s
    return Cause(
        name="slow_steps",
        symptom=symptom,
        share=share,
        evidence=f"{'; '.join(found)} ({files}; {facts.num_timed} steps)",
        advice=advice,
        settings={},
        predicted_saving_s=saved_s,
        low=0.7 * saved_s,
        high=saved_s,
        figures={"stage": tail.path, "steps": list(tail.steps), "lost_s": tail.lost_s, **_figures(place)},
        is_urgent=False,
    )


def _steps(steps: Sequence[int]) -> str:
    shown = ", ".join(str(step) for step in steps[:_MAX_STEPS_SHOWN])
    if len(steps) > _MAX_STEPS_SHOWN:
        return f"{len(steps)} steps ({shown}, ...)"
    return f"step{'s' if len(steps) > 1 else ''} {shown}"


def _place_of(facts: Facts, tail: Tail) -> Seen | None:
    """The line at which slow steps spend more time than usual ones, if it is a good part of what they lose."""
    slow, usual = _split(facts.windows, set(tail.steps))
    usual_s = {_line(seen): seen.seconds for seen in summed(usual)}
    per_step = _num_steps(slow) / max(1, _num_steps(usual))
    excess = {
        seen: seen.seconds - per_step * usual_s.get(_line(seen), 0.0)
        for seen in summed(slow)
        if within(seen.stage, tail.path) and not seen.is_own_work
    }
    best = max(excess, key=lambda seen: excess[seen], default=None)
    return best if best is not None and excess[best] > _EXPLAINED * tail.lost_s else None


def _split(windows: Sequence[Window], steps: set[int]) -> tuple[list[Window], list[Window]]:
    """The windows with one of `steps`, and those without."""
    known = [window for window in windows if not window.is_new]
    return [one for one in known if one.has(steps)], [one for one in known if not one.has(steps)]


def _num_steps(windows: Sequence[Window]) -> int:
    return sum(window.last - window.first + 1 for window in windows)


def _line(seen: Seen) -> tuple[object, ...]:
    return seen.stage, seen.kind, seen.file, seen.function if seen.kind == "computes" else seen.line


def _figure_of(facts: Facts, tail: Tail) -> tuple[_Figure, str] | None:
    """The figure that explains the slow steps, with its values."""
    for figure in _FIGURES:
        if not within(tail.path, figure.stage):
            continue
        found = [
            (row.get("step") in tail.steps, x) for row in facts.rows if (x := number(row.get(figure.name))) is not None
        ]
        slow, usual = [x for is_slow, x in found if is_slow], [x for is_slow, x in found if not is_slow]
        if not slow or not usual:
            continue
        mean, others = statistics.mean(slow), statistics.median(usual)
        lost_s = tail.lost_s / max(1, len(tail.steps))
        is_reason = mean > figure.factor * max(others, 10.0) if figure.factor else mean - others > _EXPLAINED * lost_s
        if is_reason:
            return figure, figure.evidence.format(slow=mean, usual=others)
    return None


def wait_causes(facts: Facts, named: Sequence[str]) -> Iterator[Cause]:
    """A cause for each kind of wait that takes a noticeable share of usual steps, in a stage whose cause is not `named`
    already.
    """
    windows = facts.usual_windows()
    num_steps, found = _num_steps(windows), dict[tuple[str, Kind], list[Seen]]()
    for seen in summed(windows):
        stage = seen.stage.partition("/")[0]
        if seen.kind in _WAITS and stage not in _EXPECTED.get(seen.kind, ()):
            found.setdefault((stage, seen.kind), []).append(seen)
    for (stage, kind), places in found.items():
        seconds = sum(seen.seconds for seen in places) / num_steps
        share = min(1.0, seconds / facts.mean_step_s) if facts.mean_step_s else 0.0
        if share >= _LEAST_WAIT and not _is_named(stage, kind, named) and not _is_in_tail(facts, stage, kind):
            yield _wait_cause(facts, places[0], stage, share)


def _is_named(stage: str, kind: Kind, named: Sequence[str]) -> bool:
    """True if a rule has named the same wait."""
    by_stage = {"log": "logging", "checkpoint": "checkpoints", "evaluate": "evaluation"}
    by_stage |= {"callback": "slow_callback", "data": "slow_data"}
    remote = ("remote_reward_serial", "reward_not_overlapped")
    return (
        by_stage.get(stage) in named
        or _WAITS[kind] in named
        or (kind == "disk" and "slow_disk" in named and stage in ("log", "checkpoint"))
        or (kind == "network" and any(name in named for name in remote))
    )


def _is_in_tail(facts: Facts, stage: str, kind: Kind) -> bool:
    """True if every row of places has a slow step, and those lose their time by this wait."""
    is_mixed = all(window.has(facts.slow_steps) for window in facts.usual_windows())
    places = [place for tail in facts.tails if (place := _place_of(facts, tail)) is not None]
    return is_mixed and any((place.stage.partition("/")[0], place.kind) == (stage, kind) for place in places)


def _wait_cause(facts: Facts, place: Seen, stage: str, share: float) -> Cause:
    saved_s = share * facts.mean_step_s
    where = f"`{stage}`" if stage else "time outside of all stages"
    return Cause(
        name=_WAITS[place.kind],
        symptom=f"The step {PHRASES[place.kind]}, in {where}.",
        share=share,
        evidence=f"{place}: {saved_s:.3g} of {facts.mean_step_s:.3g} s a step (places.jsonl, {facts.num_timed} steps)",
        advice=_advice(place),
        settings={},
        predicted_saving_s=saved_s,
        low=0.5 * saved_s,
        high=saved_s,
        figures=_figures(place),
        is_urgent=False,
    )


def _advice(place: Seen) -> str:
    more = _IN_REWARD.get(place.kind, "") if within(place.stage, "reward") else ""
    return ADVICE[place.kind] + more


def _figures(place: Seen | None) -> dict[str, object]:
    if place is None:
        return {}
    figures: dict[str, object] = {"kind": place.kind, "file": place.file, "line": place.line, "text": place.text}
    return figures if place.others is None else {**figures, "others": f"{place.others}"}


def line_in(facts: Facts, stage: str, kinds: Sequence[Kind] = ()) -> str:
    """The line at which most of the time of `stage` goes at usual steps, as evidence of a rule; empty if it is unknown,
    or one of this package's that computes.
    """
    seen = [
        one for one in summed(facts.usual_windows()) if within(one.stage, stage) and (not kinds or one.kind in kinds)
    ]
    return str(seen[0]) if seen and not seen[0].is_own_work else ""
