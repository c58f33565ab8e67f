"""The folder of a run. `metrics.jsonl` is the truth about a run; everything else can be made again from it.

runs/<date>-<name>-<id>/
  recipe.yaml       resolved configuration        provenance.json   where each value came from
  environment.json  versions and machine          metrics.jsonl     one object per step
  samples.jsonl     prompts, completions, scores  checkpoints/      see distributed/checkpoint.py
  final/            the model, Hugging Face layout  result.json     the summary   report.html
"""

import datetime
import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from tunesmith.core.errors import RunError
from tunesmith.telemetry.environment import environment


class RunFolder:
    """A run's folder and its append-only files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(
        cls, parent: Path, name: str, recipe: Mapping[str, object], provenance: Mapping[str, str] | None = None
    ) -> "RunFolder":
        """A fresh folder below `parent` with the resolved recipe, its provenance and the environment written.

        Raises:
            RunError: if `parent` cannot be written.
        """
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "run"
        path = parent / f"{stamp}-{slug}-{secrets.token_hex(2)}"
        try:
            path.mkdir(parents=True)
        except OSError as error:
            raise RunError(f"cannot make the run folder {path} ({error}); choose another with --run.dir") from error
        run = cls(path)
        (path / "recipe.yaml").write_text(
            yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True), encoding="utf-8"
        )
        run.write_json("provenance.json", dict(provenance or {}))
        run.write_json("environment.json", environment())
        return run

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def final(self) -> Path:
        """Folder of the trained model."""
        return self.path / "final"

    def write_json(self, name: str, value: object) -> None:
        """Write `value` as the JSON file `name`; numbers that are not finite become null."""
        (self.path / name).write_text(json.dumps(_finite(value), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one line to `metrics.jsonl`."""
        self._append("metrics.jsonl", [{"step": step, **metrics}])

    def append_samples(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Add one line to `samples.jsonl` for each row."""
        self._append("samples.jsonl", rows)

    def _append(self, name: str, rows: Sequence[Mapping[str, object]]) -> None:
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(_finite(row), ensure_ascii=False) + "\n" for row in rows)


def read_jsonl(path: Path) -> list[dict[str, object]]:
    """The objects of a JSONL file that Tunesmith wrote; empty if there is no such file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def _finite(value: object) -> object:
    """`value` with numbers that JSON cannot hold replaced by None, also inside of containers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, Path) else value
