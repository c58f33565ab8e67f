"""Figures of standard benchmarks before and after a training, compared question by question."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from tunesmith.collect.statistics.intervals import bootstrap_interval, paired_permutation_p


@dataclass(frozen=True, slots=True)
class Figure:
    """A metric of a model on a task, or on a group of tasks.

    `num_fewshot` is None for a group whose tasks differ in it. `filter` says how an answer is read from a text, `none`
    if it is not. `stderr` is the harness' own standard error. `of_question` has the metric of each question, where its
    mean is `value`; otherwise, as for a perplexity, it is empty.
    """

    task: str
    metric: str
    filter: str
    num_fewshot: int | None
    num_questions: int
    value: float
    stderr: float | None
    higher_is_better: bool
    of_question: tuple[float, ...] = ()

    @property
    def key(self) -> tuple[str, str, str]:
        """What figures of two models are compared by."""
        return self.task, self.metric, self.filter


@dataclass(frozen=True, slots=True)
class BenchmarkRow:
    """A figure of a model, and beside it that of the model before.

    `low` and `high` are the 95 % bootstrap interval of the difference over the questions, `p_value` is that of the
    two-sided paired permutation test; None where a question has no metric of its own. Without a model before, all that
    is of it or of the difference is None.
    """

    task: str
    metric: str
    filter: str
    num_fewshot: int | None
    num_questions: int
    higher_is_better: bool
    after: float
    stderr_after: float | None
    before: float | None = None
    stderr_before: float | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def benchmark_rows(
    after: Sequence[Figure], before: Sequence[Figure] | None = None, *, seed: int = 0
) -> list[BenchmarkRow]:
    """One row for each figure of `after`, in their order, with that of `before` beside it.

    `before` has the same tasks. `seed` is of the resampling.
    """
    known = {figure.key: figure for figure in before or ()}
    return [_row(figure, known.get(figure.key), seed) for figure in after]


def _row(after: Figure, before: Figure | None, seed: int) -> BenchmarkRow:
    compared: dict[str, float | None] = {}
    if before is not None:
        compared = {"before": before.value, "stderr_before": before.stderr, "difference": after.value - before.value}
        if after.of_question and len(after.of_question) == len(before.of_question):
            differences = [new - old for new, old in zip(after.of_question, before.of_question, strict=True)]
            low, high = bootstrap_interval(differences, seed)
            compared |= {"low": low, "high": high, "p_value": paired_permutation_p(differences, seed)}
    return BenchmarkRow(
        after.task,
        after.metric,
        after.filter,
        after.num_fewshot,
        after.num_questions,
        after.higher_is_better,
        after.value,
        after.stderr,
        **compared,
    )


def figures_of(results: Mapping[str, Any]) -> list[Figure]:
    """The figures in what lm-eval's `evaluate` returns: those of groups, then those of tasks."""
    questions = _questions(results.get("samples") or {})
    groups = results.get("group_subtasks") or {}
    figures: list[Figure] = []
    for task, metrics in sorted(results["results"].items(), key=lambda found: not groups.get(found[0])):
        for name, value in metrics.items():
            metric, _, filter_ = name.partition(",")
            if not filter_ or metric.endswith("_stderr") or not _is_number(value):
                continue
            tasks = _leaves(task, groups)
            each = tuple(number for leaf in tasks for number in questions.get((leaf, metric, filter_), ()))
            is_mean = bool(each) and math.isclose(fmean(each), value, rel_tol=1e-9, abs_tol=1e-9)
            stderr = metrics.get(f"{metric}_stderr,{filter_}")
            counts = [results["n-samples"][leaf]["effective"] for leaf in tasks if leaf in results["n-samples"]]
            shots = {int(results["n-shot"].get(leaf) or 0) for leaf in tasks}
            better = (results["higher_is_better"].get(task) or {}).get(metric)
            figures.append(
                Figure(
                    task,
                    metric,
                    filter_,
                    shots.pop() if len(shots) == 1 else None,
                    sum(counts),
                    float(value),
                    float(stderr) if _is_number(stderr) else None,
                    better is None or bool(better),
                    each if is_mean else (),
                )
            )
    return figures


def _questions(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[tuple[str, str, str], list[float]]:
    """(Task, metric, filter) -> the metric of each question, for those that are numbers."""
    found: dict[tuple[str, str, str], list[float]] = {}
    asked = ((task, row) for task, rows in samples.items() for row in sorted(rows, key=lambda row: row["doc_id"]))
    for task, row in asked:
        for metric in filter(lambda name: _is_number(row.get(name)), row["metrics"]):
            found.setdefault((task, metric, row["filter"]), []).append(float(row[metric]))
    return found


def _leaves(task: str, group_subtasks: Mapping[str, Sequence[str]]) -> list[str]:
    """The tasks of a group, of its groups too; a task itself."""
    if not group_subtasks.get(task):
        return [task]
    return list(dict.fromkeys(leaf for child in group_subtasks[task] for leaf in _leaves(child, group_subtasks)))


def _is_number(value: object) -> bool:
    """True for a finite number, those of numpy and truth values included."""
    try:
        return not isinstance(value, str) and math.isfinite(float(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
