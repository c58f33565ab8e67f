"""A vLLM server, or another that speaks OpenAI's completions protocol with token ids, over HTTP."""

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tunesmith.base.core.errors import InputError
from tunesmith.base.core.http import HTTPClient, LostError, checked_key
from tunesmith.engine.rollout.remote.connection import PLAIN, Drawn, Job, TransientError, checked

API_KEY = "TUNESMITH_SERVER_KEY"
"""Environment variable with the server's key, if it wants one."""

_AWAY = (408, 425, 429, 502, 503, 504)
_LOAD = "tunesmith_load"


class RefusedError(InputError):
    """The server does not do what it was asked: an error of the request, or an unknown path."""


class _BrokenError(TransientError):
    """The server failed at a request (500)."""


class Server:
    """The `Connection` to the server at `url`, with at most `num_slots` completions at a time."""

    def __init__(self, url: str, *, timeout_s: float, num_slots: int) -> None:
        try:
            self._client = HTTPClient(url, timeout_s)
        except ValueError as error:
            raise InputError(f"rollout.server_url is {error}") from error
        self._key = checked_key(os.environ.get(API_KEY, ""), API_KEY)
        self.name = f"the server {url}"
        self.dtype: str | None = None
        self._path = self._client.path.removesuffix("/v1")
        self._num_slots = num_slots
        self._way: dict[str, Any] | None = None  # of loading weights, once one worked
        self._model = ""

    def absence(self) -> str:
        """Why the server does not answer now, or empty. Raises RefusedError if it refuses, as without its key."""
        try:
            self._call("GET", "/v1/models")
        except TransientError as error:
            return str(error)
        return ""

    def push(self, folder: Path, version: str) -> None:
        """See `Connection.push`. Uses our worker extension, else the server's own way to reload a folder."""
        models = self._call("GET", "/v1/models")
        try:
            self._model = models["data"][0]["id"]
        except (IndexError, KeyError, TypeError) as error:  # a router whose servers are still starting
            raise TransientError(f"it names no model: {str(models)[:200]}") from error
        self._call_if_known("/pause?mode=keep")
        try:
            answer = self._load(str(folder), version)
            if self._is_ours:
                self.dtype = answer["results"][0]
            self._call_if_known("/reset_prefix_cache")
            self._call_if_known("/update_weight_version", {"new_version": version})
        finally:
            self._call_if_known("/resume")

    def version(self) -> str | None:
        """See `Connection.version`."""
        if not self._is_ours:
            return None
        names = self._call("POST", "/collective_rpc", {"method": "tunesmith_version"})["results"]
        return str(names[0]) if len(set(names)) == 1 else ""  # its processes have different weights

    def complete(self, jobs: Mapping[int, Job]) -> tuple[dict[int, list[Drawn]], TransientError | None]:
        """See `Connection.complete`."""
        failed = threading.Event()

        def draw(job: Job) -> list[Drawn] | None:
            return None if failed.is_set() else self._complete(job)  # it would only wait for the same timeout

        done: dict[int, list[Drawn]] = {}
        problem: TransientError | None = None
        pool = ThreadPoolExecutor(max(1, self._num_slots // max(job.n for job in jobs.values())))
        try:
            futures: dict[Future[list[Drawn] | None], int] = {pool.submit(draw, job): key for key, job in jobs.items()}
            for future in as_completed(futures):
                try:
                    drawn = future.result()
                except TransientError as error:
                    failed.set()
                    problem = problem or error
                else:
                    done |= {} if drawn is None else {futures[future]: drawn}
        finally:
            failed.set()
            self._client.abort()
            pool.shutdown()
        return done, problem

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """See `Connection.score`."""
        settings = {**PLAIN, "prompt": list(token_ids), "echo": True, "logprobs": 1, "max_tokens": 1}
        (choice,) = self._choices(settings, 1)
        return [float(logp) for logp in choice["logprobs"]["token_logprobs"][1 : len(token_ids)]]

    @property
    def _is_ours(self) -> bool:
        return self._way is not None and self._way.get("method") == _LOAD

    def _load(self, folder: str, version: str) -> Any:
        """The answer of the first way to load weights that the server knows."""
        ways: list[tuple[str, dict[str, Any]]] = [
            ("/collective_rpc", {"method": _LOAD, "args": [folder, version]}),
            ("/update_weights_from_disk", {"model_path": folder}),  # SGLang
            ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}}),
        ]
        reasons: list[str] = []
        for path, body in ways:
            if self._way is not None and body.get("method") != self._way.get("method"):
                continue
            try:
                answer = self._call("POST", path, body)
            except (RefusedError, _BrokenError) as error:
                if self._way is not None:
                    raise
                reasons.append(str(error))
            else:
                self._way = body
                return answer
        raise InputError(
            f"{self.name} loads no weights; start vLLM with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls "
            "tunesmith.engine.rollout.remote.worker.WeightLoader. It answered:\n"
            + "\n".join(f"  {one}" for one in reasons)
        )

    def _complete(self, job: Job) -> list[Drawn]:
        extra = {"prompt": list(job.prompt_ids), "return_token_ids": True, "skip_special_tokens": False}
        choices = self._choices({**job.settings, **extra}, job.n)
        drawn: list[Drawn] = []
        for choice in choices:
            if choice.get("token_ids") is None or choice.get("logprobs") is None:
                raise InputError(
                    f"{self.name} returns no token ids and log-probs with its completions; use vLLM 0.11 or newer"
                )
            if tuple(choice.get("prompt_token_ids") or job.prompt_ids) != job.prompt_ids:
                raise TransientError("it answered with completions of another prompt")
            drawn.append(Drawn(choice["token_ids"], choice["logprobs"]["token_logprobs"]))
        return checked(job, drawn)

    def _choices(self, body: dict[str, Any], n: int) -> list[Any]:
        """The choices of a completions request, each once, in order."""
        answer = self._call("POST", "/v1/completions", {"model": self._model, **body})
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            indices = [choice["index"] for choice in choices]
        except (KeyError, TypeError) as error:
            raise TransientError(f"it answered without choices: {str(answer)[:200]}") from error
        if indices != list(range(n)):
            raise TransientError(f"it answered with the completions {indices} where {n} were asked for")
        return choices

    def _call_if_known(self, path: str, body: object = None) -> None:
        with contextlib.suppress(RefusedError):  # a server without this path has nothing to do here
            self._call("POST", path, body)

    def _call(self, method: str, path: str, body: object = None) -> Any:
        """The JSON value that the server answers, None for an empty answer.

        Raises:
            RefusedError: it will not do that.
            InputError: its certificate or protocol lets nobody ask it.
            TransientError: it is away, or it failed.
        """
        where = f"{method} {path.partition('?')[0]}"
        try:
            response = self._client.send(method, self._path + path, body, self._key)
        except LostError as error:
            if error.lasts:
                raise InputError(f"{self.name}: {error}") from error
            raise TransientError(f"{where}: {error}") from error
        status, text = response.status, response.text
        said = f"{where} answered {status}: {' '.join(text.split())[:300]}"
        if status in _AWAY:
            raise TransientError(said)
        if status >= 500:
            raise _BrokenError(said)
        if status >= 400:
            raise RefusedError(f"{self.name}: {said}")
        try:
            return response.json() if text.strip() else None
        except ValueError as error:
            raise TransientError(f"{where} answered what is no JSON: {text[:200]}") from error
