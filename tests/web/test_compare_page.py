"""The page of runs side by side in a browser, and the comparison of algorithms that the list starts."""

import json
import re

import pytest

from app_parts import make_run
from job_parts import kill_runs
from page_parts import HOSTILE, faults_of, looks
from tunesmith.base.runs.lock import RunLock
from watch_parts import label

pytestmark = pytest.mark.browser

RECIPE = "algorithm: grpo\nmodel: {name: smollm2}\nrollout: {prompts_per_step: 4, completions_per_prompt: 2}\n"


def append(file, *rows):
    with file.open("a") as stream:
        stream.write("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "runs"
    for place, kl in ((1, 0.5), (2, 1.0)):
        rows = [
            {"step": step, "reward": step / 10, "objective/kl": kl * step, "time/step_s": 60.0 * place}
            for step in range(1, 6)
        ]
        run = make_run(folder / f"2026010{place}-120000-grpo-000{place}", RECIPE, *rows)
        for step in (4, 5):
            sample = {"step": step, "reward": 0.5, "completion": f" by {place} at {step}"}
            append(run / "samples.jsonl", {**sample, "prompt": "The film"}, {**sample, "prompt": f"Own {place}"})
    make_run(folder / "20260103-120000-dpo-0003", "algorithm: dpo\n", {"step": 1, "loss": 0.7, "time/step_s": 1.0})
    return folder


@pytest.fixture
def look(studio, visit, root):
    """The page at a path of the studio, in a window that is logged in."""
    server = studio()
    context = visit.context(server)
    yield lambda path="/runs": visit.page(context, server, f"{server.url}{path}")
    kill_runs(root / ".studio" / "jobs")


def compared(page, *names):
    """Tick these runs in the list, and open the page that compares them."""
    for name in names:
        page.get_by_role("checkbox", name=f"Compare {name}").check()
    page.get_by_role("link", name=re.compile("^Compare ")).click()
    page.locator("#rows tr").nth(len(names) - 1).wait_for()


ONE, TWO, DPO = "20260101-120000-grpo-0001", "20260102-120000-grpo-0002", "20260103-120000-dpo-0003"


def test_runs_are_ticked_in_the_list_and_drawn_over_steps_samples_and_minutes(look):
    page = look()
    compared(page, ONE, TWO)
    label(page, "reward", f"{ONE} 0.5 at step 5", f"{TWO} 0.5 at step 5")
    page.get_by_role("radio", name="samples").check()
    label(page, "reward", f"{ONE} 0.5 at sample 40")
    page.get_by_label("minutes").check()
    label(page, "reward", f"{ONE} 0.5 at minute 4", f"{TWO} 0.5 at minute 8")
    label(page, "frontier", f"{ONE} 0.5 at a KL of 2.5, step 5", f"{TWO} 0.5 at a KL of 5, step 5")
    page.get_by_role("link", name=f"Leave out {ONE}").click()
    page.get_by_text("Choose two runs or more").wait_for()
    assert page.locator("#rows tr").count() == 1


def test_the_newest_samples_of_the_same_prompts_stand_side_by_side(look):
    page = look()
    compared(page, ONE, TWO)
    page.locator("#samples article").wait_for()
    (shown,) = page.locator("#samples article").all_inner_texts()
    assert "The film" in shown and "by 1 at 5" in shown and "by 2 at 5" in shown and "Own" not in shown


def test_missing_metrics_are_said_and_a_run_that_trains_is_renewed(look, root):
    page = look()
    with RunLock(root / ONE):
        compared(page, ONE, DPO)
        page.get_by_text(f"Without a KL and a reward at the same steps: {DPO}.").wait_for()
        label(page, "loss", f"{DPO} 0.7 at step 1")
        append(root / ONE / "metrics.jsonl", {"step": 6, "reward": 0.9, "objective/kl": 9.0, "time/step_s": 1.0})
        label(page, "reward", f"{ONE} 0.9 at step 6")
        label(page, "frontier", f"{ONE} 0.9 at a KL of 9, step 6")
    page.get_by_label("Metric").select_option("time/step_s")
    label(page, "time-step_s", f"{DPO} 1 at step 1")


def test_a_run_has_a_link_to_its_comparison(look):
    page = look()
    page.get_by_role("link", name=ONE).click()
    page.get_by_role("link", name="Compare", exact=True).click()
    page.get_by_role("checkbox", name=f"Compare {ONE}").wait_for()
    assert page.get_by_role("checkbox", name=f"Compare {ONE}").is_checked()
    compared(page, TWO)
    page.locator("#rows tr").nth(1).wait_for()


def test_hostile_runs_and_unknown_ids_are_text(look, root, visit):
    visit.expected = ("404",)
    text = HOSTILE[0]
    run = make_run(
        root / text.replace("/", ""), json.dumps({"algorithm": text, text: 1}), {"step": 1, text: 1.0, "reward": 0.5}
    )
    append(run / "samples.jsonl", *({"step": 1, "prompt": "The film", "completion": one} for one in HOSTILE))
    page = look()
    compared(page, run.name, ONE)
    page.locator("#samples article").wait_for()
    page.goto(page.url + "&run=<img src=x onerror=document.title=1>")
    page.locator("#status", has_text="no such run").wait_for()
    assert page.title() != "owned" and page.locator("main img, main script, main style").count() == 0


def test_the_page_is_accessible_and_fits_its_screen(look):
    page = look()
    compared(page, ONE, TWO, DPO)
    page.locator("#samples article").wait_for()
    for width, _ in looks(page):
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert faults_of(page) == []
    page.goto(page.url.partition("/compare")[0] + "/runs")
    page.get_by_role("button", name="Compare algorithms").focus()
    page.keyboard.press("Enter")
    page.get_by_label("Seeds").wait_for()
    for width, _ in looks(page):
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert faults_of(page) == []


def test_a_comparison_of_algorithms_waits_in_the_list_once(look, root, visit):
    visit.expected = ("422",)
    page = look()
    page.get_by_role("button", name="Compare algorithms").click()
    page.get_by_label("Model").fill("/etc")
    page.get_by_role("button", name="Start", exact=True).click()
    page.locator("#asked", has_text="'/etc' is not allowed here, nor built in").wait_for()
    page.get_by_role("button", name="Compare algorithms").click()
    page.get_by_label("Model").fill("tiny:llama")
    page.get_by_role("button", name="Start", exact=True).click()
    page.locator("#jobs", has_text="compare-algorithms --model=tiny:llama --seeds=3 --steps=16").wait_for()
    assert len(list((root / ".studio" / "jobs").iterdir())) == 1
