"""`tunesmith watch`: the charts of a run in the browser, while it trains and afterwards."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tunesmith.cli.options import Positional, flag, parse
from tunesmith.cli.output import Output, reporting
from tunesmith.core.errors import InputError, MissingDependencyError

if TYPE_CHECKING:
    from tunesmith.web.server import Opened

_MAX_PORT = 65_535


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Watch a run of any trainer in the browser, while it trains and afterwards.

    The run is only read. What the page needs is made from its metrics.jsonl and kept in the folder `watch` of the run,
    which can be removed at any time. A live loop has its page at `tunesmith serve`.
    """

    run: Annotated[str, Positional, flag("A run folder, or the name of a run below --dir.", metavar="RUN")]
    dir: Annotated[Path, flag("Folder that holds the runs.", metavar="FOLDER", shows_default=True)] = Path("runs")
    port: Annotated[int, flag("Port to listen on; 0 takes a free one.", metavar="N", shows_default=True)] = 8001
    json: Annotated[bool, flag("Print one JSON object, with the addresses, at the start.")] = False


def watch(words: Sequence[str]) -> None:
    """Run `tunesmith watch`."""
    options = parse(WatchOptions, words, "watch")
    if not 0 <= options.port <= _MAX_PORT:
        raise InputError(f"--port is {options.port}; it must be from 0 to {_MAX_PORT}")
    from tunesmith.runs.run_list import resolve_run

    run = resolve_run(options.run, options.dir)
    try:
        from tunesmith.store.run_tail import following
        from tunesmith.web import server
        from tunesmith.web.settings import ServerSettings
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"the page needs {error.name}, which is not installed; run `pip install 'tunesmith[web]'`"
        ) from None
    with reporting(as_json=options.json) as output, following(run) as folder:
        server.serve(ServerSettings(folder, port=options.port), announce=lambda opened: _say(opened, run, output))


def _say(opened: "Opened", run: Path, output: Output) -> None:
    """Print where the page is."""
    login_url = f"{opened.login_url}&next=/watch"
    output.say(f"watch    {login_url}\n         this link logs you in, once; {opened.url}/watch afterwards")
    output.say(f"run      {run}")
    output.say("Ctrl-C ends the page; the run does not notice.")
    output.finish({"url": f"{opened.url}/watch", "login_url": login_url, "run": run})
    output.flush()
