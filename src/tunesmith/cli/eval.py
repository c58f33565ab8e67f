"""`tunesmith eval reward`: how good a reward model is, and what simple rules reach on the same pairs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tunesmith.cli.options import flag, parse
from tunesmith.cli.output import reporting
from tunesmith.core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class RewardEvalOptions:
    """Judge a reward model on pairs that it was not trained on: accuracy, calibration, length bias.

    Two rules are judged beside it: the longer one wins, and a Bradley-Terry model on TF-IDF fitted on other pairs.
    """

    model: Annotated[str, flag("Run folder, folder or hub id of a reward model.", metavar="RUN")]
    pairs: Annotated[str | None, flag("Source of pairs; by default those that the run held out.", metavar="SOURCE")] = (
        None
    )
    label: Annotated[str | None, flag("Of a classifier with several labels: the reward's.", metavar="NAME")] = None
    skip_bad: Annotated[bool, flag("Drop rows that cannot be used, and count them.")] = False
    micro_batch_size: Annotated[int, flag("Sequences in one pass.", metavar="N", shows_default=True)] = 16
    num_bins: Annotated[int, flag("Bins of the calibration.", metavar="N", shows_default=True)] = 10
    json: Annotated[bool, flag("Print one JSON object at the end.")] = False


def reward(words: Sequence[str]) -> None:
    """Run `tunesmith eval reward`."""
    options = parse(RewardEvalOptions, words, "eval reward")
    for name in ("micro_batch_size", "num_bins"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be at least 1")
    from tunesmith.evaluation.reward_table import reward_table
    from tunesmith.workflows.reward_evaluation import evaluate_reward

    with reporting(as_json=options.json) as output:
        found = evaluate_reward(
            options.model,
            options.pairs,
            label=options.label,
            skip_bad=options.skip_bad,
            micro_batch_size=options.micro_batch_size,
            num_bins=options.num_bins,
        )
        output.say(reward_table(found.quality))
        output.say(f"\npairs    {found.source}\nTF-IDF   fitted on {found.train_source}")
        output.finish(found.to_json())
