"""Linear models on TF-IDF features: a classifier of texts, and a Bradley-Terry model of pairs.

Baselines that a trained reward model must beat, and judges that are independent of the models they judge.
Shape legend: N texts or pairs, F features and one more column. Everything is float64 and deterministic.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import softplus

from tunesmith.base.core.errors import DataError

_WORD = re.compile(r"\w+(?:'\w+)?|[!?]")
_MIN_TEXTS = 2


@dataclass(frozen=True, slots=True)
class Vectorizer:
    """Words and word pairs that occur in at least two texts, with their weight ln((1 + n) / (1 + df)) + 1.

    A count c weighs 1 + ln c, and each row has length 1 (Salton and Buckley 1988; the usual smoothing).
    """

    index: Mapping[str, int]
    weights: tuple[float, ...]

    @classmethod
    def fitted(cls, texts: Sequence[str]) -> "Vectorizer":
        """The features of `texts`, sorted; none if the texts share no word."""
        counts = Counter(name for text in texts for name in set(_features(text)))
        kept = sorted(name for name, count in counts.items() if count >= _MIN_TEXTS)
        weights = tuple(math.log((1 + len(texts)) / (1 + counts[name])) + 1 for name in kept)
        return cls({name: place for place, name in enumerate(kept)}, weights)

    def rows(self, texts: Sequence[str], last_N: Sequence[float]) -> torch.Tensor:
        """Sparse [N, F]: one row for each text, zero for a text without known features, and `last_N` as last column."""
        places: list[tuple[int, int]] = []
        values: list[float] = []
        for row, (text, last) in enumerate(zip(texts, last_N, strict=True)):
            counts = Counter(self.index[name] for name in _features(text) if name in self.index)
            weighed = [(1 + math.log(count)) * self.weights[column] for column, count in counts.items()]
            norm = math.hypot(*weighed)
            places += [(row, column) for column in (*counts, len(self.weights))]
            values += [*(value / norm for value in weighed), last]
        indices = torch.tensor(places, dtype=torch.int64).reshape(-1, 2).T
        size = (len(texts), len(self.weights) + 1)
        return torch.sparse_coo_tensor(indices, torch.tensor(values, dtype=torch.float64), size, check_invariants=True)


@dataclass(frozen=True, slots=True)
class TextClassifier:
    """Logistic regression on TF-IDF: the probability that a text is positive."""

    vectorizer: Vectorizer
    weight_F: torch.Tensor

    @classmethod
    def fitted(cls, texts: Sequence[str], labels: Sequence[bool], *, l2: float = 1.0) -> "TextClassifier":
        """The classifier of `texts`. Raises DataError if all labels are equal."""
        if len(set(labels)) < 2:
            raise DataError(f"{len(texts)} texts have one label alone; give texts of both")
        vectorizer = Vectorizer.fitted(texts)
        sign_N = torch.tensor(labels, dtype=torch.float64) * 2 - 1
        return cls(vectorizer, fit_logistic(vectorizer.rows(texts, [1.0] * len(texts)), sign_N, l2=l2))

    def probabilities(self, texts: Sequence[str]) -> np.ndarray:
        """The probability of each text, [N]."""
        return torch.sigmoid(_product(self.vectorizer.rows(texts, [1.0] * len(texts)), self.weight_F)).numpy()


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two answers to one prompt, the better one first."""

    better: str
    worse: str


@dataclass(frozen=True, slots=True)
class TextBradleyTerry:
    """A Bradley-Terry model whose reward is linear in TF-IDF and in the log of the number of words."""

    vectorizer: Vectorizer
    weight_F: torch.Tensor

    @classmethod
    def fitted(
        cls, pairs: Sequence[TextPair], *, l2: float = 3.0, weights: Sequence[float] | None = None
    ) -> "TextBradleyTerry":
        """The model of `pairs`, of one at least. With `weights` each pair counts so often."""
        vectorizer = Vectorizer.fitted([text for pair in pairs for text in (pair.better, pair.worse)])
        sign_N = torch.ones(len(pairs), dtype=torch.float64)
        weight_N = None if weights is None else torch.tensor(weights, dtype=torch.float64)
        return cls(vectorizer, fit_logistic(_differences(vectorizer, pairs), sign_N, l2=l2, weight_N=weight_N))

    def margins(self, pairs: Sequence[TextPair]) -> np.ndarray:
        """Reward of the better minus reward of the worse answer, [N]."""
        return _product(_differences(self.vectorizer, pairs), self.weight_F).numpy()


def pair_rows(pairs: Sequence[TextPair]) -> torch.Tensor:
    """Sparse [N, F]: the features of the better less those of the worse answer, of all pairs together."""
    return _differences(Vectorizer.fitted([text for pair in pairs for text in (pair.better, pair.worse)]), pairs)


def fit_logistic(
    rows_NF: torch.Tensor,
    sign_N: torch.Tensor,
    *,
    l2: float = 1.0,
    weight_N: torch.Tensor | None = None,
    max_iter: int = 1000,
) -> torch.Tensor:
    """The minimum over weights, [F], of sum ln(1 + exp(-sign * row @ weights)) + l2 / 2 * |weights|^2, by L-BFGS.

    `rows_NF` may be sparse. For `l2` above 0 the minimum is unique. With `weight_N` each row counts so often.
    """
    weight_F = torch.zeros(rows_NF.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight_F], max_iter=max_iter, tolerance_grad=1e-8, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss_N = softplus(-sign_N * _product(rows_NF, weight_F))
        loss_N = loss_N if weight_N is None else loss_N * weight_N
        loss = loss_N.sum() + l2 / 2 * weight_F.square().sum()
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        return loss

    optimizer.step(closure)  # pyright: ignore[reportUnknownMemberType, reportArgumentType]
    return weight_F.detach()


def _product(rows_NF: torch.Tensor, weight_F: torch.Tensor) -> torch.Tensor:
    return (rows_NF @ weight_F[:, None])[:, 0]


def _differences(vectorizer: Vectorizer, pairs: Sequence[TextPair]) -> torch.Tensor:
    sides = [pair.better for pair in pairs], [pair.worse for pair in pairs]
    better, worse = (
        vectorizer.rows(texts, [math.log1p(len(_WORD.findall(text))) for text in texts]) for texts in sides
    )
    return (better - worse).coalesce()


def _features(text: str) -> Iterator[str]:
    words = _WORD.findall(text.lower())
    yield from words
    yield from (f"{first} {second}" for first, second in itertools.pairwise(words))
