"""Shares, ratios and bars of `benchmarks.gpu`: all that follows from the records of the rows, and how it is printed."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from benchmarks.common import print_table
from benchmarks.gpu_measure import Floor
from benchmarks.gpu_rows import CEILINGS, ROWS, Bar

Records = Mapping[str, Mapping[str, Any]]
Ceilings = tuple[float | None, float | None]
"""Bytes and floating-point operations of a second, as measured; None where that failed or is still to come."""


def facts_of(records: Records, made: Mapping[str, Any]) -> dict[str, Any]:
    """The content of `gpu.json`: every record with `shares` and `is_correct`, ceilings, bars, failures."""
    ceilings = ceilings_of(records.get(CEILINGS))
    rows = {
        name: {
            **records[name],
            "settings": {
                key: {**setting, "shares": shares(setting, ceilings), "is_correct": is_correct(setting)}
                for key, setting in records[name]["settings"].items()
            },
        }
        for name in ROWS
        if name in records
    }
    sources = {setting["sources"] for record in records.values() for setting in record["settings"].values()}
    return {
        "bench": "gpu",
        **made,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "ceilings": {
            "copy_gb_per_s": ceilings[0] and ceilings[0] / 1e9,
            "matrix_tflop_per_s": ceilings[1] and ceilings[1] / 1e12,
        },
        "rows": rows,
        "bars": bars(records, ceilings),
        "failed": failures(records),
        "unmeasured": [
            f"{name}: {key}"
            for name, row in ROWS.items()
            for key in row.units
            if name not in records or key not in {**records[name]["settings"], **records[name]["errors"]}
        ],
        "has_one_source": len(sources) <= 1,
        "seconds": sum(record["wall_s"] for record in records.values()),
    }


def ceilings_of(record: Mapping[str, Any] | None) -> Ceilings:
    """From the record of the ceilings."""

    def rate(name: str, quantity: str) -> float | None:
        setting = record["settings"].get(name) if record else None
        if setting is None:
            return None
        return sum(floor[quantity] for floor in setting["floors"]) / setting["timings"]["ours"]["median_s"]

    return rate("copy", "num_bytes"), rate("matrix", "num_flops")


def shares(setting: Mapping[str, Any], ceilings: Ceilings) -> dict[str, dict[str, float | None]]:
    """Shares of each timing of a setting, by its name.

    `copy_share`: the time to copy as many bytes, over the time taken; `matrix_share`: that of a matrix product of as
    many operations; `roofline_share`: that of the longer of both, part by part. `gb_per_s` and `tflop_per_s`.
    `times_ours`: its time over ours. None without a measurement that it could be a share of.
    """
    floors = [Floor(**floor) for floor in setting["floors"]]
    num_bytes, num_flops = sum(floor.num_bytes for floor in floors), sum(floor.num_flops for floor in floors)
    bytes_per_s, flops_per_s = ceilings
    ideal_s = None
    if bytes_per_s and flops_per_s and floors:
        ideal_s = sum(floor.seconds(bytes_per_s, flops_per_s) for floor in floors)
    ours_s = setting["timings"].get("ours", {}).get("median_s")
    found: dict[str, dict[str, float | None]] = {}
    for name, timing in setting["timings"].items():
        seconds = timing["median_s"]
        found[name] = {
            "gb_per_s": num_bytes / seconds / 1e9,
            "tflop_per_s": num_flops / seconds / 1e12,
            "copy_share": num_bytes / bytes_per_s / seconds if bytes_per_s else None,
            "matrix_share": num_flops / flops_per_s / seconds if flops_per_s and num_flops else None,
            "roofline_share": ideal_s / seconds if ideal_s else None,
            "times_ours": seconds / ours_s if ours_s else None,
        }
    return found


def is_correct(setting: Mapping[str, Any]) -> bool:
    """Whether the setting is as near to its definition as it must be; true where nothing is compared."""
    error, tolerance = setting["max_error"], setting["tolerance"]
    return tolerance is None or (error is not None and error <= tolerance)


def bars(records: Records, ceilings: Ceilings) -> list[dict[str, Any]]:
    """Every bar, what was reached (None if it was not measured), and whether it holds: a wrong result holds none."""
    found: list[dict[str, Any]] = []
    for name, bar in ((name, bar) for name, row in ROWS.items() for bar in row.bars):
        setting = records[name]["settings"].get(bar.setting) if name in records else None
        reached = None if setting is None else _reached(bar, shares(setting, ceilings))
        holds = setting is not None and reached is not None and reached >= bar.least and is_correct(setting)
        place = {"row": name, "setting": bar.setting, "quantity": bar.quantity}
        found.append({**place, "least": bar.least, "reached": reached, "holds": holds})
    return found


def _reached(bar: Bar, found: Mapping[str, Mapping[str, float | None]]) -> float | None:
    way, quantity = ("eager", "times_ours") if bar.quantity == "times_eager" else ("ours", bar.quantity)
    return found[way][quantity] if way in found else None


def failures(records: Records) -> list[str]:
    """`row: setting` of all that failed, and of all whose result is further from its definition than it may be."""
    found: list[str] = []
    for name, record in records.items():
        found += [f"{name}: {key}" for key in record["errors"]]
        wrong = {key: setting for key, setting in record["settings"].items() if not is_correct(setting)}
        found += [f"{name}: {key} is {setting['max_error']} off its definition" for key, setting in wrong.items()]
    return found


_HEADINGS = ("ms", "GB/s", "TFLOP/s", "copy", "matrix", "roofline", "x ours")


def show(facts: Mapping[str, Any]) -> None:
    """Print every setting with its shares, the bars, and what failed or is still to come."""
    missing: dict[str, None] = {}
    for name, row in facts["rows"].items():
        for key, setting in row["settings"].items():
            _show_setting(f"{name}, {key}", setting)
            missing |= {f"{other}: {note}": None for other, note in setting["notes"].items()}
    ceilings = facts["ceilings"]
    print(
        f"\nceilings: {_number(ceilings['copy_gb_per_s'])} GB/s copied, {_number(ceilings['matrix_tflop_per_s'])} "
        "TFLOP/s of bfloat16 products; copy, matrix and roofline are shares of them, `x ours` is the time over ours"
    )
    for line in missing:
        print(f"left out: {line}")
    for bar in () if facts["quick"] else facts["bars"]:
        held = "holds" if bar["holds"] else "not measured" if bar["reached"] is None else "does not hold"
        reached = _number(bar["reached"]) or "nothing"
        print(
            "bar: {row}, {setting}: {quantity} at least {least:g}".format(**bar), f"reached {reached}: {held}", sep=", "
        )
    for label in ("failed", "unmeasured"):
        for line in facts[label]:
            print(f"{label}: {line}")
    if not facts["has_one_source"]:
        print("these rows were measured by different versions of the sources; --again measures all by this one")


def _show_setting(name: str, setting: Mapping[str, Any]) -> None:
    error = "" if setting["max_error"] is None else f"; error {setting['max_error']:.1e}"
    wrong = "" if setting["is_correct"] else f", more than {setting['tolerance']:.1e}: WRONG"
    print(f"\n{name} ({setting['picked']}): {setting['size']}; against {setting['against']}{error}{wrong}")
    rows: list[Sequence[str]] = []
    for way, timing in setting["timings"].items():
        found = setting["shares"][way]
        shares_ = (_number(found[key], "{:.0%}") for key in ("copy_share", "matrix_share", "roofline_share"))
        speeds = _number(found["gb_per_s"]), _number(found["tflop_per_s"] or None)
        rows.append((f"  {way}", _number(1e3 * timing["median_s"]), *speeds, *shares_, _number(found["times_ours"])))
    if rows:
        print_table(("", *_HEADINGS), rows)
    for key, value in setting["facts"].items():
        if value is not None:
            print(f"  {key}: {_shown(value)}")


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _number(value: float | None, form: str = "{:.3g}") -> str:
    return "" if value is None else form.format(value)
