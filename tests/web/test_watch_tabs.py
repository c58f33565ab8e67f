"""The watch page over restarts, in many tabs, hidden, and of a run by itself."""

import json
import subprocess
import sys

import pytest

from watch_parts import hide, label, num_drawn

pytestmark = pytest.mark.browser


def test_after_a_restart_of_the_server_nothing_is_missing_and_nothing_there_twice(watch, server, trainer, visit):
    visit.expected += ("ERR_CONNECTION", "ERR_INCOMPLETE", "Failed to load resource")
    trainer.add_metrics(1, {"reward": 1.0})
    page = watch()
    label(page, "reward", "step 1")
    trainer.add_metrics(2, {"reward": 2.0})
    label(page, "reward", "step 2")
    server.stop()
    page.get_by_text("The connection is lost").wait_for()
    trainer.add_metrics(3, {"reward": 3.0})
    server.start()
    trainer.add_metrics(4, {"reward": 4.0})
    label(page, "reward", "reward 4 at step 4")
    assert num_drawn(page, "reward") == 4


def test_eight_tabs_share_one_stream_and_all_are_live(visit, server, trainer):
    trainer.add_metrics(1, {"reward": 1.0})
    context = visit.context(server)
    pages = [visit.page(context, server, f"{server.url}/watch") for _ in range(8)]
    for page in pages:
        label(page, "reward", "step 1")
    trainer.add_metrics(2, {"reward": 2.0})
    for page in pages:
        label(page, "reward", "reward 2 at step 2")
        page.get_by_text("No trainer has written here yet.").wait_for()
    # Whoever keeps the stream leaves; another one takes over and tells the rest.
    pages.pop(0).close()
    trainer.add_metrics(3, {"reward": 3.0})
    for page in pages:
        label(page, "reward", "reward 3 at step 3")
        assert num_drawn(page, "reward") == 3


def test_a_hidden_tab_lets_go_of_the_stream_and_catches_up_when_it_is_seen_again(visit, server, trainer):
    trainer.add_metrics(1, {"reward": 1.0})
    context = visit.context(server)
    first, second = (visit.page(context, server, f"{server.url}/watch") for _ in range(2))
    for page in (first, second):
        label(page, "reward", "step 1")
    hide(first, True)
    for step in (2, 3):
        trainer.add_metrics(step, {"reward": float(step)})
        label(second, "reward", f"step {step}")
    assert "step 1" in first.locator("#chart-reward svg.plot").get_attribute("aria-label")
    hide(first, False)
    label(first, "reward", "reward 3 at step 3")
    assert num_drawn(first, "reward") == 3


def test_any_run_can_be_watched_while_it_writes(visit, tmp_path):
    run = tmp_path / "runs" / "20260101-120000-ppo-ab12"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text("algorithm: ppo\n")

    def write(*steps):
        with (run / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps({"step": step, "reward": step / 10}) + "\n" for step in steps)

    write(1, 2, 3)
    process = subprocess.Popen(
        [sys.executable, "-m", "tunesmith", "watch", "ab12", "--dir", str(run.parent), "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        said = json.loads(process.stdout.readline())
        page = visit.stranger().new_page()
        page.goto(said["login_url"])
        page.wait_for_url("**/runs/*")
        label(page, "reward", "reward 0.3 at step 3")
        page.get_by_text("The run has failed.").wait_for()  # nobody trains, and there is no checkpoint to go on from
        write(4)
        label(page, "reward", "reward 0.4 at step 4")
        (run / "result.json").write_text("{}")
        page.get_by_text("The run has finished.").wait_for()
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
    assert sorted(path.name for path in run.iterdir()) == ["metrics.jsonl", "recipe.yaml", "result.json"]
