"""A server as a process, clients of its API, and a browser that looks at it."""

from api_fixtures import admin, calling, client, key
from page_fixtures import browser, serve, server, stored, studio, trainer, visit, watch

__all__ = [
    "admin",
    "browser",
    "calling",
    "client",
    "key",
    "serve",
    "server",
    "stored",
    "studio",
    "trainer",
    "visit",
    "watch",
]
