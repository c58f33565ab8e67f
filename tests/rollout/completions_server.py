"""A server for tests that speaks vLLM's HTTP: real tokens, drawn by the native engine from a copy of a tiny model, and
faults by switch.
"""

import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.models.language_model import language_model
from tunesmith.engine.models.loaded import LoadedModel
from tunesmith.engine.models.logprob import token_logps
from tunesmith.engine.rollout.native_engine import NativeEngine


class CompletionsServer:
    """Serves `loaded`, whose weights it changes; `url` is its address.

    `faults` maps the number of a drawing request, counted from 0 over all starts, to what happens at it: "die" (no
    answer, and none to others until `start`), "restart" (die and start), "hang", "twice", "other prompt", "garbage",
    "overloaded". `keeps` names parameters that a push does not change, "" all of them. `knows` are the ways to load
    weights, `is_raw` says that log-probs are those at temperature 1.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.model = loaded.model
        self.engine = NativeEngine(language_model(loaded.model), loaded.tokenizer)
        self.started_with = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
        self.faults: dict[int, str] = {}
        self.keeps: tuple[str, ...] = ("nothing",)
        self.knows = {"tunesmith_load", "tunesmith_version", "reload_weights"}
        self.is_raw = False
        self.restart_after_s: float | None = None
        self.version = ""
        self.models: list[dict[str, str]] = [{"id": "served"}]
        self.calls: list[str] = []
        self.num_draws = self.num_starts = 0
        self.lock = threading.RLock()
        self.hanging = threading.Event()
        self._http: ThreadingHTTPServer | None = None
        self._port = 0
        self.start()
        self.url = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start, or start again with the weights of the first start."""
        with self.lock:
            self._load(self.started_with)
            self.version = ""
            self.num_starts += 1
            self._http = QuietHTTP(("127.0.0.1", self._port), _Handler)
            self._http.owner = self  # type: ignore[attr-defined]
            self._port = self._http.server_address[1]
            threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        """Close the port; requests that run get no answer."""
        with self.lock:
            http, self._http = self._http, None
        self.hanging.set()
        if http is not None:
            http.shutdown()
            http.server_close()

    def load(self, folder: str, version: str) -> str:
        """Take the weights of a folder, but those in `keeps`."""
        tensors: dict[str, torch.Tensor] = {}
        for path in Path(folder).glob("*.safetensors"):
            tensors |= load_file(path)
        assert tensors, "an empty folder was pushed"
        self._load({name: tensor for name, tensor in tensors.items() if not any(one in name for one in self.keeps)})
        self.version = version
        return str(self.model.dtype)

    @torch.no_grad()
    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        own = self.model.state_dict()
        for name, tensor in tensors.items():
            own[name].copy_(tensor)

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a completions request."""
        ids, n, temperature = body["prompt"], body.get("n", 1), body["temperature"]
        sampling = SamplingParams(
            max_new_tokens=body["max_tokens"],
            min_new_tokens=body.get("min_tokens", 0),
            temperature=temperature,
            top_p=body["top_p"],
            top_k=body["top_k"],
            min_p=body["min_p"],
            repetition_penalty=body["repetition_penalty"],
            stop_token_ids=tuple(body.get("stop_token_ids", ())),
            logit_bias={int(token): value for token, value in body.get("logit_bias", {}).items()},
            seed=body.get("seed", 0),
        )
        (group,) = self.engine.generate([Prompt("p", "", token_ids=tuple(ids))], n, sampling)
        choices: list[dict[str, Any]] = []
        for index, one in enumerate(group.completions):
            logps = list(one.logps)
            if self.is_raw or temperature == 0:  # vLLM's at temperature 0 are those at 1
                logps = self._scored([*ids, *one.token_ids], len(ids))
            if body.get("echo"):
                logps = [None, *self._scored(ids, 1), *logps]  # type: ignore[list-item]
            choices.append(
                {
                    "index": index,
                    "text": one.text,
                    "finish_reason": one.finish_reason,
                    "logprobs": {"token_logprobs": logps},
                    **({"token_ids": one.token_ids, "prompt_token_ids": ids} if body.get("return_token_ids") else {}),
                }
            )
        return {"choices": choices}

    @torch.no_grad()
    def _scored(self, ids: Sequence[int], num_prompt: int) -> list[float]:
        scores = token_logps(
            language_model(self.model),
            torch.tensor([ids]),
            torch.tensor([len(ids)]),
            prompt_lengths_B=torch.tensor([num_prompt]),
        )
        return scores.logp_BT[0].tolist()

    def rpc(self, body: dict[str, Any]) -> object | None:
        """The result of a remote call, None if it is not known."""
        if body["method"] not in self.knows:
            return None
        if body["method"] == "tunesmith_version":
            return self.version
        if body["method"] == "reload_weights":
            return self.load(body["kwargs"]["weights_path"], "")
        return self.load(*body["args"])


class QuietHTTP(ThreadingHTTPServer):
    """A server whose threads end with the process."""

    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients that go away are what is tested."""


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        owner: CompletionsServer = self.server.owner  # type: ignore[attr-defined]
        self._answer({"data": owner.models} if self.path == "/v1/models" else None)

    def do_POST(self) -> None:
        owner: CompletionsServer = self.server.owner  # type: ignore[attr-defined]
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        path = self.path.partition("?")[0]
        with owner.lock:
            owner.calls.append(body.get("method", path))
        if path == "/v1/completions":
            self._complete(owner, body)
        elif path == "/collective_rpc":
            with owner.lock:
                result = owner.rpc(body)
            self._answer(
                {"results": [result]} if result is not None else "no such method", 200 if result is not None else 500
            )
        else:
            self._answer({} if path in ("/pause", "/resume", "/reset_prefix_cache") else None)

    def _complete(self, owner: CompletionsServer, body: dict[str, Any]) -> None:
        fault = ""
        with owner.lock:
            starts = owner.num_starts
            if not body.get("echo"):
                fault = owner.faults.get(owner.num_draws, "")
                owner.num_draws += 1
        if fault == "hang":
            owner.hanging.wait(30)
            return
        if fault in ("die", "restart"):
            owner.stop()
            if fault == "restart":
                owner.start()
            elif owner.restart_after_s is not None:
                threading.Timer(owner.restart_after_s, owner.start).start()
            return
        with owner.lock:
            answer = owner.complete(body)
        if starts != owner.num_starts or owner._http is None:
            return  # it died meanwhile
        if fault == "twice":
            answer["choices"] *= 2
        if fault == "other prompt":
            answer["choices"][0]["prompt_token_ids"] = [5, 6]
        self._answer("garbage" if fault == "garbage" else answer, 503 if fault == "overloaded" else 200)

    def _answer(self, value: object, status: int = 200) -> None:
        """Answer with JSON, with 404 for None, with plain text for a text."""
        text = value if isinstance(value, str) else json.dumps(value)
        data = b"" if value is None else text.encode()
        self.send_response(404 if value is None else status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Clock:
    """In place of `time` in the engine: waiting takes no time, so that a test of a long wait is short."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s
