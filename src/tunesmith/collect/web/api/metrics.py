"""Figures of the API for Prometheus."""

import asyncio
import time
from collections.abc import Generator
from contextlib import contextmanager

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tunesmith.collect.store.records import StoredFeedback
from tunesmith.collect.web.api.endpoint import Endpoint
from tunesmith.collect.web.api.openai import Json, RefusedError

_FIRST_TOKEN_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_REQUEST_S = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 300)


class Metrics:
    """Counts requests, tokens and feedback; of one server, since it began."""

    media_type = CONTENT_TYPE_LATEST

    def __init__(self, endpoint: Endpoint) -> None:
        self.begun_at = int(time.time())
        self._registry = CollectorRegistry()
        self._requests = Counter("tunesmith_requests", "Requests by their end", ["end"], registry=self._registry)
        self._tokens = Counter("tunesmith_tokens", "Tokens read and drawn", ["kind"], registry=self._registry)
        self._feedback = Counter("tunesmith_feedback", "Feedback that was stored", ["kind"], registry=self._registry)
        open_now = Gauge("tunesmith_open_requests", "Requests that are drawn or wait", registry=self._registry)
        open_now.set_function(lambda: endpoint.num_open)
        self._first_token = Histogram(
            "tunesmith_first_token_seconds", "Time to the first token", buckets=_FIRST_TOKEN_S, registry=self._registry
        )
        self._request_s = Histogram(
            "tunesmith_request_seconds", "Time of a whole request", buckets=_REQUEST_S, registry=self._registry
        )

    def text(self) -> bytes:
        """All figures in Prometheus' text format."""
        return generate_latest(self._registry)

    def feedback(self, stored: StoredFeedback) -> None:
        """Count feedback. Its metric is named by clients, so only reserved names are told apart."""
        if not stored.is_repeat:
            is_known = stored.metric in ("comment", "demonstration", "preference")
            self._feedback.labels(stored.metric if is_known else "metric").inc()

    @contextmanager
    def request(self) -> Generator["Timer"]:
        """Measure a request in this block."""
        begun_s, end = time.perf_counter(), "failed"
        timer = Timer(self._tokens, self._first_token, begun_s)
        try:
            yield timer
            end = "answered"
        except (GeneratorExit, asyncio.CancelledError):  # the client went away
            end = "stopped"
            raise
        except RefusedError as error:
            end = "refused" if error.status_code < 500 else "failed"
            raise
        finally:
            self._requests.labels(end).inc()
            self._request_s.observe(time.perf_counter() - begun_s)


class Timer:
    """The tokens of a request, and the time to its first one."""

    def __init__(self, tokens: Counter, first_token: Histogram, begun_s: float) -> None:
        self.num_tokens = 0
        self._tokens = tokens
        self._first_token = first_token
        self._begun_s = begun_s
        self._has_token = False

    def note(self, reply: Json) -> None:
        """Take a reply of the process that draws."""
        ids = reply["begun"]["prompt_ids"] if "begun" in reply else reply.get("token_ids", ())
        self._tokens.labels("prompt" if "begun" in reply else "drawn").inc(len(ids))
        self.num_tokens += len(ids)
        if "begun" in reply:
            return
        if not self._has_token:
            self._has_token = True
            self._first_token.observe(time.perf_counter() - self._begun_s)
