"""Data of the report pages from run folders, comparisons and demo results: tiles, goals, samples, votes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.core.errors import RunError
from tunesmith.reports.series import Row, evenly, number
from tunesmith.reports.text import UNKNOWN, cut, decimal, p_value, percent, prompt_text, score
from tunesmith.runs.listing import read_object, read_rows

Facts = Mapping[str, Any]
"""A JSON object."""

MAX_PROMPTS = 60
"""Prompts whose samples a page shows; the JSONL has them all."""

MAX_PAIRS = 16
_STEPS_SHOWN = 4
_SAMPLES_PER_STEP = 4


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure with its name and a short note."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure that the demo sets out to reach; `met` is None where the figure is missing."""

    name: str
    value: str
    target: str
    met: bool | None


@dataclass(frozen=True, slots=True)
class ScoredText:
    """One text by a model, and its score."""

    text: str
    score: str


@dataclass(frozen=True, slots=True)
class PromptSamples:
    """All samples of one prompt, before and after. `continues` is set if completions continue the prompt's text."""

    prompt: str
    continues: bool
    mean_before: str
    mean_after: str
    pairs: tuple[tuple[ScoredText, ScoredText], ...]


@dataclass(frozen=True, slots=True)
class StepSamples:
    """Samples drawn at one training step."""

    step: str
    samples: tuple[tuple[str, bool, ScoredText], ...]


def comparison_tiles(comparison: Facts) -> tuple[Tile, ...]:
    """The figures of a comparison."""
    interval = comparison.get("interval") or (None, None)
    method = {True: "exact", False: "Monte Carlo"}.get(comparison.get("p_value_exact", ""), "")
    return (
        Tile(
            "Prompts improved", _out_of(comparison), f"{comparison.get('num_completions', UNKNOWN)} completions of each"
        ),
        Tile(
            "Mean",
            _arrow(comparison, "mean"),
            f"95\u202f% interval of the gain {decimal(interval[0])} to {decimal(interval[1])}",
        ),
        Tile("Median", _arrow(comparison, "median"), "over prompt means"),
        Tile(
            "Paired permutation test",
            p_value(comparison.get("p_value")),
            f"two-sided, over prompts{method and ', ' + method}",
        ),
        Tile(
            "KL to the model before",
            f"{decimal(comparison.get('kl_per_sequence'), 2)} nats",
            "per completion, on the samples after",
        ),
        Tile(
            "Distinct-2, after / before",
            decimal(comparison.get("distinct2_ratio"), 2),
            f"{decimal(comparison.get('distinct2_before'))} and {decimal(comparison.get('distinct2_after'))} "
            f"at {decimal(comparison.get('distinct2_num_tokens'), 0)} tokens each",
        ),
    )


def _out_of(facts: Facts) -> str:
    return f"{facts.get('num_improved', UNKNOWN)} of {facts.get('num_prompts', UNKNOWN)}"


def _arrow(facts: Facts, name: str) -> str:
    return f"{decimal(facts.get(f'{name}_before'))} → {decimal(facts.get(f'{name}_after'))}"


def demo_goals(result: Facts) -> tuple[Goal, ...]:
    """The demo's goals and whether this run reached them. The number improved is judged as a share, 14 of 15."""
    prompts, improved = number(result.get("num_prompts")), number(result.get("num_improved"))
    share = improved / prompts if improved is not None and prompts else None
    accuracy_note = f" of {result['num_heldout_votes']} votes" if "num_heldout_votes" in result else ""
    return (
        Goal("Openings improved", _out_of(result), "at least 14 of 15", _at_least(share, 14 / 15)),
        Goal(
            "Paired permutation test", p_value(result.get("p_value")), "p < 0.01", _at_most(result.get("p_value"), 0.01)
        ),
        Goal(
            "KL to the starting model",
            f"{decimal(result.get('kl_per_sequence'), 2)} nats",
            "at most 8 nats a completion",
            _at_most(result.get("kl_per_sequence"), 8),
        ),
        Goal(
            "Variety kept (distinct-2)",
            decimal(result.get("distinct2_ratio"), 2),
            "at least 0.60 of before",
            _at_least(result.get("distinct2_ratio"), 0.6),
        ),
        Goal(
            "Reward model, unseen votes",
            percent(result.get("reward_model_accuracy")) + accuracy_note,
            "at least 75\u202f% right",
            _at_least(result.get("reward_model_accuracy"), 0.75),
        ),
    )


def _at_least(value: object, limit: float) -> bool | None:
    x = number(value)
    return None if x is None else x >= limit - 1e-9


def _at_most(value: object, limit: float) -> bool | None:
    x = number(value)
    return None if x is None else x <= limit


def prompt_samples(samples: Sequence[Row]) -> tuple[PromptSamples, ...]:
    """The samples of a comparison by prompt, completions as drawn; at most `MAX_PROMPTS` prompts, evenly spaced."""
    groups: dict[object, list[Row]] = {}
    for sample in samples:
        groups.setdefault(sample.get("prompt_index", str(sample.get("prompt"))), []).append(sample)
    return tuple(_prompt_samples(group) for group in evenly(list(groups.values()), MAX_PROMPTS))


def _prompt_samples(group: Sequence[Row]) -> PromptSamples:
    prompt = group[0].get("prompt")
    return PromptSamples(
        prompt=cut(prompt),
        continues=isinstance(prompt, str),
        mean_before=score(_mean(group, "score_before")),
        mean_after=score(_mean(group, "score_after")),
        pairs=tuple((_scored_text(sample, "before"), _scored_text(sample, "after")) for sample in group[:MAX_PAIRS]),
    )


def _mean(group: Sequence[Row], key: str) -> float | None:
    values = [value for sample in group if (value := number(sample.get(key))) is not None]
    return sum(values) / len(values) if values else None


def _scored_text(sample: Row, side: str) -> ScoredText:
    return ScoredText(cut(sample.get(f"text_{side}")), score(sample.get(f"score_{side}")))


def step_samples(samples: Sequence[Row]) -> tuple[StepSamples, ...]:
    """The first samples of four steps from the first to the last: no choice by score is made."""
    steps: dict[float, list[Row]] = {}
    for sample in samples:
        steps.setdefault(number(sample.get("step")) or 0.0, []).append(sample)
    return tuple(
        StepSamples(f"{step:g}", tuple(_step_sample(row) for row in steps[step][:_SAMPLES_PER_STEP]))
        for step in evenly(sorted(steps), _STEPS_SHOWN)
    )


def _step_sample(row: Row) -> tuple[str, bool, ScoredText]:
    value = next((row[key] for key in ("reward", "score", "rewards") if key in row), None)
    return (
        cut(row.get("prompt"), 1_000),
        isinstance(row.get("prompt"), str),
        ScoredText(cut(row.get("completion")), score(value)),
    )


@dataclass(frozen=True, slots=True)
class VoteView:
    """A vote as a reader sees it: both texts, which won, and the rater's scores if it gives any."""

    prompt: str
    continues: bool
    chosen: ScoredText
    rejected: ScoredText
    tie: bool


def vote_views(examples: Sequence[Row]) -> tuple[VoteView, ...]:
    """Votes with columns `a`, `b`, `preference` (and `score_a`, `score_b`), or `chosen` and `rejected`."""
    return tuple(_vote(row) for row in examples)


def _vote(row: Row) -> VoteView:
    raw = row.get("prompt")
    prompt = raw.get("content") if isinstance(raw, Mapping) else raw  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    if "chosen" in row:
        won, lost = (ScoredText(cut(row.get(side)), score(row.get(f"score_{side}"))) for side in ("chosen", "rejected"))
    else:
        first, second = ("b", "a") if row.get("preference") == "b" else ("a", "b")
        won, lost = (ScoredText(cut(row.get(side)), score(row.get(f"score_{side}"))) for side in (first, second))
    tie = bool(row.get("tie")) or row.get("preference") == "tie"
    return VoteView(prompt_text(prompt), isinstance(prompt, str), won, lost, tie)


def run_tiles(metrics: Sequence[Row], result: Facts) -> tuple[Tile, ...]:
    """First and last value of the metrics that a reader asks for first, and the figures in `result.json`."""
    names = (
        ("reward", "Reward"),
        ("objective/scores", "Reward"),
        ("rewards/accuracies", "Accuracy on votes"),
        ("accuracy", "Accuracy on votes"),
        ("eval/accuracy", "Accuracy on held-out votes"),
        ("kl", "KL, nats per token"),
        ("objective/kl", "KL, nats per completion"),
        ("entropy", "Entropy, nats"),
        ("loss", "Loss"),
        ("tokens_per_s", "Tokens per second"),
    )
    tiles = [Tile("Steps recorded", decimal(len(metrics)))] if metrics else []
    for key, name in (("accuracy", "Right answers, sampled"), ("greedy", "Right answers, greedy")):
        before, after = number(result.get(f"{key}_before")), number(result.get(f"{key}_after"))
        if before is not None and after is not None:
            tiles.append(Tile(name, f"{percent(before)} → {percent(after)}", "held-out prompts, before and after"))
    for key, name in names:
        values = [value for row in metrics if (value := number(row.get(key))) is not None]
        if values:
            tiles.append(Tile(name, f"{decimal(values[0])} → {decimal(values[-1])}", "first and last step"))
    scalars = [(key, value) for key, value in result.items() if number(value) is not None]
    tiles += [Tile(key.replace("_", " "), decimal(value), "result") for key, value in scalars]
    return tuple(tiles[:8])


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The contents of a run folder; `num_unreadable` counts lines that are no JSON object: one cut off by a crash."""

    name: str
    recipe: str
    environment: Mapping[str, Any]
    result: Mapping[str, Any]
    metrics: tuple[Row, ...]
    samples: tuple[Row, ...]
    findings: tuple[Row, ...]
    num_unreadable: int


def read_run(run_dir: Path) -> RunFacts:
    """The facts of `run_dir`; raises RunError if it is no folder."""
    if not run_dir.is_dir():
        raise RunError(
            f"run folder {run_dir} does not exist; give one that `tunesmith train` or `tunesmith demo` wrote"
        )
    metrics, num_bad_metrics = _rows(run_dir / "metrics.jsonl")
    samples, num_bad_samples = _rows(run_dir / "samples.jsonl")
    findings, num_bad_findings = _rows(run_dir / "findings.jsonl")
    return RunFacts(
        name=run_dir.resolve().name,
        recipe=_text(run_dir / "recipe.yaml"),
        environment=read_object(run_dir / "environment.json"),
        result=read_object(run_dir / "result.json"),
        metrics=metrics,
        samples=samples,
        findings=findings,
        num_unreadable=num_bad_metrics + num_bad_samples + num_bad_findings,
    )


def _rows(path: Path) -> tuple[tuple[Row, ...], int]:
    """The JSON objects of a JSONL file, and the number of lines that are none; nothing if there is no such file."""
    rows = read_rows(path)
    num_lines = sum(1 for line in _text(path).split("\n") if line.strip())
    return tuple(rows), num_lines - len(rows)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
