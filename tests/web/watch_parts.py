"""Reads of the watch page."""

import re

from server_parts import Client


def client_of(context, server):
    """A client that is who the window is: the value of the session's cookie is a token too."""
    (cookie,) = context.cookies()
    return Client(server.url, cookie["value"])


def label(page, chart, *parts):
    """Wait until the words for a chart hold each of `parts`."""
    pattern = "".join(f"(?=.*{re.escape(part)})" for part in parts)
    page.wait_for_function(
        "([id, pattern]) => new RegExp(pattern).test("
        "document.getElementById(id)?.querySelector('svg').getAttribute('aria-label') ?? '')",
        arg=[f"chart-{chart}", pattern],
    )


def num_drawn(page, chart):
    """Number of points of a chart's first line."""
    path = page.locator(f"#chart-{chart} path.line").first.get_attribute("d")
    return len(re.findall("[ML]", path))


def hide(page, is_hidden):
    page.evaluate(
        "(hidden) => { Object.defineProperty(document, 'hidden', { configurable: true, get: () => hidden });"
        "document.dispatchEvent(new Event('visibilitychange')); }",
        is_hidden,
    )
