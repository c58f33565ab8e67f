"""`tunesmith votes select`: which pairs of a campaign raters are asked about next."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tunesmith.apps.cli.options import DATABASE, check_ranges, flag, parse
from tunesmith.apps.cli.output import reporting, wants_progress
from tunesmith.base.core.errors import InputError
from tunesmith.base.core.log import get_logger

if TYPE_CHECKING:
    from tunesmith.apps.workflows.selecting import Source
    from tunesmith.base.config.algorithms.live import LiveSelectionSection

_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class SelectOptions:
    """Choose the given pairs of a campaign that raters are asked about next: those that say most.

    A reward model with several heads says what it is unsure of, or a model of the campaign's votes on features of any
    language model. Some pairs stay random, held-out ones always are. Why a pair is asked stands with it, and with its
    votes in exports. Repeat the command as votes come.
    """

    dir: Annotated[Path, flag("Folder of the votes.", "FOLDER")] = Path("live")
    database: Annotated[str | None, DATABASE] = None
    campaign: Annotated[str, flag("Campaign.", "NAME")] = "default"
    selection: Annotated[
        Literal["random", "infomax", "drts", "delta_ucb", "d_optimal"],
        flag("Method, as `live.selection`; `random` gives an order by chance."),
    ] = "drts"
    reward_model: Annotated[str | None, flag("Run folder, folder or hub id of a reward model with heads.", "RUN")] = (
        None
    )
    model: Annotated[str | None, flag("Language model, in place of a reward model: hub id, folder, smollm2.", "ID")] = (
        None
    )
    num: Annotated[int, flag("Pairs that are put in order; the others come after them.", "N")] = 500
    random_share: Annotated[float, flag("Share of the prompts whose pairs stay random.", "X")] = 0.2
    seed: Annotated[int, flag("Of what is drawn by chance. Keep it from call to call.", "N")] = 0
    json: Annotated[bool, flag("Print one JSON object.")] = False


def select(words: Sequence[str]) -> None:
    """Run `tunesmith votes select`."""
    options = parse(SelectOptions, words, "votes select")
    check_ranges(options, num=(1, inf), random_share=(0, 1))
    named = [name for name in (options.reward_model, options.model) if name is not None]
    if options.selection != "random" and len(named) != 1:
        raise InputError(
            f"{'two models are' if named else 'no model is'} named, but {options.selection} needs one that judges the "
            "pairs; give --reward-model RUN with several heads, or --model ID with any language model"
        )
    if options.selection == "random" and named:
        raise InputError("--selection random needs no model; leave it out, or give another selection")
    from tunesmith.apps.cli.votes import place_of, reader_of
    from tunesmith.base.config.algorithms.live import LiveSelectionSection

    reader_of(options).close()
    section = LiveSelectionSection(method=options.selection, random_share=options.random_share)
    with reporting(as_json=options.json) as output:
        from tunesmith.apps.workflows.selecting import read_campaign, select_pairs
        from tunesmith.base.runs.progress import progress

        place = place_of(options)
        campaign = read_campaign(place, options.campaign)
        source = _source(options, section)
        num_pairs = 0 if source is None else len(campaign.pairs)
        with progress("pairs", num_pairs, enabled=num_pairs > 0 and wants_progress()) as reporter:
            found = select_pairs(
                place,
                campaign,
                section,
                source,
                most=options.num,
                seed=options.seed,
                waiting=lambda message: _log.info("%s", message),
                progress=reporter.update,
            )
        output.say(f"in order       {found.num_placed} of {found.num_waiting} pairs, {found.num_random} at random")
        if options.model is not None:
            output.say(f"votes          {found.num_votes} known")
        if found.num_unread:
            output.say(f"left out       {found.num_unread} that the model cannot read; they come last")
        output.finish({**asdict(found), "campaign": options.campaign, "selection": options.selection})


def _source(options: SelectOptions, section: "LiveSelectionSection") -> "Source | None":
    """The model that judges the pairs, loaded; None if none is needed."""
    if options.selection == "random":
        return None
    from tunesmith.apps.workflows.selecting import FromHeads, FromVotes
    from tunesmith.engine.models.load import load_policy, load_reward_model

    if options.reward_model is not None:
        return FromHeads(load_reward_model(options.reward_model))
    return FromVotes(load_policy(str(options.model)), section)
