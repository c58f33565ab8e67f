"""Comparisons and the quality of reward models as tables for the terminal."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tunesmith.base.core.log import one_line
from tunesmith.base.schema.records import plain_text
from tunesmith.learn.evaluation.compare import Comparison
from tunesmith.learn.evaluation.judged import agreement_text
from tunesmith.learn.evaluation.reward_quality import RewardQuality
from tunesmith.observe.reports.text import count_of

_NUM_SAMPLES = 3


def comparison_table(comparison: Comparison) -> RenderableType:
    """A rich renderable: the per-prompt table, the figures below it, and some pairs of texts side by side."""
    parts = [_prompt_table(comparison), _figures(comparison)]
    if comparison.environment is not None:
        parts.append(_trajectory_table(comparison.environment))
    return Group(*parts, _sample_table(comparison))


def _prompt_table(comparison: Comparison) -> Table:
    title = f"{one_line(comparison.before)} against {one_line(comparison.after)}"
    table = Table(title=Text(title), title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("prompt", ratio=1, overflow="ellipsis", no_wrap=True)
    for name in ("before", "after", "difference"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in comparison.rows:
        style = "green" if row.difference > 0 else "red" if row.difference < 0 else ""
        table.add_row(
            Text(one_line(row.prompt)),
            f"{row.mean_before:.3f}",
            f"{row.mean_after:.3f}",
            Text(f"{row.difference:+.3f}", style=style),
        )
    table.add_section()
    table.add_row(
        "mean", f"{comparison.mean_before:.3f}", f"{comparison.mean_after:.3f}", f"{comparison.mean_difference:+.3f}"
    )
    table.add_row("median", f"{comparison.median_before:.3f}", f"{comparison.median_after:.3f}", "")
    return table


def _figures(comparison: Comparison) -> Table:
    c = comparison
    ratio = "none" if c.distinct2_ratio is None else f"{c.distinct2_ratio:.2f}"
    method = "exact" if c.p_value_exact else "Monte Carlo"
    table = Table.grid(padding=(0, 2))
    table.add_row("improved", f"{c.num_improved} of {c.num_prompts} prompts, {c.num_completions} completions of each")
    for name, (low, high) in (("before", c.interval_before), ("after", c.interval_after)):
        table.add_row(f"mean {name}", f"{getattr(c, f'mean_{name}'):.3f}, 95 % interval {low:.3f} to {high:.3f}")
    low, high = c.win_rate_interval
    table.add_row("win rate", f"{c.win_rate:.0%} of the pairs, ties half, 95 % interval {low:.0%} to {high:.0%}")
    if c.judge is not None:
        table.add_row(
            "judge", f"{one_line(c.judge['model'])} ({c.judge['mode']}): {agreement_text(c.judge['agreement'])}"
        )
        order = c.judge.get("order_decided")
        if order is not None:
            table.add_row("", f"the order of the answers decided {order:.0%} of its comparisons, which are ties")
        table.add_row("", f"{c.judge['num_requests']} requests, {c.judge['num_tokens']} tokens ({c.judge['answers']})")
    if c.num_left_out:
        table.add_row("left out", f"{count_of(c.num_left_out, 'pair')}, of which one has no reward")
    table.add_row("p-value", f"{c.p_value:.2g} (paired permutation test over prompts, two-sided, {method})")
    table.add_row("95 % interval", f"{c.interval[0]:+.3f} to {c.interval[1]:+.3f} (bootstrap of the mean difference)")
    table.add_row("KL", f"{c.kl_per_sequence:.2f} nats per completion")
    table.add_row(
        "distinct-2",
        f"{c.distinct2_before:.3f} before, {c.distinct2_after:.3f} after, ratio {ratio} "
        f"(at {c.distinct2_num_tokens} tokens each)",
    )
    table.add_row("tokens", f"{c.mean_tokens_before:.1f} before, {c.mean_tokens_after:.1f} after, on average")
    return table


def _trajectory_table(found: Mapping[str, Any]) -> Table:
    """Turns, calls and what ended the trajectories, on both sides."""
    table = Table(title="Trajectories", title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("")
    for name in ("before", "after"):
        table.add_column(name, justify="right")
    for name, what in (("turns", "turns"), ("calls", "calls")):
        table.add_row(what, *(f"{found[f'{name}_{side}']:.2f}" for side in ("before", "after")))
    table.add_row("calls not made", *(f"{found[f'failed_calls_{side}']:.0%}" for side in ("before", "after")))
    before, after = found["stop_reasons_before"], found["stop_reasons_after"]
    for reason in sorted({*before, *after}):
        table.add_row(f"ended: {reason}", f"{before.get(reason, 0.0):.0%}", f"{after.get(reason, 0.0):.0%}")
    return table


def _sample_table(comparison: Comparison) -> Table:
    """The first completion of each prompt, in the order of the prompts: no choice is made."""
    table = Table(title="Samples", title_justify="left", show_lines=True)
    table.add_column("prompt", ratio=1)
    table.add_column("before", ratio=2)
    table.add_column("after", ratio=2)
    first = [sample for sample in comparison.samples if sample.completion_index == 0]
    for sample in first[:_NUM_SAMPLES]:
        table.add_row(
            Text(one_line(plain_text(sample.prompt))),
            Text(f"{sample.score_before:+.3f}  {one_line(sample.text_before)}"),
            Text(f"{sample.score_after:+.3f}  {one_line(sample.text_after)}"),
        )
    return table


def reward_table(quality: RewardQuality) -> RenderableType:
    """A rich renderable: the figures with what they are measured by, and the bins of the calibration."""
    q = quality
    table = Table.grid(padding=(0, 2))
    interval = f"{q.accuracy_low:.3f} to {q.accuracy_high:.3f}"
    table.add_row("accuracy", f"{q.accuracy:.3f}", f"95 % interval {interval}, {count_of(q.num_pairs, 'pair')}")
    table.add_row("longer wins", f"{q.longer_wins:.3f}", "the rule that the longer one was preferred")
    if q.tfidf is not None:
        p_value = "" if q.p_value_tfidf is None else f", p = {q.p_value_tfidf:.2g} (McNemar)"
        table.add_row(
            "TF-IDF", f"{q.tfidf:.3f}", f"Bradley-Terry, fitted on {q.num_tfidf_pairs:,} other pairs{p_value}"
        )
    table.add_row("Brier score", f"{q.brier:.3f}", "0.25 is a coin's")
    table.add_row("log loss", f"{q.log_loss:.3f}", "0.693 is a coin's")
    table.add_row("ECE", f"{q.ece:.3f}", "mean distance of confidence and accuracy")
    table.add_row("margin", f"{q.mean_margin:.3f}", "mean reward of the better minus that of the worse one")
    table.add_row("length", _or_none(q.length_correlation), "correlation of margin and difference in tokens")
    longer, shorter = count_of(q.num_longer, "pair"), count_of(q.num_shorter, "pair")
    table.add_row("", _or_none(q.accuracy_longer), f"accuracy on the {longer} whose better one is longer")
    table.add_row("", _or_none(q.accuracy_shorter), f"on the {shorter} whose better one is shorter")
    if (plain := q.uncorrected) is not None:
        table.add_row("uncorrected", f"{plain.accuracy:.3f}", "accuracy without the correction for length")
        table.add_row("", _or_none(plain.length_correlation), "correlation of margin and difference in tokens")
        table.add_row("", _or_none(plain.accuracy_shorter), "accuracy where the better one is shorter")
        table.add_row("", f"{plain.slope:+.3f}", "reward of twice the tokens, which is taken off")
    if q.heads is not None:
        agreed, split = count_of(q.heads.num_agreed, "pair"), count_of(q.heads.num_split, "pair")
        table.add_row("heads", str(q.heads.num_heads), "score heads, whose mean is the reward")
        table.add_row("spread", f"{q.heads.margin_spread:.3f}", "mean standard deviation of their margins of a pair")
        table.add_row("", _or_none(q.heads.accuracy_agreed), f"accuracy on the {agreed} on which all heads agree")
        table.add_row("", _or_none(q.heads.accuracy_split), f"on the {split} on which they do not")
    bins = Table(show_edge=False, pad_edge=False)
    for name in ("confidence", "pairs", "mean", "accuracy"):
        bins.add_column(name, justify="right")
    for one in quality.bins:
        bounds = f"{one.low:.2f} to {one.high:.2f}"
        bins.add_row(bounds, f"{one.num_pairs:,}", _or_none(one.confidence), _or_none(one.accuracy))
    return Group(table, "", bins, *(["", _sources(quality)] if quality.sources else []))


def _sources(quality: RewardQuality) -> Table:
    """Each source of pairs; "longer lost" is where the better one is shorter."""
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("source")
    for name in ("trained on", "pairs", "accuracy", "longer wins", "TF-IDF", "longer lost", "accuracy there"):
        table.add_column(name, justify="right")
    for one in quality.sources:
        table.add_row(
            Text(one_line(one.name)),
            "yes" if one.is_trained else "no",
            f"{one.num_pairs:,}",
            f"{one.accuracy:.3f} ({one.accuracy_low:.3f} to {one.accuracy_high:.3f})",
            f"{one.longer_wins:.3f}",
            _or_none(one.tfidf),
            f"{one.num_shorter:,}",
            _or_none(one.accuracy_shorter),
        )
    return table


def _or_none(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
