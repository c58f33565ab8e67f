import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def synthetic():
    """The module `synthetic.py` beside this file: facts of runs that never happened."""
    spec = importlib.util.spec_from_file_location("report_synthetic", Path(__file__).with_name("synthetic.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def browser(chromium: str):
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as play:
        instance = play.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield instance
        instance.close()


@pytest.fixture
def look(browser) -> Iterator[Callable]:
    """Opens a page and fails the test on anything in the console or any request but the page itself."""
    complaints, contexts = [], []

    def open_page(path: Path, width: int = 1280, scheme: str = "light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: None if request.url == path.as_uri() else complaints.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("#theme:not([hidden])")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
