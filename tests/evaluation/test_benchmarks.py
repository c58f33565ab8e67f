"""What lm-eval returns becomes figures, and figures of two models are compared question by question."""

from typing import Any

import numpy as np
import pytest

from tunesmith.learn.evaluation.benchmarks import Figure, benchmark_rows, figures_of


def sample(doc_id: int, filter_: str = "none", **metrics: Any) -> dict[str, Any]:
    return {"doc_id": doc_id, "filter": filter_, "metrics": list(metrics), **metrics}


def results() -> dict[str, Any]:
    """As `lm_eval.evaluate` returns them: a group of two tasks, texts with two filters, and a perplexity."""
    return {
        "results": {
            "one": {"alias": " - one", "acc,none": 0.5, "acc_stderr,none": 0.5},
            "two": {"alias": " - two", "acc,none": 1.0, "acc_stderr,none": "N/A"},
            "both": {"alias": "both", "acc,none": 0.75, "acc_stderr,none": 0.2},
            "told": {"exact_match,strict": np.float64(0.0), "exact_match,loose": np.float64(1.0), "sample_len": 1},
            "read": {"word_perplexity,none": 12.5, "word_perplexity_stderr,none": "N/A"},
        },
        "group_subtasks": {"both": ["one", "two"], "told": []},
        "n-samples": {
            name: {"original": 9, "effective": 1 + (name != "told")} for name in ("one", "two", "told", "read")
        },
        "n-shot": {"one": 0, "two": 2, "told": 5, "read": 0},
        "higher_is_better": {
            **{name: {"acc": True} for name in ("both", "one", "two")},
            "told": {"exact_match": True},
            "read": {"word_perplexity": False},
        },
        "samples": {
            "one": [sample(1, acc=1.0), sample(0, acc=np.float64(0.0))],
            "two": [sample(0, acc=True), sample(1, acc=1)],
            "told": [sample(0, "strict", exact_match=0.0), sample(0, "loose", exact_match=1.0)],
            "read": [sample(0, word_perplexity=(-3.0, 2)), sample(1, word_perplexity=(-4.0, 2))],
        },
    }


def test_figures_have_the_questions_of_their_tasks() -> None:
    found = {figure.key: figure for figure in figures_of(results())}
    assert list(found) == [
        ("both", "acc", "none"),
        ("one", "acc", "none"),
        ("two", "acc", "none"),
        ("told", "exact_match", "strict"),
        ("told", "exact_match", "loose"),
        ("read", "word_perplexity", "none"),
    ]
    group, told, read = (found[key] for key in list(found)[::5][:1] + list(found)[3:6:2])
    assert (group.of_question, group.num_questions, group.stderr) == ((0.0, 1.0, 1.0, 1.0), 4, 0.2)
    assert (group.num_fewshot, found["two", "acc", "none"].num_fewshot) == (None, 2)
    assert (told.num_fewshot, told.of_question, told.stderr) == (5, (0.0,), None)
    assert (read.higher_is_better, read.of_question, read.num_questions) == (False, (), 2)
    assert found["two", "acc", "none"].stderr is None


def test_a_group_whose_figure_is_no_mean_over_the_questions_has_none() -> None:
    given = results()
    given["results"]["both"]["acc,none"] = 0.6  # as if weighted in another way
    assert figures_of(given)[0].of_question == ()


def figure(*of_question: float, value: float | None = None) -> Figure:
    mean = sum(of_question) / len(of_question) if value is None else value
    return Figure("t", "acc", "none", 0, 40, mean, 0.1, True, () if value is not None else of_question)


def test_the_difference_is_that_of_the_same_questions() -> None:
    before, after = figure(*[1.0] * 30, *[0.0] * 10), figure(*[1.0] * 20, *[0.0] * 20)
    (row,) = benchmark_rows([after], [before])
    assert (row.before, row.after, row.difference) == (0.75, 0.5, -0.25)
    assert row.low is not None and row.high is not None and row.p_value is not None
    assert -0.45 < row.low < -0.25 < row.high < -0.1 and row.p_value < 0.01
    mirrored = figure(*[0.0] * 10, *[1.0] * 20, *[0.0] * 10)  # as many right ones, of other questions
    (row,) = benchmark_rows([mirrored], [before])
    assert row.difference == -0.25 and row.high is not None and row.low is not None
    assert row.high - row.low == pytest.approx(0.25, abs=0.1)


def test_without_questions_or_a_model_before_there_is_no_interval() -> None:
    (row,) = benchmark_rows([figure(value=11.0)], [figure(value=12.0)])
    assert (row.difference, row.low, row.p_value) == (-1.0, None, None)
    (row,) = benchmark_rows([figure(1.0, 0.0)])
    assert (row.after, row.before, row.difference, row.low) == (0.5, None, None, None)
    assert row.to_json()["before"] is None
