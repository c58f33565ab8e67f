"""Labelled film reviews: rows with `text` and `label`, pieces of them, and sentences in the form of rt-polarity."""

import random
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tunesmith.base.core.errors import DataError
from tunesmith.base.core.seeds import derive
from tunesmith.collect.data.rows import Row, RowError
from tunesmith.collect.data.sources import data_path, is_data_source, parse_rows

_POSITIVE, _NEGATIVE = ".pos", ".neg"


@dataclass(frozen=True, slots=True)
class Review:
    """A text and whether it praises.

    Example: `Review("imdb.jsonl:3", "A joy from start to end.", is_positive=True)`.
    """

    id: str
    text: str
    is_positive: bool


def load_reviews(source: str) -> list[Review]:
    """The reviews of `source`, in order: anything that `data.sources` reads with `text` and `label` (0 or 1), or a zip
    archive with one sentence a line in files that end in `.pos` and `.neg`. Line breaks in HTML become blanks.

    Raises DataError that names and counts the rows that cannot be used.
    """
    if source.lower().endswith(".zip"):
        return _sentences(data_path(source) if is_data_source(source) else Path(source))
    return parse_rows(source, _as_review, label="reviews")


def pieces(review: Review, num_words: tuple[int, int], count: int, seed: int) -> list[str]:
    """`count` runs of words out of a review, of a length drawn from `num_words`, both ends included.

    A pure function of its arguments. A review shorter than a drawn length is taken whole.
    """
    words = review.text.split()
    draw = random.Random(derive(seed, "pieces", review.id))
    found: list[str] = []
    for _ in range(count):
        length = min(draw.randint(*num_words), len(words))
        start = draw.randint(0, len(words) - length)
        found.append(" ".join(words[start : start + length]))
    return found


def cleaned(text: str) -> str:
    """`text` without HTML line breaks and quotes with a backslash, as the IMDB files have them."""
    return " ".join(text.replace("<br />", " ").replace('\\"', '"').strip('"').split())


def _as_review(row: Row) -> Review:
    text, label = row.columns.get("text"), row.columns.get("label")
    if not isinstance(text, str) or not cleaned(text):
        raise RowError("`text` must be a text that says something", "missing column" if text is None else "empty")
    if isinstance(label, bool) or label not in (0, 1):
        raise RowError(f"`label` is {label!r}; give 1 for praise and 0 for complaint", "bad value")
    return Review(row.where, cleaned(text), label == 1)


def _sentences(path: Path) -> list[Review]:
    try:
        with zipfile.ZipFile(path) as archive:
            lines = {
                name: archive.read(name).decode("utf-8", errors="replace").splitlines()
                for name in sorted(archive.namelist())
                if name.endswith((_POSITIVE, _NEGATIVE))
            }
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read as a zip archive ({error}); copy it again") from error
    if not any(name.endswith(_POSITIVE) for name in lines) or not any(name.endswith(_NEGATIVE) for name in lines):
        raise DataError(f"{path} holds no files that end in {_POSITIVE} and {_NEGATIVE}; give rows with text and label")
    return [
        Review(f"{name}:{number}", cleaned(line), name.endswith(_POSITIVE))
        for name, rows in lines.items()
        for number, line in enumerate(rows, start=1)
        if line.strip()
    ]
