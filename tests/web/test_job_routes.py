"""Routes that check, estimate, start, stop and resume runs."""

import json
import shlex

import pytest

from app_parts import JOB_ID, RUN, RUN_ID, app_in
from page_parts import HOSTILE
from tunesmith.collect.web.access import API

GRPO = {"algorithm": "grpo", "recipe": "", "settings": [["model.name", "tiny:llama"]]}


@pytest.fixture
def parts(tmp_path):
    with app_in(tmp_path) as made:
        yield made


@pytest.fixture
def client(parts):
    return parts.client(parts.admin)


def start(client, body=GRPO, key="a", path=f"{API}/jobs"):
    return client.post(path, json=body, headers={"Idempotency-Key": key})


def test_a_started_run_is_acknowledged_once_and_shown_with_its_command(client, parts):
    first = start(client)
    assert first.status_code == 202 and first.json()["state"] == "queued"
    assert shlex.split(first.json()["command"]) == [
        *("tunesmith", "train", "grpo", "--model.name=tiny:llama"),
        f"--run.dir={parts.jobs.root}",
    ]
    again = start(client)
    assert (again.status_code, again.json()) == (202, first.json())
    assert start(client, {**GRPO, "recipe": "grpo_arithmetic"}).status_code == 409
    assert [job["id"] for job in client.get(f"{API}/jobs").json()["jobs"]] == [first.json()["id"], JOB_ID]
    assert client.post(f"{API}/jobs", json=GRPO).status_code == 422  # a start without a key could not be repeated


def test_the_keys_of_two_admins_do_not_meet(client, parts):
    other = parts.client(parts.store.add_rater("bea", "admin").token)
    assert start(client).json()["id"] != start(other).json()["id"]


def test_a_waiting_run_is_stopped_for_good(client):
    for _ in range(2):
        answer = client.post(f"{API}/jobs/{JOB_ID}/stop")
        assert answer.status_code == 202 and answer.json()["state"] == "cancelled"
    assert client.get(f"{API}/jobs").json()["jobs"] == []
    assert client.get(f"{API}/jobs/nothing").status_code == 404


def test_problems_come_with_their_keys(client):
    body = {**GRPO, "settings": [["run.steps", "ten"], ["reward.0.source", "./evil.py:f"], ["grpo.clip_lo", "1"]]}
    problems = dict(client.post(f"{API}/recipes/check", json=body).json()["problems"])
    assert set(problems) == {"run.steps", "grpo.clip_lo"}
    assert "'ten' given" in problems["run.steps"] and "did you mean grpo.clip_low?" in problems["grpo.clip_lo"]
    body["settings"] = body["settings"][1:2]
    ((key, message),) = client.post(f"{API}/recipes/check", json=body).json()["problems"]
    assert key == "reward.0.source" and "--allow" in message
    for path in (f"{API}/jobs", f"{API}/recipes/estimate"):
        answer = start(client, body, path=path)
        assert answer.status_code == 422 and "--allow" in answer.json()["detail"]
    assert client.post(f"{API}/recipes/check", json=GRPO).json()["problems"] == []


@pytest.mark.parametrize("text", [*HOSTILE, "a'b\"c", "$(id)", "--config=/etc/passwd", "\ud800", "a\0b"])
def test_hostile_values_are_one_word_of_the_command_or_refused(client, text):
    body = {**GRPO, "settings": [["run.name", text]]}
    json_type = {"Content-Type": "application/json"}
    answer = client.post(f"{API}/recipes/check", content=json.dumps(body).encode(), headers=json_type)
    if answer.status_code == 422:
        assert text in ("\ud800", "a\0b")
        return
    assert f"--run.name={text}" in shlex.split(answer.json()["command"])
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "settings",
    [[["a b", "x"]], [["a=b", "x"]], [["", "x"]], [["run.steps"]], [["run.steps", 3]], [["x", "x" * 20_000]]],
)
def test_settings_that_are_none_are_refused(client, settings):
    assert client.post(f"{API}/recipes/check", json={**GRPO, "settings": settings}).status_code == 422


def test_the_live_loop_and_unknown_algorithms_are_not_started(client):
    for algorithm in ("live", "demo", "../x", ""):
        assert start(client, {**GRPO, "algorithm": algorithm}).status_code == 422
    assert client.get(f"{API}/recipes/keys?algorithm=live").status_code == 422
    keys = client.get(f"{API}/recipes/keys?algorithm=dpo").json()
    assert any(row[0] == "pairs.source" for row in keys)


def test_a_run_is_resumed_by_a_command_of_its_own(client, tmp_path):
    (tmp_path / "runs" / RUN / "checkpoints" / "step-000001").mkdir(parents=True)
    path = f"{API}/runs/{RUN_ID}/resume"
    made = start(client, {"steps": 7}, path=path)
    assert made.status_code == 202
    assert shlex.split(made.json()["command"])[1:] == ["resume", str(tmp_path / "runs" / RUN), "--run.steps=7"]
    assert start(client, {"steps": 7}, path=path).json() == made.json()
    assert start(client, {}, "other", path).status_code == 409
    assert client.get(f"{API}/runs/{RUN_ID}").json()["job"]["id"] == made.json()["id"]
    assert start(client, {"steps": 0}, "third", path).status_code == 422
    assert start(client, {}, "third", f"{API}/runs/{'0' * 12}/resume").status_code == 404


def test_a_run_that_names_what_is_not_allowed_is_not_resumed(client, tmp_path):
    recipe = tmp_path / "runs" / RUN / "recipe.yaml"
    recipe.write_text("algorithm: grpo\nreward: ./evil.py:f\n")
    answer = start(client, {}, path=f"{API}/runs/{RUN_ID}/resume")
    assert answer.status_code == 422 and "./evil.py:f" in answer.json()["detail"]
    recipe.write_text("algorithm: live\n")
    assert start(client, {}, path=f"{API}/runs/{RUN_ID}/resume").status_code == 409


def test_the_settings_of_a_run_fill_a_form(client):
    found = client.get(f"{API}/runs/{RUN_ID}/settings").json()
    assert found == {"algorithm": "ppo", "settings": [["model.name", "smollm2"]]}


def test_an_estimate_has_memory_time_and_data(client):
    settings = [["model.name", "tiny:llama"], ["run.steps", "7"], ["reward.0.source", "length"]]
    body = {**GRPO, "settings": settings}
    facts = client.post(f"{API}/recipes/estimate", json=body).json()
    assert facts["memory_gb"]["weights"] > 0 and facts["seconds"] > 0
    assert facts["num_steps"] == 7 and facts["num_items"] > 100 and facts["sample"]
