"""`tunesmith demo`: the whole loop on a real language model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tunesmith.cli.options import flag, parse
from tunesmith.cli.output import reporting


@dataclass(frozen=True, kw_only=True)
class DemoFlags:
    """The whole loop on SmolLM2-135M: completions, votes, reward model, PPO, before and after.

    The votes come from a simulated rater of sentiment, or from you with --vote. Two CPU cores suffice; it takes some
    minutes.
    """

    seed: Annotated[int, flag("Seed of everything that is drawn.", metavar="N", shows_default=True)] = 0
    vote: Annotated[bool, flag("You vote, with two keys in the terminal.")] = False
    quick: Annotated[bool, flag("A run of few steps, to see that all parts work.")] = False
    out: Annotated[str, flag("Folder for the run folders.", metavar="DIR", shows_default=True)] = "runs"
    json: Annotated[bool, flag("Print one JSON object at the end.")] = False


def demo(words: Sequence[str]) -> None:
    """Run `tunesmith demo`."""
    flags = parse(DemoFlags, words, "demo")
    from tunesmith.workflows.demo import DemoOptions, run_demo

    with reporting(as_json=flags.json) as output:
        result = run_demo(DemoOptions(seed=flags.seed, vote=flags.vote, out=flags.out, quick=flags.quick))
        output.finish(result.to_json())
