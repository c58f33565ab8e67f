"""Clients chat and give feedback while the server, the process that draws for it, or the database's server is killed
again and again.
"""

import http.client
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field

import psutil
import pytest

from postgres_parts import Postgres
from server_parts import Answer, Client, Server
from tunesmith.collect.store.votes import VoteStore

PATIENCE_S = 3000
LETTERS = {str(token): 50 for token in range(68, 94)}


@dataclass
class Heard:
    """What was said and answered by id, and the last feedback on each that the server has said yes to."""

    texts: dict[str, tuple[str, str]] = field(default_factory=dict)
    values: dict[str, bool] = field(default_factory=dict)
    num_replies: int = 0


def until_answered(send: Callable[[], Answer], over: threading.Event) -> Answer:
    """The answer to a request that is sent again while the server or its process is away, or has too many."""
    while not over.wait(0.01):
        try:
            answer = send()
        except (OSError, http.client.HTTPException):
            over.wait(0.1)
            continue
        if answer.status < 500 and answer.status != 429:
            return answer
        over.wait(0.1)
    raise AssertionError("the server did not come back")


def work(client: Client, num_chats: int, seed: int, heard: Heard, over: threading.Event) -> None:
    draw = random.Random(seed)
    for number in range(num_chats):
        said = f"client {seed} says {number}"
        body = {
            "messages": [{"role": "user", "content": said}],
            "max_tokens": draw.randrange(4, 20),
            "logit_bias": LETTERS,
        }
        answer = until_answered(lambda body=body: client.send("POST", "/v1/chat/completions", body), over)
        assert answer.status == 200, answer.body
        name = answer.json["id"]
        assert name not in heard.texts
        heard.texts[name] = said, answer.json["choices"][0]["message"]["content"]
        for _ in range(1 + (draw.random() < 0.3)):
            value = draw.random() < 0.5
            thumb = {"inference_id": name, "metric_name": "thumbs", "value": value}
            answer = until_answered(lambda thumb=thumb: client.send("POST", "/v1/feedback", thumb), over)
            assert answer.status == 200, answer.body
            heard.values[name] = value
            heard.num_replies += 1


def kill(server: Server, number: int, postgres: Postgres | None) -> None:
    """Kill the server, the process that draws, or that of the database, in turn; what has ended is started again."""
    kind = number % (2 if postgres is None else 3)
    if kind == 1:
        for one in psutil.Process(server.process.pid).children():
            one.send_signal(signal.SIGKILL)
    elif kind == 2:
        postgres.stop("immediate")
        postgres.start()
    else:
        server.kill()
        server.start()


@pytest.fixture(params=["sqlite", "postgresql"])
def own(request: pytest.FixtureRequest) -> Iterator[Postgres | None]:
    """A server of PostgreSQL that may be stopped; None for a file."""
    if request.param == "sqlite":
        yield None
        return
    request.getfixturevalue("postgres")  # skips where there is none
    with closing(Postgres().make(is_durable=True)) as server:
        yield server


@pytest.mark.parametrize(
    ("num_kills", "num_clients", "num_chats"), [(6, 6, 12), pytest.param(100, 50, 20, marks=pytest.mark.slow)]
)
def test_what_was_acknowledged_is_there_once_and_every_answer_has_its_tokens(
    tmp_path, own, num_kills, num_clients, num_chats
):
    place = tmp_path / "live" / "votes.db" if own is None else own.new()
    flags = () if own is None else ("--database", place)
    server = Server(tmp_path / "live", ("--openai", "tiny:llama", *flags)).start()
    key, heard, over = server.facts["key"], Heard(), threading.Event()
    with ThreadPoolExecutor(num_clients) as pool:
        client = Client(server.url, key)
        jobs = [pool.submit(work, client, num_chats, seed, heard, over) for seed in range(num_clients)]
        try:
            for number in range(num_kills):
                # As many are answered between two kills, so that there is work until the last one.
                wanted = heard.num_replies + num_clients * num_chats // num_kills
                deadline = time.monotonic() + PATIENCE_S
                while heard.num_replies < wanted and not all(job.done() for job in jobs):
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                kill(server, number, own)
            for job in jobs:
                job.result(PATIENCE_S)
        finally:
            over.set()
    assert server.stop() == 0
    assert len(heard.texts) == num_clients * num_chats
    with VoteStore.open(place) as store:
        given = {}
        while page := store.reader.feedback_after(max((one.id for one in given.values()), default=0)):
            given |= {(one.inference, one.revision): one for one in page}
        assert {name: value for (name, _), value in sorted((k, v.value) for k, v in given.items())} == heard.values
        assert all(given[name, number - 1].value != one.value for (name, number), one in given.items() if number > 1)
        for name, (said, text) in heard.texts.items():
            found = store.reader.inference(name)
            (choice,) = found.choices
            assert found.prompt[-1]["content"] == said and choice.text == text
            assert len(choice.token_ids) == len(choice.logps) > 0
