"""The pages of runs in a browser: the list, a run while it trains, and what hostile folders do to them."""

import json

import pytest

from app_parts import make_run
from page_parts import HOSTILE, faults_of, looks
from tunesmith.base.runs.lock import RunLock
from watch_parts import label

pytestmark = pytest.mark.browser

RECIPE = "algorithm: grpo\nmodel: {name: smollm2}\nrun: {steps: 9}\n"


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "runs"
    for day in range(1, 4):
        rows = [{"step": step, "reward": step / 10, "kl": 0.1, "time/step_s": 2.0} for step in range(1, 6)]
        make_run(folder / f"2026010{day}-120000-grpo-000{day}", RECIPE, *rows)
    make_run(folder / "20251231-120000-dpo-0009", "algorithm: dpo\nmodel: {name: scratch}\n")
    return folder


@pytest.fixture
def look(studio, visit, root):
    """The page at a path of the studio, in a window that is logged in."""
    server = studio()
    context = visit.context(server)
    return lambda path="/runs": visit.page(context, server, f"{server.url}{path}")


def append(file, *rows):
    with file.open("a") as stream:
        stream.write("".join(json.dumps(row) + "\n" for row in rows))


def test_runs_are_found_by_filters_that_stay_in_the_address(look, root):
    page = look()
    page.get_by_text("4 runs.").wait_for()
    assert page.locator("#rows th").first.inner_text() == "20260103-120000-grpo-0003"
    page.get_by_label("Find").fill("0002")
    page.get_by_text("1 of 4 runs.").wait_for()
    assert "text=0002" in page.url
    page.reload()
    page.get_by_text("1 of 4 runs.").wait_for()
    page.get_by_label("Find").fill("")
    page.get_by_label("Algorithm").select_option("dpo")
    page.get_by_text("1 of 4 runs.").wait_for()
    page.get_by_label("Algorithm").select_option("")
    page.get_by_label("State").select_option("running")
    page.get_by_text("0 of 4 runs.").wait_for()
    with RunLock(root / "20260101-120000-grpo-0001"):
        page.get_by_role("link", name="20260101-120000-grpo-0001").wait_for()
    page.get_by_text("0 of 4 runs.").wait_for()


def test_a_run_is_seen_as_it_trains(look, root):
    run = root / "20260103-120000-grpo-0003"
    page = look()
    with RunLock(run):
        page.get_by_role("link", name=run.name).click()
        page.get_by_role("heading", name=run.name).wait_for()
        page.get_by_text("Training.").wait_for()
        label(page, "reward", "reward 0.5 at step 5")
        page.get_by_text("This run has no samples yet.").wait_for()
        append(run / "metrics.jsonl", {"step": 6, "reward": 0.75, "time/step_s": 2.0})
        append(
            run / "samples.jsonl",
            *({"step": step, "prompt": "The film", "completion": f" at {step}"} for step in (5, 6)),
        )
        append(run / "findings.jsonl", {"step": 6, "severity": "warning", "name": "kl/high", "message": "lower it"})
        label(page, "reward", "reward 0.75 at step 6")
        page.get_by_role("cell", name="kl/high").wait_for()
        page.locator("#samples").get_by_text("at 6").wait_for()
        page.locator("#sample-place").fill("0")
        page.locator("#samples").get_by_text("at 5").wait_for()
    page.get_by_text("The run has failed.").wait_for()  # it has no checkpoint


def test_the_recipe_says_where_each_value_comes_from(look, root):
    run = root / "20260103-120000-grpo-0003"
    (run / "provenance.json").write_text(json.dumps({"algorithm": "default", "run.steps": "command line --steps"}))
    page = look()
    page.get_by_role("link", name=run.name).click()
    row = page.locator("#recipe tr", has_text="run.steps")
    row.wait_for()
    assert row.inner_text().split("\t") == ["run.steps", "9", "command line --steps"]
    assert page.locator("#recipe tr", has_text="algorithm").count() == 0
    page.get_by_label("only what is no default").uncheck()
    page.locator("#recipe tr", has_text="algorithm").wait_for()


def test_one_run_has_its_page_without_the_others(studio, visit, root):
    run = root / "20260103-120000-grpo-0003"
    server = studio("watch", run.name)
    page = visit.page(visit.context(server), server, server.url)
    page.get_by_text("1 run.").wait_for()
    assert page.get_by_role("link", name="New run").count() == 0
    page.get_by_role("link", name=run.name).click()
    page.get_by_role("heading", name=run.name).wait_for()
    label(page, "reward", "reward 0.5 at step 5")


def test_a_report_shows_but_cannot_act_for_the_admin(look, root, visit):
    visit.expected = ("CORS", "Failed to load", "connect-src", "Content Security Policy")
    run = root / "20260103-120000-grpo-0003"
    script = "fetch('/api/v1/raters').then(() => document.title = 'owned', () => document.title = 'refused')"
    (run / "report.html").write_text(f"<!doctype html><title>report</title><p>A report</p><script>{script}</script>")
    page = look()
    page.get_by_role("link", name=run.name).click()
    page.get_by_role("link", name="Report").click()
    page.get_by_text("A report").wait_for()
    page.wait_for_function("document.title === 'refused'")


def test_whatever_a_folder_holds_is_shown_as_text(look, root):
    text = HOSTILE[0]
    recipe = json.dumps({"algorithm": text, "model": {"name": text}, text: {"steps": text}})
    run = make_run(root / text.replace("/", ""), recipe, {"step": 1, text: 1.0, "reward": 0.5, "time/step_s": 1.0})
    append(
        run / "samples.jsonl", *({"step": 1, "prompt": one, "completion": one, "finish_reason": one} for one in HOSTILE)
    )
    append(run / "findings.jsonl", *({"step": one, "name": one, "severity": one, "message": one} for one in HOSTILE))
    for name in ("provenance.json", "result.json", "environment.json"):
        (run / name).write_text(json.dumps({text: text, "algorithm": text}))
    page = look()
    page.get_by_role("link", name=run.name).click()
    page.get_by_role("heading", name=run.name).wait_for()
    page.locator("#samples article").nth(len(HOSTILE) - 1).wait_for()
    page.locator("#recipe tr").first.wait_for()
    assert page.title() != "owned"
    assert page.locator("main img, main script, main style").count() == 0


def trajectory(text):
    """A sample with tokens, whatever its text is."""
    parts = [{"turn": 1, "pieces": [text, "b"], "logps": [-5.0, -0.01], "reward": 0.5, "advantage": -0.25}]
    parts.append({"pieces": [text]})
    return {"step": 1, "prompt": "p", "completion": "c", "tokens": {"parts": parts, "left_out": 0}}


def test_the_tokens_of_a_trajectory_are_shown_when_asked_for(look, root):
    run = root / "20260103-120000-grpo-0003"
    append(run / "samples.jsonl", *map(trajectory, HOSTILE), {"step": 1, "prompt": "old", "completion": "c"})
    page = look()
    page.get_by_role("link", name=run.name).click()
    page.locator("#samples article").nth(len(HOSTILE)).wait_for()
    views = page.locator("#samples details.tokens")
    assert views.count() == len(HOSTILE) and page.locator("#samples .piece").count() == 0
    for summary in views.locator("summary").all():
        summary.click()
    pieces = views.first.locator(".pieces").first.locator(".piece")
    pieces.first.wait_for()
    assert pieces.first.inner_text() == HOSTILE[0]
    assert pieces.first.get_attribute("title") == "log-prob \u22125.00, 1\u202f%; advantage \u22120.25"
    assert views.first.locator(".part").all_inner_texts() == [
        "turn 1, reward 0.50, advantage \u22120.25",
        "reply, not learnt",
    ]
    assert page.title() != "owned" and page.locator("main img, main script, main style").count() == 0
    for width, _ in looks(page):
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert faults_of(page) == []


def test_the_pages_are_accessible_and_fit_their_screen(look, root):
    run = root / "20260103-120000-grpo-0003"
    append(run / "samples.jsonl", {"step": 1, "prompt": "The film", "completion": " was good"})
    append(run / "findings.jsonl", {"step": 1, "severity": "note", "name": "kl/high", "message": "lower it"})
    page = look()
    page.get_by_text("4 runs.").wait_for()
    for width, _ in looks(page):
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert faults_of(page) == []
    page.get_by_role("link", name=run.name).click()
    page.locator("#samples article").wait_for()
    for summary in page.locator("details:visible > summary").all():
        summary.click()
    for width, _ in looks(page):
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert faults_of(page) == []
