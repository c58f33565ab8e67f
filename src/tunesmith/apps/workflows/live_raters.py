"""Simulated raters who vote over HTTP as people do: each asks for a pair, judges it, and sends a verdict.

They judge by a lexicon (`rewards.builtin.SimulatedRater`), are wrong at a given rate, and may prefer a
side. No person votes, and nothing that is learnt from them says anything about people.
"""

import http.client
import itertools
import json
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tunesmith.base.core.errors import InputError, TunesmithError
from tunesmith.base.core.log import get_logger
from tunesmith.base.core.seeds import derive
from tunesmith.base.schema.records import Text
from tunesmith.learn.rewards.builtin import TIE_BELOW, SimulatedRater

_log = get_logger(__name__)

MUCH = 0.8
"""Scores that differ by more than this, of a range of 2, make an answer much better."""

NUM_TURNS = 3
"""Turns of a conversation."""

VOTE_SHARE = 2 / 3
"""Share of the turns that a rater votes on."""

_TIMEOUT_S = 30.0
_RETRY_S = 0.5
_CONNECTION_ERRORS = (OSError, http.client.HTTPException)


@dataclass(frozen=True, slots=True)
class RaterTraits:
    """Behaviour of simulated raters: `accuracy` is the share of verdicts that follow the lexicon, `left_bias` the share
    that take the left answer regardless of its text, `pace_s` the seconds that a rater looks at a pair.
    """

    accuracy: float = 0.85
    left_bias: float = 0.0
    pace_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("accuracy", "left_bias"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} of a simulated rater is {getattr(self, name):g}; give a share from 0 to 1")
        if self.pace_s < 0:
            raise InputError(f"pace_s of a simulated rater is {self.pace_s:g}; give 0 or more seconds")


@dataclass(frozen=True, slots=True)
class Talk:
    """Settings of raters who talk in the arena: `count` conversations in all, with messages out of `openings`."""

    count: int
    openings: Sequence[str]


@dataclass(frozen=True, slots=True)
class Reply:
    """Status and body of an answer of the server: JSON, or the text of a stream."""

    status: int
    body: Any


class RaterClient:
    """One rater's connection to the server. A request is sent again, with its key, until the server answers."""

    def __init__(self, url: str, token: str) -> None:
        self._host = urlsplit(url).netloc
        self._token = token
        self._connection: http.client.HTTPConnection | None = None

    def send(
        self, method: str, path: str, body: Mapping[str, object] | None = None, *, key: str = "", until: float
    ) -> Reply:
        """The server's answer. Raises TunesmithError if there is none before `until`, a time of the monotonic clock."""
        headers = {"Authorization": f"Bearer {self._token}", "Accept": "application/json"}
        data = None if body is None else json.dumps(body)
        if data is not None:
            headers["Content-Type"] = "application/json"
        if key:
            headers["Idempotency-Key"] = key
        while True:
            try:
                return self._once(method, path, data, headers)
            except _CONNECTION_ERRORS as error:
                self.close()
                if time.monotonic() >= until:
                    raise TunesmithError(f"the server at {self._host} does not answer ({error})") from error
                time.sleep(_RETRY_S)

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _once(self, method: str, path: str, data: str | None, headers: Mapping[str, str]) -> Reply:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self._host, timeout=_TIMEOUT_S)
        self._connection.request(method, path, data, dict(headers))
        response = self._connection.getresponse()
        text = response.read()
        if response.status >= 500:
            raise http.client.HTTPException(f"status {response.status}")
        is_stream = "event-stream" in response.getheader("content-type", "")
        return Reply(response.status, text.decode() if is_stream else json.loads(text) if text else None)


class Raters:
    """`with Raters(...)`: one thread for each token votes until the block ends; with `talk`, in conversations."""

    def __init__(
        self, url: str, tokens: Sequence[str], traits: RaterTraits, seed: int, talk: "Talk | None" = None
    ) -> None:
        self._url = url
        self._traits = traits
        self._talk = talk
        self._left = itertools.count(1)
        self.num_conversations = 0
        self._leave = threading.Event()
        # Lists to which all threads append.
        self.vote_ms: list[float] = []
        """Milliseconds from sending to acknowledgement of each vote, the raters' own time for it included."""
        self.problems: list[str] = []
        """Requests that the server refused, and why raters gave up."""
        self._threads = [
            threading.Thread(target=self._work, args=(index, token, seed), name=f"rater-{index}", daemon=True)
            for index, token in enumerate(tokens)
        ]

    @property
    def num_votes(self) -> int:
        """Votes that the server has acknowledged."""
        return len(self.vote_ms)

    def __enter__(self) -> "Raters":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.set()
        for thread in self._threads:
            thread.join(_TIMEOUT_S)

    def _work(self, index: int, token: str, seed: int) -> None:
        draw, judge = random.Random(derive(seed, "rater", index)), SimulatedRater()
        client = RaterClient(self._url, token)
        try:
            while not self._leave.is_set() and (self._talk is None or next(self._left) <= self._talk.count):
                if self._talk is None:
                    self._turn(client, draw, judge, index)
                else:
                    self._converse(client, draw, judge, self._talk)
        except TunesmithError as error:
            self._note(str(error))
        finally:
            client.close()

    def _turn(self, client: RaterClient, draw: random.Random, judge: SimulatedRater, index: int) -> None:
        """Ask for a pair, look at it, and vote; or wait where there is none."""
        reply = client.send("GET", "/api/v1/next?count=1", until=time.monotonic() + _TIMEOUT_S)
        shown = reply.body["presentations"] if reply.status == 200 else []
        if reply.status != 200:
            self._note(f"rater {index}: GET next was answered with {reply.status} {reply.body}")
        if not shown:
            self._leave.wait(_RETRY_S)
            return
        presentation = shown[0]
        verdict = verdict_of(presentation, self._traits, draw, judge)
        key = f"simulated-{derive(0, presentation['token'], verdict)}"
        self._send_vote(client, draw, f"/api/v1/presentations/{presentation['token']}/vote", verdict, key)

    def _converse(self, client: RaterClient, draw: random.Random, judge: SimulatedRater, talk: "Talk") -> None:
        """One conversation, with votes on some of its turns, on one at least."""
        begun = self._ask(client, "POST", "/api/v1/arena", {})
        path, number, num_votes = f"/api/v1/arena/{begun['id']}" if begun else "", 0, 0
        while begun and number < NUM_TURNS and not self._leave.is_set():
            body = {"number": number, "text": draw.choice(talk.openings)}
            told = self._ask(client, "POST", f"{path}/turns", body) and self._ask(client, "GET", f"{path}/stream")
            turn = answered(told or "")
            if turn is None:
                self._note(f"no answers came: {told}")
                self._leave.wait(_RETRY_S)
                return
            number += 1
            if turn["can_vote"] and (draw.random() < VOTE_SHARE or (number == NUM_TURNS and not num_votes)):
                shown = {"prompt": [{"text": turn["text"], "role": None}], "answers": turn["answers"]}
                verdict = verdict_of(shown, self._traits, draw, judge)
                self._send_vote(client, draw, f"{path}/turns/{number - 1}/vote", verdict)
                num_votes += 1
        self.num_conversations += number == NUM_TURNS

    def _ask(self, client: RaterClient, method: str, path: str, body: Mapping[str, object] | None = None) -> Any:
        """The body of the server's answer; None, and a problem noted, if it refused."""
        reply = client.send(method, path, body, until=time.monotonic() + _TIMEOUT_S)
        if reply.status < 300:
            return reply.body
        self._note(f"{method} {path} was answered with {reply.status} {reply.body}")
        self._leave.wait(_RETRY_S)
        return None

    def _send_vote(self, client: RaterClient, draw: random.Random, path: str, verdict: str, key: str = "") -> None:
        """Look at the answers for a while, and vote."""
        if self._leave.wait(self._traits.pace_s * draw.uniform(0.5, 1.5)):
            return
        body = {"verdict": verdict, "dwell_ms": int(1000 * self._traits.pace_s)}
        sent_s = time.monotonic()
        reply = client.send("PUT", path, body, key=key, until=sent_s + _TIMEOUT_S)
        if reply.status == 200:
            self.vote_ms.append(1000 * (time.monotonic() - sent_s))
        else:
            self._note(f"a vote was answered with {reply.status} {reply.body}")

    def _note(self, problem: str) -> None:
        self.problems.append(problem)
        _log.debug("%s", problem)


def verdict_of(presentation: Mapping[str, Any], traits: RaterTraits, draw: random.Random, judge: SimulatedRater) -> str:
    """The verdict of a simulated rater on a presentation as the server sends it."""
    prompt = prompt_of(presentation)
    left, right = (judge.score(prompt, answer["text"]) for answer in presentation["answers"])
    if draw.random() < traits.left_bias:
        return "left"
    gain = right - left
    if draw.random() >= traits.accuracy:
        gain = -gain if abs(gain) >= TIE_BELOW else draw.choice((-1.0, 1.0)) * TIE_BELOW
    if abs(gain) < TIE_BELOW:
        return "tie"
    side = "right" if gain > 0 else "left"
    return f"{side}_much" if abs(gain) > MUCH else side


def answered(stream: str) -> Mapping[str, Any] | None:
    """The last turn of the conversation at the end of a stream of answers; None if they did not come."""
    _, mark, data = stream.partition("event: done\ndata: ")
    return json.loads(data)["turns"][-1] if mark else None


def prompt_of(presentation: Mapping[str, Any]) -> Text:
    """The prompt of a presentation: text, or the turns of a conversation."""
    passages = presentation["prompt"]
    if len(passages) == 1 and passages[0]["role"] is None:
        return str(passages[0]["text"])
    return tuple({"role": str(one["role"]), "content": str(one["text"])} for one in passages)
