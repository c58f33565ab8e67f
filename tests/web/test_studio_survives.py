"""Servers and runs are killed in random order while pages are open: what was acknowledged is there once."""

import os
import random
import signal
import threading
import time
from collections import Counter
from contextlib import suppress

import pytest

from job_parts import kill_runs, running, wait_for
from server_parts import Client, pairs
from test_votes_survive import effective_verdicts
from tunesmith.collect.web.access import API

NUM_KILLS = 50
RUN = {
    "algorithm": "grpo",
    "settings": [
        *(["model.name", "tiny:llama"], ["reward.0.source", "unique_chars"], ["run.steps", "1000000"]),
        *(["rollout.prompts_per_step", "2"], ["rollout.completions_per_prompt", "2"], ["rollout.max_new_tokens", "4"]),
    ],
}

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def sent(client: Client, method: str, path: str, body: dict, key: str) -> dict:
    """The JSON of the answer, asked for again with the same key until the server is there to give one."""
    while True:
        with suppress(OSError):
            answer = client.send(method, API + path, body, {"Idempotency-Key": key})
            if answer.status != 429:
                assert answer.status < 300, answer.body
                return answer.json
        time.sleep(0.2)


def test_fifty_kills_lose_and_double_nothing(studio, serve, visit, tmp_path):
    visit.expected = ("ERR_", "Failed to load")
    draw = random.Random(5)
    runs_server, votes_server = studio(), serve(pairs(200))
    admin, rater = runs_server.admin(), votes_server.rater("rob")
    jobs = tmp_path / "runs" / ".studio" / "jobs"
    runs_server.kill()
    runs_server.start()  # with a new link for the window
    page = visit.page(visit.context(runs_server), runs_server, f"{runs_server.url}/runs")
    started: dict[str, str] = {}
    voted: dict[str, str] = {}

    def act(number: int, *, starts: bool) -> None:
        """Start a run, if it `starts` one, and vote; each is done once its answer has come."""
        if starts:
            started[f"key {number}"] = sent(admin, "POST", "/jobs", RUN, f"key {number}")["id"]
        (item,) = sent_next(rater)
        verdict = draw.choice(("left", "right", "tie"))
        sent(rater, "PUT", f"/presentations/{item}/vote", {"verdict": verdict}, f"vote {number}")
        voted[item] = verdict

    killed = Counter()
    try:
        for number in range(NUM_KILLS):
            victim = draw.choice(("studio", "serve", "run"))
            acting = threading.Thread(target=act, args=(number,), kwargs={"starts": victim == "run" or number % 5 == 0})
            acting.start()
            time.sleep(draw.random() * 0.2)
            if victim == "run":
                for process in wait_for(lambda: running(jobs), 120):
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
            else:
                server = runs_server if victim == "studio" else votes_server
                server.kill()
                page.wait_for_timeout(draw.random() * 500)
                server.start()
            killed[victim] += 1
            acting.join(120)
            assert not acting.is_alive()
        assert len(killed) == 3
        # Every run that was acknowledged is one job, of which at most one run was made; none was started again.
        assert len(set(started.values())) == len(started) >= killed["run"]
        assert {folder.name for folder in jobs.iterdir() if folder.name[0] != "."} == set(started.values())
        made = Counter(path.name.rpartition("-")[2] for path in (tmp_path / "runs").glob("*-grpo-*"))
        assert set(made) <= set(started.values()) and all(count == 1 for count in made.values())
        # The page that was open all the time recovers by itself: it lists what there is, and says what became of it.
        page.wait_for_function("count => document.querySelectorAll('#rows tr').length === count", arg=len(made))
        states = page.locator("#rows tr").evaluate_all("rows => rows.map(({ dataset }) => dataset.state)")
        assert Counter(states)["running"] <= 1 and set(states) <= {"running", "failed", "stopped"}
        page.get_by_text("1 run." if len(made) == 1 else f"{len(made)} runs.").wait_for()
    finally:
        visit.close()
        runs_server.stop()
        kill_runs(jobs)
    votes_server.stop()
    assert effective_verdicts(votes_server) == voted


def sent_next(rater: Client) -> list[str]:
    """The token of the next pair, asked for until the server answers."""
    while True:
        with suppress(OSError):
            answer = rater.get("/next?count=1")
            if answer.status == 200:
                return [one["token"] for one in answer.json["presentations"]]
        time.sleep(0.2)
