"""Numbers and names as a reader wants to see them."""

import json
from collections.abc import Mapping
from typing import Any

from tunesmith.base.runs.listing import number

Facts = Mapping[str, Any]
"""A JSON object: a row of `metrics.jsonl`, a sample, the figures of a comparison."""

MAX_CHARACTERS = 4_000
"""Longer samples are truncated in a report; the JSONL file has the whole text."""

_MINUS = "\u2212"
UNKNOWN = "\u2013"
"""Placeholder of a missing or non-finite number."""


def decimal(value: object, digits: int = 3) -> str:
    """The number with `digits` decimals, fewer if it is large; a dash if it is not a finite number."""
    x = number(value)
    if x is None:
        return UNKNOWN
    size = abs(x)
    if x == int(x) and size < 1e15 and isinstance(value, int):
        return f"{int(x):,}".replace(",", "\u202f").replace("-", _MINUS)
    if size != 0 and (size < 10**-digits or size >= 1e7):
        return f"{x:.2e}".replace("-", _MINUS)
    return f"{x:.{digits if size < 100 else 1}f}".replace("-", _MINUS)


def score(value: object) -> str:
    """The number with two decimals however small it is, or a dash: scores of one kind, one below the other."""
    x = number(value)
    return UNKNOWN if x is None else f"{x:.2f}".replace("-", _MINUS).replace(f"{_MINUS}0.00", "0.00")


def signed(value: object, digits: int = 3) -> str:
    """Like `decimal`, with a plus sign in front of positive numbers."""
    x = number(value)
    return f"+{decimal(value, digits)}" if x is not None and x > 0 else decimal(value, digits)


def p_value(value: object) -> str:
    """`p = 0.012`, or `p < 0.001`."""
    x = number(value)
    if x is None:
        return f"p {UNKNOWN}"
    return "p < 0.001" if x < 0.001 else f"p = {x:.2g}"


def percent(value: object) -> str:
    """A share as a whole percentage."""
    x = number(value)
    return UNKNOWN if x is None else f"{100 * x:.0f}\u202f%"


def memory_size(gb: float) -> str:
    """`12.3 GB`, or `4.5 MB` where a tenth of a gigabyte would be rounded to nothing."""
    return f"{gb:.1f} GB" if gb >= 0.1 else f"{gb * 1000:.1f} MB"


def count_of(number: int, noun: str) -> str:
    """`1 step`, `2,000 steps`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def duration(seconds: object) -> str:
    """Seconds as `840 ms`, `12.3 s`, `4 min 05 s` or `2 h 10 min`."""
    x = number(seconds)
    if x is None:
        return UNKNOWN
    if x < 1:
        return f"{1000 * x:.0f} ms"
    if x < 60:
        return f"{x:.1f} s"
    whole = round(x)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def cut(text: object, limit: int = MAX_CHARACTERS) -> str:
    """The text, truncated at `limit` characters with the number of missing ones."""
    whole = prompt_text(text)
    return whole if len(whole) <= limit else f"{whole[:limit]} \u2026 ({len(whole) - limit} more characters)"


def short(text: object, limit: int = 60) -> str:
    """The text on one line of at most `limit` characters."""
    line = " ".join(prompt_text(text).split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "\u2026"


def prompt_text(content: Any) -> str:
    """A prompt as text: itself, or one line `role: content` for each message."""
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        return "\n".join(_message(message) for message in content)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return "" if content is None else str(content)


def answer_text(sample: Facts) -> str:
    """The completion of a sample; of a trajectory every turn, its calls and what it was rewarded with."""
    if not isinstance(sample.get("messages"), list):
        return prompt_text(sample.get("completion"))
    messages: list[Any] = sample["messages"]
    lines = [_turn(message) for message in messages]
    reason, error = sample.get("stop_reason"), sample.get("error")
    if reason:
        lines.append(f"[ended: {reason}{f', {error}' if error else ''}]")
    return "\n".join(lines)


def _turn(message: Any) -> str:
    if not isinstance(message, Mapping):
        return str(message)
    fields: Mapping[str, Any] = message  # pyright: ignore[reportUnknownVariableType]
    calls: list[Any] = fields.get("tool_calls") or []
    named: list[Facts] = [call.get("function", call) for call in calls if isinstance(call, Mapping)]  # pyright: ignore[reportUnknownMemberType]
    written = [f"{one.get('name')}({json.dumps(one.get('arguments'), ensure_ascii=False)})" for one in named]
    given = number(fields.get("reward"))
    rewarded = [] if given is None else [f"[reward {given:g}]"]
    return " ".join(part for part in (_message(fields), *written, *rewarded) if part)


def _message(message: Any) -> str:
    if not isinstance(message, Mapping):
        return str(message)
    fields: Mapping[str, Any] = message  # pyright: ignore[reportUnknownVariableType]
    return f"{fields.get('role', '')}: {fields.get('content', '')}".lstrip(": ")


def flatten(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested facts as (dotted name, text) rows for a table; a list of objects by index, as in `reward.0.source`."""
    if isinstance(value, list | tuple):
        items: list[Any] = list(value)  # pyright: ignore[reportUnknownArgumentType]
        if not items or not all(isinstance(item, Mapping) for item in items):
            return [(prefix, ", ".join(map(str, items)))]
        value = dict(enumerate(items))
    if isinstance(value, Mapping):
        fields: Mapping[Any, Any] = value  # pyright: ignore[reportUnknownVariableType]
        return [row for key, item in fields.items() for row in flatten(item, f"{prefix}.{key}" if prefix else str(key))]
    return [(prefix, "" if value is None else str(value))]
