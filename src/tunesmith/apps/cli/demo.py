"""`tunesmith demo` and `tunesmith sentiment`: the whole loop on a language model, from votes or labels to PPO."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from tunesmith.apps.cli.options import flag, parse
from tunesmith.apps.cli.output import reporting


@dataclass(frozen=True, kw_only=True)
class DemoFlags:
    """The whole loop on SmolLM2-135M: completions, votes, reward model, PPO or GRPO, before and after.

    The votes come from a simulated rater of sentiment, or from you with --vote. Two CPU cores suffice; it takes some
    minutes.
    """

    algorithm: Annotated[str, flag("What trains the policy: a NAME with a shipped recipe demo_NAME.", "NAME")] = "ppo"
    seed: Annotated[int, flag("Seed of everything that is drawn.", "N")] = 0
    vote: Annotated[bool, flag("You vote, with two keys in the terminal.")] = False
    quick: Annotated[bool, flag("A run of few steps, to see that all parts work.")] = False
    backend: Annotated[Literal["native", "transformers"], flag("What draws completions.")] = "native"
    level: Annotated[str | None, flag("Of both trainings: baseline, basic, advanced or optimal.", "LEVEL")] = None
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], flag("Precision of all models.")] = "auto"
    out: Annotated[str, flag("Folder for the run folders.", "DIR")] = "runs"
    live: Annotated[bool, flag("You vote in the browser, and the model learns while you do; Ctrl-C ends it.")] = False
    json: Annotated[bool, flag("Print one JSON object at the end.")] = False


def demo(words: Sequence[str]) -> None:
    """Run `tunesmith demo`."""
    flags = parse(DemoFlags, words, "demo")
    if flags.live:
        _live(flags)
        return
    from tunesmith.apps.workflows.demo import DemoOptions, run_demo
    from tunesmith.learn.evaluation.tables import comparison_table

    with reporting(as_json=flags.json) as output:
        options = DemoOptions(
            flags.algorithm,
            seed=flags.seed,
            vote=flags.vote,
            out=flags.out,
            quick=flags.quick,
            backend=flags.backend,
            level=flags.level,
            dtype=flags.dtype,
        )
        result = run_demo(options)
        facts = result.figures
        output.say(comparison_table(result.comparison))
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
    from tunesmith.apps.workflows.demo import run_live_demo
    from tunesmith.observe.reports.text import count_of

    folder = Path(flags.out) / "live"
    with reporting(as_json=flags.json) as output:
        result = run_live_demo(folder, seed=flags.seed, announce=lambda url: output.say(f"vote     {url}"))
        output.say(f"version {result.serving} has learnt from {count_of(result.votes, 'vote')}\nfolder   {folder}")
        if result.path:
            output.say(f"try it   tunesmith chat {result.path} --against base")
        output.finish({"folder": folder, **asdict(result)})


@dataclass(frozen=True, kw_only=True)
class SentimentFlags:
    """Film reviews: SFT, a reward model from labels, PPO from the first tokens, and an independent judge.

    The recipes sentiment_imdb_sft, sentiment_imdb_reward and sentiment_imdb say how each stage is trained.
    """

    reviews: Annotated[
        str | None, flag("Source with `text` and `label`; IMDB of TUNESMITH_DATA if left out.", "SOURCE")
    ] = None
    judge: Annotated[str | None, flag("The judge's own texts, in the same form or a zip of sentences.", "SOURCE")] = (
        None
    )
    model: Annotated[str | None, flag("Model to start from instead of the recipes'.", "ID")] = None
    level: Annotated[str | None, flag("Of all trainings: baseline, basic, advanced or optimal.", "LEVEL")] = None
    seed: Annotated[int, flag("Seed of everything that is drawn.", "N")] = 0
    quick: Annotated[bool, flag("Few reviews and steps, to see that all parts work.")] = False
    out: Annotated[str, flag("Folder for the run folders.", "DIR")] = "runs"
    json: Annotated[bool, flag("Print one JSON object at the end.")] = False


def sentiment(words: Sequence[str]) -> None:
    """Run `tunesmith sentiment`."""
    flags = parse(SentimentFlags, words, "sentiment")
    from tunesmith.apps.workflows.sentiment import SentimentOptions, run_sentiment
    from tunesmith.learn.evaluation.tables import comparison_table

    with reporting(as_json=flags.json) as output:
        defaults = SentimentOptions()
        options = SentimentOptions(
            reviews=flags.reviews or defaults.reviews,
            judge=flags.judge or defaults.judge,
            model=flags.model,
            seed=flags.seed,
            out=flags.out,
            quick=flags.quick,
            level=flags.level,
        )
        result = run_sentiment(options)
        output.say(comparison_table(result.comparison))
        facts = result.figures
        output.say(
            f"\nreward   {facts['reward_first']:.2f} to {facts['reward_plateau']:.2f}, plateau from step "
            f"{facts['plateau_step']}\njudge    right on {facts['judge_accuracy']:.0%} of texts that it has not seen"
            f"\nreport   {facts['report']}"
        )
        output.finish({**facts, "run_dir": result.run_dir})
