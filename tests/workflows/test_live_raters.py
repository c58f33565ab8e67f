"""Simulated raters: as accurate and as biased as they are said to be, and patient with a server that goes away."""

import functools
import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.apps.workflows.live_raters import RaterClient, Raters, RaterTraits, prompt_of, verdict_of
from tunesmith.base.core.errors import InputError, TunesmithError
from tunesmith.learn.rewards.builtin import SimulatedRater

GOOD, BAD, PLAIN = " wonderful and great", " awful and terrible", " here"
JUDGE = SimulatedRater()
JUDGE.score = functools.cache(JUDGE.score)  # type: ignore[method-assign]  # reads each text once


def shown(left: str, right: str) -> dict[str, Any]:
    """A presentation as the server sends it."""
    return {
        "token": "t",
        "prompt": [{"text": "The film was", "html": None, "role": None}],
        "answers": [{"text": left}, {"text": right}],
    }


def verdicts(left: str, right: str, traits: RaterTraits, count: int = 2000) -> Counter[str]:
    draw = random.Random(0)
    return Counter(verdict_of(shown(left, right), traits, draw, JUDGE) for _ in range(count))


@given(st.sampled_from([(GOOD, BAD), (BAD, GOOD), (GOOD, PLAIN), (PLAIN, BAD)]), st.floats(0.5, 1.0))
def test_raters_are_right_as_often_as_they_are_said_to_be(pair: tuple[str, str], accuracy: float) -> None:
    found = verdicts(*pair, RaterTraits(accuracy=accuracy), count=500)
    side = "left" if pair[0] == GOOD or pair[1] == BAD else "right"
    right = sum(count for verdict, count in found.items() if verdict.startswith(side))
    assert right / 500 == pytest.approx(accuracy, abs=0.09)


def test_raters_call_equal_answers_a_tie_and_great_differences_much() -> None:
    sure = RaterTraits(accuracy=1.0)
    assert verdicts(PLAIN, " there", sure, 10) == {"tie": 10}
    assert verdicts(GOOD, BAD, sure, 10) == {"left_much": 10}
    assert verdicts(BAD, GOOD, sure, 10) == {"right_much": 10}
    assert verdicts(GOOD, BAD, RaterTraits(accuracy=0.0), 10) == {"right_much": 10}


def test_biased_raters_take_the_left_answer_unseen() -> None:
    assert verdicts(BAD, GOOD, RaterTraits(accuracy=1.0, left_bias=1.0), 10) == {"left": 10}
    assert verdicts(BAD, GOOD, RaterTraits(accuracy=1.0, left_bias=0.3))["left"] / 2000 == pytest.approx(0.3, abs=0.04)


def test_a_conversation_is_judged_as_one() -> None:
    turns = [{"text": "hi", "html": None, "role": "user"}, {"text": "yes?", "html": None, "role": "assistant"}]
    assert prompt_of({"prompt": turns}) == (
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?"},
    )


@pytest.mark.parametrize("traits", [{"accuracy": 1.1}, {"left_bias": -0.1}, {"pace_s": -1}])
def test_traits_that_make_no_sense_are_refused(traits: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(traits))):
        RaterTraits(**traits)


class Recorder(BaseHTTPRequestHandler):
    """Answers votes; the first request of each key is dropped after it was counted, as by a server that is killed."""

    protocol_version = "HTTP/1.1"
    keys: Counter[str]

    def do_GET(self) -> None:
        self.reply({"presentations": [shown(GOOD, BAD)]})

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        key = self.headers["Idempotency-Key"]
        self.keys[key] += 1
        if self.keys[key] == 1:
            self.close_connection = True
            return
        self.reply({"revision": 1})

    def reply(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def recording() -> Iterator[tuple[str, Counter[str]]]:
    keys: Counter[str] = Counter()
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Recorder,), {"keys": keys})) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", keys
        finally:
            server.shutdown()
            thread.join()


def test_a_vote_whose_answer_was_lost_is_sent_again_with_the_same_key() -> None:
    with recording() as (url, keys):
        client = RaterClient(url, "token")
        reply = client.send("PUT", "/api/v1/presentations/t/vote", {"verdict": "left"}, key="k", until=1e12)
        client.close()
    assert reply.status == 200 and keys == {"k": 2}


def test_raters_vote_until_the_block_ends_and_count_what_was_acknowledged() -> None:
    with recording() as (url, _), Raters(url, ["a", "b"], RaterTraits(pace_s=0.0), seed=0) as raters:
        while raters.num_votes < 2:
            pass
    assert raters.num_votes >= 2 and raters.problems == []


def test_a_rater_gives_up_on_a_server_that_is_not_there() -> None:
    with pytest.raises(TunesmithError, match="does not answer"):
        RaterClient("http://127.0.0.1:9", "t").send("GET", "/", until=0.0)
