"""`tunesmith compare`: two models on the same prompts, judged by one scorer."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tunesmith.cli.options import flag, parse
from tunesmith.cli.output import reporting
from tunesmith.core.errors import InputError

_NUM_SAMPLES = 3
"""Samples that are shown side by side."""


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Compare two models on the same prompts with the same seeds, judged by one scorer."""

    before: Annotated[str, flag("Model or run folder that is compared with.", metavar="A")]
    after: Annotated[str, flag("Model or run folder that is judged.", metavar="B")]
    prompts: Annotated[str, flag("JSONL with a `prompt` column, or films.", metavar="FILE")]
    scorer: Annotated[str, flag("./file.py:function, built-in or reward model.", metavar="SOURCE")]
    num_completions: Annotated[int, flag("Completions of each prompt.", "-n", metavar="N", shows_default=True)] = 8
    max_new_tokens: Annotated[int, flag("Limit of a completion.", metavar="N", shows_default=True)] = 32
    seed: Annotated[int, flag("Seed of both models.", metavar="N", shows_default=True)] = 0
    trust_remote_code: Annotated[bool, flag("Run code that the models bring along.")] = False
    html: Annotated[Path | None, flag("Write the comparison as a page too.", metavar="FILE.html")] = None
    json: Annotated[bool, flag("Print one JSON object at the end.")] = False


def compare(words: Sequence[str]) -> None:
    """Run `tunesmith compare`."""
    options = parse(CompareOptions, words, "compare")
    for name in ("num_completions", "max_new_tokens"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be at least 1")
    if options.html and options.html.exists():
        raise InputError(f"{options.html} exists and is kept; give another name to --html")
    from tunesmith.evaluation.table import comparison_table
    from tunesmith.workflows.comparison import ComparisonOptions, run_comparison

    how = ComparisonOptions(
        num_completions=options.num_completions,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        trust_remote_code=options.trust_remote_code,
        out=options.html,
    )
    with reporting(as_json=options.json) as output:
        comparison = run_comparison(options.before, options.after, options.prompts, options.scorer, how)
        output.say(comparison_table(comparison, num_samples=_NUM_SAMPLES))
        if options.html:
            output.say(f"page     {options.html}")
        output.finish(comparison.to_json())
