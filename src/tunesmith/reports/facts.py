"""What a run folder says about itself. Every file may be missing; the report then says so."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.core.errors import RunError
from tunesmith.reports.series import Row


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The contents of a run folder; `num_unreadable` counts lines that are no JSON object: one cut off by a crash."""

    name: str
    recipe: str
    environment: Mapping[str, Any]
    result: Mapping[str, Any]
    metrics: tuple[Row, ...]
    samples: tuple[Row, ...]
    findings: tuple[Row, ...]
    num_unreadable: int


def read_run(run_dir: Path) -> RunFacts:
    """The facts of `run_dir`; raises RunError if it is no folder."""
    if not run_dir.is_dir():
        raise RunError(
            f"run folder {run_dir} does not exist; give one that `tunesmith train` or `tunesmith demo` wrote"
        )
    metrics, num_bad_metrics = read_rows(run_dir / "metrics.jsonl")
    samples, num_bad_samples = read_rows(run_dir / "samples.jsonl")
    findings, num_bad_findings = read_rows(run_dir / "findings.jsonl")
    return RunFacts(
        name=run_dir.resolve().name,
        recipe=_text(run_dir / "recipe.yaml"),
        environment=_object(run_dir / "environment.json"),
        result=_object(run_dir / "result.json"),
        metrics=metrics,
        samples=samples,
        findings=findings,
        num_unreadable=num_bad_metrics + num_bad_samples + num_bad_findings,
    )


def read_rows(path: Path) -> tuple[tuple[Row, ...], int]:
    """The JSON objects of a JSONL file and the number of lines that are none; nothing if there is no such file."""
    rows: list[Row] = []
    num_bad = 0
    for line in _text(path).split("\n"):
        if not line.strip():
            continue
        row = _parse(line)
        if row is None:
            num_bad += 1
        else:
            rows.append(row)
    return tuple(rows), num_bad


def _object(path: Path) -> Mapping[str, Any]:
    return _parse(_text(path)) or {}


def _parse(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None  # pyright: ignore[reportUnknownVariableType]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
