"""Data of the report pages from run folders, comparisons and demo results: tiles, goals, samples, votes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tunesmith.base.config.yaml_text import is_list, is_mapping
from tunesmith.base.runs.listing import number
from tunesmith.observe.profiling.diagnosis import Diagnosis, setting_lines
from tunesmith.observe.reports.figures import evenly
from tunesmith.observe.reports.text import (
    UNKNOWN,
    Facts,
    answer_text,
    count_of,
    cut,
    decimal,
    duration,
    p_value,
    percent,
    prompt_text,
    score,
    short,
    signed,
)

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
class Token:
    """The text of a token, its shade from 0 (likely) to 4 (surprising), and a note with its figures."""

    text: str
    shade: int
    note: str


@dataclass(frozen=True, slots=True)
class TokenPart:
    """A turn of a trajectory that the model drew, or what was replied, which is not learnt and has no shades."""

    title: str
    is_drawn: bool
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class StepSamples:
    """Samples drawn at one training step, those of trajectories with their tokens."""

    step: str
    samples: tuple[tuple[str, bool, ScoredText, tuple[TokenPart, ...]], ...]


MOST_TOKENS = 2_000
"""Tokens of a sample that a page shows: more than `samples.jsonl` holds, unless something else has written it."""

_MOST_CHARACTERS = 200
"""Characters of a token that a page shows."""

_SHADES = (-0.11, -0.7, -2.3, -4.6)
"""Log-probs of 90, 50, 10 and 1 %: a token below as many of them has that shade."""


def comparison_tiles(comparison: Facts) -> tuple[Tile, ...]:
    """The figures of a comparison."""
    low, high = comparison.get("interval") or (None, None)
    method = {True: ", exact", False: ", Monte Carlo"}.get(comparison.get("p_value_exact", ""), "")
    num_each = comparison.get("num_completions", UNKNOWN)
    interval = f"95\u202f% interval of the gain {decimal(low)} to {decimal(high)}"
    kl, ratio = (decimal(comparison.get(name), 2) for name in ("kl_per_sequence", "distinct2_ratio"))
    before, after = (decimal(comparison.get(f"distinct2_{side}")) for side in ("before", "after"))
    variety = f"{before} and {after} at {decimal(comparison.get('distinct2_num_tokens'), 0)} tokens each"
    return (
        Tile("Prompts improved", _out_of(comparison), f"{num_each} completions of each"),
        Tile("Mean", _arrow(comparison, "mean"), interval),
        Tile("Median", _arrow(comparison, "median"), "over prompt means"),
        Tile("Paired permutation test", p_value(comparison.get("p_value")), f"two-sided, over prompts{method}"),
        Tile("KL to the model before", f"{kl} nats", "per completion, on the samples after"),
        Tile("Distinct-2, after / before", ratio, variety),
        *_win_tiles(comparison),
    )


def _win_tiles(comparison: Facts) -> list[Tile]:
    """The win rate, and of trajectories turns, calls and what ended them; empty for pages of older releases."""
    if "win_rate" not in comparison:
        return []
    low, high = map(percent, comparison.get("win_rate_interval") or (None, None))
    tiles = [Tile("Win rate", percent(comparison["win_rate"]), f"ties half, 95\u202f% interval {low} to {high}")]
    if judge := comparison.get("judge"):
        tiles.append(Tile("Judge", str(judge.get("model", UNKNOWN)), _agreement(judge.get("agreement"))))
    found: Facts | None = comparison.get("environment")
    if found:
        sides = ("before", "after")
        calls = " and ".join(decimal(found.get(f"calls_{side}"), 2) for side in sides)
        turns = " → ".join(decimal(found.get(f"turns_{side}"), 2) for side in sides)
        shares: list[Facts] = [found.get(f"stop_reasons_{side}") or {} for side in sides]
        ended = [", ".join(f"{name} {percent(value)}" for name, value in side.items()) for side in shares]
        tiles.append(Tile("Turns", turns, f"{calls} calls of a trajectory"))
        tiles.append(Tile("Ended, after", ended[1], f"before: {ended[0]}"))
    return tiles


def _agreement(found: Facts | None) -> str:
    """How far a judge agrees with people, which stands beside what it says."""
    if not found:
        return "agreement with people not measured"
    share, low, high = (percent(found.get(name)) for name in ("share", "low", "high"))
    return (
        f"agrees with people on {share} of {found.get('num_votes', UNKNOWN)} votes, 95\u202f% interval {low} to {high}"
    )


def _out_of(facts: Facts) -> str:
    return f"{facts.get('num_improved', UNKNOWN)} of {facts.get('num_prompts', UNKNOWN)}"


def _arrow(facts: Facts, name: str) -> str:
    return f"{decimal(facts.get(f'{name}_before'))} → {decimal(facts.get(f'{name}_after'))}"


def demo_goals(result: Facts) -> tuple[Goal, ...]:
    """The demo's goals and whether this run reached them. The number improved is judged as a share, 14 of 15."""
    prompts, improved = number(result.get("num_prompts")), number(result.get("num_improved"))
    share = improved / prompts if improved is not None and prompts else None
    p, kl, variety = (result.get(name) for name in ("p_value", "kl_per_sequence", "distinct2_ratio"))
    accuracy = result.get("reward_model_accuracy")
    right = percent(accuracy) + (f" of {result['num_heldout_votes']} votes" if "num_heldout_votes" in result else "")
    return (
        Goal("Openings improved", _out_of(result), "at least 14 of 15", _at_least(share, 14 / 15)),
        Goal("Paired permutation test", p_value(p), "p < 0.01", _at_most(p, 0.01)),
        Goal("KL to the starting model", f"{decimal(kl, 2)} nats", "at most 6.5 nats a completion", _at_most(kl, 6.5)),
        Goal("Variety kept (distinct-2)", decimal(variety, 2), "at least 0.60 of before", _at_least(variety, 0.6)),
        Goal("Reward model, unseen votes", right, "at least 75\u202f% right", _at_least(accuracy, 0.75)),
    )


def _at_least(value: object, limit: float) -> bool | None:
    x = number(value)
    return None if x is None else x >= limit - 1e-9


def _at_most(value: object, limit: float) -> bool | None:
    x = number(value)
    return None if x is None else x <= limit


def prompt_samples(samples: Sequence[Facts]) -> tuple[PromptSamples, ...]:
    """The samples of a comparison by prompt, completions as drawn; at most `MAX_PROMPTS` prompts, evenly spaced."""
    groups: dict[object, list[Facts]] = {}
    for sample in samples:
        groups.setdefault(sample.get("prompt_index", str(sample.get("prompt"))), []).append(sample)
    return tuple(_prompt_samples(group) for group in evenly(list(groups.values()), MAX_PROMPTS))


def _prompt_samples(group: Sequence[Facts]) -> PromptSamples:
    prompt = group[0].get("prompt")
    return PromptSamples(
        prompt=cut(prompt),
        continues=isinstance(prompt, str),
        mean_before=score(_mean(group, "score_before")),
        mean_after=score(_mean(group, "score_after")),
        pairs=tuple((_scored_text(sample, "before"), _scored_text(sample, "after")) for sample in group[:MAX_PAIRS]),
    )


def _mean(group: Sequence[Facts], key: str) -> float | None:
    values = [value for sample in group if (value := number(sample.get(key))) is not None]
    return sum(values) / len(values) if values else None


def _scored_text(sample: Facts, side: str) -> ScoredText:
    return ScoredText(cut(sample.get(f"text_{side}")), score(sample.get(f"score_{side}")))


def step_samples(samples: Sequence[Facts]) -> tuple[StepSamples, ...]:
    """The first samples of four steps from the first to the last: no choice by score is made."""
    steps: dict[float, list[Facts]] = {}
    for sample in samples:
        steps.setdefault(number(sample.get("step")) or 0.0, []).append(sample)
    return tuple(
        StepSamples(f"{step:g}", tuple(_step_sample(row) for row in steps[step][:_SAMPLES_PER_STEP]))
        for step in evenly(sorted(steps), _STEPS_SHOWN)
    )


def _step_sample(row: Facts) -> tuple[str, bool, ScoredText, tuple[TokenPart, ...]]:
    value = next((row[key] for key in ("reward", "score", "rewards") if key in row), None)
    return (
        cut(row.get("prompt"), 1_000),
        isinstance(row.get("prompt"), str),
        ScoredText(cut(answer_text(row)), score(value)),
        token_parts(row),
    )


def token_parts(sample: Facts) -> tuple[TokenPart, ...]:
    """The tokens of a trajectory by turns; empty for a sample without them, as runs of older releases have."""
    tokens = sample.get("tokens")
    if not is_mapping(tokens):
        return ()
    parts: list[TokenPart] = []
    num_left = MOST_TOKENS
    for row in _list(tokens.get("parts")):
        if is_mapping(row) and num_left > 0:
            parts.append(_token_part(row, num_left))
            num_left -= len(parts[-1].tokens)
    left_out = number(tokens.get("left_out")) or 0
    if left_out > 0:
        parts.append(TokenPart(f"{count_of(int(left_out), 'token')} more, not recorded", False, ()))
    return tuple(parts)


def _token_part(part: Mapping[str, object], limit: int) -> TokenPart:
    pieces, logps = (_list(part.get(name)) for name in ("pieces", "logps"))
    given = part.get("advantage")
    each = _list(given) or [given] * len(pieces)
    tokens: list[Token] = []
    for place, piece in enumerate(pieces[:limit]):
        logp = number(logps[place]) if place < len(logps) else None
        figures = [] if logp is None else [f"log-prob {decimal(logp, 2)}, {percent(math.exp(min(0.0, logp)))}"]
        advantage = number(each[place]) if place < len(each) else None
        figures += [] if advantage is None else [f"advantage {signed(advantage, 2)}"]
        shade = 0 if logp is None else sum(logp < bound for bound in _SHADES)
        text = str(piece)[:_MOST_CHARACTERS].replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}\n")
        tokens.append(Token(text, shade, "; ".join(figures)))
    is_drawn = "turn" in part
    words = [f"turn {short(part['turn'], 9)}" if is_drawn else "reply, not learnt"]
    words += [f"reward {decimal(part['reward'], 2)}"] if "reward" in part else []
    words += [f"advantage {signed(given, 2)}"] if number(given) is not None else []
    words += ["not learnt"] if is_drawn and given is None else []
    words += [f"in a new sequence ({short(part['sample'], 9)})"] if "sample" in part else []
    return TokenPart(", ".join(words), is_drawn, tuple(tokens))


def _list(value: object) -> Sequence[object]:
    return value if is_list(value) else []


@dataclass(frozen=True, slots=True)
class VoteView:
    """A vote as a reader sees it: both texts, and the rater's scores if it gives any."""

    prompt: str
    continues: bool
    chosen: ScoredText
    rejected: ScoredText


def vote_views(votes: Sequence[Facts]) -> tuple[VoteView, ...]:
    """Votes with `prompt`, `a`, `b`, `preference` (not a tie), `score_a` and `score_b`."""
    return tuple(
        VoteView(
            prompt_text(vote["prompt"]),
            isinstance(vote["prompt"], str),
            *(
                ScoredText(cut(vote[side]), score(vote[f"score_{side}"]))
                for side in (("b", "a") if vote["preference"] == "b" else ("a", "b"))
            ),
        )
        for vote in votes
    )


def run_tiles(metrics: Sequence[Facts], result: Facts) -> tuple[Tile, ...]:
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


def cause_rows(diagnosis: Diagnosis) -> list[tuple[str, ...]]:
    """Cause, predicted saving with its interval, evidence and advice of each cause."""
    return [
        (
            cause.symptom,
            f"{duration(cause.predicted_saving_s)} of {duration(diagnosis.mean_step_s)} a step "
            f"({duration(cause.low)} to {duration(cause.high)}), {cause.share:.0%} of the run",
            cause.evidence,
            "; ".join((cause.advice, *setting_lines(cause))),
        )
        for cause in diagnosis.causes
    ]
