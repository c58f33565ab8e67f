"""`tunesmith demo`: the whole loop on a real language model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tunesmith.cli.options import flag, parse
from tunesmith.cli.output import reporting

_NUM_SAMPLES = 3
"""Samples that are shown side by side."""


@dataclass(frozen=True, kw_only=True)
class DemoFlags:
    """The whole loop on SmolLM2-135M: completions, votes, reward model, PPO or GRPO, before and after.

    The votes come from a simulated rater of sentiment, or from you with --vote. Two CPU cores suffice; it takes some
    minutes.
    """

    algorithm: Annotated[Literal["ppo", "grpo"], flag("What trains the policy.", shows_default=True)] = "ppo"
    seed: Annotated[int, flag("Seed of everything that is drawn.", metavar="N", shows_default=True)] = 0
    vote: Annotated[bool, flag("You vote, with two keys in the terminal.")] = False
    quick: Annotated[bool, flag("A run of few steps, to see that all parts work.")] = False
    backend: Annotated[Literal["native", "transformers"], flag("What draws completions.", shows_default=True)] = (
        "native"
    )
    out: Annotated[str, flag("Folder for the run folders.", metavar="DIR", shows_default=True)] = "runs"
    live: Annotated[bool, flag("You vote in the browser, and the model learns while you do; Ctrl-C ends it.")] = False
    json: Annotated[bool, flag("Print one JSON object at the end.")] = False


def demo(words: Sequence[str]) -> None:
    """Run `tunesmith demo`."""
    flags = parse(DemoFlags, words, "demo")
    if flags.live:
        _live(flags)
        return
    from tunesmith.evaluation.table import comparison_table
    from tunesmith.workflows.demo import DemoOptions, run_demo

    with reporting(as_json=flags.json) as output:
        options = DemoOptions(
            flags.algorithm,
            seed=flags.seed,
            vote=flags.vote,
            out=flags.out,
            quick=flags.quick,
            backend=flags.backend,
        )
        result = run_demo(options)
        facts = result.to_json()
        output.say(comparison_table(result.comparison, num_samples=_NUM_SAMPLES))
        accuracy = facts["reward_model_accuracy"]
        if isinstance(accuracy, float):
            output.say(
                f"\nvotes    the reward model is right on {accuracy:.0%} of {facts['num_heldout_votes']} held-out votes"
            )
        rater = "you" if flags.vote else "a simulated rater, the VADER sentiment lexicon"
        output.say(f"rater    {rater}\nreport   {facts['report']}")
        for policy in sorted(result.run_dir.glob(f"*-demo_{flags.algorithm}-*")):
            output.say(f"try it   tunesmith chat {policy} --against base")
        output.finish(facts)


def _live(flags: DemoFlags) -> None:
    """Run `tunesmith demo --live`."""
    from tunesmith.workflows.live_demo import run_live_demo

    with reporting(as_json=flags.json) as output:
        found = run_live_demo(Path(flags.out), seed=flags.seed, announce=lambda url: output.say(f"vote     {url}"))
        output.say(
            f"version {found.result.serving} has learnt from {found.result.votes} votes\nfolder   {found.folder}"
        )
        if found.result.path:
            output.say(f"try it   tunesmith chat {found.result.path} --against base")
        output.finish({"folder": found.folder, **found.result.to_json()})
