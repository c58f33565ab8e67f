"""Profiles as a picture of their timelines, in SVG, and as tables, in Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil

from benchmarks.opt_profile import OTHER, PART_NAMES, Call, Profile

_COLOURS = ("#4477aa", "#66ccee", "#ee6677", "#ccbb44", "#aa3377", "#228833", "#ee8866", "#994455", "#bbbbbb")
"""One for each of PART_NAMES; they can be told apart by people who see fewer colours (Paul Tol, "Colour schemes")."""

_LEFT, _WIDTH, _BAR, _GAP, _RIGHT = 150, 740, 34, 12, 110
_PIXELS = 0.5
"""Width of what has one colour: it bounds the size of the picture."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The same work before and after. `seconds_*` were measured without the profiler."""

    title: str
    before: Profile
    after: Profile
    seconds_before: float
    seconds_after: float


@dataclass(frozen=True, slots=True)
class _Bar:
    part: str
    left: float
    right: float


def picture(pairs: Sequence[Pair]) -> str:
    """An SVG: of each pair two bars over one axis of time, a colour for each part, white where nothing was called."""
    rows: list[str] = []
    top = 54.0
    for pair in pairs:
        longest_us = max(pair.before.wall_us, pair.after.wall_us)
        rows.append(_text(12, top + 14, pair.title, "font-weight='bold'"))
        top += 24
        for name, profile in (("before (torch)", pair.before), ("after (auto)", pair.after)):
            rows.append(_text(12, top + 22, name))
            rows.append(_lane(profile, top, longest_us))
            end = _LEFT + _WIDTH * profile.wall_us / longest_us
            rows.append(_text(end + 6, top + 22, _duration(profile.wall_us)))
            top += _BAR + _GAP
        top += 18
    width = _LEFT + _WIDTH + _RIGHT
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {top:.0f}' font-family='sans-serif' "
        f"font-size='13' role='img'><title>{escape(', '.join(pair.title for pair in pairs))}: before and after"
        f"</title><rect width='100%' height='100%' fill='#fff'/>{_legend()}{''.join(rows)}</svg>\n"
    )


def _legend() -> str:
    parts, left = [], 12.0
    for name, colour in zip(PART_NAMES, _COLOURS, strict=True):
        parts.append(
            f"<rect x='{left:.0f}' y='14' width='14' height='14' fill='{colour}'/>{_text(left + 19, 26, name)}"
        )
        left += 36 + 7.2 * len(name)
    return "".join(parts)


def _lane(profile: Profile, top: float, longest_us: float) -> str:
    frame = f"<rect x='{_LEFT}' y='{top:.0f}' width='{_WIDTH * profile.wall_us / longest_us:.1f}' height='{_BAR}' "
    paths: dict[str, list[str]] = {}
    for bar in _bars(profile.calls, _WIDTH / longest_us):
        paths.setdefault(bar.part, []).append(f"M{_LEFT + bar.left:.1f} {top:.0f}h{bar.right - bar.left:.1f}v{_BAR}")
    drawn = ""
    for part, moves in paths.items():
        closed = "".join(f"{move}H{move[1:].split()[0]}z" for move in moves)
        drawn += f"<path fill='{_COLOURS[PART_NAMES.index(part)]}' d='{closed}'/>"
    return f"{frame}fill='#fff' stroke='#999' stroke-width='0.5'/>{drawn}"


def _bars(calls: Sequence[Call], pixels_per_us: float) -> list[_Bar]:
    """Each half pixel has the colour of the part that took most of it, or none where calls took less than half of it;
    neighbours of one colour are one bar.
    """
    columns: dict[int, dict[str, float]] = {}
    for call in calls:
        left = call.start_us * pixels_per_us / _PIXELS
        right = left + call.duration_us * pixels_per_us / _PIXELS
        for column in range(int(left), ceil(right)):
            taken = columns.setdefault(column, {})
            taken[call.part] = taken.get(call.part, 0.0) + min(right, column + 1) - max(left, column)
    bars: list[_Bar] = []
    for column, taken in sorted(columns.items()):
        if sum(taken.values()) < 0.5:
            continue
        part, left = max(taken, key=lambda name: taken[name]), column * _PIXELS
        if bars and bars[-1].part == part and bars[-1].right == left:
            bars[-1] = _Bar(part, bars[-1].left, left + _PIXELS)
        else:
            bars.append(_Bar(part, left, left + _PIXELS))
    return bars


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f"<text x='{x:.0f}' y='{y:.0f}' {style}>{escape(text)}</text>"


def _duration(microseconds: float) -> str:
    return f"{microseconds / 1e6:.2f} s" if microseconds >= 1e6 else f"{microseconds / 1e3:.1f} ms"


def table(pair: Pair) -> str:
    """A row for each part: calls and time in them, before and after; then what lies between calls, and the whole."""
    lines = [
        "| part | calls before | calls after | ms before | ms after |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    before, after = pair.before, pair.after
    for part in PART_NAMES:
        counts = before.num_calls(part), after.num_calls(part)
        if any(counts):
            times = before.milliseconds(part), after.milliseconds(part)
            lines.append(_row("the rest" if part == OTHER else part, counts, times))
    lines.append(f"| between calls (Python, autograd) | | | {before.between_ms:,.1f} | {after.between_ms:,.1f} |")
    whole = before.wall_us / 1e3, after.wall_us / 1e3
    lines.append(_row("**in the profile**", (before.num_calls(), after.num_calls()), whole))
    lines.append(
        f"| **without the profiler** | | | {1e3 * pair.seconds_before:,.1f} | {1e3 * pair.seconds_after:,.1f} |"
    )
    if before.num_launches or after.num_launches:
        lines.append(f"| kernels launched on the GPU | {before.num_launches:,} | {after.num_launches:,} | | |")
    return "\n".join(lines)


def _row(name: str, counts: tuple[int, int], times: tuple[float, float]) -> str:
    return f"| {name} | {counts[0]:,} | {counts[1]:,} | {times[0]:,.1f} | {times[1]:,.1f} |"
