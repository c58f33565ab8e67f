"""A judge behind OpenAI's API, over HTTP: what it answers, and the faults of servers that pass or that do not."""

import email.utils
import json
import time
from collections.abc import Sequence
from typing import Any, cast

from tunesmith.base.config.judge import JudgeSettings
from tunesmith.base.core.errors import InputError
from tunesmith.base.core.http import HTTPClient, LostError, Response
from tunesmith.learn.judges.asking import AwayError, FatalError, RefusedError, Reply
from tunesmith.learn.judges.rubric import Question

_AWAY = (408, 409, 425, 429)
_FATAL = (401, 403, 404, 405)
_TOKENS_OF_TURN = 64
"""More than a chat template writes around a message."""

_MAX_SHOWN = 200


class ServerAsker:
    """Asks the model of a server. `settings.model` is its address."""

    batch_size = 1
    can_wait = True

    def __init__(self, settings: JudgeSettings) -> None:
        try:
            self._client = HTTPClient(settings.model, settings.timeout_s)
        except ValueError as error:
            raise InputError(f"the judge's model is {error}") from error
        self._settings = settings
        self._path = self._client.path.removesuffix("/v1") + "/v1"
        self._model = settings.served_model
        self.num_threads = settings.concurrency

    @property
    def name(self) -> str:
        """The server's name of its model; it is asked once. Raises AwayError if it does not say now."""
        if not self._model:
            said = self._call("GET", "/models")
            try:
                self._model = str(said["data"][0]["id"])
            except (LookupError, TypeError) as error:
                raise AwayError(f"{self._settings.model} lists no model: {str(said)[:_MAX_SHOWN]}") from error
        return self._model

    @property
    def identity(self) -> str:
        """The same: whoever serves a model of one name is taken for the same."""
        return self.name

    def most_tokens(self, question: Question) -> int:
        """A bound of the tokens of a request, whatever its tokenizer: a token is a byte or more."""
        text = "".join(str(message["content"]) for message in question.messages)
        num_bytes = len(text.encode("utf-8", "surrogatepass"))
        return num_bytes + _TOKENS_OF_TURN * (1 + len(question.messages)) + self._settings.answer_tokens

    def ask(self, questions: Sequence[Question], seed: int) -> list[Reply]:
        """The reply to a question. Errors as those of `Asker.ask`."""
        (question,) = questions
        cfg = self._settings
        body: dict[str, object] = {
            "model": self.name,
            "messages": [dict(message) for message in question.messages],
            cfg.answer_tokens_field: cfg.answer_tokens,
            **({} if cfg.temperature is None else {"temperature": cfg.temperature}),
            "seed": seed,
            **cfg.options,
        }
        answer = self._call("POST", "/chat/completions", body)
        try:
            (choice,) = answer["choices"]  # one was asked for: two are no answer to this request
            text = choice["message"]["content"]
        except (LookupError, TypeError, ValueError) as error:
            raise AwayError(f"it answered without one choice: {str(answer)[:_MAX_SHOWN]}") from error
        if not isinstance(text, str):  # a model that thought until its limit says nothing
            text = ""
        return [Reply(text.encode("utf-8", "replace").decode(), _tokens_of(answer))]

    def abort(self) -> None:
        """End the requests that run."""
        self._client.abort()

    def _call(self, method: str, path: str, body: object = None) -> Any:
        try:
            response = self._client.send(method, self._path + path, body, self._settings.key)
        except LostError as error:
            raise AwayError(f"{self._settings.model}: {error}", was_sent=error.was_sent) from error
        if response.status == 200:
            try:
                return json.loads(response.text)
            except ValueError as error:
                raise AwayError(f"it answered what is no JSON: {response.text[:_MAX_SHOWN]}") from error
        raise self._error(response, path)

    def _error(self, response: Response, path: str) -> Exception:
        shown = " ".join(response.text.split())[:_MAX_SHOWN]
        said = f"{self._settings.model} answers {response.status} to {path}: {shown}"
        if response.status in _FATAL:
            variable = self._settings.key_variable
            told = f"; its key is read from {variable}, which is {'set' if self._settings.key else 'not set'}"
            return FatalError(said + (told if response.status in (401, 403) else ""))
        if response.status in _AWAY or response.status >= 500:
            return AwayError(said, is_refused=True, wait_s=_wait_of(response))
        return RefusedError(said)


def _tokens_of(answer: Any) -> int | None:
    """The tokens that the server counted, None if it did not."""
    usage: object = answer.get("usage")
    counted = cast(dict[str, object], usage) if isinstance(usage, dict) else {}
    total = counted.get("total_tokens")
    if total is None and {"prompt_tokens", "completion_tokens"} <= counted.keys():
        parts = [counted["prompt_tokens"], counted["completion_tokens"]]
        total = sum(part for part in parts if isinstance(part, int))
    return total if isinstance(total, int) and total >= 0 else None


def _wait_of(response: Response) -> float:
    """The seconds that the server asks to wait, 0 if it does not: `Retry-After`, in seconds or as a date."""
    given = response.headers.get("retry-after", "").strip()
    try:
        return max(0.0, float(given))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(given).timestamp() - time.time())
    except (ValueError, TypeError):
        return 0.0
