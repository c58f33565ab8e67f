"""Shares, ratios and bars of what was measured: all that follows from the records of the rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_files import RowRecord
from benchmarks.gpu_records import Bar, Floor
from benchmarks.gpu_rows import ROWS


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes and floating-point operations of a second, as measured; None where that failed or is still to come."""

    bytes_per_s: float | None
    flops_per_s: float | None

    @classmethod
    def of(cls, record: RowRecord | None) -> "Ceilings":
        """From the record of the ceilings."""
        settings = {} if record is None else record.settings
        return cls(_rate(settings.get("copy"), "num_bytes"), _rate(settings.get("matrix"), "num_flops"))

    def facts(self) -> dict[str, float | None]:
        """In GB/s and TFLOP/s."""
        return {
            "copy_gb_per_s": None if self.bytes_per_s is None else self.bytes_per_s / 1e9,
            "matrix_tflop_per_s": None if self.flops_per_s is None else self.flops_per_s / 1e12,
        }


def shares(setting: Mapping[str, Any], ceilings: Ceilings) -> dict[str, dict[str, float | None]]:
    """Of each timing of a setting, by its name.

    `copy_share`: the time to copy as many bytes, over the time taken; `matrix_share`: that of a matrix product of as
    many operations; `roofline_share`: that of the longer of both, part by part. `gb_per_s` and `tflop_per_s`.
    `times_ours`: its time over ours. None where nothing was measured that it could be a share of.
    """
    floors = [Floor(**floor) for floor in setting["floors"]]
    num_bytes, num_flops = sum(floor.num_bytes for floor in floors), sum(floor.num_flops for floor in floors)
    bytes_per_s, flops_per_s = ceilings.bytes_per_s, ceilings.flops_per_s
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


def bars(records: Mapping[str, RowRecord], ceilings: Ceilings) -> list[dict[str, Any]]:
    """Every bar, what was reached (None if it was not measured), and whether it holds: a wrong result holds none."""
    found: list[dict[str, Any]] = []
    for name, row in ROWS.items():
        for bar in row.bars:
            setting = records[name].settings.get(bar.setting) if name in records else None
            reached = None if setting is None else _reached(bar, setting, ceilings)
            holds = setting is not None and reached is not None and reached >= bar.least and is_correct(setting)
            found.append(
                {
                    "row": name,
                    "setting": bar.setting,
                    "quantity": bar.quantity,
                    "least": bar.least,
                    "reached": reached,
                    "holds": holds,
                }
            )
    return found


def _reached(bar: Bar, setting: Mapping[str, Any], ceilings: Ceilings) -> float | None:
    found = shares(setting, ceilings)
    if bar.quantity == "times_eager":
        return found["eager"]["times_ours"] if "eager" in found else None
    return found["ours"][bar.quantity] if "ours" in found else None


def _rate(setting: Mapping[str, Any] | None, quantity: str) -> float | None:
    if setting is None:
        return None
    return sum(floor[quantity] for floor in setting["floors"]) / setting["timings"]["ours"]["median_s"]


def rows_facts(records: Mapping[str, RowRecord], ceilings: Ceilings) -> dict[str, Any]:
    """The records for `gpu.json`, with `shares` and `is_correct` beside what was measured."""
    found: dict[str, Any] = {}
    for name in [*ROWS, *(name for name in records if name not in ROWS)]:
        if name not in records:
            continue
        content = records[name].as_json()
        content["settings"] = {
            key: {**setting, "shares": shares(setting, ceilings), "is_correct": is_correct(setting)}
            for key, setting in content["settings"].items()
        }
        found[name] = content
    return found


def failures(records: Mapping[str, RowRecord]) -> list[str]:
    """`row: setting` of all that failed, and of all whose result is further from its definition than it may be."""
    found: list[str] = []
    for name, record in records.items():
        found += [f"{name}: {key}" for key in record.errors]
        wrong = [key for key, setting in record.settings.items() if not is_correct(setting)]
        found += [f"{name}: {key} is {record.settings[key]['max_error']} off its definition" for key in wrong]
    return found


def unmeasured(records: Mapping[str, RowRecord]) -> list[str]:
    """`row: setting` of all that no start has come to yet."""
    return [
        f"{name}: {key}"
        for name, row in ROWS.items()
        for key in row.units
        if name not in records or (key not in records[name].settings and key not in records[name].errors)
    ]
