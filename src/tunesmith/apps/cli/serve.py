"""`tunesmith serve`, `tunesmith studio` and `tunesmith watch`: the pages of voting and of runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

from tunesmith.apps.cli.options import (
    DATABASE,
    WEIGHTS,
    Positional,
    UseAppendAction,
    check_ranges,
    checked_database,
    flag,
    parse,
)
from tunesmith.apps.cli.output import Output, reporting
from tunesmith.base.core.errors import InputError
from tunesmith.base.schema.weights import Weights
from tunesmith.collect.web.settings import LOOPBACK, ServerSettings

if TYPE_CHECKING:
    from tunesmith.collect.store.records import CampaignSettings, NewItem, Scope
    from tunesmith.collect.store.votes import VoteStore
    from tunesmith.collect.web.server import Opened

STUDIO_FOLDER = ".studio"
"""Folder below that of the runs with the logins of the studio."""

_PORTS = (0, 65_535)
_MAX_GOLD_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Open the pages where people vote and watch training, and with --openai an OpenAI-compatible API.

    Votes are kept in FOLDER/votes.db, or in a database of PostgreSQL. A trainer (`tunesmith live --dir FOLDER`) may
    run, start or end at any time.
    """

    dir: Annotated[Path, flag("Folder of votes and of the trainer.", "FOLDER")] = Path("live")
    database: Annotated[str | None, DATABASE] = None
    openai: Annotated[
        str | None,
        flag(
            "Answer OpenAI's API at /v1 with this model or run, or with the served version of the live loop in FOLDER: "
            "give FOLDER again.",
            "MODEL",
        ),
    ] = None
    weights: Annotated[Weights, WEIGHTS] = "model"
    new_key: Annotated[
        str | None,
        flag(
            "Print a new key of the API with this name, and end; no server may be running, unless votes are in a "
            "--database.",
            "NAME",
        ),
    ] = None
    scopes: Annotated[
        str | None,
        flag(
            "With --new-key: what the key may do, generate and feedback by default, or admin for everything; joined by "
            "commas.",
            "SCOPES",
        ),
    ] = None
    host: Annotated[str, flag("Address to listen on.", "HOST")] = "127.0.0.1"
    port: Annotated[int, flag("Port to listen on; 0 takes a free one.", "N")] = 8000
    login: Annotated[bool, flag("Allow other machines; everybody logs in with a token.")] = False
    allow_host: Annotated[
        UseAppendAction[tuple[str, ...]], flag("Another name that browsers know this server by.", "NAME")
    ] = ()
    allow_origin: Annotated[
        UseAppendAction[tuple[str, ...]],
        flag("Pages of another server that may ask the API, such as https://app.example; repeatable.", "ORIGIN"),
    ] = ()
    retention_days: Annotated[
        float | None,
        flag("Remove stored answers, feedback, usage and audit log that are older; without it they are kept.", "N"),
    ] = None
    root_path: Annotated[
        str, flag("Path prefix below which a proxy serves the pages, if it does not say so itself.", "PREFIX")
    ] = ""
    forwarded_allow_ips: Annotated[
        UseAppendAction[tuple[str, ...]],
        flag("Address or network of a proxy whose X-Forwarded headers are believed; repeatable.", "IP"),
    ] = LOOPBACK
    pairs: Annotated[
        str | None, flag("Pairs or rankings to be judged, as `tunesmith votes import` reads them.", "FILE")
    ] = None
    guidelines: Annotated[Path | None, flag("Markdown for raters: what makes an answer good.", "FILE")] = None
    overlap: Annotated[int | None, flag("Raters who judge each pair; 1 at first.", "N")] = None
    gold_share: Annotated[
        float | None,
        flag("Share of what a rater sees whose better answer is known, as a silent check; 0 at first.", "SHARE"),
    ] = None
    max_votes: Annotated[int | None, flag("Votes that one rater may give; 0 at first: no limit.", "N")] = None
    lease: Annotated[
        float | None,
        flag("Minutes for which a pair is kept for the rater who sees it; 10 at first.", "MINUTES"),
    ] = None
    raw: Annotated[bool, flag("Show answers as they are, not as Markdown.")] = False
    no_raw: Annotated[bool, flag("Show answers as Markdown again, after a start with --raw.")] = False
    new_admin_link: Annotated[
        bool,
        flag(
            "Print a new link that logs the admin in, once, and end; the server may be running, and its --host and "
            "--port, if they were given, belong here too."
        ),
    ] = False
    json: Annotated[bool, flag("Print one JSON object, with the addresses, at the start.")] = False


def serve(words: Sequence[str]) -> None:
    """Run `tunesmith serve`."""
    options = parse(ServeOptions, words, "serve")
    _check(options)
    from tunesmith.collect.store.database import shown
    from tunesmith.collect.web import server

    items: Sequence[NewItem] = ()
    if options.pairs is not None:
        from tunesmith.collect.data.vote_imports import read_items

        items = read_items(options.pairs)  # all of them, before anything is stored
    guidelines = None if options.guidelines is None else _text(options.guidelines)
    settings = ServerSettings(
        options.dir.expanduser(),
        options.host,
        options.port,
        options.allow_host,
        options.root_path,
        options.forwarded_allow_ips,
        has_arena=True,
        openai=options.openai or "",
        weights=options.weights,
        origins=_origins(options),
        retention_days=options.retention_days,
        database=checked_database(options.database),
    )
    with reporting(as_json=options.json) as output:
        if options.new_admin_link:
            _say_link("vote", server.admin_link(settings), "", output)
            return
        if options.new_key is not None:
            key = server.new_key(settings, options.new_key, _scopes(options.scopes or "generate,feedback"))
            output.say(f"key      {key}")
            output.finish({"key": key})
            return
        _check_served(settings)

        def fill(votes: "VoteStore", campaign_id: int) -> None:
            if items:
                done = votes.import_items(campaign_id, items)
                votes.note("import", {"num_new": done.num_new, "num_there": done.num_there})
                output.say(f"pairs    {done.num_new} added, {done.num_there} were there already")

        server.serve(
            settings,
            adjust=lambda campaign: _adjusted(campaign, options, guidelines),
            is_exposed=options.login,
            fill=fill,
            announce=lambda opened: _say_vote(
                opened, shown(settings.votes_place), output, has_api=bool(settings.openai)
            ),
        )


def _check(options: ServeOptions) -> None:
    """Raise InputError for flags that are out of range or do not go together."""
    check_ranges(options, port=_PORTS, overlap=(1, inf), gold_share=(0, _MAX_GOLD_SHARE), max_votes=(0, inf))
    if options.lease is not None and not 0 < options.lease < inf:
        raise InputError(f"--lease is {options.lease:g}; give a number of minutes above 0")
    if options.retention_days is not None and not 0 < options.retention_days < inf:
        raise InputError(f"--retention-days is {options.retention_days:g}; give a number of days above 0")
    if options.raw and options.no_raw:
        raise InputError("--raw and --no-raw contradict each other; give one")
    if options.scopes is not None and options.new_key is None:
        raise InputError("--scopes is that of a new key; give --new-key NAME too")
    if options.weights != "model" and options.openai is None:
        raise InputError(f"--weights {options.weights} is for what the API answers; give --openai MODEL too")


def _origins(options: ServeOptions) -> tuple[str, ...]:
    """The pages that may ask the API. Raises InputError."""
    for origin in options.allow_origin:
        parts = urlsplit(origin)
        if parts.scheme not in ("http", "https") or not parts.netloc or origin != f"{parts.scheme}://{parts.netloc}":
            raise InputError(
                f"--allow-origin is {origin}; give scheme and host of the page, and its port if it has one, such as "
                "https://app.example"
            )
    if options.allow_origin and not options.openai:
        raise InputError("--allow-origin is for pages that ask the API; give --openai MODEL too")
    return tuple(origin.lower() for origin in options.allow_origin)


def _scopes(given: str) -> "tuple[Scope, ...]":
    """The scopes of a key. Raises InputError."""
    from tunesmith.collect.store.records import SCOPES

    wanted = given.split(",")
    found: tuple[Scope, ...] = tuple(scope for scope in SCOPES if wanted.count(scope))
    if len(found) != len(wanted):
        raise InputError(f"--scopes is {given!r}; give some of {', '.join(SCOPES)}, joined by commas")
    return found


_FORMER_UNDO_S = 300.0
"""The default of campaigns that were made when a vote could be changed for five minutes only."""


def _adjusted(campaign: "CampaignSettings", options: ServeOptions, guidelines: str | None) -> "CampaignSettings":
    """The campaign with what the flags say; what they do not say stays as it was at the last start."""
    given = {
        "guidelines": guidelines,
        "overlap": options.overlap,
        "gold_share": options.gold_share,
        "max_votes_per_rater": options.max_votes,
        "lease_s": None if options.lease is None else 60 * options.lease,
        "answer_style": "raw" if options.raw else "markdown" if options.no_raw else None,
        "undo_s": 0.0 if campaign.undo_s == _FORMER_UNDO_S else None,
    }
    return replace(campaign, **{name: value for name, value in given.items() if value is not None})


def _text(path: Path) -> str:
    """The guidelines in a file."""
    from tunesmith.collect.web.markdown import MAX_CHARACTERS  # longer texts are not rendered

    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"--guidelines {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"--guidelines {path} is no text in UTF-8: {error}") from None
    if len(text) > MAX_CHARACTERS:
        raise InputError(f"--guidelines {path} has {len(text):,} characters; {MAX_CHARACTERS:,} are allowed")
    return text


def _say_vote(opened: "Opened", votes_place: str, output: Output, *, has_api: bool) -> None:
    """Print where the server is."""
    _say_entry("vote", opened, "", output)
    output.say(f"votes    {votes_place}")
    if has_api:
        output.say(f"API      {opened.url}/v1")
        if opened.key:
            output.say(f"key      {opened.key}\n         it is not stored; keep it")
        else:
            output.say("key      as before; --new-key makes another")
    output.say("Ctrl-C ends the server; pairs that are not judged yet stay for the next start.")
    api = {"api": f"{opened.url}/v1", "key": opened.key or None} if has_api else {}
    output.finish({**_addresses(opened, ""), "votes": votes_place, **api})


def _check_served(settings: ServerSettings) -> None:
    """Refuse a model that is not there before anything is opened."""
    from tunesmith.base.runs.listing import read_recipe
    from tunesmith.collect.web.server import serves_live_loop

    path = Path(settings.openai).expanduser()
    if not settings.openai or serves_live_loop(settings):
        return
    if path.is_dir() and (path / "versions").is_dir() and read_recipe(path):
        raise InputError(f"{path} is a live loop, whose votes are in it; give --dir {path} too")
    if settings.openai.startswith((".", "/", "~")) and not path.exists():
        raise InputError(f"--openai {settings.openai}: there is no such folder or file")


@dataclass(frozen=True, kw_only=True)
class StudioOptions:
    """Open the pages of all runs and live loops below a folder: a list with filters, and a page for each, live.

    Runs can be started, stopped and resumed there; they are processes of their own, which the end of the server does
    not end. Other runs are only read, except for a cache of their metrics in the folder `watch` of each run that is
    looked at, which can be removed at any time. People vote on the pages of `tunesmith serve`.
    """

    folder: Annotated[Path, Positional, flag("Folder that holds the runs.", "[FOLDER]")] = Path("runs")
    host: Annotated[str, flag("Address to listen on.", "HOST")] = "127.0.0.1"
    port: Annotated[int, flag("Port to listen on; 0 takes a free one.", "N")] = 8002
    login: Annotated[bool, flag("Allow other machines; everybody logs in with a token.")] = False
    allow_host: Annotated[
        UseAppendAction[tuple[str, ...]], flag("Another name that browsers know this server by.", "NAME")
    ] = ()
    root_path: Annotated[
        str, flag("Path prefix below which a proxy serves the pages, if it does not say so itself.", "PREFIX")
    ] = ""
    forwarded_allow_ips: Annotated[
        UseAppendAction[tuple[str, ...]],
        flag("Address or network of a proxy whose X-Forwarded headers are believed; repeatable.", "IP"),
    ] = LOOPBACK
    max_runs: Annotated[
        int, flag("Runs from the pages that train at a time, the others wait; 0: none can be started.", "N")
    ] = 1
    allow: Annotated[
        UseAppendAction[tuple[str, ...]],
        flag(
            "A file, a folder, or the name of a model, data set or reward (`./file.py:function`) that runs from the "
            "pages may use beside what is built in and the runs themselves; repeatable.",
            "NAME",
        ),
    ] = ()
    new_admin_link: Annotated[
        bool,
        flag(
            "Print a new link that logs the admin in, once, and end; the server may be running, and its --host and "
            "--port, if they were given, belong here too."
        ),
    ] = False
    json: Annotated[bool, flag("Print one JSON object, with the addresses, at the start.")] = False


def studio(words: Sequence[str]) -> None:
    """Run `tunesmith studio`."""
    options = parse(StudioOptions, words, "studio")
    check_ranges(options, port=_PORTS, max_runs=(0, inf))
    root = options.folder.expanduser()
    is_new = not root.exists()
    if not options.new_admin_link:
        _make_folder(root)
    settings = ServerSettings(
        root / STUDIO_FOLDER,
        options.host,
        options.port,
        options.allow_host,
        options.root_path,
        options.forwarded_allow_ips,
        runs=root,
        max_runs=options.max_runs,
        allow=options.allow,
        has_arena=True,
    )
    _serve_runs(
        settings,
        root,
        "/runs",
        is_exposed=options.login,
        is_new=is_new,
        as_json=options.json,
        only_link=options.new_admin_link,
    )


def _make_folder(root: Path) -> None:
    """Make the folder of the runs if it is missing: those that are started in a terminal later appear by themselves."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the folder {root} cannot be made: {error.strerror or error}") from None


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Watch a run of any trainer in the browser, while it trains and afterwards.

    This is the page that `tunesmith studio` has for each run. The run is only read, as there.
    """

    run: Annotated[str, Positional, flag("A run folder, or the name of a run below --dir.", "RUN")]
    dir: Annotated[Path, flag("Folder that holds the runs.", "FOLDER")] = Path("runs")
    port: Annotated[int, flag("Port to listen on; 0 takes a free one.", "N")] = 8001
    json: Annotated[bool, flag("Print one JSON object, with the addresses, at the start.")] = False


def watch(words: Sequence[str]) -> None:
    """Run `tunesmith watch`."""
    options = parse(WatchOptions, words, "watch")
    check_ranges(options, port=_PORTS)
    from tunesmith.base.runs.listing import resolve_run

    run = resolve_run(options.run, options.dir)
    with TemporaryDirectory(prefix="tunesmith-watch-") as folder:
        settings = ServerSettings(Path(folder), port=options.port, runs=run)
        _serve_runs(settings, run, None, is_exposed=False, as_json=options.json)


def _serve_runs(
    settings: ServerSettings,
    root: Path,
    page: str | None,
    *,
    is_exposed: bool,
    as_json: bool,
    is_new: bool = False,
    only_link: bool = False,
) -> None:
    """Serve the runs below `root`; `page` is opened first, by default that of `root`."""
    from tunesmith.collect.web import server
    from tunesmith.collect.web.run_index import id_of

    first = page or f"/runs/{id_of(root, root)}"
    with reporting(as_json=as_json) as output:
        if only_link:
            _say_link("runs", server.admin_link(settings), first, output)
            return

        def say(opened: "Opened") -> None:
            _say_entry("runs", opened, first, output)
            output.say(f"folder   {root}{', which was just made' if is_new else ''}")
            output.say("Ctrl-C ends the pages; the runs do not notice.")
            output.finish({**_addresses(opened, first), "page": f"{opened.url}{first}", "runs": root})

        server.serve(settings, is_exposed=is_exposed, announce=say)


def _say_link(name: str, opened: "Opened", page: str, output: Output) -> None:
    """Print the addresses of a server that somebody else started."""
    _say_entry(name, opened, page, output)
    output.finish(_addresses(opened, page))


def _say_entry(name: str, opened: "Opened", page: str, output: Output) -> None:
    """Print the addresses that log the admin in; each works, and all of them together once."""
    links = [f"{url}{opened.login}{_next(page)}" for url in opened.urls]
    lines = [f"{name:<8} {links[0]}", *(f"or       {link}" for link in links[1:])]
    output.say("\n".join(lines))
    output.say(f"         this link logs you in as admin, once; {opened.url}{page} afterwards")


def _addresses(opened: "Opened", page: str) -> dict[str, object]:
    return {"url": opened.url, "login_url": f"{opened.url}{opened.login}{_next(page)}", "urls": opened.urls}


def _next(page: str) -> str:
    return f"&next={page}" if page else ""
