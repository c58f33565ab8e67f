"""A server as a process, and a browser that looks at it."""

from page_fixtures import browser, serve, server, stored, studio, trainer, visit, watch

__all__ = ["browser", "serve", "server", "stored", "studio", "trainer", "visit", "watch"]
