"""The samples of a comparison: one JSON line for each completion index of a prompt, from which every figure follows."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from math import isfinite
from pathlib import Path

from tunesmith.core.errors import DataError
from tunesmith.schema.records import Text, plain_text


@dataclass(frozen=True, slots=True)
class Sample:
    """Completion `completion_index` of one prompt, by both sides, drawn with the same seed.

    `logp_<sample>_by_<model>` is the summed log-prob in nats of one side's token ids by one side's model, at
    temperature 1 and without filters: `logp_after_by_before` is what the model before thinks of the text after.
    """

    prompt_index: int
    completion_index: int
    prompt_id: str
    prompt: Text
    prompt_token_ids: tuple[int, ...]
    token_ids_before: tuple[int, ...]
    token_ids_after: tuple[int, ...]
    text_before: str
    text_after: str
    score_before: float
    score_after: float
    logp_before_by_before: float
    logp_before_by_after: float
    logp_after_by_before: float
    logp_after_by_after: float
    finish_reason_before: str
    finish_reason_after: str
    seed: int

    @property
    def prompt_text(self) -> str:
        """The prompt as plain text."""
        return plain_text(self.prompt)

    @property
    def log_ratio_after(self) -> float:
        """log p_after - log p_before of the sample after: its mean estimates the KL per sequence, in nats."""
        return self.logp_after_by_after - self.logp_after_by_before

    def to_json(self) -> dict[str, object]:
        """The fields as JSON types."""
        return asdict(self)


_NUMBERS = tuple(field.name for field in fields(Sample) if field.type is float)
_NAMES = frozenset(field.name for field in fields(Sample))


def write_samples(path: Path, samples: Iterable[Sample]) -> Path:
    """Write one JSON line for each sample, as UTF-8, and return `path`. Parent folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as file:
        # ASCII escapes keep text that is no valid UTF-8, such as a lone surrogate, readable and exact.
        file.writelines(json.dumps(sample.to_json(), allow_nan=False) + "\n" for sample in samples)
    return path


def read_samples(path: Path) -> list[Sample]:
    """The samples of a JSONL file that `write_samples` wrote; raises DataError that names file and line."""
    if not path.is_file():
        raise DataError(
            f"samples file {path} does not exist; give the JSONL that `tunesmith compare` or the demo wrote"
        )
    with path.open(encoding="utf-8") as file:
        samples = [_parse(line, f"{path}:{number}") for number, line in enumerate(file, 1) if line.strip()]
    if not samples:
        raise DataError(f"samples file {path} is empty; give one with at least one line")
    return samples


def _parse(line: str, where: str) -> Sample:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg} at column {error.colno}); each line is one object") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: a {type(row).__name__}; each line is one object")
    if wrong := sorted(_NAMES ^ row.keys()):
        raise DataError(
            f"{where}: field {wrong[0]!r} is missing or unknown; the fields are {', '.join(sorted(_NAMES))}"
        )
    for name in _NUMBERS:
        if not isinstance(row[name], int | float) or not isfinite(row[name]):
            raise DataError(f"{where}: {name} is {row[name]!r}; give a finite number")
    prompt = row["prompt"] if isinstance(row["prompt"], str) else tuple(row["prompt"])
    ids = {
        name: tuple(value) for name, value in row.items() if name.endswith("token_ids") or name.startswith("token_ids")
    }
    return Sample(**{**row, **ids, "prompt": prompt})


def by_prompt(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each prompt, prompts in the order of `prompt_index`."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt_index, []).append(sample)
    return [groups[index] for index in sorted(groups)]
