"""Rows written in every format that is read, for tests."""

import csv
import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

Rows = Sequence[Mapping[str, object]]


def write_jsonl(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_json(path: Path, rows: Rows) -> Path:
    path.write_text(json.dumps(rows, ensure_ascii=False, indent=1), encoding="utf-8")
    return path


def write_csv(path: Path, rows: Rows) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(rows[0])
        writer.writerows([cell(row[name]) for name in rows[0]] for row in rows)
    return path


def cell(value: object) -> object:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def write_parquet(path: Path, rows: Rows) -> Path:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows]), path)
    return path


def write_folder(path: Path, rows: Rows) -> Path:
    import datasets

    datasets.Dataset.from_list([dict(row) for row in rows]).save_to_disk(str(path))
    return path


WRITERS = {
    "rows.jsonl": write_jsonl,
    "rows.json": write_json,
    "rows.csv": write_csv,
    "rows.parquet": write_parquet,
    "folder": write_folder,
}


def write_all(folder: Path, rows: Rows) -> list[Path]:
    """`rows` in every format, the text formats also gzipped."""
    paths = [write(folder / name, rows) for name, write in WRITERS.items()]
    for path in paths[:3]:
        packed = folder / f"packed-{path.name}.gz"
        packed.write_bytes(gzip.compress(path.read_bytes()))
        paths.append(packed)
    return paths
