"""Raters vote while their server is killed right after a reply, again and again: what it acknowledged is there once."""

import http.client
import random
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field

import pytest

from server_parts import Answer, Client, Server, pairs
from tunesmith.collect.web.access import API

PATIENCE_S = 3000
VERDICTS = ("left_much", "left", "tie", "right", "right_much", "both_bad")
CHANGED = 0.2
"""Share of the votes that the rater changes at once."""


@dataclass
class Acknowledged:
    """The last verdict on each presentation that the server has said yes to."""

    verdicts: dict[str, str] = field(default_factory=dict)
    replied: threading.Condition = field(default_factory=threading.Condition)

    def note(self, token: str, verdict: str) -> None:
        with self.replied:
            self.verdicts[token] = verdict
            self.replied.notify_all()

    def wait_for_next(self) -> None:
        with self.replied:
            assert self.replied.wait(PATIENCE_S)


def until_answered(send: Callable[[], Answer], over: threading.Event) -> Answer:
    """A vote as the page sends it: again while there is no answer. Slower than the rate that a rater may have."""
    while not over.wait(0.02):
        try:
            return send()
        except (OSError, http.client.HTTPException):
            over.wait(0.1)
    raise AssertionError("the server did not come back")


def work(client: Client, num_votes: int, seed: int, heard: Acknowledged, over: threading.Event) -> None:
    """`num_votes` pairs are judged, and some of the votes are changed."""
    draw = random.Random(seed)
    for _ in range(num_votes):
        answer = until_answered(lambda: client.get("/next?count=1"), over)
        assert answer.status == 200, answer.body
        (shown,) = answer.json["presentations"]
        for turn in range(1 + (draw.random() < CHANGED)):
            send_vote(client, shown["token"], draw.choice(VERDICTS), f"{shown['token']} {turn}", heard, over)


def send_vote(client: Client, token: str, verdict: str, key: str, heard: Acknowledged, over: threading.Event) -> None:
    def send() -> Answer:
        body, headers = {"verdict": verdict}, {"Idempotency-Key": key}
        return client.send("PUT", f"{API}/presentations/{token}/vote", body, headers)

    answer = until_answered(send, over)
    assert answer.status == 200, answer.body
    heard.note(token, verdict)


def kill_after_replies(server: Server, num_kills: int, heard: Acknowledged, is_over: Callable[[], bool]) -> int:
    """Number of times that the server was killed, as soon as it had acknowledged a vote, and started again."""
    for number in range(num_kills):
        if is_over():
            return number
        heard.wait_for_next()
        server.kill()
        server.start()
    return num_kills


@pytest.mark.parametrize(
    ("num_kills", "num_raters", "num_votes"), [(5, 10, 40), pytest.param(100, 50, 400, marks=pytest.mark.slow)]
)
def test_each_vote_that_was_acknowledged_counts_once_though_the_server_is_killed(
    serve, stored, num_kills, num_raters, num_votes
):
    # More pairs than are needed: near the end a rater would find nothing but what they have judged already.
    server = serve(pairs(num_raters * num_votes * 6 // 10), overlap=2)
    admin = server.admin()
    clients = [server.rater(f"rater {number}", admin) for number in range(num_raters)]
    heard, over = Acknowledged(), threading.Event()
    with ThreadPoolExecutor(num_raters) as pool:
        jobs = [pool.submit(work, client, num_votes, seed, heard, over) for seed, client in enumerate(clients)]
        try:
            assert kill_after_replies(server, num_kills, heard, lambda: all(job.done() for job in jobs)) == num_kills
            for job in jobs:
                job.result(PATIENCE_S)
        finally:
            over.set()
    assert server.stop() == 0
    rows = stored(server)
    assert len(heard.verdicts) == len(rows) == num_raters * num_votes
    assert max(Counter(row.prompt for row in rows).values()) == 2
    assert len({(row.rater, row.prompt) for row in rows}) == len(rows)
    assert effective_verdicts(server) == heard.verdicts


def effective_verdicts(server: Server) -> dict[str, str]:
    """The newest verdict on each presentation, straight from the file."""
    query = (
        "SELECT p.token, v.verdict FROM votes v JOIN presentations p ON p.id = v.presentation_id ORDER BY v.revision"
    )
    with closing(sqlite3.connect(server.folder / "votes.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return dict(connection.execute(query).fetchall())
