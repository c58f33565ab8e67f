"""Fixtures of tests of pages, here and in `tests/outside`: a server as a process, and a browser that looks at it."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from server_parts import Server, Trainer
from tunesmith.collect.store.records import CampaignSettings, NewItem
from tunesmith.collect.store.votes import VoteStore

Serve = Callable[..., Server]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """A function that fills a folder with items and serves it: `serve(items, overlap=2)`."""
    with ExitStack() as stack:

        def start(items: Sequence[NewItem] = (), flags: Sequence[str] = (), folder: str = "live", **settings) -> Server:
            path = tmp_path / folder
            path.mkdir(exist_ok=True)
            with VoteStore.open(path / "votes.db") as store:
                campaign = store.set_campaign(CampaignSettings(**settings))
                store.add_items(campaign.id, items)
            return run(Server(path, flags))

        def run(server: Server) -> Server:
            stack.callback(lambda: server.process and server.process.is_alive() and server.kill())
            return server.start()

        start.run = run
        yield start


@pytest.fixture
def studio(serve: Serve, tmp_path: Path) -> Callable[..., Server]:
    """A function that serves the pages of the runs in the folder `runs`, or that of one of them."""
    (tmp_path / "runs").mkdir(exist_ok=True)
    return lambda command="studio", run="": serve.run(Server(tmp_path / "runs" / run, command=(command,)))


@pytest.fixture
def server(serve: Serve) -> Server:
    """A server without items."""
    return serve()


@pytest.fixture
def trainer(server: Server) -> Iterator[Trainer]:
    """The files of a trainer beside that server."""
    with Trainer.open(server.folder / "runs.db") as store:
        yield store


@pytest.fixture
def stored() -> Callable[[Server], list]:
    """A function: the effective votes of a server that has ended."""

    def read(server: Server) -> list:
        with VoteStore.open(server.folder / "votes.db") as store:
            return list(store.reader.export())

    return read


@pytest.fixture(scope="module")  # playwright keeps an event loop running, in which asyncio.run fails
def browser(chromium: str):
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as play:
        instance = play.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield instance
        instance.close()


class Visit:
    """Browser windows that are logged in. Whatever a console says, and any request elsewhere, fails the test."""

    def __init__(self, browser) -> None:
        self._browser = browser
        self._contexts = []
        self.complaints: list[str] = []
        self.expected: tuple[str, ...] = ()

    def context(self, server: Server, width: int = 1280, scheme: str = "light", **options):
        """A window's cookies and storage, logged in by the printed link."""
        context = self._browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **options)
        context.set_default_timeout(20_000)
        self._contexts.append(context)
        page = self.page(context, server, server.login_url)
        page.wait_for_url(re.compile(re.escape(server.url) + "/(vote|runs)"))
        page.close()
        return context

    def stranger(self, width: int = 1280):
        """A window that is not logged in."""
        context = self._browser.new_context(viewport={"width": width, "height": 900})
        self._contexts.append(context)
        return context

    def page(self, context, server: Server, address: str = ""):
        page = context.new_page()
        page.on("console", lambda message: self._hear(message.text))
        page.on("pageerror", lambda error: self._hear(str(error)))
        page.on(
            "request", lambda sent: sent.url.startswith((server.url, "data:")) or self._hear(f"foreign: {sent.url}")
        )
        page.goto(address or f"{server.url}/vote")
        return page

    def open(self, server: Server, width: int = 1280, scheme: str = "light"):
        return self.page(self.context(server, width, scheme), server)

    def end(self, server: Server) -> None:
        """Closes the windows and ends the server; a window left open would ask it in vain, and tell."""
        self.close()
        server.stop()

    def close(self) -> None:
        while self._contexts:
            self._contexts.pop().close()

    def _hear(self, text: str) -> None:
        if not any(part in text for part in self.expected):
            self.complaints.append(text)


@pytest.fixture
def visit(serve: Serve, browser) -> Iterator[Visit]:
    """Windows that are closed before their server ends: a stream that breaks is told on the console."""
    seen = Visit(browser)
    yield seen
    seen.close()
    assert not seen.complaints, seen.complaints


@pytest.fixture
def watch(visit: Visit, server: Server):
    """The watch page of the server, in a window of its own."""

    def look(width: int = 1280, scheme: str = "light"):
        return visit.page(visit.context(server, width, scheme), server, f"{server.url}/watch")

    return look
