"""Runs that are started in a browser: checked, estimated, watched, stopped, resumed and copied."""

import json
import re

import pytest

from app_parts import make_run
from job_parts import kill_runs, num_steps
from page_parts import HOSTILE, faults_of, looks
from watch_parts import label

pytestmark = pytest.mark.browser

PATIENT_MS = 120_000  # a run loads its libraries first


@pytest.fixture
def server(studio, tmp_path):
    """A studio whose runs are ended afterwards."""
    yield studio()
    kill_runs(tmp_path / "runs" / ".studio" / "jobs")


@pytest.fixture
def look(visit, server):
    """The page at a path of the studio, in a window that is logged in."""
    context = visit.context(server)
    return lambda path: visit.page(context, server, f"{server.url}{path}")


def fill(page, **settings):
    """Fill in fields by their labels."""
    page.locator("#start:not([disabled])").wait_for()
    for name, value in settings.items():
        page.get_by_label(re.compile(f"^{name}")).first.fill(value)


def add_key(page, key, value):
    page.get_by_role("button", name="Add a key").click()
    row = page.locator(".setting").last
    row.get_by_label("Key").fill(key)
    row.get_by_label("Value").fill(value)
    return row


def test_a_run_is_started_at_a_level_watched_stopped_resumed_and_copied(look, tmp_path):
    page = look("/runs")
    page.get_by_role("link", name="New run").click()
    fill(page, Model="tiny:llama", Data="films", Reward="unique_chars", Steps="many", Name="mine")
    page.get_by_label("Level").select_option("optimal")
    page.get_by_text("'many' given").wait_for()
    page.get_by_label("Steps").fill("1000000")
    row = add_key(page, "rollout.max_new_token", "4")
    row.get_by_text("did you mean rollout.max_new_tokens?").wait_for()
    row.get_by_label("Key").fill("rollout.max_new_tokens")
    for key in ("rollout.prompts_per_step", "rollout.completions_per_prompt"):
        add_key(page, key, "2")
    page.wait_for_function("() => [...document.querySelectorAll('.problem')].every((one) => !one.textContent)")
    page.get_by_role("button", name="Estimate").click()
    page.get_by_text(re.compile("about .* for 1000000 steps")).wait_for(timeout=PATIENT_MS)
    command = page.locator("#command").inner_text()
    assert "--level=optimal" in command and "--run.steps=1000000" in command
    page.get_by_role("button", name="Start the run").dblclick()
    page.get_by_role("heading", name=re.compile(r"^\d{8}-\d{6}-mine-")).wait_for(timeout=PATIENT_MS)
    (run,) = (tmp_path / "runs").glob("*-mine-*")
    page.get_by_text("Training.").wait_for(timeout=PATIENT_MS)
    label(page, "reward", "at step")

    page.get_by_role("button", name="Stop", exact=True).click()
    page.get_by_role("button", name="Stop the run").click()
    page.get_by_text("The run has stopped.").wait_for(timeout=PATIENT_MS)
    done = num_steps(run)
    assert done > 0 and (run / "checkpoints" / f"step-{done:06d}").is_dir()

    page.get_by_role("button", name="Resume", exact=True).click()
    page.get_by_label("Steps of the whole run").fill(str(done + 3))
    page.get_by_role("button", name="Resume the run").click()
    page.get_by_text("The run has finished.").wait_for(timeout=PATIENT_MS)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, done + 4))
    assert len(list((tmp_path / "runs").glob("*-mine-*"))) == 1

    page.get_by_role("link", name="Clone", exact=True).click()
    page.locator("#start:not([disabled])").wait_for()
    assert page.get_by_label("Level").input_value() == "optimal"
    assert page.get_by_label("Model").input_value() == "tiny:llama"
    assert page.locator(".setting input").evaluate_all("all => all.map(({ value }) => value)") == [
        *("rollout.prompts_per_step", "2", "rollout.completions_per_prompt", "2", "rollout.max_new_tokens", "4")
    ]


def test_the_advice_of_a_finding_is_followed_by_a_clone(look, tmp_path):
    row = {"reward": 0.5, "time/step_s": 10.0, "time/rollout_s": 1.0, "time/checkpoint_s": 6.0}
    recipe = "algorithm: grpo\nmodel: {name: 'tiny:llama'}\nrun: {checkpoint_every: 1, steps: 9}\n"
    run = make_run(tmp_path / "runs" / "slow", recipe, *({"step": step, **row} for step in range(1, 9)))
    (run / "provenance.json").write_text("{}")
    page = look("/runs")
    page.get_by_role("link", name="slow", exact=True).click()
    page.get_by_role("link", name=re.compile("Clone with this advice")).first.click()
    page.locator("#start:not([disabled])").wait_for()
    assert page.get_by_label("Model").input_value() == "tiny:llama" and page.get_by_label("Steps").input_value() == "9"
    keys = page.locator(".setting input").evaluate_all("all => all.map(({ value }) => value)")
    assert keys[0::2] == ["run.checkpoint_every"] and int(keys[1]) > 1


def test_a_comparison_is_no_run_to_clone(look, tmp_path):
    recipe = {"algorithm": "compare_algorithms", "comparison": {"model": "tiny:llama"}}
    make_run(tmp_path / "runs" / "all", json.dumps(recipe))
    page = look("/runs")
    page.get_by_role("link", name="all", exact=True).click()
    page.locator("#clone").wait_for(state="hidden")


def test_hostile_names_and_what_fails_with_them_are_text(look, tmp_path):
    hostile = HOSTILE[0].replace("/", "")
    (tmp_path / "runs" / hostile).mkdir()
    page = look("/runs/new")
    fill(page, Model=str(tmp_path / "runs" / hostile), Name=HOSTILE[1])
    page.locator("#command", has_text="</script>").wait_for()
    page.get_by_role("button", name="Start the run").click()
    page.get_by_text("The run has failed.").wait_for(timeout=PATIENT_MS)
    page.locator("#output", has_text="<img").wait_for()
    page.get_by_role("link", name="Runs").first.click()
    page.locator("#failed", has_text="<img").wait_for()
    assert page.title() != "owned"
    assert page.locator("main img, main script").count() == 0


def test_a_hostile_run_is_copied_as_text_and_cannot_be_started(look, visit, tmp_path):
    visit.expected = ("422",)
    text = HOSTILE[0]
    run = make_run(tmp_path / "runs" / "run", json.dumps({"algorithm": "grpo", text: text, "run": {"name": text}}))
    (run / "provenance.json").write_text("{}")
    page = look("/runs")
    page.get_by_role("link", name="run", exact=True).click()
    page.get_by_role("link", name="Clone", exact=True).click()
    page.locator("#start:not([disabled])").wait_for()
    assert page.get_by_label("Name").input_value() == text
    page.get_by_role("button", name="Start the run").click()
    page.locator("#status.bad").wait_for()
    assert page.title() != "owned" and page.locator("main img").count() == 0
    assert not list((tmp_path / "runs" / ".studio" / "jobs").iterdir())


def test_the_form_is_accessible_and_fits_its_screen(look):
    page = look("/runs/new")
    fill(page, Steps="many")
    add_key(page, "x", "1").get_by_text("unknown key").wait_for()
    for width, _ in looks(page):
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert faults_of(page) == []
