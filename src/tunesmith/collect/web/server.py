"""`serve`: bind a socket, create the first admin, and run the app until a signal."""

import asyncio
import errno
import ipaddress
import itertools
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType

import psutil
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tunesmith.base.core.errors import InputError, NameTakenError
from tunesmith.collect.store.content import name_key
from tunesmith.collect.store.database import shown
from tunesmith.collect.store.records import CampaignSettings, KeySettings, Rater, Scope
from tunesmith.collect.store.runs import RunReader
from tunesmith.collect.store.vote_reader import VoteReader
from tunesmith.collect.store.votes import VoteStore
from tunesmith.collect.web.allowed import Allowed
from tunesmith.collect.web.api.endpoint import Endpoint
from tunesmith.collect.web.app import create_app
from tunesmith.collect.web.arena import FOLDER, Arena, Contestant, of_live_loop, of_runs, tried_in
from tunesmith.collect.web.drawing import Drawer
from tunesmith.collect.web.jobs import Jobs
from tunesmith.collect.web.logins import new_link
from tunesmith.collect.web.proxies import check_trusted, checked_root_path
from tunesmith.collect.web.services import Services
from tunesmith.collect.web.settings import ServerSettings
from tunesmith.collect.web.studio import Studio

_GRACE_S = 2
"""Seconds that pending responses get after a signal."""

_KEEP_ALIVE_S = 15
_MAX_HEAD_BYTES = 32 * 1024
_FIRST_ADMIN = "admin"

LIVE_ALIAS = "live"
"""Name of the served version of a live loop in the API."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Addresses of a server: `urls`, without a slash at the end, of which at least the first can be reached from this
    machine, and the path and query that log an admin in, once. `key` is the first key of the API, at the first start.
    """

    urls: tuple[str, ...]
    login: str
    key: str = ""

    @property
    def url(self) -> str:
        """The first address."""
        return self.urls[0]


def is_local(host: str) -> bool:
    """True if a server bound to `host` can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve(
    settings: ServerSettings,
    *,
    adjust: Callable[[CampaignSettings], CampaignSettings] | None = None,
    is_exposed: bool = False,
    fill: Callable[[VoteStore, int], None] | None = None,
    announce: Callable[[Opened], None],
) -> None:
    """Serve until a signal: SIGTERM returns, Ctrl-C raises KeyboardInterrupt.

    `adjust` changes the campaign's settings and `fill` adds items to it before the server listens. `is_exposed` allows
    a host that is not loopback. `announce` is called once connections are accepted.

    Raises:
        InputError: for a host beyond this machine without `is_exposed`, and a port in use.
        StoreError: if `votes.db` cannot be opened.
    """
    settings = replace(settings, root_path=checked_root_path(settings.root_path))
    check_trusted(settings.proxies)
    if not is_exposed and not is_local(settings.host):
        raise InputError(
            f"--host {settings.host} is open to other machines; give --login to serve them, or leave --host out"
        )
    listener = _listen(settings)
    with ExitStack() as stack:
        stack.enter_context(closing(listener))
        votes = stack.enter_context(VoteStore.open(settings.votes_place))
        runs = stack.enter_context(closing(RunReader.open(settings.runs_path)))
        studio = None if settings.runs is None else stack.enter_context(Studio(settings.runs))
        jobs = _jobs(settings)
        if jobs is not None:
            stack.enter_context(jobs)
        log = settings.folder / "model_worker.log"
        drawer = stack.enter_context(Drawer(log, stays=bool(settings.openai), weights=settings.weights))
        arena = _arena(settings, drawer, runs, studio, votes.reader.is_deleted)
        endpoint = _endpoint(settings, drawer, runs)
        names = _machine_names() if _is_any(settings.host) else ()
        app = create_app(replace(settings, hosts=(*settings.hosts, *names)), votes, runs, studio, jobs, arena, endpoint)
        services: Services = app.state.services
        campaign = services.campaign()
        if adjust is not None:
            campaign = votes.set_campaign(adjust(campaign.settings))
        if fill is not None:
            fill(votes, campaign.id)
        key = "" if endpoint is None else _first_key(votes)
        opened = Opened(_urls(settings, listener.getsockname()[1]), _login(settings, _admin(votes).id), key)
        if endpoint is not None:
            endpoint.warm()
        signal.signal(signal.SIGTERM, _leave)
        server = _Server(_config(app, settings), services.shutdown, lambda: announce(opened))
        server.run(sockets=[listener])


def _jobs(settings: ServerSettings) -> Jobs | None:
    if settings.runs is None or not settings.max_runs:
        return None
    allowed = Allowed(settings.runs, settings.folder, settings.allow)
    return Jobs(settings.folder / "jobs", allowed, settings.max_runs)


def _arena(
    settings: ServerSettings,
    drawer: Drawer,
    runs: RunReader,
    studio: Studio | None,
    is_deleted: Callable[[int], bool],
) -> Arena | None:
    if not settings.has_arena:
        return None
    folder = settings.folder / FOLDER
    if studio is None:
        contestants = partial(of_live_loop, settings.folder, runs)
        return Arena(folder, drawer, contestants, keeps_first=True, is_deleted=is_deleted)
    return Arena(folder, drawer, lambda: of_runs(studio.index), keeps_first=False, is_deleted=is_deleted)


def _endpoint(settings: ServerSettings, drawer: Drawer, runs: RunReader) -> Endpoint | None:
    """The API, over the versions of the live loop in the server's folder, or over one model."""
    if not settings.openai:
        return None
    if serves_live_loop(settings):
        served, tried = partial(of_live_loop, settings.folder, runs, has_all=True), partial(tried_in, settings.folder)
        return Endpoint(drawer, served, LIVE_ALIAS, tried=tried)
    only = Contestant(settings.openai, {"name": settings.openai}, {})
    return Endpoint(drawer, lambda: [only], Path(settings.openai).name or settings.openai)


def serves_live_loop(settings: ServerSettings) -> bool:
    """True if the API serves the versions of the live loop in the server's own folder."""
    return Path(settings.openai).expanduser().absolute() == settings.folder.expanduser().absolute()


def new_key(settings: ServerSettings, name: str, scopes: tuple[Scope, ...]) -> str:
    """A new key of the API. Raises StoreError if the name is taken, or a server is running."""
    with VoteStore.open(settings.votes_place) as votes:
        return votes.add_rater(name, key=KeySettings(scopes)).token


def _first_key(votes: VoteStore) -> str:
    """A key of the API if there is none yet; else empty: keys are not stored."""
    raters = votes.reader.raters()
    if any(one.scopes for one in raters):
        return ""
    try:
        return votes.add_rater(_free_name("key", raters), key=KeySettings(("generate", "feedback"))).token
    except NameTakenError:  # another server of the same database begins now
        return _first_key(votes)


class _Server(uvicorn.Server):
    """uvicorn's server; at shutdown it ends streams before it waits for them."""

    def __init__(self, config: uvicorn.Config, shutting_down: asyncio.Event, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._shutting_down = shutting_down
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._shutting_down.set()
        await super().shutdown(sockets)


def _config(app: object, settings: ServerSettings) -> uvicorn.Config:
    limits = settings.limits
    return uvicorn.Config(
        app,  # pyright: ignore[reportArgumentType]
        http=_protocol_with_deadline(limits.head_timeout_s),
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,  # `BehindProxy` reads them
        server_header=False,
        limit_concurrency=limits.num_connections,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
        h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
    )


def _protocol_with_deadline(head_timeout_s: float) -> type[asyncio.Protocol]:
    """A protocol class that closes connections whose next request head does not arrive in time (Slowloris).

    uvicorn has no such timeout, so a few hundred silent clients would use up all connections.
    """

    class TimedProtocol(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)  # pyright: ignore[reportArgumentType]
            self._start()

        def data_received(self, data: bytes) -> None:
            self._start()
            super().data_received(data)
            # A request is in progress: its body and response have limits of their own.
            if self.cycle is not None and not self.cycle.response_complete:  # pyright: ignore[reportUnnecessaryComparison]
                self._stop()

        def on_response_complete(self) -> None:
            # uvicorn's keep-alive timeout applies until the next request starts.
            self._stop()
            super().on_response_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _start(self) -> None:
            if self._deadline is None:
                self._deadline = self.loop.call_later(head_timeout_s, self.transport.close)

        def _stop(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return TimedProtocol


def _leave(signal_number: int, frame: FrameType | None) -> None:
    """Exit with code 0 when uvicorn raises the signal again after its shutdown."""
    sys.exit(0)


def _listen(settings: ServerSettings) -> socket.socket:
    """A bound socket: the port is known before the server starts, and no other process can take it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise InputError(f"--host {settings.host} is no address of this machine: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise InputError(f"port {settings.port} is taken; give another --port, or 0 for one that is free") from None
        raise InputError(f"cannot listen on {settings.host} port {settings.port}: {error.strerror}") from None
    return listener


def admin_link(settings: ServerSettings) -> Opened:
    """A new link that logs the first admin in, once. The server of the folder may be running.

    Raises:
        InputError: if there is no admin yet.
    """
    with closing(VoteReader.open(settings.votes_place)) as votes:
        admin = _first_admin(votes.raters())
    if admin is None:
        raise InputError(
            f"{shown(settings.votes_place)} has no admin yet; start the server, which prints a link for one"
        )
    settings = replace(settings, root_path=checked_root_path(settings.root_path))
    return Opened(_urls(settings, settings.port), _login(settings, admin.id))


def _admin(votes: VoteStore) -> Rater:
    """The first admin, who is made if there is none."""
    raters = votes.reader.raters()
    if (admin := _first_admin(raters)) is not None:
        return admin
    try:
        return votes.add_rater(_free_name(_FIRST_ADMIN, raters), "admin").rater
    except NameTakenError:  # another server of the same database begins now
        return _admin(votes)


def _free_name(name: str, raters: Sequence[Rater]) -> str:
    """`name`, with a number if imported votes have brought a rater of this name."""
    names = (f"{name} {number}" if number > 1 else name for number in itertools.count(1))
    taken = {name_key(one.name) for one in raters}
    return next(one for one in names if one not in taken)


def _first_admin(raters: Sequence[Rater]) -> Rater | None:
    return next((one for one in raters if one.role == "admin" and one.has_access(time.time())), None)


def _login(settings: ServerSettings, rater_id: int) -> str:
    return f"/login?token={new_link(settings.folder, rater_id)}"


def _is_any(host: str) -> bool:
    """True for the address that stands for all addresses of this machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _urls(settings: ServerSettings, port: int) -> tuple[str, ...]:
    """The addresses at which the server answers without a proxy."""
    names = list(settings.hosts)
    if is_local(settings.host):
        names.insert(0, settings.host)
    else:
        names += [*_addresses(settings.host), *_machine_names()] if _is_any(settings.host) else [settings.host]
    return tuple(f"http://{_place(name, port)}" for name in dict.fromkeys(names))


def _place(name: str, port: int) -> str:
    """A name or address with the port, if it has none."""
    if name.count(":") == 1 or name.startswith("["):
        return name
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def _addresses(host: str) -> list[str]:
    """The addresses that `host`, `0.0.0.0` or `::`, stands for: those in networks, or that of this machine alone."""
    families = (socket.AF_INET,) if host == "0.0.0.0" else (socket.AF_INET, socket.AF_INET6)
    own = [one for ones in psutil.net_if_addrs().values() for one in ones if one.family in families]
    found = [ip for one in own if not (ip := ipaddress.ip_address(one.address)).is_loopback and not ip.is_link_local]
    return [str(ip) for ip in sorted(found, key=lambda ip: ip.version)] or ["127.0.0.1"]


def _machine_names() -> tuple[str, ...]:
    """The names of this machine in its network."""
    name = socket.gethostname().lower()
    return (name,) if "." in name else (name, f"{name}.local")
