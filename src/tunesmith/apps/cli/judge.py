"""`tunesmith judge vote` and `eval judge`: a judge votes on stored pairs, and is compared with people."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tunesmith.apps.cli.options import DATABASE, Positional, check_ranges, flag, parse
from tunesmith.apps.cli.output import Output, reporting, wants_progress
from tunesmith.base.core.errors import InputError
from tunesmith.base.core.log import get_logger, visible

if TYPE_CHECKING:
    from tunesmith.apps.workflows.judging import Judged
    from tunesmith.learn.judges.judge import Judge

_log = get_logger(__name__)

_ANSWERS = "judge_answers.db"


@dataclass(frozen=True, kw_only=True)
class JudgeFlags:
    """Flags of the commands that ask a judge."""

    judge: Annotated[str, Positional, flag("FILE.yaml with its settings, a server's address, or a model.", "JUDGE")] = (
        ""
    )
    answers: Annotated[Path | None, flag("File in which answers and costs are kept.", "FILE.db")] = None
    most_requests: Annotated[int | None, flag("Requests at most, all that the file counts together.", "N")] = None
    most_tokens: Annotated[int | None, flag("Tokens at most, counted in the same way.", "N")] = None


@dataclass(frozen=True, kw_only=True)
class JudgeVoteOptions(JudgeFlags):
    """Let a judge vote on the pairs of a folder: those of people's votes, which shows how far it agrees with them, and
    those that nobody has voted on.

    It is a rater that is marked as a machine: its votes close no pair for people, and are in no statistics and no
    training unless they are asked for. A call that ended early goes on where it was.
    """

    dir: Annotated[Path, flag("Folder of the votes.", "FOLDER")] = Path("live")
    database: Annotated[str | None, DATABASE] = None
    campaign: Annotated[str | None, flag("One campaign; without it, all.", "NAME")] = None
    pairs: Annotated[Literal["all", "voted", "open"], flag("Pairs of people's votes, open ones, or both.")] = "all"
    limit: Annotated[int | None, flag("Pairs at most.", "N")] = None
    json: Annotated[bool, flag("Print one JSON object.")] = False


@dataclass(frozen=True, kw_only=True)
class JudgeEvalOptions(JudgeFlags):
    """Measure how far a judge agrees with people on a file of pairs, with an interval. It is kept beside the judge's
    answers, and stands from then on beside the figures that the judge makes.
    """

    pairs: Annotated[str | None, flag("Source of pairs, the preferred answer in `chosen`.", "SOURCE")] = None
    limit: Annotated[int | None, flag("Of more pairs, a random sample of as many.", "N")] = None
    seed: Annotated[int, flag("Of the sample.", "N")] = 0
    skip_bad: Annotated[bool, flag("Drop rows that cannot be used, and count them.")] = False
    json: Annotated[bool, flag("Print one JSON object.")] = False


def vote(words: Sequence[str]) -> None:
    """Run `tunesmith judge vote`."""
    options = parse(JudgeVoteOptions, words, "judge vote")
    _check(options)
    check_ranges(options, limit=(1, inf))
    from tunesmith.apps.cli.votes import place_of, reader_of
    from tunesmith.apps.workflows.judging import pairs_for, vote_on_stored
    from tunesmith.base.runs.progress import progress

    reader_of(options).close()
    place = place_of(options)
    with reporting(as_json=options.json) as output:
        judge = _judge_of(options, options.dir.expanduser() / _ANSWERS)
        wanted = pairs_for(judge, place, options.campaign, which=options.pairs, limit=options.limit)
        with _interrupts_explained(judge), progress("pairs", len(wanted), enabled=wants_progress()) as reporter:
            found = vote_on_stored(
                judge,
                place,
                wanted,
                waiting=lambda message: _log.info("%s", message),
                progress=reporter.update,
            )
        output.say(f"votes          {found.num_judged} of {found.num_pairs} pairs, by {visible(judge.rater_name)!r}")
        _finish(judge, found, output, {"dir": options.dir, "rater": judge.rater_name})


def evaluate(words: Sequence[str]) -> None:
    """Run `tunesmith eval judge`."""
    options = parse(JudgeEvalOptions, words, "eval judge")
    _check(options)
    check_ranges(options, limit=(1, inf))
    if options.pairs is None:
        raise InputError("no pairs are named; give --pairs SOURCE, or let the judge vote by `tunesmith judge vote`")
    from tunesmith.apps.workflows.judging import compare_with_people, decided_pairs_of
    from tunesmith.base.runs.progress import progress

    with reporting(as_json=options.json) as output:
        judge = _judge_of(options, None)
        wanted = decided_pairs_of(options.pairs, limit=options.limit, seed=options.seed, skip_bad=options.skip_bad)
        with _interrupts_explained(judge), progress("pairs", len(wanted), enabled=wants_progress()) as reporter:
            found = compare_with_people(judge, options.pairs, wanted, progress=reporter.update)
        output.say(f"judged         {found.num_judged} of {found.num_pairs} pairs of {options.pairs}")
        _finish(judge, found, output, {"pairs": options.pairs})


def _check(options: JudgeFlags) -> None:
    """Raise InputError if no judge is named, or a limit is below 1."""
    if not options.judge:
        raise InputError("no judge is named; give FILE.yaml with its settings, a server's address, or a model")
    check_ranges(options, most_requests=(1, inf), most_tokens=(1, inf))


def _judge_of(options: JudgeFlags, answers: Path | None) -> "Judge":
    """The judge that the flags name; `answers` is its file, where neither they nor its settings say another."""
    from tunesmith.base.config.judge import judge_settings
    from tunesmith.learn.judges.judge import open_judge

    settings = judge_settings(options.judge, most_requests=options.most_requests, most_tokens=options.most_tokens)
    given = options.answers or (answers if "answers" not in settings.model_fields_set else None)
    return open_judge(settings if given is None else settings.model_copy(update={"answers": str(given)}))


@contextmanager
def _interrupts_explained(judge: "Judge") -> Generator[None]:
    """Say after Ctrl-C what is kept."""
    try:
        yield
    except KeyboardInterrupt:
        _log.warning("answers so far are in %s; the same command goes on from there", judge.answers.path)
        raise


def _finish(judge: "Judge", found: "Judged", output: Output, facts: dict[str, object]) -> None:
    from tunesmith.learn.evaluation.judged import agreement_text

    costs = judge.answers.costs
    output.say(f"people         {agreement_text(found.agreement or judge.agreement)}")
    if found.order_decided is not None:
        output.say(f"order          decided {found.order_decided:.0%} of the pairs, which are ties")
    if found.prefers_longer is not None:
        output.say(f"longer answer  preferred in {found.prefers_longer:.0%} of its decisions; ties {found.num_ties}")
    output.say(f"cost           {costs.num_requests} requests, {costs.num_tokens} tokens in all ({judge.answers.path})")
    if found.unjudged:
        output.say(f"left out       {visible(found.unjudged)}")
    output.finish({**asdict(found), **judge.facts(), **facts})
