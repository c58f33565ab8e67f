"""Tables of standard benchmarks, before and after a training."""

from collections.abc import Sequence

from tunesmith.base.config.yaml_text import is_list, is_mapping
from tunesmith.base.runs.listing import number
from tunesmith.observe.reports.chart import Table
from tunesmith.observe.reports.text import UNKNOWN, Facts, count_of, decimal, short, signed

FILE = "benchmarks.jsonl"
"""In a run folder: a line for each call of `tunesmith eval`."""

_ASKED = ("tasks", "include_path", "num_fewshot", "limit", "chat_template", "before")
"""Two lines that agree in these are of the same question, so a page has the newer one."""


def benchmark_table(found: Facts) -> Table:
    """A line of the file as a table: metrics of the tasks, of one model or of two with their difference."""
    rows = _rows(found)
    is_compared = any(number(row.get("before")) is not None for row in rows)
    return Table(
        _caption(found),
        ("task", "metric", "shots", "questions", *_figure_columns(is_compared)),
        [
            (
                short(row.get("task"), 60),
                _metric(row),
                decimal(row.get("num_fewshot")),
                decimal(row.get("num_questions")),
                *(_compared(row) if is_compared else _alone(row)),
            )
            for row in rows
        ],
    )


def benchmark_tables(lines: Sequence[Facts]) -> list[Table]:
    """The tables of a run, newest first; of lines that ask the same, the last alone."""
    newest: dict[str, Facts] = {}
    for line in filter(_rows, reversed(lines)):
        newest.setdefault(repr([line.get(name) for name in _ASKED]), line)
    return [benchmark_table(line) for line in newest.values()]


def _rows(found: Facts) -> list[Facts]:
    rows: object = found.get("rows")
    return [row for row in rows if is_mapping(row)] if is_list(rows) else []


def _figure_columns(is_compared: bool) -> tuple[str, ...]:
    if is_compared:
        return "before", "after", "difference", "95\u202f% interval", "after is"
    return "value", "standard error"


def _metric(row: Facts) -> str:
    """The metric with its filter, if it has one, and an arrow if the lower value is the better one."""
    name = short(row.get("metric"), 40)
    name += "" if row.get("filter") in (None, "none") else f" ({short(row.get('filter'), 40)})"
    return name if row.get("higher_is_better", True) else f"{name}, lower is better"


def _alone(row: Facts) -> tuple[str, ...]:
    return decimal(row.get("after")), decimal(row.get("stderr_after"))


def _compared(row: Facts) -> tuple[str, ...]:
    low, high = number(row.get("low")), number(row.get("high"))
    interval = UNKNOWN if low is None or high is None else f"{signed(low)} to {signed(high)}"
    return decimal(row.get("before")), decimal(row.get("after")), signed(row.get("difference")), interval, _verdict(row)


def _verdict(row: Facts) -> str:
    """`better` or `worse` if the interval of the difference excludes zero, else `equal within the interval`."""
    low, high = number(row.get("low")), number(row.get("high"))
    if low is None or high is None:
        return UNKNOWN
    if low <= 0 <= high:
        return "equal within the interval"
    return "better" if (low > 0) == bool(row.get("higher_is_better", True)) else "worse"


def _caption(found: Facts) -> str:
    """Which models were asked, and how."""
    limit, steps = number(found.get("limit")), number(found.get("steps"))
    words = [f"lm-eval {short(found.get('lm_eval') or 'of an unknown version', 40)}"]
    if found.get("before") is not None:
        words.append(f"before: {short(found['before'], 80)}")
    if steps is not None:
        words.append(f"after {count_of(int(steps), 'step')}")
    if limit is not None:
        words.append(f"the first {count_of(int(limit), 'question')} of each task")
    if found.get("chat_template"):
        words.append("in the chat template")
    return ", ".join([*words, str(found.get("written", ""))])
