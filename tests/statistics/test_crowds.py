"""Labels of crowds by Dawid and Skene's model: simulated crowds, and published ones with known truth."""

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest

from tunesmith.base.core.errors import InputError
from tunesmith.collect.statistics.crowds import GivenLabel, infer_labels

BEST = {"duck-identification": 0.8888888888888888, "jn-product": 0.9397474443776308}
"""Accuracy of the best of crowd-kit 1.4.2's aggregations, which is its DawidSkene on both."""


def labels_of(name: str, data_dir: Path) -> tuple[list[GivenLabel], dict[str, str]]:
    tables: list[list[list[str]]] = []
    for kind in ("answer", "truth"):
        with gzip.open(data_dir / "raters" / f"{name}.{kind}.csv.gz", "rt", encoding="utf-8") as file:
            tables.append(list(csv.reader(file))[1:])
    return [GivenLabel(*row) for row in tables[0]], dict(tables[1])


@pytest.mark.parametrize("name", sorted(BEST))
def test_labels_of_published_crowds_are_as_right_as_those_of_crowd_kit(name: str, data_dir: Path) -> None:
    given, truth = labels_of(name, data_dir)
    found = infer_labels(given)
    assert np.mean([found.labels[question] == label for question, label in truth.items()]) >= BEST[name]


def simulated(seed: int, confusion_WKK: np.ndarray) -> tuple[list[GivenLabel], dict[int, str]]:
    random = np.random.default_rng(seed)
    names = "abc"[: confusion_WKK.shape[1]]
    truth = {question: names[random.integers(len(names))] for question in range(300)}
    given = [
        GivenLabel(question, worker, names[random.choice(len(names), p=rows_KK[names.index(label)])])
        for question, label in truth.items()
        for worker, rows_KK in enumerate(confusion_WKK)
        if random.random() < 0.6
    ]
    return given, truth


def test_a_worker_who_mixes_two_classes_up_is_understood() -> None:
    good = np.full((3, 3), 0.1) + 0.7 * np.eye(3)
    swapped = good[[1, 0, 2]]
    given, truth = simulated(0, np.stack([good, good, good, swapped, swapped]))
    found = infer_labels(given)
    right = np.mean([found.labels.get(question) == label for question, label in truth.items()])
    votes = {question: [one.label for one in given if one.question == question] for question in truth}
    majority = np.mean([max(set(said), key=said.count) == truth[one] for one, said in votes.items() if said])
    assert right > majority + 0.1
    assert [round(found.workers[worker].accuracy, 1) > 0.6 for worker in range(5)] == [True, True, True, False, False]


def test_known_labels_are_kept_and_tell_of_the_workers() -> None:
    """Two workers always contradict each other: a few known questions say which one to believe."""
    given = [GivenLabel(q, w, "yes" if (q + w) % 2 else "no") for q in range(40) for w in range(2)]
    known = {question: "yes" if question % 2 else "no" for question in range(6)}
    found = infer_labels(given, known)
    assert all(found.labels[question] == ("yes" if question % 2 else "no") for question in range(40))
    assert found.workers[0].accuracy > 0.9 > 0.1 > found.workers[1].accuracy
    assert found.workers[0].num_labels == 40
    with pytest.raises(InputError, match="none that was given"):
        infer_labels(given, {0: "perhaps"})
    with pytest.raises(InputError, match="no labels"):
        infer_labels([])
