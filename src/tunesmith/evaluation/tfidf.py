"""Linear models on TF-IDF features: a classifier of texts, and a Bradley-Terry model of pairs.

They are what a trained reward model must beat, and judges that share nothing with the models they judge.
Shape legend: N texts or pairs, F features. Everything is float64 and deterministic.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tunesmith.core.errors import DataError

_WORD = re.compile(r"\w+(?:'\w+)?|[!?]")
_MIN_TEXTS = 2
_MAX_NEWTON_STEPS = 50
_MAX_CG_STEPS = 200
_TOLERANCE = 1e-8

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class SparseRows:
    """A sparse matrix of shape [N, F] as (row, column, value) triples; entries of one place add up.

    Example: rows (0, 0, 1), columns (2, 0, 1), values (0.5, 1, 3) are [[1, 0, 0.5], [0, 3, 0]].
    """

    row_E: Array
    column_E: Array
    value_E: Array
    num_rows: int
    num_columns: int

    def times(self, vector_F: Array) -> Array:
        """The product with a vector, shape [N]."""
        return np.bincount(self.row_E, self.value_E * vector_F[self.column_E], self.num_rows)

    def transposed_times(self, vector_N: Array) -> Array:
        """The product of the transposed matrix with a vector, shape [F]."""
        return np.bincount(self.column_E, self.value_E * vector_N[self.row_E], self.num_columns)

    def minus(self, other: "SparseRows") -> "SparseRows":
        """The difference of two matrices of one shape."""
        return SparseRows(
            np.concatenate([self.row_E, other.row_E]),
            np.concatenate([self.column_E, other.column_E]),
            np.concatenate([self.value_E, -other.value_E]),
            self.num_rows,
            self.num_columns,
        )

    def beside(self, column_N: Array) -> "SparseRows":
        """The matrix with one more column behind the others."""
        return SparseRows(
            np.concatenate([self.row_E, np.arange(self.num_rows)]),
            np.concatenate([self.column_E, np.full(self.num_rows, self.num_columns)]),
            np.concatenate([self.value_E, column_N]),
            self.num_rows,
            self.num_columns + 1,
        )


@dataclass(frozen=True, slots=True)
class Vectorizer:
    """Words and pairs of words that stand in at least two texts, with their weight: ln((1 + n) / (1 + df)) + 1.

    A count c weighs 1 + ln c, and each row has length 1 (Salton and Buckley 1988; the usual smoothing).
    """

    index: Mapping[str, int]
    weight_F: Array

    @classmethod
    def fitted(cls, texts: Sequence[str]) -> "Vectorizer":
        """The features of `texts`, sorted; none if the texts share no word."""
        counts = Counter(name for text in texts for name in set(_features(text)))
        kept = [name for name, count in counts.items() if count >= _MIN_TEXTS]
        kept.sort()  # sets have no order of their own
        weight_F = np.array([math.log((1 + len(texts)) / (1 + counts[name])) + 1 for name in kept])
        return cls({name: place for place, name in enumerate(kept)}, weight_F)

    def rows(self, texts: Sequence[str]) -> SparseRows:
        """One row for each text; zero for a text without known features."""
        parts = [self._row(text) for text in texts]
        return SparseRows(
            np.repeat(np.arange(len(texts)), [len(columns) for columns, _ in parts]),
            np.concatenate([columns for columns, _ in parts] or [np.zeros(0, dtype=np.int64)]),
            np.concatenate([values for _, values in parts] or [np.zeros(0)]),
            len(texts),
            len(self.weight_F),
        )

    def _row(self, text: str) -> tuple[Array, Array]:
        counts = Counter(self.index[name] for name in _features(text) if name in self.index)
        columns = np.array(list(counts), dtype=np.int64)
        values = (1 + np.log(np.array(list(counts.values()), dtype=np.float64))) * self.weight_F[columns]
        return columns, values / np.linalg.norm(values) if len(values) else values


@dataclass(frozen=True, slots=True)
class TextClassifier:
    """Logistic regression on TF-IDF: the probability that a text is positive."""

    vectorizer: Vectorizer
    weight_F: Array

    @classmethod
    def fitted(cls, texts: Sequence[str], labels: Sequence[bool], *, l2: float = 1.0) -> "TextClassifier":
        """The classifier of `texts`. Raises DataError if the labels are all alike."""
        if len(set(labels)) < 2:
            raise DataError(f"{len(texts)} texts have one label alone; give texts of both")
        vectorizer = Vectorizer.fitted(texts)
        rows = vectorizer.rows(texts).beside(np.ones(len(texts)))
        return cls(vectorizer, fit_logistic(rows, np.where(np.asarray(labels), 1.0, -1.0), l2=l2))

    def probabilities(self, texts: Sequence[str]) -> Array:
        """Of each text, shape [N]."""
        logit_N = self.vectorizer.rows(texts).beside(np.ones(len(texts))).times(self.weight_F)
        return 1 / (1 + np.exp(-logit_N))


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two answers to one prompt, the better one first."""

    better: str
    worse: str


@dataclass(frozen=True, slots=True)
class TextBradleyTerry:
    """A Bradley-Terry model whose reward is linear in TF-IDF and in the log of the number of words."""

    vectorizer: Vectorizer
    weight_F: Array = field(repr=False)

    @classmethod
    def fitted(cls, pairs: Sequence[TextPair], *, l2: float = 3.0) -> "TextBradleyTerry":
        """The model of `pairs`. Raises DataError if there are none."""
        if not pairs:
            raise DataError("there are no pairs to learn from; give at least one")
        vectorizer = Vectorizer.fitted([text for pair in pairs for text in (pair.better, pair.worse)])
        rows = _differences(vectorizer, pairs)
        return cls(vectorizer, fit_logistic(rows, np.ones(len(pairs)), l2=l2))

    def margins(self, pairs: Sequence[TextPair]) -> Array:
        """Reward of the better one minus reward of the worse one, shape [N]."""
        return _differences(self.vectorizer, pairs).times(self.weight_F)


def fit_logistic(rows: SparseRows, sign_N: Array, *, l2: float = 1.0) -> Array:
    """The weights, shape [F], that minimise the sum of ln(1 + exp(-sign * row @ weights)) plus l2 / 2 of their square.

    Newton's method with conjugate gradients and a halving line search; the minimum is unique, for l2 above 0.
    """
    weight_F = np.zeros(rows.num_columns)
    value, gradient_F = _loss(rows, sign_N, weight_F, l2)
    tolerance = _TOLERANCE * max(1.0, float(np.linalg.norm(gradient_F)))
    for _ in range(_MAX_NEWTON_STEPS):
        if float(np.linalg.norm(gradient_F)) <= tolerance:
            break
        step_F = _newton_direction(rows, weight_F, gradient_F, l2)
        slope, size = float(gradient_F @ step_F), 1.0
        while size > _TOLERANCE:
            new_value, new_gradient_F = _loss(rows, sign_N, weight_F + size * step_F, l2)
            if new_value <= value + 1e-4 * size * slope:
                break
            size /= 2
        else:  # rounding leaves nothing to gain
            break
        weight_F, value, gradient_F = weight_F + size * step_F, new_value, new_gradient_F
    return weight_F


def _loss(rows: SparseRows, sign_N: Array, weight_F: Array, l2: float) -> tuple[float, Array]:
    margin_N = sign_N * rows.times(weight_F)
    value = float(np.logaddexp(0.0, -margin_N).sum() + l2 / 2 * weight_F @ weight_F)
    return value, rows.transposed_times(-sign_N / (1 + np.exp(margin_N))) + l2 * weight_F


def _newton_direction(rows: SparseRows, weight_F: Array, gradient_F: Array, l2: float) -> Array:
    """The solution of (X' D X + l2) d = -gradient by conjugate gradients (Hestenes and Stiefel 1952)."""
    probability_N = 1 / (1 + np.exp(-rows.times(weight_F)))
    curvature_N = probability_N * (1 - probability_N)
    direction_F, residual_F = np.zeros_like(gradient_F), -gradient_F
    search_F, square = residual_F, float(residual_F @ residual_F)
    enough = square * 1e-6
    for _ in range(_MAX_CG_STEPS):
        if square <= enough:
            break
        image_F = rows.transposed_times(curvature_N * rows.times(search_F)) + l2 * search_F
        size = square / float(search_F @ image_F)
        direction_F, residual_F = direction_F + size * search_F, residual_F - size * image_F
        last, square = square, float(residual_F @ residual_F)
        search_F = residual_F + square / last * search_F
    return direction_F


def _differences(vectorizer: Vectorizer, pairs: Sequence[TextPair]) -> SparseRows:
    better, worse = [pair.better for pair in pairs], [pair.worse for pair in pairs]
    length_N = np.array([_log_length(pair.better) - _log_length(pair.worse) for pair in pairs])
    return vectorizer.rows(better).minus(vectorizer.rows(worse)).beside(length_N)


def _log_length(text: str) -> float:
    return math.log1p(sum(1 for _ in _WORD.finditer(text)))


def _features(text: str) -> Iterator[str]:
    words = _WORD.findall(text.lower())
    yield from words
    yield from (f"{first} {second}" for first, second in itertools.pairwise(words))
