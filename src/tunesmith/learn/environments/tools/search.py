"""Search in the text files of a folder, for a model: passages ranked by BM25."""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tunesmith.base.core.errors import InputError

SUFFIXES = (".txt", ".md", ".rst", ".csv", ".tsv", ".json", ".jsonl")
"""Names of the files that are searched end in one of these."""

_MAX_QUERY = 1000
_WORD = re.compile(r"\w+")
_BLANK = re.compile(r"\n\s*\n")

# Robertson and Zaragoza 2009, "The Probabilistic Relevance Framework": how soon a word's repetitions count no more, and
# how much a long passage is held against it.
_K1, _B = 1.2, 0.75


@dataclass(frozen=True)
class Passage:
    """A paragraph of the file `path`, or a line of it if the file has a row in each line."""

    path: str
    text: str


class FileSearch:
    """The text files of `folder`, each paragraph of which is a passage, ranked by BM25 for a query.

    The files are read once, here. Symbolic links to folders, and links that lead outside, are not followed. Files that
    are unreadable or no UTF-8 text are skipped; `num_skipped` counts them. `search` is the tool: it returns at most
    `max_results` passages, of each at most `max_chars` characters.

    Raises:
        InputError: The folder is none, or has no passage.
    """

    def __init__(self, folder: Path | str, *, max_results: int = 3, max_chars: int = 1000) -> None:
        for name, value in (("max_results", max_results), ("max_chars", max_chars)):
            if value < 1:
                raise InputError(f"{name} is {value}; the search tool needs at least 1")
        self._root = Path(folder)
        if not self._root.is_dir():
            raise InputError(f"{folder} is no folder; give the search tool a folder with text files")
        self._max_results, self._max_chars = max_results, max_chars
        self.num_skipped = 0
        self.passages = tuple(self._read())
        if not self.passages:
            raise InputError(
                f"{folder} has no text that can be searched ({self.num_skipped} files were skipped); put UTF-8 files "
                f"there whose names end in {', '.join(SUFFIXES)}"
            )
        self._index()

    def _index(self) -> None:
        """For each word the passages that have it, with a weight in [0, k1 + 1] for how often."""
        counts = [Counter(_words(passage.text)) for passage in self.passages]
        lengths = [count.total() for count in counts]
        mean = sum(lengths) / len(lengths) or 1.0
        self._weights: dict[str, list[tuple[int, float]]] = {}
        for place, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            scale = _K1 * (1 - _B + _B * length / mean)
            for word, times in count.items():
                self._weights.setdefault(word, []).append((place, times * (_K1 + 1) / (times + scale)))

    def search(self, query: str) -> str:
        """
        Search the documents and return the passages that fit the query best, each with the name of its file.

        Args:
            query: The words to look for.

        Returns:
            The best passages, or a line that says that there are none.
        """
        words = sorted(set(_words(query[:_MAX_QUERY])))
        if not words:
            return "Error: the query has no words"
        scores: dict[int, float] = {}
        for word in words:  # in an order of their own, so that sums of floats are the same each time
            found = self._weights.get(word, [])
            rarity = math.log(1 + (len(self.passages) - len(found) + 0.5) / (len(found) + 0.5))
            for place, weight in found:
                scores[place] = scores.get(place, 0.0) + rarity * weight
        if not scores:
            return f"No passage has any of these words: {', '.join(words)[: self._max_chars]}"
        best = sorted(scores, key=lambda place: (-scores[place], place))[: self._max_results]
        return "\n\n".join(self._shown(rank, self.passages[place]) for rank, place in enumerate(best, 1))

    def _shown(self, rank: int, passage: Passage) -> str:
        text = passage.text
        if len(text) > self._max_chars:
            text = f"{text[: self._max_chars]} ..."
        return f"[{rank}] {passage.path}\n{text}"

    def _read(self) -> Iterator[Passage]:
        """The passages of all files, in the order of the files' paths."""
        root = self._root.resolve()
        paths = [Path(folder, name) for folder, _, names in os.walk(root) for name in names]
        for path in sorted(paths, key=lambda path: path.relative_to(root).parts):
            if path.suffix.lower() not in SUFFIXES:
                continue
            try:
                real = path.resolve(strict=True)
                if not real.is_relative_to(root) or not real.is_file():
                    self.num_skipped += 1
                    continue
                text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
            except (OSError, RuntimeError, UnicodeDecodeError):  # unreadable, links in a circle, no text
                self.num_skipped += 1
                continue
            if "\0" in text:
                self.num_skipped += 1
                continue
            name = path.relative_to(root).as_posix()
            yield from (Passage(name, part) for part in _parts(text, path.suffix.lower()) if _WORD.search(part))


def _words(text: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(text)]


def _parts(text: str, suffix: str) -> Iterator[str]:
    """The texts of the passages of a file: its rows if it has one in each line, otherwise its paragraphs."""
    if suffix in (".csv", ".tsv"):
        yield from text.splitlines()
    elif suffix == ".jsonl":
        for line in text.split("\n"):
            yield _row_text(line)
    else:
        for paragraph in _BLANK.split(text):
            yield paragraph.strip()


def _row_text(line: str) -> str:
    """The texts of a row's fields, or the line if it is no JSON object."""
    try:
        row: object = json.loads(line)
    except (ValueError, RecursionError):
        return line
    if not isinstance(row, dict):
        return line
    values = cast("dict[str, object]", row).values()
    return "\n".join(value for value in values if isinstance(value, str)) or line
