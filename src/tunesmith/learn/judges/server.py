"""A judge behind OpenAI's API, over HTTP: what it answers, and the faults of servers that pass or that do not."""

import email.utils
import time
from collections.abc import Sequence
from typing import Any, cast

from tunesmith.base.config.judge import JudgeSettings
from tunesmith.base.core.http import HTTPClient, LostError, Response, checked_key
from tunesmith.base.core.log import one_line
from tunesmith.learn.judges.asking import AwayError, FatalError, RefusedError, Reply
from tunesmith.learn.judges.rubric import Question

_AWAY = (408, 409, 425, 429)
_FATAL = (401, 403, 404, 405)
_TOKENS_OF_TURN = 64
"""More than a chat template writes around a message."""

_MAX_SHOWN = 200

_MAX_BYTES = 1 << 24
"""Of an answer to one question."""

_MOST_COUNTED = 1 << 40
"""Tokens of a request beyond which a server's count is no count."""


class ServerAsker:
    """Asks the model of a server. `settings.model` is its address."""

    batch_size = 1
    can_wait = True

    def __init__(self, settings: JudgeSettings) -> None:
        self._client = HTTPClient(settings.model, settings.timeout_s, _MAX_BYTES)
        self._settings = settings
        self._key = checked_key(settings.key, settings.key_variable)
        self._path = self._client.path.removesuffix("/v1") + "/v1"
        self._model = settings.served_model
        self.num_threads = settings.concurrency

    @property
    def name(self) -> str:
        """The server's name of its model; it is asked once. Raises AwayError if it does not say now."""
        if not self._model:
            said = self._call("GET", "/models")
            try:
                named = said["data"][0]["id"]
            except (LookupError, TypeError):
                named = None
            if not isinstance(named, str) or not named.strip():
                raise AwayError(f"{self._settings.model} lists no model: {_shown(said)}")
            self._model = _storable(named)
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
            raise AwayError(f"it answered without one choice: {_shown(answer)}") from error
        if not isinstance(text, str):  # a model that thought until its limit says nothing
            text = ""
        return [Reply(_storable(text), _tokens_of(answer))]

    def abort(self) -> None:
        """End the requests that run."""
        self._client.abort()

    def _call(self, method: str, path: str, body: object = None) -> Any:
        try:
            response = self._client.send(method, self._path + path, body, self._key)
        except LostError as error:
            kind = FatalError if error.lasts else AwayError
            raise kind(f"{self._settings.model}: {error}", was_sent=error.was_sent) from error
        if 200 <= response.status < 300:
            try:
                return response.json()
            except ValueError as error:
                raise AwayError(f"it answered what is no JSON: {_shown(response.text)}") from error
        raise self._error(response, path)

    def _error(self, response: Response, path: str) -> Exception:
        said = f"{self._settings.model} answers {response.status} to {path}: {_shown(response.text)}"
        if 300 <= response.status < 400:  # the key is for this address alone
            named = response.headers.get("location", "")
            return FatalError(f"{said}; it sends on to {_shown(named) or 'no place'}: give the address that answers")
        if response.status in _FATAL:
            variable = self._settings.key_variable
            told = f"; its key is read from {variable}, which is {'set' if self._key else 'not set'}"
            return FatalError(said + (told if response.status in (401, 403) else ""))
        if response.status in _AWAY or response.status >= 500:
            return AwayError(said, is_refused=True, wait_s=_wait_of(response))
        return RefusedError(said)


def _tokens_of(answer: Any) -> int | None:
    """The tokens that the server counted, None if it did not. A request has tokens, so a count of none is no count."""
    usage: object = answer.get("usage")
    counted = cast(dict[str, object], usage) if isinstance(usage, dict) else {}
    names = ("total_tokens",) if counted.get("total_tokens") is not None else ("prompt_tokens", "completion_tokens")
    numbers = [counted.get(name) for name in names]
    parts = [one for one in numbers if isinstance(one, int) and not isinstance(one, bool) and one >= 0]
    total = sum(parts)
    return total if len(parts) == len(numbers) and 0 < total < _MOST_COUNTED else None


def _storable(text: str) -> str:
    """The text with another character for each that JSON can hold and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()


def _shown(value: object) -> str:
    """The beginning of what a server said, for a message."""
    return one_line(str(value)[: 4 * _MAX_SHOWN])[:_MAX_SHOWN]


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
