import math
import os
import subprocess
import sys
from unittest.mock import patch

import pytest

from page_parts import faults_of, looks
from server_parts import Trainer
from tunesmith.collect.store.records import Candidate, NewItem, PolicyVersion
from tunesmith.collect.store.runs import TRIED, RunStore
from tunesmith.collect.store.vote_reader import VoteReader
from watch_parts import client_of, label, num_drawn

pytestmark = pytest.mark.browser


def test_metrics_are_drawn_and_grow_as_they_come(watch, trainer):
    for step in range(1, 6):
        trainer.add_metrics(step, {"reward": step / 10, "time/rollout_s": 1.0, "completions/mean_length": 20.0})
    page = watch()
    label(page, "reward", "reward 0.5 at step 5", "between 0.1 and 0.5")
    assert num_drawn(page, "reward") == 5
    for step in range(6, 9):
        trainer.add_metrics(step, {"reward": step / 10, "time/rollout_s": 1.0, "completions/mean_length": 20.0})
    label(page, "reward", "reward 0.8 at step 8")
    assert num_drawn(page, "reward") == 8
    label(page, "stages", "step 8")
    assert page.locator("#chart-reward .legend").inner_text().split() == ["reward", "0.8"]


def test_a_page_that_was_open_before_the_first_step_shows_it(watch, server):
    page = watch()
    page.get_by_text("No step has been recorded yet").wait_for()
    with Trainer.open(server.folder / "runs.db") as trainer:
        trainer.beat("learning")
        trainer.add_metrics(1, {"kl": 0.25})
        label(page, "kl", "kl 0.25 at step 1")
        page.get_by_text("Training.").wait_for()
    assert page.get_by_text("No step has been recorded yet").is_hidden()


def test_a_number_that_is_not_finite_is_a_marked_gap(watch, trainer):
    for step, value in enumerate([1.0, 2.0, math.nan, 3.0, math.inf, 2.0], 1):
        trainer.add_metrics(step, {"kl": value})
    page = watch()
    label(page, "kl", "2 not finite")
    path = page.locator("#chart-kl path.line").first.get_attribute("d")
    assert path.count("M") == 3
    assert page.locator("#chart-kl path.not-finite").get_attribute("d").count("M") == 2


def test_steps_that_a_resumed_run_does_again_replace_what_was_there(watch, trainer):
    for step in range(1, 7):
        trainer.add_metrics(step, {"reward": 1.0})
    page = watch()
    label(page, "reward", "step 6")
    for step in range(4, 6):
        trainer.add_metrics(step, {"reward": 2.0})
    label(page, "reward", "reward 2 at step 5")
    assert num_drawn(page, "reward") == 5


def test_a_trainer_that_dies_is_said_to_be_dead_with_what_to_do(watch, trainer):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with patch.object(os, "getpid", lambda: process.pid):
        trainer.beat("learning")
    page = watch()
    page.get_by_text("Training.").wait_for()
    page.get_by_text("learning").wait_for()
    process.kill()
    process.wait()
    page.get_by_text("The trainer has died.").wait_for()
    assert page.get_by_text("goes on from the last checkpoint").is_visible()


def serve_versions(trainer, serving=2):
    for version in range(3):
        trainer.add_version(
            PolicyVersion(
                version=version,
                created_at=1_800_000_000.0 + version,
                kl=0.5 * version,
                win_rate=0.5 + 0.1 * version,
                win_rate_low=0.4,
                win_rate_high=0.9,
                serving=version == serving,
                note="first" if version == 0 else "",
            )
        )


def test_an_admin_rolls_back_after_being_asked(watch, server, trainer):
    serve_versions(trainer)
    page = watch()
    row = page.locator("tr[data-version='1']")
    row.wait_for()
    assert "60 % (40 % to 90 %)" in row.inner_text()
    assert page.locator("#chart-win-rate .win").count() == 3
    assert page.locator("tr[data-version='2'] button").count() == 0
    row.get_by_role("button", name="Roll back to version 1").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    row.get_by_role("button").click()
    page.get_by_role("dialog").get_by_role("button", name="Roll back").click()
    page.get_by_text("The trainer was asked to serve version 1").wait_for()
    reader = VoteReader.open(server.folder / "votes.db")
    assert [(one.kind, one.argument) for one in reader.commands_after(0)] == [("rollback", "1")]
    serve_versions(trainer, serving=1)
    page.locator("tr.serving[data-version='1']").wait_for()


def test_a_version_on_trial_is_served_and_not_gone_back_to(watch, server, trainer):
    serve_versions(trainer)
    note = f"{TRIED}20% of the conversations"
    trainer.add_version(PolicyVersion(version=3, created_at=1_800_000_009.0, kl=-0.02, note=note))
    page = watch()
    row = page.locator("tr[data-version='3']")
    row.wait_for()
    assert row.locator("td").all_inner_texts()[3:6] == ["0", "0", note]
    assert page.get_by_role("button", name="Roll back to version 1").count() == 1
    row.get_by_role("button", name="Serve version 3").click()
    dialog = page.get_by_role("dialog", name="Serve version 3?")
    dialog.get_by_text("will serve that version to everybody").wait_for()
    assert faults_of(page) == []
    dialog.get_by_role("button", name="Serve").click()
    page.get_by_text("The trainer was asked to serve version 3").wait_for()


def test_a_rater_sees_versions_but_no_way_to_roll_back(visit, server, trainer):
    serve_versions(trainer)
    rater = server.rater("rob")
    page = visit.page(visit.stranger(), server, f"{server.url}/login?token={rater.token}&next=/watch")
    page.wait_for_url("**/watch")
    page.locator("tr[data-version='1']").wait_for()
    assert page.get_by_role("button", name="Roll back").count() == 0
    assert rater.send("POST", "/api/v1/versions/1/rollback").status == 403


def test_votes_are_counted_as_they_are_given(visit, serve):
    pair = (Candidate("old", source_id="v0"), Candidate("new", source_id="v1"))
    server = serve([NewItem(f"prompt {number}", pair) for number in range(6)])
    with RunStore.open(server.folder / "runs.db") as trainer:
        for version in (0, 1):
            trainer.add_version(PolicyVersion(version=version, created_at=1.0))
        context = visit.context(server)
        page = visit.page(context, server, f"{server.url}/watch")
        page.get_by_text("0 votes, 0 a minute").wait_for()
        admin = client_of(context, server)
        for _ in range(6):
            (shown,) = admin.next(1)
            assert admin.vote(shown["token"], "left").status == 200
        page.get_by_text("6 votes, 1.2 a minute over the last five.").wait_for()
        label(page, "votes", "6 in the last hour")
        page.locator("tr[data-version='1']", has_text="(").wait_for()


def test_what_files_name_cannot_become_markup(watch, trainer):
    name = "<img src=x onerror=alert(1)>"
    trainer.add_metrics(1, {name: 1.0, f"rewards/{name}": 2.0})
    trainer.add_version(PolicyVersion(version=0, created_at=1.0, note=name))
    trainer.beat(name)
    page = watch()
    page.locator("#all-metrics summary").click()
    page.locator("#metric-rows").get_by_text(name, exact=True).wait_for()
    page.locator("#version-rows").get_by_text(name).wait_for()
    page.locator("#details", has_text=name).wait_for()
    assert page.locator("main img").count() == 0


def test_of_thousands_of_metrics_any_can_be_found_and_drawn(watch, trainer):
    trainer.add_metrics(1, {f"layer/{number:04d}/norm": float(number) for number in range(5_000)})
    page = watch()
    page.locator("#all-metrics summary").click()
    page.get_by_text("60 of 5000 metrics").wait_for()
    page.get_by_label("Find").fill("4321")
    page.get_by_role("button", name="Draw layer/4321/norm").click()
    figure = page.locator("figure", has_text="layer/4321/norm")
    figure.get_by_text("4321", exact=True).wait_for()
    trainer.add_metrics(2, {"layer/4321/norm": 7.5})
    figure.get_by_text("7.5", exact=True).wait_for()


def test_smoothing_keeps_the_raw_line_visible(watch, trainer):
    for step in range(30):
        trainer.add_metrics(step, {"reward": float(step % 2)})
    page = watch()
    label(page, "reward", "step 29")
    page.get_by_label("Smoothing").fill("0.9")
    page.locator("#chart-reward path.raw").wait_for()
    raw, smoothed = (path.bounding_box() for path in page.locator("#chart-reward path.line").all())
    assert smoothed["height"] < raw["height"]


def test_the_page_is_accessible_and_fits_its_screen(watch, trainer):
    serve_versions(trainer)
    trainer.beat("learning")
    for step in range(1, 4):
        trainer.add_metrics(step, {"reward": 0.1, "kl": 0.1, "lr": 0.1, "time/rollout_s": 2.0, "eval/reward": 0.2})
    page = watch()
    label(page, "reward", "step 3")
    page.get_by_text("More charts").click()
    page.locator("#all-metrics summary").click()
    page.locator("#metric-rows tr").first.wait_for()
    for width, _ in looks(page):
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert faults_of(page) == []


def test_a_long_line_is_replaced_by_a_thinned_one(watch, trainer):
    trainer.add_metrics(1, {"reward": 0.0})
    page = watch()
    label(page, "reward", "step 1")
    for step in range(2, 1_300):
        trainer.add_metrics(step, {"reward": 99.0 if step == 333 else float(step % 7)})
    label(page, "reward", "step 1299", "between 0 and 99")
    page.wait_for_function(
        "() => document.querySelector('#chart-reward path.line').getAttribute('d').match(/[ML]/g).length < 1000"
    )
    label(page, "reward", "step 1299", "between 0 and 99")


def test_points_come_once_smoothing_keeps_gaps_and_ticks_are_round(watch):
    found = watch().evaluate(
        """async () => {
        const { Line, smooth, ticks } = await import('/static/chart.js');
        const line = new Line('a', 'a');
        for (let id = 1; id <= 200; id += 1) line.add(id, id, 0, id === 123 ? -50 : 1);
        return {
          again: line.add(200, 200, 0, 5), length: line.points.length,
          smooth: smooth([1, null, 1, 3], 0.5), ticks: ticks(0, 1, 4), none: ticks(2, 2, 4),
        };
        }"""
    )
    assert (found["again"], found["length"]) == (False, 200)
    assert found["smooth"][:3] == [1, None, 1]
    assert 2 < found["smooth"][3] < 3
    assert found["ticks"] == pytest.approx([0, 0.5, 1])
    assert found["none"] == [2]
