"""Logging: one logger tree, on stderr, so that stdout holds results alone."""

import logging
import sys

_LOGGER_NAME = "tunesmith"


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


class Once:
    """Says each message a single time; an object of this kind lives in the state of whoever speaks."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._said: set[str] = set()

    def warning(self, message: str) -> bool:
        """Log `message` as a warning unless it was said before; True if it was said now."""
        if message in self._said:
            return False
        self._said.add(message)
        self._logger.warning(message)
        return True
