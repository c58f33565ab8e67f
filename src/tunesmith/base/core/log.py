"""One logger tree on stderr, so that stdout holds results alone; and text made safe to print on a terminal."""

import io
import logging
import sys
import unicodedata

_LOGGER_NAME = "tunesmith"
_BIDI_CONTROLS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; pass `__name__`."""
    return logging.getLogger(name if name.startswith(_LOGGER_NAME) else f"{_LOGGER_NAME}.{name}")


def configure(*, verbose: bool = False, quiet: bool = False) -> None:
    """Send log records to stderr: INFO and up, DEBUG if `verbose`, WARNING if `quiet`. Called by the CLI only."""
    logger = logging.getLogger(_LOGGER_NAME)
    logger.setLevel(logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.propagate = False


def escape_what_cannot_be_encoded() -> None:
    """Write characters that the encoding of stdout or stderr lacks as `\\u2713`, in place of an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class Once:
    """Logs each message a single time per object; keep it in the state of the caller."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._logged: set[str] = set()

    def warning(self, message: str, *, about: str | None = None) -> bool:
        """Log `message` as a warning unless it, or another message `about` the same, was logged before; True if it was
        logged now.
        """
        if (about or message) in self._logged:
            return False
        self._logged.add(about or message)
        self._logger.warning(message)
        return True


def visible(text: str) -> str:
    """`text` with control and bidi characters escaped: model output must not drive the terminal. Newlines are kept."""
    return "".join(char if char in "\n\t" or not _is_control(char) else repr(char)[1:-1] for char in text)


def one_line(text: str) -> str:
    """`text` on one line, without control and bidi characters."""
    return " ".join("".join(char for char in text if char.isspace() or not _is_control(char)).split())


def _is_control(char: str) -> bool:
    return unicodedata.category(char) in ("Cc", "Cs") or char in _BIDI_CONTROLS
