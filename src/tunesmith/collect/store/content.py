"""Encoding of values as columns, and checks of text before it is stored."""

import hashlib
import json
import math
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tunesmith.base.core.errors import DataError
from tunesmith.base.schema.records import Text

MAX_NAME = 200
"""Characters of a name: of a campaign, a rater, a source, a request key."""


def as_answer(prompt: Text, text: str) -> Text:
    """An answer in the form of its prompt: text, or a message of the assistant."""
    return text if isinstance(prompt, str) else ({"role": "assistant", "content": text},)


def is_storable(text: str) -> bool:
    """True if every database and file can hold `text`: it has no NUL and no lone surrogate."""
    return _fault(text) is None


def check_values(value: object, what: str) -> None:
    """Raise DataError, as `check_text` does, for a text or number anywhere in a value of JSON that no file holds."""
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{what} holds a number that is not finite ({value}); give another one, or leave it out")
    if isinstance(value, str):
        check_text(value, what)
    elif isinstance(value, Mapping):
        for name, part in cast(Mapping[str, object], value).items():
            check_text(name, what)
            check_values(part, what)
    elif isinstance(value, list | tuple):
        for part in cast(Sequence[object], value):
            check_values(part, what)


def check_text(text: str, what: str) -> str:
    """`text` itself. Raises DataError, which names `what`, for a NUL or a lone surrogate."""
    fault = _fault(text)
    if fault is not None:
        raise DataError(f"{what} holds {fault}; remove it")
    return text


def check_name(name: str, what: str) -> str:
    """`name` itself. Raises DataError if it is blank, longer than `MAX_NAME`, or not storable."""
    if not name_key(name):
        raise DataError(f"{what} is empty; give a name")
    if len(name) > MAX_NAME:
        raise DataError(f"{what} has {len(name)} characters; {MAX_NAME} are allowed")
    return check_text(name, what)


def name_key(name: str) -> str:
    """The text that spellings of one name share, though they differ in case, white space, invisible characters, or the
    form that Unicode gives a letter (composed, full width).
    """
    if name.isascii():
        return " ".join(name.casefold().split())
    seen = "".join(one for one in unicodedata.normalize("NFKC", name) if unicodedata.category(one) != "Cf")
    return " ".join(unicodedata.normalize("NFKC", seen.casefold()).split())


def spelling_of(name: str) -> str:
    """SHA-256 of `name_key`, which has one length."""
    return hashlib.sha256(name_key(name).encode()).hexdigest()


def check_content(content: Text, what: str) -> None:
    """Raise DataError as `check_text` does, for text or messages."""
    for text in [content] if isinstance(content, str) else [part for message in content for part in message.values()]:
        check_text(text, what)


def encode_json(value: object) -> str:
    """`value` as JSON; equal values give equal JSON."""
    return json.dumps(value, default=dict, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def decode_json(encoded: str) -> Any:
    """The value of `encode_json`; an array as a tuple, and None for numbers that are not finite."""
    value: Any = json.loads(encoded, parse_constant=lambda _: None)
    return tuple(cast(list[Any], value)) if isinstance(value, list) else value


def prompt_sha256(prompt: Text) -> str:
    """SHA-256 of a prompt, which identifies it."""
    return hashlib.sha256(encode_json(prompt).encode()).hexdigest()


def token_sha256(token: str) -> str:
    """SHA-256 of an access token. Tokens have at least 128 random bits, so no salt is needed."""
    return hashlib.sha256(token.encode("utf-8", errors="surrogatepass")).hexdigest()


def _fault(text: str) -> str | None:
    if "\x00" in text:
        return f"a NUL character (at position {text.index(chr(0))})"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"a lone surrogate (U+{ord(text[error.start]):04X} at position {error.start}), which is no character"
    return None
