"""Values of the columns that say who judged, how, when and on which side. One of a wrong type is an error, which names
the column, never an absence: a vote without its rater or its mark would count as another vote.
"""

import re
import time
from collections.abc import Mapping
from datetime import datetime
from typing import cast

from tunesmith.base.core.errors import DataError
from tunesmith.base.runs.listing import number as finite_number
from tunesmith.collect.data.rows import RowError, kind_of, number_shown
from tunesmith.collect.store.content import check_name
from tunesmith.collect.store.records import PREFERENCE_NAMES, PreferenceName, Side

UNKNOWN_RATER = "import"
"""Who is said to have given a preference whose row names nobody."""

_MILLISECONDS = 1e11
"""Times from here on are no seconds, which would be after the year 5000, but milliseconds."""

_MOST = 1e14
_DAYS = (1900, 100_000)
"""Numbers in this range are years or days of a spreadsheet, not seconds, which would be of two days in 1970."""

_DATE = re.compile(r"(19|20)\d\d(0\d|1[0-2])([0-2]\d|3[01])(\d{4}|\d{6})?")
"""A date, perhaps with a time, in ISO's basic form."""

_WITH_GAPS = re.compile(r"\d+\.0+")
_DAY_S = 24 * 3600.0


def rater_of(value: object, name: str = "rater") -> str:
    """The name of a rater: text or a whole number; `UNKNOWN_RATER` where there is none."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return UNKNOWN_RATER
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a column of whole numbers with gaps, as Parquet writes it
    if isinstance(value, str) and _WITH_GAPS.fullmatch(value.strip()):
        value = value.strip().partition(".")[0]  # the same, as pandas writes it to CSV
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RowError(f"`{name}` is {kind_of(value)}; give a name or a whole number", "wrong type")
    try:
        return check_name(str(value).strip(), f"`{name}`")
    except DataError as error:
        raise RowError(str(error)) from error


def time_of(value: object, name: str = "created_at") -> float | None:
    """Seconds since the epoch: a number of seconds or milliseconds, or a time with its zone; None where there is none.

    Raises RowError for a time without a zone, one in the future, and anything else.
    """
    if isinstance(value, str):
        value = _time_in_text(value.strip(), name)
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise RowError(
                f"`{name}` is {value.isoformat()}, a time without its zone; write {value.isoformat()}Z, or +02:00 or so"
            )
        value = value.timestamp()
    number = _number(value, name, "give seconds since the epoch, or a time such as 2024-01-01T12:00:00Z")
    if number is None:
        return None
    if not 0 <= number < _MOST or _DAYS[0] <= number < _DAYS[1]:
        raise RowError(f"`{name}` is {value}; give seconds since the epoch, or milliseconds, or 2024-01-01T12:00:00Z")
    seconds = number / 1000 if number >= _MILLISECONDS else number
    if seconds > time.time() + _DAY_S:
        raise RowError(f"`{name}` is {value}, which is in the future; give seconds since the epoch, or milliseconds")
    return seconds


def _time_in_text(text: str, name: str) -> object:
    if not text or (_is_number(text) and not _DATE.fullmatch(text)):
        return text
    try:
        return datetime.fromisoformat(f"{text[:8]}T{text[8:]}" if _DATE.fullmatch(text) and text[8:] else text)
    except ValueError as error:
        raise RowError(f"`{name}` is {text[:40]!r}; write a time as 2024-01-01T12:00:00Z") from error


def duration_of(value: object, name: str = "dwell_ms") -> int | None:
    """Whole milliseconds; None where there is none."""
    number = _number(value, name, "give milliseconds")
    if number is None:
        return None
    if number < 0:
        raise RowError(f"`{name}` is {value}; give milliseconds, at least 0")
    return round(number)


def whole_number(value: object, name: str) -> int | None:
    """A whole number of at least 0; None where there is none."""
    number = _number(value, name, "give a whole number")
    if number is None:
        return None
    if number < 0 or not number.is_integer():
        raise RowError(f"`{name}` is {value}; give a whole number of at least 0")
    return int(number)


def text_of(value: object, name: str) -> str:
    """A text, empty where there is none."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RowError(f"`{name}` is {kind_of(value)}; give text", "wrong type")
    return value


def verdict_of(value: object, *, is_tie: bool, name: str = "verdict") -> PreferenceName | None:
    """The verdict; None where there is none. `is_tie` is what the row's `tie` says, which must agree."""
    if value is None or value == "":
        return None
    if value not in PREFERENCE_NAMES:
        shown = repr(value[:40]) if isinstance(value, str) else kind_of(value)
        raise RowError(f"`{name}` is {shown}; give {', '.join(PREFERENCE_NAMES)}, or leave it out")
    if (value in ("tie", "both_bad")) != is_tie:
        raise RowError(f"`{name}` is {value!r} but `tie` is {str(is_tie).lower()}; correct one of them")
    return cast(PreferenceName, value)


def side_of(value: object, name: str = "chosen_side") -> Side | None:
    """`left` or `right`; None where nobody recorded it."""
    if value is None or value == "":
        return None
    if value not in ("left", "right"):
        shown = repr(value[:40]) if isinstance(value, str) else kind_of(value)
        raise RowError(f"`{name}` is {shown}; give left or right, or leave it out")
    return cast(Side, value)


def mapping_of(value: object, name: str) -> Mapping[str, object]:
    """An object, empty where there is none."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RowError(f"`{name}` is {kind_of(value)}; give an object", "wrong type")
    return cast(Mapping[str, object], value)


def _number(value: object, name: str, advice: str) -> float | None:
    """A finite number, also as text, as in CSV; None where there is none."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if isinstance(value, str) and _is_number(value):
        value = float(value)
    number = finite_number(value)
    if number is None:
        shown = repr(value[:40]) if isinstance(value, str) else number_shown(value)
        raise RowError(f"`{name}` is {shown}; {advice}", "wrong type")
    return number


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
