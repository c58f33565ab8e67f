"""Clients of the API that the fixture `served` of a test file serves."""

from collections.abc import Iterator
from typing import Any

import pytest

from server_parts import Client, Server


@pytest.fixture(scope="module")
def client(served: Server) -> Iterator[Any]:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=served.facts["api"], api_key=served.facts["key"], max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def admin(served: Server) -> Client:
    return served.admin()


@pytest.fixture
def key(served: Server) -> Client:
    return Client(served.url, served.facts["key"])


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server of a live loop whose versions call tools when they are told to."""
    from arena_parts import make_loop  # which replaces the process that draws

    folder = make_loop(tmp_path_factory.mktemp("calling") / "live")
    server = Server(folder, ("--openai", str(folder)), prepare="arena_parts").start()
    yield server
    server.kill()
