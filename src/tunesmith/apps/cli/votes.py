"""`tunesmith votes import | export | stats | prune | audit`: the votes of a folder. Nothing here loads torch."""

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from tunesmith.apps.cli.options import DATABASE, Positional, check_ranges, checked_database, flag, parse
from tunesmith.apps.cli.output import Output, reporting, wants_progress
from tunesmith.base.core.errors import InputError
from tunesmith.base.core.log import get_logger, visible

if TYPE_CHECKING:
    from tunesmith.collect.statistics.bradley_terry import Standing
    from tunesmith.collect.statistics.rater_report import CrowdReport, RaterReport
    from tunesmith.collect.store.inbox import Chore
    from tunesmith.collect.store.vote_reader import VoteReader
    from tunesmith.collect.store.vote_stats import Agreement, BiasTest, FeedbackStats, VoteStats

_log = get_logger(__name__)

VOTES_FILE = "votes.db"
"""Name of the database in a folder of the live loop."""

_TABLES = ("jsonl", "csv", "parquet", "datasets")
"""Formats with a column for each field of a vote."""

_MAX_SHOWN = 20
_QUIET = 1000
"""Rows of an import that are stored too soon for a bar."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Put pairs and rankings of files before raters, or take over votes and feedback that were given elsewhere."""

    files: Annotated[
        tuple[str, ...], Positional, flag("JSONL, JSON, CSV, Parquet, a datasets folder, exports of tools.", "FILE")
    ] = ()
    dir: Annotated[Path, flag("Folder of the votes.", "FOLDER")] = Path("live")
    database: Annotated[str | None, DATABASE] = None
    labels: Annotated[
        Literal["drop", "votes", "gold"] | None,
        flag(
            "What the files say of the better answer: `drop` it and ask raters, take it for `votes`, or check raters "
            "silently by it (`gold`). Without it, pairs in columns and Argilla's records are put before raters, and "
            "the exports of other tools are votes.",
        ),
    ] = None
    format: Annotated[str | None, flag("Format; without it, the content says it.", "NAME")] = None
    preview: Annotated[bool, flag("Show what the files hold, and store nothing.")] = False
    campaign: Annotated[str, flag("Campaign, made if it is new.", "NAME")] = "default"
    heldout: Annotated[bool, flag("Votes on these items check versions and train nothing.")] = False
    question: Annotated[
        str | None, flag("In Argilla's records with several questions, the one that tells the better answer.", "NAME")
    ] = None
    json: Annotated[bool, flag("Print one JSON object.")] = False


@dataclass(frozen=True, kw_only=True)
class ExportVotesOptions:
    """Write votes to a file or folder, in TRL's columns or as Argilla's records. Nothing is overwritten."""

    dest: Annotated[str, Positional, flag("NAME.jsonl, NAME.csv, NAME.parquet, or a new folder.", "DEST")]
    dir: Annotated[Path, flag("Folder of the votes.", "FOLDER")] = Path("live")
    database: Annotated[str | None, DATABASE] = None
    kind: Annotated[Literal["votes", "rankings", "demonstrations", "feedback"], flag("What to write.")] = "votes"
    format: Annotated[
        Literal["jsonl", "csv", "parquet", "datasets", "argilla", "openai-preference", "openai-chat", "label-studio"]
        | None,
        flag("Format; without it, the name says it."),
    ] = None
    campaign: Annotated[str | None, flag("One campaign; without it, all.", "NAME")] = None
    decided: Annotated[bool, flag("Leave out ties, and feedback that is no thumb: some trainers know none.")] = False
    both_bad: Annotated[bool, flag("Keep votes that call both answers bad, with that `verdict`, as ties.")] = False
    machines: Annotated[bool, flag("Write votes of judges too; a column `machine` says which ones they are.")] = False
    json: Annotated[bool, flag("Print one JSON object.")] = False


@dataclass(frozen=True, kw_only=True)
class StatsOptions:
    """Count votes and feedback; how far raters agree, what they lean to, and which versions and models win."""

    dir: Annotated[Path, flag("Folder of the votes.", "FOLDER")] = Path("live")
    database: Annotated[str | None, DATABASE] = None
    campaign: Annotated[str | None, flag("One campaign; without it, all.", "NAME")] = None
    json: Annotated[bool, flag("Print one JSON object.")] = False


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """Remove stored answers, feedback, usage of keys and the audit log that are older than some days. Votes stay.

    A server that has the votes does it, and goes on meanwhile. `tunesmith serve --retention-days N` does it regularly.
    """

    days: Annotated[float, flag("What is older is removed.", "N")]
    dir: Annotated[Path, flag("Folder of the votes.", "FOLDER")] = Path("live")
    database: Annotated[str | None, DATABASE] = None
    json: Annotated[bool, flag("Print one JSON object.")] = False


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """Print the audit log: who made and ended keys, changed settings, imported, exported, deleted, and when."""

    dir: Annotated[Path, flag("Folder of the votes.", "FOLDER")] = Path("live")
    database: Annotated[str | None, DATABASE] = None
    num: Annotated[int, flag("The newest so many entries.", "N")] = 50
    json: Annotated[bool, flag("Print one JSON object.")] = False


def import_(words: Sequence[str]) -> None:
    """Run `tunesmith votes import`."""
    options = parse(ImportOptions, words, "votes import")
    if not options.files:
        raise InputError("no file is named; give one or more, such as pairs.jsonl")
    from tunesmith.base.runs.progress import progress
    from tunesmith.collect.data.vote_imports import VoteFiles, import_notes
    from tunesmith.collect.store.votes import import_into

    with reporting(as_json=options.json) as output:
        # All files are checked before anything is stored.
        files = VoteFiles(
            options.files, options.labels, heldout=options.heldout, question=options.question, form=options.format
        )
        facts: dict[str, object] = {"files": list(map(asdict, files.understood)), "labels": files.labels}
        for line in itertools.chain.from_iterable(one.lines() for one in files.understood):
            output.say(line)
        if options.preview:
            output.finish(facts)
            return
        what = "votes" if files.labels == "votes" else "items"
        with progress(what, files.num_given, enabled=files.num_given > _QUIET and wants_progress()) as reporter:
            done = import_into(
                place_of(options),
                options.campaign,
                files.rows(),
                lambda num_done, _: reporter.update(num_done),
                lambda message: _log.info("%s", message),
                files.num_given,
            )
        output.say(f"{done.num_new} {what} added, {done.num_there} were there already")
        for line in import_notes(done, files.labels, heldout=options.heldout):
            output.say(line)
        output.finish({"dir": options.dir, **asdict(done), **facts})


def export(words: Sequence[str]) -> None:
    """Run `tunesmith votes export`."""
    options = parse(ExportVotesOptions, words, "votes export")
    from tunesmith.collect.data.vote_files import (
        demonstration_columns,
        feedback_columns,
        format_of,
        openai_chat,
        ranking_columns,
        write_rows,
        write_votes,
    )

    form = options.format or format_of(options.dest)
    if form == "argilla" and options.kind != "votes":
        raise InputError(f"Argilla's records hold votes, not {options.kind}; choose another format")
    if form in ("openai-preference", "label-studio") and options.kind != "votes":
        raise InputError(f"{form} holds votes, not {options.kind}; choose another format")
    if options.machines and (options.kind != "votes" or form not in _TABLES):
        raise InputError(f"--machines is for votes in columns ({', '.join(_TABLES)}), which say what a machine voted")
    if form == "openai-chat" and options.kind != "demonstrations":
        raise InputError("openai-chat holds written answers; add --kind demonstrations")
    with reporting(as_json=options.json) as output, reader_of(options) as reader:
        campaign_id = None if options.campaign is None else reader.campaign_named(options.campaign).id
        if options.kind == "rankings":
            num = write_rows(options.dest, map(ranking_columns, reader.export_rankings(campaign_id)), form)
        elif form == "openai-chat":
            written = ((one.prompt, one.text) for one in reader.export_demonstrations(campaign_id))
            edited = reader.corrections() if campaign_id is None else ()
            rows = itertools.chain(written, edited)
            num = write_rows(options.dest, itertools.starmap(openai_chat, rows), "jsonl")
        elif options.kind == "feedback":
            rows = map(feedback_columns, reader.export_feedback())
            kept = (row for row in rows if row["label"] is not None or not options.decided)
            num = write_rows(options.dest, kept, form)
        elif options.kind == "demonstrations":
            num = write_rows(options.dest, map(demonstration_columns, reader.export_demonstrations(campaign_id)), form)
        else:
            rows = reader.export(campaign_id, include_bad=options.both_bad, machines=options.machines)
            judges = {one.name for one in reader.raters() if one.is_machine} if options.machines else None
            num = write_votes(options.dest, (row for row in rows if not (options.decided and row.tie)), form, judges)
        output.say(f"{options.dest}  {num} {options.kind}")
        output.finish({"dest": options.dest, "format": form, "kind": options.kind, "num_rows": num})


def stats(words: Sequence[str]) -> None:
    """Run `tunesmith votes stats`."""
    options = parse(StatsOptions, words, "votes stats")
    from tunesmith.collect.statistics.rater_report import crowd_report
    from tunesmith.collect.statistics.rater_words import notes
    from tunesmith.observe.reports.text import count_of

    with reporting(as_json=options.json) as output, reader_of(options) as reader:
        campaign_id = None if options.campaign is None else reader.campaign_named(options.campaign).id
        found = reader.stats(campaign_id)
        crowd = crowd_report(reader.judged_pairs(campaign_id))
        places = _leaderboard(options, crowd)
        # It belongs to no campaign.
        said = reader.feedback_stats() if campaign_id is None else []
        judges = _judges(reader, campaign_id)
        _say(found, crowd, output)
        for judge in judges[:_MAX_SHOWN]:
            output.say(f"judge          {visible(str(judge['name']))}: {judge['said']}")
        for each in said[:_MAX_SHOWN]:
            output.say(f"feedback       {_feedback(each)}")
        base = next((visible(one.name) for one in places if one.low == one.high == 0.5), "")
        for one in places[:_MAX_SHOWN]:
            rate = one.note if one.win_rate is None else f"{one.win_rate:.0%} ({one.low:.0%} to {one.high:.0%})"
            weighed = "" if one.weighed is None or one.low == one.high else f", weighed {one.weighed:.0%}"
            output.say(f"against {base:<6} {visible(one.name)}: {rate}{weighed}, {count_of(one.num_votes, 'vote')}")
        output.finish(
            {
                **asdict(found),
                "num_preferring": crowd.num_votes,
                "effective": crowd.effective,
                "estimates": [{**one.figures(), "notes": notes(one)} for one in crowd.raters.values()],
                "leaderboard": list(map(asdict, places)),
                "feedback": list(map(asdict, said)),
                "judges": judges,
            }
        )


def prune(words: Sequence[str]) -> None:
    """Run `tunesmith votes prune`."""
    options = parse(PruneOptions, words, "votes prune")
    if not 0 < options.days < math.inf:
        raise InputError(f"--days is {options.days:g}; give a number of days above 0")
    from tunesmith.collect.store.inbox import Chore

    with reporting(as_json=options.json) as output:
        num = do_in(options, Chore("prune", {"days": options.days}))
        said = ", ".join(f"{count} of {name}" for name, count in num.items())
        output.say(f"older than {options.days:g} days: {said or 'nothing'}{' removed' if num else ''}")
        output.finish({"dir": options.dir, "days": options.days, "removed": num})


def audit(words: Sequence[str]) -> None:
    """Run `tunesmith votes audit`."""
    options = parse(AuditOptions, words, "votes audit")
    check_ranges(options, num=(1, math.inf))
    with reporting(as_json=options.json) as output, reader_of(options) as reader:
        entries = reader.audit(limit=options.num)
        for one in reversed(entries):
            when = datetime.fromtimestamp(one.created_at, UTC).isoformat(" ", timespec="seconds")
            detail = ", ".join(f"{name} {value}" for name, value in one.detail.items())
            output.say(visible(f"{when}  {one.who}: {one.kind} {one.about}  {detail}".rstrip()))
        output.finish({"entries": list(map(asdict, entries))})


class Votes(Protocol):
    """Options that say where votes are: in a folder, or in a database of PostgreSQL."""

    @property
    def dir(self) -> Path:
        """The folder."""
        ...

    @property
    def database(self) -> str | None:
        """The database in place of the folder's."""
        ...


def do_in(options: Votes, chore: "Chore") -> Mapping[str, Any]:
    """Have work done on the votes, by the server that has them if there is one. Raises InputError if there are none."""
    from tunesmith.collect.store.votes import do_in

    reader_of(options).close()
    return do_in(place_of(options), chore, lambda message: _log.info("%s", message))


def _judges(reader: "VoteReader", campaign_id: int | None) -> list[dict[str, object]]:
    """The machines among the raters, each with its agreement with people; they count in no other figure."""
    from tunesmith.observe.reports.text import count_of

    found = reader.machine_stats(campaign_id)
    if not found:
        return []
    from tunesmith.apps.workflows.judging import machine_agreement
    from tunesmith.learn.evaluation.judged import agreement_text

    rows: list[dict[str, object]] = []
    for one in found:
        agreement = machine_agreement(one, "these votes")
        said = f"a machine, {count_of(one.num_votes, 'vote')} (ties {one.num_ties}), {agreement_text(agreement)}"
        facts = None if agreement is None else asdict(agreement)
        rows.append({"name": one.name, "num_votes": one.num_votes, "num_ties": one.num_ties, "said": said})
        rows[-1]["agreement"] = facts
    return rows


def _leaderboard(options: StatsOptions, crowd: "CrowdReport") -> "Sequence[Standing]":
    """Versions and models that votes compare, over all campaigns: the strongest first."""
    from tunesmith.collect.statistics.bradley_terry import leaderboard
    from tunesmith.collect.statistics.rater_report import known_weights
    from tunesmith.collect.store.vote_watch import VoteWatch

    with VoteWatch(place_of(options)) as watch:
        return leaderboard(watch.contests()[1], known_weights(crowd))


def place_of(options: Votes) -> str | Path:
    """Where the votes are."""
    return checked_database(options.database) or options.dir.expanduser() / VOTES_FILE


def reader_of(options: Votes) -> "VoteReader":
    """A reader of the votes. Raises InputError if the folder or database has none."""
    from tunesmith.collect.store.vote_reader import VoteReader

    place = place_of(options)
    if isinstance(place, Path) and not place.is_file():
        raise InputError(f"{place} does not exist; name the folder of a `tunesmith serve` or `votes import` in --dir")
    reader = VoteReader.open(place)
    with ExitStack() as opened:
        opened.enter_context(reader)
        if not reader.is_there():
            raise InputError(
                f"{reader.place} holds no votes yet; name the one of a `tunesmith serve` or `votes import`"
            )
        opened.pop_all()
    return reader


def _say(found: "VoteStats", crowd: "CrowdReport", output: Output) -> None:
    from tunesmith.collect.statistics.rater_words import notes
    from tunesmith.observe.reports.text import count_of

    output.say(
        f"votes          {found.num_votes}  (ties {found.num_ties}, both bad {found.num_both_bad}, "
        f"last hour {found.num_votes_last_hour}); skipped {found.num_skips}"
    )
    output.say(f"worth          {_worth(crowd)}")
    output.say(f"rankings       {found.num_rankings}; written answers {found.num_demonstrations}")
    output.say(f"items          {found.num_items}, with all their votes {found.num_items_done}")
    output.say(f"agreement      Krippendorff's alpha {_agreement(found.alpha)}")
    output.say(f"left answer    {_bias(found.left)}")
    output.say(f"longer answer  {_bias(found.longer)}")
    for one in found.asked[:_MAX_SHOWN]:
        by = f"{visible(one.method) or 'no choice'}, {count_of(one.num_votes, 'vote')}"
        output.say(f"asked by       {by}: alpha {_agreement(one.alpha)}; longer {_bias(one.longer)}")
    for pair in found.kappas[:_MAX_SHOWN]:
        output.say(f"kappa          {_agreement(pair.kappa)}  {visible(pair.a)}, {visible(pair.b)}")
    for rater in found.raters[:_MAX_SHOWN]:
        gold = "" if rater.gold_accuracy is None else f", gold {rater.gold_accuracy:.0%} of {rater.num_gold}"
        dwell = "" if rater.median_dwell_ms is None else f", {rater.median_dwell_ms / 1000:.1f} s each"
        num_votes = count_of(rater.num_votes, "vote")
        report = crowd.raters.get(rater.rater_id)
        known = "" if report is None or not report.is_known else f", {_reliability(report)}"
        output.say(f"rater          {visible(rater.name)}: {num_votes}{known}, left {_bias(rater.left)}{gold}{dwell}")
        for note in () if report is None else notes(report):
            output.say(f"               {note}")


def _worth(crowd: "CrowdReport") -> str:
    if crowd.effective is None:
        return "not known: too few votes are on pairs with several votes or known answers"
    return f"{crowd.effective:.0f} votes without an error, of {crowd.num_votes} that prefer an answer"


def _reliability(report: "RaterReport") -> str:
    right = report.reliability
    return f"reliability {right.value:.0%} ({right.low:.0%} to {right.high:.0%}), worth {report.effective:.0f}"


def _feedback(said: "FeedbackStats") -> str:
    true = "" if said.share_true is None else f", {said.share_true:.0%} true"
    mean = "" if said.mean is None else f", mean {said.mean:.3g}"
    mixed = f" of {said.num_thumbs}" if true and said.num_thumbs < said.num else ""
    return f"{visible(said.metric)} on {visible(said.source) or 'conversations'}: {said.num}{true}{mixed}{mean}"


def _agreement(measure: "Agreement") -> str:
    if measure.value is None:
        return f"undefined: {measure.reason}"
    return f"{measure.value:.3f} over {measure.num} items"


def _bias(test: "BiasTest") -> str:
    if test.share is None or test.p_value is None:
        return "no choices yet"
    return f"{test.share:.0%} of {test.num} (p {test.p_value:.3g})"
