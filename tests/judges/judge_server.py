"""A server for tests that speaks OpenAI's chat API as a judge: its verdicts are a function of the texts that it is
shown, and it has faults by switch.
"""

import contextlib
import json
import re
import ssl
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from completions_server import QuietHTTP

_BLOCK = re.compile(r"\[(\w{12}) (answer [AB]|answer)\]\n(.*?)\n\[\1 end of \2\]", re.DOTALL)

TOKENS_OF_ANSWER = 7


def longer(first: str, second: str) -> str:
    """The verdict of a judge who prefers the longer answer."""
    return "A" if len(first) > len(second) else "B" if len(second) > len(first) else "C"


class JudgeServer:
    """`url` is its address; `verdict` is what it says of two answers, `grade` of one.

    `faults` maps the number of a request, counted from 0 over all starts, to what happens at it: "drop" (no answer),
    "restart" (no answer; it is away for `away_s`), "die" (no answer, ever), "hang", "cut" (half an answer), "dribble"
    (a byte now and then), "twice" (two choices), "garbage", "nonsense" (no verdict), "both" (two verdicts), "empty",
    "limited" (429 with `Retry-After`), "overloaded" (503), "too long" (400), "no usage", "null usage" (counts that are
    null), "no tokens" (a count of 0), "minus" (a negative one), "many tokens" (more than there are),
    "deep" (JSON that is nested a hundred thousand times), "endless" (a body without an end), "slow header" (a byte now
    and then, before the body), "continue" (100, again and again), "moved" (301), "echo" (what it was sent, as an
    error), "created" (201). A fault of the number -1 is that of all requests.
    """

    def __init__(
        self,
        verdict: Callable[[str, str], str] = longer,
        grade: Callable[[str], object] = len,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.verdict, self.grade, self.tls = verdict, grade, tls
        self.faults: dict[int, str] = {}
        self.key = ""
        self.model: object = "rater-1"
        self.away_s = 0.2
        self.retry_after = "0.05"
        self.bodies: list[dict[str, Any]] = []
        self.num_tokens = 0
        self.num_running = self.most_running = 0
        self.lock = threading.RLock()
        self.hanging = threading.Event()
        self._http: ThreadingHTTPServer | None = None
        self._port = 0
        self.start()
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self._port}"

    @property
    def num_requests(self) -> int:
        return len(self.bodies)

    def start(self) -> None:
        with self.lock:
            self._http = QuietHTTP(("127.0.0.1", self._port), _Handler)
            if self.tls is not None:
                self._http.socket = self.tls.wrap_socket(self._http.socket, server_side=True)
            self._http.owner = self  # type: ignore[attr-defined]
            self._port = self._http.server_address[1]
            threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        with self.lock:
            http, self._http = self._http, None
        if http is not None:
            http.shutdown()
            http.server_close()

    def close(self) -> None:
        self.hanging.set()
        self.stop()

    def said(self, body: dict[str, Any]) -> str:
        """What the judge answers."""
        blocks = [text for _, _, text in _BLOCK.findall(body["messages"][-1]["content"])]
        return f"Because of its length. [[{self.verdict(*blocks) if len(blocks) == 2 else self.grade(*blocks)}]]"


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        owner: JudgeServer = self.server.owner  # type: ignore[attr-defined]
        self._answer({"data": [{"id": owner.model}]})

    def do_POST(self) -> None:
        owner: JudgeServer = self.server.owner  # type: ignore[attr-defined]
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if owner.key and self.headers.get("Authorization") != f"Bearer {owner.key}":
            self._answer({"error": {"message": "wrong key"}}, 401)
            return
        with owner.lock:
            fault = owner.faults.get(len(owner.bodies), owner.faults.get(-1, ""))
            owner.bodies.append(body)
            owner.num_running += 1
            owner.most_running = max(owner.most_running, owner.num_running)
        try:
            self._respond(owner, body, fault)
        finally:
            with owner.lock:
                owner.num_running -= 1

    def _respond(self, owner: JudgeServer, body: dict[str, Any], fault: str) -> None:
        if fault == "hang":
            owner.hanging.wait(30)
            return
        if fault in ("drop", "restart", "die"):
            if fault != "drop":
                owner.stop()
            if fault == "restart":
                threading.Timer(owner.away_s, owner.start).start()
            return
        if fault in ("limited", "overloaded", "too long"):
            status = {"limited": 429, "overloaded": 503, "too long": 400}[fault]
            self._answer(
                {"error": {"message": fault}}, status, {"Retry-After": owner.retry_after} if status == 429 else {}
            )
            return
        if fault in ("endless", "slow header", "continue"):
            self._write_on(fault)
            return
        if fault == "moved":
            self._answer({}, 301, {"Location": "https://elsewhere.example/v1"})
            return
        if fault == "echo":
            self._answer(str(self.headers), 401)
            return
        text = {"nonsense": "I like both.", "both": "[[A]] or [[B]]", "empty": None}.get(fault, owner.said(body))
        used = len(body["messages"][-1]["content"]) // 4 + TOKENS_OF_ANSWER
        with owner.lock:
            owner.num_tokens += used
        answer: dict[str, Any] = {
            "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
            "usage": {"total_tokens": used},
        }
        if fault == "twice":
            answer["choices"] *= 2
        if fault == "no usage":
            del answer["usage"]
        counts = {"null usage": (None, None), "no tokens": (0, 0), "minus": (None, -5), "many tokens": (10**30, 0)}
        if fault in counts:
            total, drawn = counts[fault]
            answer["usage"] = {"total_tokens": total, "prompt_tokens": drawn and 10, "completion_tokens": drawn}
        said = {"garbage": "garbage", "deep": "[" * 100_000}.get(fault, answer)
        status = 201 if fault == "created" else 200
        self._answer(said, status, cut=fault == "cut", dribbles=fault == "dribble")

    def _write_on(self, fault: str) -> None:
        """Write for ever, or until the other side has had enough."""
        begin = {"continue": b"", "endless": b"HTTP/1.1 200 OK\r\n\r\n", "slow header": b"HTTP/1.1 200 OK\r\nX-Slow: "}
        more = {"continue": b"HTTP/1.1 100 Continue\r\n\r\n", "endless": b"x" * (1 << 20), "slow header": b"x"}
        owner: JudgeServer = self.server.owner  # type: ignore[attr-defined]
        with contextlib.suppress(OSError):
            self.wfile.write(begin[fault])
            while not owner.hanging.wait(0 if fault == "endless" else 0.1):
                self.wfile.write(more[fault])

    def _answer(
        self,
        value: object,
        status: int = 200,
        headers: dict[str, str] | None = None,
        *,
        cut: bool = False,
        dribbles: bool = False,
    ) -> None:
        data = (value if isinstance(value, str) else json.dumps(value)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        self.end_headers()
        if dribbles:
            for place in range(len(data)):
                self.wfile.write(data[place : place + 1])
                self.wfile.flush()
                time.sleep(0.1)
            return
        self.wfile.write(data[: len(data) // 2] if cut else data)
