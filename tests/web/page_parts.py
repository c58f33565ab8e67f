"""Actions of a rater on the vote page, and its accessibility."""

import re

from axe_playwright_python.sync_playwright import Axe

HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\">",
    "</script><script>document.title='owned'</script>",
    "[click](javascript:document.title='owned') ![pixel](http://evil.example/x.png)",
    "\x1b[31mred \u202ereversed\u202c " + "|a|b|\n|-|-|\n" + "|x|y|\n" * 50,
    "<style>*{display:none}</style><base href=http://evil.example>",
)

# What a browser may say of a server that has gone: a kept connection is reset, a new one refused.
WENT_AWAY = ("ERR_CONNECTION_REFUSED", "ERR_INTERNET_DISCONNECTED", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE")


def press(page, *keys: str) -> None:
    """Press keys as soon as the page takes a verdict."""
    page.wait_for_selector("main[data-state=ready]")
    for key in keys:
        page.keyboard.press(key)


def answers(page) -> list[str]:
    """The texts of the answers from left to right."""
    page.wait_for_selector("main[data-state=ready]")
    return page.locator(".answer .passage").all_inner_texts()


def number(page) -> int:
    """The number in the prompt that is shown."""
    page.wait_for_selector("main[data-state=ready]")
    return int(re.search(r"Prompt (\d+)", page.locator("#prompt").inner_text())[1])


def wait_until_sent(page, count: int) -> None:
    """Wait until the page knows from the server that this rater has `count` votes."""
    words = "1 vote " if count == 1 else f"{count} votes "
    page.wait_for_function("words => document.getElementById('progress-text').textContent.startsWith(words)", arg=words)


def looks(page):
    """Show the page wide in light colours, then narrow in dark ones; yields (width, scheme)."""
    for width, scheme in ((1280, "light"), (390, "dark")):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        yield width, scheme


def faults_of(page) -> list[str]:
    """Violations that axe finds for people who use assistive technology."""
    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {[node['html'][:120] for node in one['nodes']]}" for one in found]
