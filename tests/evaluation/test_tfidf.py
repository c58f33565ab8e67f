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

from tunesmith.core.errors import DataError
from tunesmith.evaluation.tfidf import (
    SparseRows,
    TextBradleyTerry,
    TextClassifier,
    TextPair,
    Vectorizer,
    fit_logistic,
)

TEXTS = ["A good film, good!", "a bad film", "What a good idea", "bad, bad idea", "unique words here"]


def dense(rows: SparseRows) -> np.ndarray:
    matrix = np.zeros((rows.num_rows, rows.num_columns))
    np.add.at(matrix, (rows.row_E, rows.column_E), rows.value_E)
    return matrix


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
    np.testing.assert_allclose(dense(vectorizer.rows(TEXTS)), expected, atol=1e-12)


def test_words_that_were_never_seen_count_for_nothing() -> None:
    assert not dense(Vectorizer.fitted(TEXTS).rows(["zebra quartz"])).any()


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.sampled_from([0.1, 1.0, 10.0]))
def test_weights_are_the_minimum_that_another_optimizer_finds(seed: int, l2: float) -> None:
    random = np.random.default_rng(seed)
    matrix, sign_N = random.normal(size=(12, 5)), random.choice([-1.0, 1.0], size=12)
    place = np.indices(matrix.shape).reshape(2, -1)
    found_F = fit_logistic(SparseRows(place[0], place[1], matrix.ravel(), *matrix.shape), sign_N, l2=l2)
    weight_F = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    tight = {"max_iter": 500, "tolerance_grad": 1e-12, "tolerance_change": 1e-16}
    optimizer = torch.optim.LBFGS([weight_F], **tight, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        margin_N = torch.from_numpy(sign_N) * (torch.from_numpy(matrix) @ weight_F)
        loss = torch.nn.functional.softplus(-margin_N).sum() + l2 / 2 * weight_F.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    np.testing.assert_allclose(found_F, weight_F.detach().numpy(), atol=1e-6)


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


def test_no_pairs_are_refused() -> None:
    with pytest.raises(DataError, match="no pairs"):
        TextBradleyTerry.fitted([])
