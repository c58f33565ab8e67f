"""The report of `python -m benchmarks.gpu`: every setting with its shares, the bars, failed and missing rows."""

from collections.abc import Mapping
from typing import Any

from tunesmith.cli.output import Output
from tunesmith.config.yaml_text import is_mapping

_HEADINGS = ("ms", "GB/s", "TFLOP/s", "copy", "matrix", "roofline", "x ours")
_NAME_WIDTH, _WIDTH = 30, 9


def show(facts: Mapping[str, Any], output: Output) -> None:
    """Every setting with its shares, figures of other kinds, the bars, and what failed or is still to come."""
    missing: dict[str, None] = {}
    for name, row in facts["rows"].items():
        for key, setting in row["settings"].items():
            _say_setting(f"{name}, {key}", setting, output)
            missing |= {f"{other}: {note}": None for other, note in setting["notes"].items()}
    ceilings = facts["ceilings"]
    output.say(
        f"\nceilings: {_number(ceilings['copy_gb_per_s'])} GB/s copied, {_number(ceilings['matrix_tflop_per_s'])} "
        "TFLOP/s of bfloat16 products; copy, matrix and roofline are shares of them, `x ours` is the time over ours"
    )
    for line in missing:
        output.say(f"left out: {line}")
    for bar in facts["bars"]:
        if facts["quick"]:
            break
        held = "holds" if bar["holds"] else "not measured" if bar["reached"] is None else "does not hold"
        what = f"{bar['row']}, {bar['setting']}: {bar['quantity']}"
        output.say(f"bar: {what} at least {bar['least']:g}, reached {_number(bar['reached']) or 'nothing'}: {held}")
    for label in ("failed", "unmeasured"):
        for line in facts[label]:
            output.say(f"{label}: {line}")
    if not facts["has_one_source"]:
        output.say("these rows were measured by different versions of the sources; --again measures all by this one")


def _say_setting(name: str, setting: Mapping[str, Any], output: Output) -> None:
    error = "" if setting["max_error"] is None else f"; error {setting['max_error']:.1e}"
    wrong = "" if setting["is_correct"] else f", more than {setting['tolerance']:.1e}: WRONG"
    output.say(f"\n{name} ({setting['picked']}): {setting['size']}; against {setting['against']}{error}{wrong}")
    if setting["timings"]:
        output.say(" " * _NAME_WIDTH + "".join(f"{heading:>{_WIDTH}}" for heading in _HEADINGS))
    for way, timing in setting["timings"].items():
        shares = setting["shares"][way]
        percent = (shares[key] for key in ("copy_share", "matrix_share", "roofline_share"))
        cells = (
            _number(1e3 * timing["median_s"]),
            _number(shares["gb_per_s"]),
            _number(shares["tflop_per_s"] or None),
            *(_number(value, "{:.0%}") for value in percent),
            _number(shares["times_ours"], "{:.2f}"),
        )
        output.say(f"  {way:<{_NAME_WIDTH - 2}}" + "".join(f"{cell:>{_WIDTH}}" for cell in cells))
    for key, value in setting["facts"].items():
        if value is not None:
            output.say(f"  {key}: {_shown(value)}")


def _shown(value: Any) -> str:
    if is_mapping(value):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _number(value: float | None, form: str = "{:.3g}") -> str:
    return "" if value is None else form.format(value)
