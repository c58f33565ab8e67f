"""`tunesmith sentiment`: SFT, reward model and PPO on film reviews."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tunesmith.cli.options import flag, parse
from tunesmith.cli.output import reporting

_NUM_SAMPLES = 3
"""Samples that are shown side by side."""


@dataclass(frozen=True, kw_only=True)
class SentimentFlags:
    """Film reviews: SFT, a reward model from labels, PPO from the first tokens, and an independent judge.

    The recipes sentiment_imdb_sft, sentiment_imdb_reward and sentiment_imdb say how each stage is trained.
    """

    reviews: Annotated[
        str | None, flag("Source with `text` and `label`; IMDB of TUNESMITH_DATA if left out.", metavar="SOURCE")
    ] = None
    judge: Annotated[
        str | None, flag("The judge's own texts, in the same form or a zip of sentences.", metavar="SOURCE")
    ] = None
    model: Annotated[str | None, flag("Model to start from instead of the recipes'.", metavar="ID")] = None
    seed: Annotated[int, flag("Seed of everything that is drawn.", metavar="N", shows_default=True)] = 0
    quick: Annotated[bool, flag("Few reviews and steps, to see that all parts work.")] = False
    out: Annotated[str, flag("Folder for the run folders.", metavar="DIR", shows_default=True)] = "runs"
    json: Annotated[bool, flag("Print one JSON object at the end.")] = False


def sentiment(words: Sequence[str]) -> None:
    """Run `tunesmith sentiment`."""
    flags = parse(SentimentFlags, words, "sentiment")
    from tunesmith.evaluation.table import comparison_table
    from tunesmith.workflows.sentiment import SentimentOptions, run_sentiment

    with reporting(as_json=flags.json) as output:
        defaults = SentimentOptions()
        options = SentimentOptions(
            reviews=flags.reviews or defaults.reviews,
            judge=flags.judge or defaults.judge,
            model=flags.model,
            seed=flags.seed,
            out=flags.out,
            quick=flags.quick,
        )
        result = run_sentiment(options)
        output.say(comparison_table(result.comparison, num_samples=_NUM_SAMPLES))
        facts = result.figures
        output.say(
            f"\nreward   {facts['reward_first']:.2f} to {facts['reward_plateau']:.2f}, plateau from step "
            f"{facts['plateau_step']}\njudge    right on {facts['judge_accuracy']:.0%} of texts that it has not seen"
            f"\nreport   {facts['report']}"
        )
        output.finish({**facts, "run_dir": result.run_dir})
