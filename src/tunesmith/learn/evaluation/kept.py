"""Answers of a model that are written down as they come, so that a killed evaluation goes on where it was.

An answer is found again by what was asked, and by who was asked: the bytes of the model's weights, and all else that
bits depend on. So nothing is mixed up that another model, another setting or another version has answered.
"""

import hashlib
import json
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from tunesmith.base.config.yaml_text import is_list, is_mapping
from tunesmith.base.core import faults
from tunesmith.base.core.log import get_logger
from tunesmith.base.runs.environment import cpu_model, package_version
from tunesmith.base.runs.folder import add_row
from tunesmith.engine.models.fingerprint import fingerprint
from tunesmith.engine.models.language_model import Decoder, LanguageModel
from tunesmith.engine.models.loaded import PreTrainedTokenizerBase

FILE = "benchmark_answers.jsonl"
"""In a run folder: a line for each part of an evaluation that was answered."""

Answer = str | tuple[float, bool]
"""A text, or the log-prob of one and whether greedy decoding would draw it."""

_PACKAGES = ("tunesmith", "torch", "transformers", "tokenizers")

_log = get_logger(__name__)


def identity(model: LanguageModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """A text of 64 characters, equal for equal weights, settings, tokenizers, and versions of what computes."""
    module, weights = model.module, fingerprint(model.module, kernels=model.kernels)
    shares = isinstance(model.backend, Decoder) and model.backend.shares_prefixes
    fast = getattr(tokenizer, "backend_tokenizer", None)
    parts = (
        weights.digest(weights.tensors.keys()),
        {name: value for name, value in module.config.to_dict().items() if name != "_name_or_path"},
        [getattr(part, "scaling", None) for part in module.modules() if "lora_A" in part._modules],
        (module.device.type, str(module.dtype), type(model.backend).__name__, shares, model.kernels.choice),
        cpu_model(),
        fast.to_str() if fast is not None else sorted(tokenizer.get_vocab().items()),
        sorted(map(str, tokenizer.special_tokens_map.items())),
        [(name, package_version(name)) for name in _PACKAGES],
    )
    return _hash(parts)


class KeptAnswers:
    """The answers of the model `identity` in `file`, with those of others that are there too; without a file in memory.

    A line that a kill has cut off, or that is damaged, counts as never written. If the file cannot be written, a
    warning says so, and nothing more is kept.
    """

    def __init__(self, file: Path | None = None, identity: str = "") -> None:
        self._file, self._identity = file, identity
        self._known = {} if file is None else _read(file)
        self.num_found = 0
        """Answers that were found so far."""

    def key(self, *asked: object) -> str:
        """The name of a part of the evaluation: a hash of who is asked and of `asked`, whose `repr` must tell all."""
        return _hash((self._identity, asked))

    def get(self, key: str, number: int) -> list[Answer] | None:
        """The `number` answers to what has the name `key`, or None if they are not there."""
        answers = self._known.get(key)
        if answers is None or len(answers) != number:
            return None
        self.num_found += number
        return answers

    def add(self, key: str, answers: Sequence[Answer]) -> None:
        """Keep the answers to what has the name `key`."""
        faults.reach("evaluation/answered")
        self._known[key] = list(answers)
        if self._file is None or not all(isinstance(one, str) or math.isfinite(one[0]) for one in answers):
            return
        try:
            add_row(self._file, {"key": key, "answers": answers, "check": _check(key, answers)})
        except OSError as error:
            _log.warning(
                "answers cannot be kept in %s, so a stopped evaluation would begin anew: %s",
                self._file,
                error.strerror or error,
            )
            self._file = None


def _read(file: Path) -> dict[str, list[Answer]]:
    """The whole lines of the file; none if it is not there, or cannot be read."""
    known: dict[str, list[Answer]] = {}
    try:
        lines = file.read_bytes().split(b"\n") if file.exists() else []
    except OSError as error:
        _log.warning("the answers in %s cannot be read, so they are asked again: %s", file, error.strerror or error)
        return known
    num_bad = 0
    for line in filter(None, lines):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if (found := _answered(row)) is None:
            num_bad += 1
        else:
            known[found[0]] = found[1]
    if num_bad:
        _log.warning("%s has %d damaged lines, which are asked again", file, num_bad)
    return known


def _answered(row: object) -> tuple[str, list[Answer]] | None:
    """(key, answers) of a line, or None if they are not as they were written."""
    if not is_mapping(row):
        return None
    key, stored = str(row.get("key")), row.get("answers")
    if not is_list(stored) or row.get("check") != _check(key, stored):
        return None
    return key, [one if isinstance(one, str) else (one[0], one[1]) for one in cast("list[Any]", stored)]


def _check(key: str, answers: object) -> int:
    return zlib.crc32(f"{key}{json.dumps(answers)}".encode())


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode("utf-8", "surrogatepass")).hexdigest()
