"""TF-IDF models against an independent dense twin, and what they learn."""

import itertools
import math
import random
import re
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.base.core.errors import DataError
from tunesmith.learn.evaluation.tfidf import (
    TextBradleyTerry,
    TextClassifier,
    TextPair,
    Vectorizer,
    fit_logistic,
)

TEXTS = ["A good film, good!", "a bad film", "What a good idea", "bad, bad idea", "unique words here"]


def dense(vectorizer: Vectorizer, texts: list[str]) -> np.ndarray:
    """The rows without their last column."""
    return vectorizer.rows(texts, [1.0] * len(texts)).to_dense().numpy()[:, :-1]


def terms(text: str) -> list[str]:
    words = re.findall(r"[a-z]+|[!?]", text.lower())
    return words + [f"{a} {b}" for a, b in itertools.pairwise(words)]


def test_rows_are_the_tf_idf_that_the_formula_gives() -> None:
    num_texts = Counter(term for text in TEXTS for term in set(terms(text)))
    kept = sorted(term for term, count in num_texts.items() if count > 1)
    expected = np.zeros((len(TEXTS), len(kept)))
    for row, text in enumerate(TEXTS):
        for term, count in Counter(terms(text)).items():
            if term in kept:
                idf = math.log((1 + len(TEXTS)) / (1 + num_texts[term])) + 1
                expected[row, kept.index(term)] = (1 + math.log(count)) * idf
    norms = np.linalg.norm(expected, axis=1, keepdims=True)
    expected = np.divide(expected, norms, out=np.zeros_like(expected), where=norms > 0)
    vectorizer = Vectorizer.fitted(TEXTS)
    assert list(vectorizer.index) == kept
    np.testing.assert_allclose(dense(vectorizer, TEXTS), expected, atol=1e-12)


def test_words_that_were_never_seen_count_for_nothing() -> None:
    assert not dense(Vectorizer.fitted(TEXTS), ["zebra quartz"]).any()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.1, 1.0, 10.0]))
def test_the_gradient_is_zero_at_the_fitted_weights(seed: int, l2: float) -> None:
    random = np.random.default_rng(seed)
    matrix, sign_N = random.normal(size=(12, 5)), random.choice([-1.0, 1.0], size=12)
    weight_F = fit_logistic(torch.from_numpy(matrix).to_sparse(), torch.from_numpy(sign_N), l2=l2).numpy()
    # The loss is strictly convex, so this is its only minimum.
    slope_N = -sign_N / (1 + np.exp(sign_N * (matrix @ weight_F)))
    np.testing.assert_allclose(matrix.T @ slope_N + l2 * weight_F, 0, atol=1e-5)


def test_a_classifier_tells_praise_from_complaint_on_new_texts() -> None:
    draw = random.Random(0)
    texts = [f"the {draw.choice(['plot', 'cast', 'score'])} is {w}" for w in ["fine", "great", "poor", "dull"] * 20]
    labels = [text.endswith(("fine", "great")) for text in texts]
    model = TextClassifier.fitted(texts, labels)
    good, bad, unknown = model.probabilities(["an ending that is great", "an ending that is dull", "xyz"])
    assert good > 0.8 > 0.2 > bad
    assert unknown == pytest.approx(0.5, abs=0.05)


def test_labels_that_are_all_alike_are_refused() -> None:
    with pytest.raises(DataError, match="one label alone"):
        TextClassifier.fitted(TEXTS, [True] * len(TEXTS))


def test_a_bradley_terry_model_learns_words_and_length_and_is_odd_in_its_sides() -> None:
    pairs = [TextPair(f"it was great number {i}", f"it was dull number {i}") for i in range(20)]
    model = TextBradleyTerry.fitted(pairs)
    assert model.margins([TextPair("a great one", "a dull one")])[0] > 0.5
    longer = TextBradleyTerry.fitted([TextPair("a " * (i + 3), "a " * (i % 2 + 1)) for i in range(20)])
    assert longer.margins([TextPair("b c d e f", "b c")])[0] > 0
    swapped = [TextPair(pair.worse, pair.better) for pair in pairs]
    np.testing.assert_allclose(model.margins(swapped), -model.margins(pairs), atol=1e-12)
