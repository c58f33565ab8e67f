"""The pages of runs: what people do with lists, charts and forms of training runs in other tools."""

import csv
import itertools
import json
import re

import pytest

from app_parts import RUN, RUN_ID, app_in, make_run
from job_parts import kill_runs, open_jobs, wait_for
from page_parts import HOSTILE, faults_of, looks
from tunesmith.apps.cli.main import main
from tunesmith.base.runs.labels import read_labels
from tunesmith.base.runs.listing import find_runs, plan_removal, remove
from tunesmith.base.runs.lock import RunLock
from tunesmith.collect.web.access import API
from tunesmith.collect.web.allowed import TINY_FAMILIES
from tunesmith.collect.web.wanted import Wanted, presets
from tunesmith.engine.models.tiny import _CONFIGS
from watch_parts import label

RECIPE = "algorithm: grpo\nmodel: {name: smollm2}\nrun: {steps: 9}\n"
ONE, TWO = "20260101-120000-grpo-0001", "20260102-120000-grpo-0002"
PATIENT_MS = 120_000


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "runs"
    for place, name in enumerate((ONE, TWO), 1):
        rows = [
            {"step": step, "reward": 10.0**step, "loss": -1.0 * step, "time/step_s": 2.0, "eval/reward": 0.1 * place}
            for step in range(1, 7)
        ]
        make_run(folder / name, RECIPE, *rows)
    return folder


@pytest.fixture
def look(studio, visit, root):
    """The page at a path of the studio, in a window that is logged in."""
    server = studio()
    context = visit.context(server, accept_downloads=True)
    yield lambda path="/runs": visit.page(context, server, f"{server.url}{path}")
    kill_runs(root / ".studio" / "jobs")


def opened(page, name=ONE):
    page.get_by_role("link", name=name, exact=True).click()
    page.locator("#main-charts figure").first.wait_for()
    return page


@pytest.mark.browser
def test_curves_come_before_the_diagnosis(look):
    """People open a run to see its curves; two screens of diagnosis were above them.

    Reported: issue 45.23
    """
    page = opened(look())
    order = page.locator("main section h2").all_inner_texts()
    assert order.index("Metrics") < order.index("Samples") < order.index("Diagnosis")
    page.set_viewport_size({"width": 1280, "height": 900})
    assert page.locator("#chart-reward svg.plot").bounding_box()["y"] < 600
    page.get_by_role("link", name="Diagnosis").click()
    assert page.url.endswith("#diagnosis-title")


@pytest.mark.browser
def test_charts_zoom_together_and_show_everything_again(look):
    """People drag over a chart to see a part of it, and expect the others to follow, as in wandb.

    Reported: gradio-app/trackio#415
    """
    page = opened(look())
    label(page, "reward", "step 6")
    box = page.locator("#chart-reward svg.plot").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 80, steps=4)
    page.mouse.up()
    page.get_by_role("button", name="Show everything").wait_for()
    low, high = (float(page.locator(f"#zoom-{end}").input_value()) for end in ("from", "to"))
    assert 2.5 < low < high < 5.5
    for chart in ("reward", "losses"):
        ticks = page.locator(f"#chart-{chart} .grid-lines text[text-anchor=middle]").all_text_contents()
        assert all(low <= float(tick) <= high for tick in ticks) and ticks, chart
    page.locator("#chart-losses svg.plot").dblclick()
    page.get_by_role("button", name="Show everything").wait_for(state="hidden")
    page.get_by_label("From").fill("2")  # with the keyboard alone
    page.get_by_label("to", exact=True).fill("4")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Show everything").click()
    assert page.locator("#zoom-from").input_value() == ""


@pytest.mark.browser
def test_a_log_scale_shows_what_is_above_zero_and_marks_the_rest(look):
    """A reward that grows by powers of ten is a line on the ground; on a log scale it is straight.

    Reported: issue 45.23
    """
    page = opened(look())
    label(page, "reward", "step 6")
    page.get_by_label("log scale").check()
    page.wait_for_function(
        "() => document.querySelectorAll('#chart-losses path.not-finite').length"
    )  # losses below 0 are marked
    path = page.locator("#chart-reward path.line").first.get_attribute("d")
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", path)]
    steps = [a - b for a, b in itertools.pairwise(heights)]
    assert len(heights) == 6 and max(steps) - min(steps) < 0.5
    assert "not finite" not in page.locator("#chart-reward svg.plot").get_attribute("aria-label")


@pytest.mark.browser
def test_the_cursor_is_in_all_charts_at_once(look):
    """People point at a spike of one metric to see what the others did at that step.

    Reported: issue 45.23
    """
    page = opened(look())
    label(page, "reward", "step 6")
    box = page.locator("#chart-reward svg.plot").bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + 60)
    page.locator("#chart-losses .pointer").wait_for(state="attached")
    assert page.locator("#chart-losses .legend").get_attribute("data-step") == "step 1"
    assert "-1" in page.locator("#chart-losses .legend").inner_text()
    page.mouse.move(5, 5)
    page.locator("#chart-losses .pointer").wait_for(state="detached")


@pytest.mark.browser
def test_a_chart_is_a_file_in_three_formats(look):
    """People put the curve into a paper, and the numbers into a spreadsheet.

    Reported: issue 45.23
    """
    page = opened(look())
    label(page, "reward", "step 6")
    chart = page.locator("#chart-reward")
    chart.locator("summary").click()
    found = {}
    for kind in ("CSV", "SVG", "PNG"):
        with page.expect_download() as download:
            chart.get_by_role("button", name=f"Download Reward as {kind}").click()
        assert download.value.suggested_filename.endswith(f".{kind.lower()}")
        found[kind] = download.value.path().read_bytes()
    rows = list(csv.DictReader(found["CSV"].decode().splitlines()))
    rewards = [(row["step"], row["reward"]) for row in rows]
    assert rewards[0] == ("1", "10") and rewards[-1] == ("6", "1000000")
    assert found["PNG"].startswith(b"\x89PNG") and len(found["PNG"]) > 5_000
    picture = found["SVG"].decode()
    assert "var(" not in picture and "stroke=" in picture and "Reward" in picture


@pytest.mark.browser
def test_a_run_is_named_noted_and_tagged_and_found_by_it(look, root):
    """Folder names are dates; people want to say what a run was for.

    Reported: gradio-app/trackio#415
    """
    page = opened(look())
    label(page, "reward", "step 6")  # the scripts of the page run
    page.get_by_role("button", name="Name and note").click()
    page.locator("#label-name").fill(f"Longer answers {HOSTILE[0]}")
    page.locator("#label-tags").fill("paper, ablation , paper")
    page.locator("#label-note").fill("Two lines\nof thoughts.")
    page.get_by_role("button", name="Save").click()
    page.get_by_role("heading", name="Longer answers").wait_for()
    assert page.locator("#folder").inner_text() == ONE
    assert page.locator("#tags li").all_inner_texts() == ["paper", "ablation"]
    assert page.title() != "owned" and page.locator("main img").count() == 0
    for _ in looks(page):
        assert faults_of(page) == []
    page.get_by_role("link", name="Runs").first.click()
    page.get_by_label("Find").fill("ablation answers")
    page.get_by_text("1 of 2 runs.").wait_for()
    page.get_by_role("link", name="Longer answers").click()
    page.get_by_role("button", name="Name and note").click()
    for name in ("name", "tags", "note"):
        page.locator(f"#label-{name}").fill("")
    page.get_by_role("button", name="Save").click()
    page.get_by_role("heading", name=ONE).wait_for()
    assert read_labels(root / ONE).tags == ()


@pytest.mark.browser
def test_a_run_is_deleted_after_a_question_and_never_while_it_trains(look, root, visit):
    """Test runs clutter the list; `rm -r` of the wrong folder costs a night.

    Reported: gradio-app/trackio#157
    """
    visit.expected = ("404",)  # its page may ask for it once more
    page = opened(look())
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("dialog").get_by_text(ONE).wait_for()
    for _ in looks(page):
        assert faults_of(page) == []
    page.get_by_role("button", name="Cancel").click()
    assert (root / ONE).is_dir()
    with RunLock(root / ONE):
        page.get_by_role("button", name="Delete", exact=True).wait_for(state="hidden")
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("button", name="Delete the run").click()
    page.get_by_text("1 run.").wait_for()
    assert not (root / ONE).exists() and (root / TWO).is_dir()
    assert [path.name for path in root.iterdir() if not path.name.startswith(".")] == [TWO]


def test_a_run_in_use_or_in_the_queue_is_not_deleted(tmp_path):
    """Somebody deletes a run from another tab while it trains, or waits to go on.

    Reported: issue 45.23
    """
    with app_in(tmp_path) as parts:
        client, path = parts.client(parts.admin), f"{API}/runs/{RUN_ID}"
        run = tmp_path / "runs" / RUN
        (run / "checkpoints" / "step-000001").mkdir(parents=True)
        with RunLock(run):
            refused = client.delete(path)
            assert refused.status_code == 409 and "is in use by" in refused.json()["detail"]
        waiting = parts.jobs.add(Wanted("ppo", resume=RUN), "again")
        refused = client.delete(path)
        assert refused.status_code == 409 and "waits for its turn" in refused.json()["detail"]
        assert client.delete(f"{API}/jobs/{waiting.id}").status_code == 409
        parts.jobs.stop(waiting)
        (run / "link").symlink_to(tmp_path / "kept")
        (tmp_path / "kept").mkdir()
        assert client.delete(path).status_code == 204
        assert not run.exists() and (tmp_path / "kept").is_dir()
        assert client.get(path).status_code == 404 and client.delete(path).status_code == 404
        assert parts.jobs.get(waiting.id) is None
        assert parts.client(parts.rater).delete(path).status_code == 403


def test_what_a_killed_deletion_leaves_is_no_run(tmp_path):
    """The server is killed while gigabytes are deleted; half a run must not be in the list.

    Reported: issue 45.23
    """
    run, other = (make_run(tmp_path / "runs" / name) for name in ("one", "two"))
    run.rename(tmp_path / "runs" / ".removed-one-123")
    assert find_runs(tmp_path / "runs") == [other]
    remove(plan_removal([other], tmp_path / "runs", checkpoints_only=False))
    assert list((tmp_path / "runs").iterdir()) == []


def test_labels_survive_damage_and_are_seen_in_the_terminal(tmp_path, capsys, own_logging):
    """Files are edited by hand, and runs are listed in a terminal too.

    Reported: issue 45.23
    """
    run = make_run(tmp_path / "runs" / ONE)
    for text in ("{", "[]", "null", '{"tags": "x", "title": 3}', "\\xff", '{"tags": [1, null]}', "[" * 10_000):
        (run / "labels.json").write_text(text)
        assert read_labels(run).title == ""
    (run / "labels.json").write_text(json.dumps({"title": "Mine", "note": "a\nb", "tags": ["x"]}))
    assert main(["runs", "show", ONE, "--dir", str(tmp_path / "runs")]) == 0
    shown = capsys.readouterr().out
    assert "Mine" in shown and "tags" in shown
    with app_in(tmp_path / "app") as parts:
        client, path = parts.client(parts.admin), f"{API}/runs/{RUN_ID}/labels"
        for wrong in ({"title": "x" * 300}, {"tags": ["x"] * 30}, {"title": "\0"}, {"name": "x"}):
            assert client.put(path, json=wrong).status_code == 422
        assert client.put(path, json={"title": " a ", "tags": [" x", "x", ""]}).json() == {
            **{"title": "a", "note": "", "tags": ["x"]}
        }


@pytest.mark.browser
def test_the_head_says_at_once_that_a_run_stops_and_goes_on(studio, visit, tmp_path):
    """After Stop the head said "running", and after Resume "stopped".

    Reported: issue 45.23
    """
    server = studio()
    context = visit.context(server)
    page = visit.page(context, server, f"{server.url}/runs/new")
    page.locator("#start:not([disabled])").wait_for()
    for name, value in (("Model", "tiny:llama"), ("Data", "films"), ("Reward", "unique_chars"), ("Steps", "1000000")):
        page.get_by_label(re.compile(f"^{name}")).first.fill(value)
    page.get_by_role("button", name="Add a key").click()
    page.locator(".setting").last.get_by_label("Key").fill("rollout.max_new_tokens")
    page.locator(".setting").last.get_by_label("Value").fill("4")
    page.get_by_role("button", name="Start the run").click()
    page.locator("#run").wait_for(timeout=PATIENT_MS)
    page.get_by_text("Training.").wait_for(timeout=PATIENT_MS)
    page.evaluate(
        "() => { window.said = []; new MutationObserver(() => window.said.push(document.getElementById('sentence')"
        ".textContent)).observe(document.getElementById('sentence'), {childList: true}); }"
    )
    page.get_by_role("button", name="Stop", exact=True).click()
    page.get_by_role("button", name="Stop the run").click()
    page.get_by_text(re.compile("Stopping|The run has stopped")).first.wait_for()
    page.get_by_text("The run has stopped.").wait_for(timeout=PATIENT_MS)
    page.get_by_role("button", name="Resume", exact=True).click()
    page.get_by_role("button", name="Resume the run").click()
    page.get_by_text(re.compile("Waiting for its turn|Starting|Training")).first.wait_for()
    page.get_by_text("Training.").wait_for(timeout=PATIENT_MS)
    said = page.evaluate("window.said")
    stopped = max(at for at, text in enumerate(said) if "has stopped" in text)
    assert "Training." not in said[:stopped] and said[-1] == "Training.", said
    assert page.locator("#facts").inner_text().startswith("1000000 steps planned")
    kill_runs(tmp_path / "runs" / ".studio" / "jobs")


@pytest.mark.browser
def test_a_run_that_cannot_start_says_why_and_is_started_again_changed(look, root):
    """A run fails while it loads: it stayed under "Waiting and starting", and its error in a folded part.

    Reported: issue 45.23
    """
    (root / "empty").mkdir()
    page = look("/runs/new")
    page.locator("#start:not([disabled])").wait_for()
    page.get_by_label("Model").fill(str(root / "empty"))
    page.get_by_label("Name", exact=True).fill("hopeless")
    page.get_by_role("button", name="Start the run").click()
    page.get_by_text("The run has failed.").wait_for(timeout=PATIENT_MS)
    page.goto(page.url.partition("/runs")[0] + "/runs")
    page.get_by_role("heading", name="Not started").wait_for()
    card = page.locator("#failed .card", has_text="hopeless")
    assert "error: " in card.locator("pre").inner_text() and "failed" in card.inner_text()
    assert page.locator("#jobs-part").is_hidden()
    for _ in looks(page):
        assert faults_of(page) == []
    card.get_by_role("link", name="Change hopeless and start it again").click()
    page.locator("#start:not([disabled])").wait_for()
    assert page.get_by_label("Model").input_value() == str(root / "empty")
    assert page.get_by_label("Name", exact=True).input_value() == "hopeless"
    page.go_back()
    page.get_by_role("button", name="Dismiss hopeless").click()
    page.locator("#failed-part").wait_for(state="hidden")
    assert list((root / ".studio" / "jobs").iterdir()) == []


def test_a_run_that_was_deleted_did_not_fail_to_start(tmp_path):
    """`tunesmith runs rm` deletes a run that a page had started; the next server must not call it failed.

    Reported: issue 45.23
    """
    with open_jobs(tmp_path) as jobs:
        job = jobs.add(Wanted("grpo", settings=(("model.name", "tiny:llama"),)), "key")
        run = wait_for(lambda: jobs.state(job) == "running" and jobs.path(job))
        jobs.stop(job)
        wait_for(lambda: jobs.state(job) == "stopped")
    remove(plan_removal([run], tmp_path / "runs", checkpoints_only=False))
    with open_jobs(tmp_path) as jobs:
        assert jobs.shown() == []


@pytest.mark.browser
def test_empty_fields_say_what_they_stand_for(look):
    """A form with empty fields does not say which model or how many steps it would start.

    Reported: issue 45.23
    """
    page = look("/runs/new")
    page.locator("#start:not([disabled])").wait_for()
    page.wait_for_function("() => document.getElementById('model').placeholder === 'smollm2'")
    assert [page.locator(f"#{id}").get_attribute("placeholder") for id in ("steps", "name")] == ["100", "grpo"]
    page.get_by_label("Algorithm").select_option("sft")
    page.wait_for_function("() => document.getElementById('steps').placeholder.startsWith('all epochs')")


def test_presets_are_those_of_recipe_and_level():
    """The default of a field depends on the recipe that is chosen.

    Reported: issue 45.23
    """
    from tunesmith.base.config.load import shipped_names

    assert presets(Wanted("grpo"))["model.name"] == "smollm2"
    assert presets(Wanted("grpo", settings=(("model.name", "scratch"), ("nonsense", "1"))))["model.name"] == "smollm2"
    named = [name for name in shipped_names() if name.startswith("grpo")]
    assert named and all(presets(Wanted("grpo", name))["run.name"] == name for name in named)


def test_a_misspelt_name_is_found_before_the_start(tmp_path):
    """People type `lenght`, wait for the model to load, and read that there is no such reward.

    Reported: issue 45.23
    """
    with app_in(tmp_path) as parts:
        client = parts.client(parts.admin)

        def problems(**settings: str):
            pairs = [[key.replace("__", "."), value] for key, value in settings.items()]
            body = {"algorithm": "grpo", "settings": pairs}
            return dict(client.post(f"{API}/recipes/check", json=body).json()["problems"])

        for key, wrong, right in (
            ("reward.0.source", "lenght", "length"),
            ("reward.0.source", "unique_char", "unique_chars"),
            ("model.name", "smolm2", "smollm2"),
            ("model.name", "tiny:lama", "tiny:llama"),
            ("prompts.source", "film", "films"),
        ):
            assert f"did you mean {right}?" in problems(**{key: wrong})[key], wrong
        assert "--allow" in problems(**{"model.name": "meta-llama/Llama-3.2-1B"})["model.name"]
        started = client.post(
            f"{API}/jobs",
            json={"algorithm": "grpo", "settings": [["model.name", "tiny:lama"]]},
            headers={"Idempotency-Key": "x"},
        )
        assert started.status_code == 422
    assert set(TINY_FAMILIES) == {*_CONFIGS, "gpt2"}


@pytest.mark.browser
def test_small_models_have_a_size(look):
    """The estimate of a tiny model was "memory 0.00 GB" eight times.

    Reported: issue 45.23
    """
    page = look("/runs/new")
    page.locator("#start:not([disabled])").wait_for()
    for name, value in (("Model", "tiny:llama"), ("Data", "films"), ("Reward", "unique_chars")):
        page.get_by_label(re.compile(f"^{name}")).first.fill(value)
    page.get_by_role("button", name="Estimate").click()
    memory = page.locator("#facts div", has=page.get_by_text("memory", exact=True)).locator("dd")
    memory.wait_for(timeout=PATIENT_MS)
    assert "0.00" not in memory.inner_text() and re.match(r"[\d.]+ MB: \w", memory.inner_text())


@pytest.mark.browser
def test_a_comparison_begins_with_what_says_how_well_runs_did(look, root):
    """The first chart was an empty one without a KL, half of the others were times, and one point was invisible.

    Reported: issue 45.23
    """
    make_run(root / "short", RECIPE, {"step": 1, "reward": 500.0, "time/rollout_s": 1.0, "completions/mean_length": 3})
    page = look()
    for name in (ONE, "short"):
        page.get_by_role("checkbox", name=f"Compare {name}").check()
    page.get_by_role("link", name=re.compile("^Compare ")).click()
    label(page, "reward", "short 500 at step 1")
    assert page.locator("#frontier-part").is_hidden()
    order = page.locator("#charts figure figcaption > span").all_inner_texts()
    assert order[:2] == ["eval/reward", "reward"] and order[-1].startswith("time/")
    box = page.locator("#chart-reward svg.inside circle").bounding_box()
    assert box["width"] >= 5
    page.get_by_label("log scale").check()
    page.get_by_role("radio", name="minutes").check()
    for width, _ in looks(page):
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert faults_of(page) == []
