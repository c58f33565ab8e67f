"""The true labels of questions from the labels that several workers gave them (Dawid and Skene 1979).

A worker w who sees a question of class k gives the label l with probability c_wkl. Classes have their shares. Both are
estimated with the labels of the questions, by expectation maximisation. A worker's row c_wk has a Dirichlet prior, with
the mean of all workers: who gave few labels is taken to be like the others.

Uses numpy only. Shape suffixes: N given labels, Q questions, W workers, K classes.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunesmith.base.core.errors import InputError

PRIOR_LABELS = 0.1
"""Labels of each class that the prior of a worker is worth: enough that nothing is impossible."""

_SMOOTH = 0.1  # labels that are added to each count of all workers
_MAX_ROUNDS = 1_000
_TOLERANCE = 1e-8


@dataclass(frozen=True, slots=True)
class GivenLabel:
    """What a worker said of a question."""

    question: Hashable
    worker: Hashable
    label: Hashable


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker's chance to give the right label to a question drawn from all, and the number of labels they gave."""

    accuracy: float
    num_labels: int


@dataclass(frozen=True, slots=True)
class Crowd:
    """The most likely label of each question, its probability, and the workers."""

    labels: Mapping[Hashable, Hashable]
    probability: Mapping[Hashable, float]
    workers: Mapping[Hashable, Worker]


def infer_labels(given: Sequence[GivenLabel], known: Mapping[Any, Hashable] | None = None) -> Crowd:
    """The labels of all questions in `given`. Those in `known` are taken as they are, and are evidence of the workers.

    Raises:
        InputError: without labels, or for a known label that nobody gave.
    """
    if not given:
        raise InputError("no labels are given; give some, each with its question and worker")
    questions, question_N = _numbered([one.question for one in given])
    workers, worker_N = _numbered([one.worker for one in given])
    classes, label_N = _numbered([one.label for one in given])
    known_QK = np.zeros((len(questions), len(classes)))
    for question, label in (known or {}).items():
        if label not in classes:
            raise InputError(f"the known label {label!r} of {question!r} is none that was given")
        if question in questions:
            known_QK[questions[question], classes[label]] = 1.0
    chance_QK, confusion_WKK = _fitted(question_N, worker_N, label_N, known_QK, len(workers))
    names = list(classes)
    best_Q = chance_QK.argmax(axis=1)
    share_K = chance_QK.mean(axis=0)
    accuracy_W = np.einsum("wkk,k->w", confusion_WKK, share_K)
    number_W = np.bincount(worker_N, minlength=len(workers))
    return Crowd(
        labels={question: names[best_Q[place]] for question, place in questions.items()},
        probability={question: float(chance_QK[place].max()) for question, place in questions.items()},
        workers={one: Worker(float(accuracy_W[place]), int(number_W[place])) for one, place in workers.items()},
    )


def _numbered(values: Sequence[Hashable]) -> tuple[dict[Hashable, int], np.ndarray]:
    """The distinct values with their places, in the order in which they came, and the place of each."""
    places: dict[Hashable, int] = {}
    numbers = [places.setdefault(value, len(places)) for value in values]
    return places, np.array(numbers, dtype=np.int64)


def _fitted(
    question_N: np.ndarray, worker_N: np.ndarray, label_N: np.ndarray, known_QK: np.ndarray, num_workers: int
) -> tuple[np.ndarray, np.ndarray]:
    """(chance_QK, confusion_WKK), from the shares of the labels of each question on."""
    num_questions, num_classes = known_QK.shape
    is_known_Q = known_QK.sum(axis=1) > 0
    counts_QK = np.zeros_like(known_QK)
    np.add.at(counts_QK, (question_N, label_N), 1.0)
    chance_QK = counts_QK / counts_QK.sum(axis=1, keepdims=True)
    chance_QK[is_known_Q] = known_QK[is_known_Q]
    confusion_WKK = np.zeros((num_workers, num_classes, num_classes))
    for _ in range(_MAX_ROUNDS):
        counts_WLK = np.zeros((num_workers, num_classes, num_classes))
        np.add.at(counts_WLK, (worker_N, label_N), chance_QK[question_N])
        counts_WKK = counts_WLK.transpose(0, 2, 1)
        pooled_KK = counts_WKK.sum(axis=0) + _SMOOTH
        pooled_KK /= pooled_KK.sum(axis=1, keepdims=True)
        confusion_WKK = counts_WKK + PRIOR_LABELS * pooled_KK
        confusion_WKK /= confusion_WKK.sum(axis=2, keepdims=True)
        share_K = chance_QK.sum(axis=0) + _SMOOTH
        log_QK = np.tile(np.log(share_K / share_K.sum()), (num_questions, 1))
        np.add.at(log_QK, question_N, np.log(confusion_WKK)[worker_N, :, label_N])
        before_QK, chance_QK = chance_QK, np.exp(log_QK - log_QK.max(axis=1, keepdims=True))
        chance_QK /= chance_QK.sum(axis=1, keepdims=True)
        chance_QK[is_known_Q] = known_QK[is_known_Q]
        if np.abs(chance_QK - before_QK).max() < _TOLERANCE:
            break
    return chance_QK, confusion_WKK
