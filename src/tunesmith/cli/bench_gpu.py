"""The table that `tunesmith bench gpu` prints."""

from collections.abc import Mapping
from typing import Any

from tunesmith.cli.output import Output


def show(facts: Mapping[str, Any], output: Output) -> None:
    """Every setting with its shares, figures of other kinds, the bars, and what failed or is still to come."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    columns = ("row", "setting", "", "ms", "GB/s", "TFLOP/s", "copy", "matrix", "roofline", "x ours", "error")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < 3 else "right", no_wrap=True)
    for name, row in facts["rows"].items():
        for key, setting in row["settings"].items():
            for line in _lines(setting):
                table.add_row(name, key, *line)
    output.say(table)
    for name, row in facts["rows"].items():
        for key, setting in row["settings"].items():
            _say_facts(f"{name}: {key}", setting, output)
    ceilings = facts["ceilings"]
    output.say(
        f"\nceilings: {_number(ceilings['copy_gb_per_s'])} GB/s copied, {_number(ceilings['matrix_tflop_per_s'])} "
        f"TFLOP/s of bfloat16 products; copy, matrix, roofline: shares of them"
    )
    for bar in facts["bars"]:
        held = "holds" if bar["holds"] else "does not hold" if bar["reached"] is not None else "not measured"
        what = f"{bar['row']}: {bar['setting']}: {bar['quantity']}"
        output.say(f"{what} at least {bar['least']:g}, reached {_number(bar['reached'])}: {held}")
    for label in ("failed", "unmeasured"):
        for line in facts[label]:
            output.say(f"{label}: {line}")


def _lines(setting: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One line for each way that was measured."""
    lines: list[tuple[str, ...]] = []
    for name, timing in setting["timings"].items():
        shares = setting["shares"][name]
        percent = (shares[key] for key in ("copy_share", "matrix_share", "roofline_share"))
        error = _number(setting["max_error"], "{:.1e}") if name == "ours" else ""
        lines.append(
            (
                name,
                _number(1e3 * timing["median_s"]),
                _number(shares["gb_per_s"]),
                _number(shares["tflop_per_s"]),
                *(_number(value, "{:.0%}") for value in percent),
                _number(shares["times_ours"], "{:.2f}"),
                error,
            )
        )
    return lines


def _say_facts(name: str, setting: Mapping[str, Any], output: Output) -> None:
    given = {**setting["facts"], **{f"no {key}": note for key, note in setting["notes"].items()}}
    shown = ", ".join(f"{key} {_shown(value)}" for key, value in given.items() if value is not None)
    output.say(f"{name} ({setting['picked']}): {setting['size']}; against {setting['against']}")
    if shown:
        output.say(f"  {shown}")


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{key} {_shown(item)}" for key, item in value.items()) + ")"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _number(value: Any, form: str = "{:.3g}") -> str:
    return "" if value is None else form.format(value)
