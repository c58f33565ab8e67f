"""Cases from outside: what people bring or do, each with where it was reported (see CONTRIBUTING.md)."""

from pathlib import Path

import pytest

from page_fixtures import browser, serve, server, stored, studio, trainer, visit, watch

__all__ = ["browser", "serve", "server", "stored", "studio", "trainer", "visit", "watch"]

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuses a case whose docstring does not say what people do and where it was reported."""
    for item in items:
        if isinstance(item, pytest.Function) and item.path.is_relative_to(FOLDER):
            words = item.function.__doc__ or ""
            if "Reported: " not in words:
                raise pytest.UsageError(
                    f"{item.nodeid}: its docstring says what people do and ends with `Reported: WHERE`"
                )
