"""The whole live loop as processes: a real server, a real trainer on a tiny model, simulated raters over HTTP."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from tunesmith.apps.cli.live import seconds
from tunesmith.apps.workflows.live_raters import Raters, RaterTraits
from tunesmith.apps.workflows.live_simulation import (
    Child,
    SimulationOptions,
    add_raters,
    child,
    hit,
    run_simulation,
    server,
    wait_until,
)
from tunesmith.base.core.errors import InputError, RunError
from tunesmith.collect.store.metric_log import MetricLog
from tunesmith.collect.store.runs import RunReader
from tunesmith.collect.store.vote_reader import VoteReader

TINY = [
    "--model", "tiny:llama", "--model.dtype", "float32", "--run.num-threads", "1",
    "--rollout.max-new-tokens", "6", "--rollout.prompts-per-step", "8", "--rollout.completions-per-prompt", "2",
    "--live.votes-per-update", "8", "--live.pool", "8", "--optimizer.learning-rate", "1e-3", "--prompts", "films",
]  # fmt: skip
PATIENCE_S = 500  # below the limit of a test


def wait_for(reader: RunReader, num_versions: int, *watched: Child) -> None:
    """Wait until so many versions were made, the base model's among them."""
    wait_until(time.monotonic() + PATIENCE_S, watched, lambda: len(reader.versions()) >= num_versions)
    assert len(reader.versions()) >= num_versions, "no version came"


def test_server_and_trainer_may_start_stop_and_die_in_any_order_and_no_vote_is_lost(tmp_path: Path) -> None:
    folder = tmp_path / "live"
    folder.mkdir()
    tokens = add_raters(folder, 2)
    words = ["live", "--dir", str(folder), *TINY]
    with child("trainer", words, folder / "t1.log") as trainer, closing(RunReader.open(folder / "runs.db")) as runs:
        wait_for(runs, 1, trainer)  # before there is any server
        with server(folder) as served, Raters(served.url, tokens, RaterTraits(pace_s=0.05), 0) as raters:
            wait_for(runs, 2, trainer, served.child)
            trainer.process.kill()
            trainer.process.wait()
        first = raters.num_votes
        with child("trainer", words, folder / "t2.log") as again:
            with server(folder) as served, Raters(served.url, tokens, RaterTraits(pace_s=0.05), 1) as raters:
                wait_for(runs, 4, again, served.child)
            assert raters.problems == []
            again.require_alive()  # the server's end is nothing to it
            assert again.end() == 0
    result = json.loads((folder / "result.json").read_text())
    with closing(VoteReader.open(folder / "votes.db")) as reader:
        votes = reader.votes_after(0, 100_000)
    assert first + raters.num_votes <= len(votes) <= first + raters.num_votes + len(tokens)
    assert 16 <= result["votes"] <= len(votes) and result["serving"] >= 2


@pytest.mark.nightly
def test_a_simulation_measures_the_last_version_against_the_base_model(tmp_path: Path) -> None:
    folder = tmp_path / "live"
    options = SimulationOptions(
        folder,
        num_raters=3,
        duration_s=PATIENCE_S,
        traits=RaterTraits(left_bias=1.0, pace_s=0.1),  # texts of a tiny model are ties to the lexicon
        trainer_words=TINY,
        num_pairs=30,
        num_versions=1,
    )
    found = run_simulation(options).to_json()
    assert json.loads((folder / "simulation.json").read_text()) == found
    assert found["versions"] >= 1 and found["votes"] >= 8 and found["problems"] == 0
    assert 0 <= found["win_rate_low"] <= found["win_rate"] <= found["win_rate_high"] <= 1
    assert found["num_pairs"] >= 30 and found["vote_to_version_median_s"] > 0 and found["vote_p95_ms"] > 0
    assert "simulated" in found["rater"]
    names = MetricLog(folder).names()
    assert {"kl", "loss", "entropy", "rewards/accuracies", "votes/to_version_s", "time/rollout_s"} <= set(names)


def test_a_trainer_that_cannot_start_is_reported_with_its_reason(tmp_path: Path) -> None:
    words = ["live", "--dir", str(tmp_path / "live"), "--model", "no/such-model"]
    with child("trainer", words, tmp_path / "log") as trainer:
        trainer.process.wait(PATIENCE_S)
        with pytest.raises(RunError, match=r"trainer ended with code 2(?s:.*)no/such-model"):
            trainer.require_alive()


def test_a_trainer_without_time_for_a_result_is_reported(tmp_path: Path) -> None:
    words = ["live", "--dir", str(tmp_path / "live"), *TINY]
    said = "trainer was ended by SIGTERM without a result: 20 s were too short"
    with child("trainer", words, tmp_path / "log") as trainer, pytest.raises(RunError, match=said):
        trainer.end_in_order(20)


def test_the_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    program = f"""
import time
from pathlib import Path
from tunesmith.apps.workflows.live_simulation import server
with server(Path({str(tmp_path)!r})) as served:
    print(served.child.process.pid, flush=True)
    time.sleep(1000)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    served = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    assert select.select([served], [], [], PATIENCE_S)[0] == [served]


def test_ctrl_c_ends_the_trainer_in_order(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tunesmith", "live", "--dir", str(tmp_path / "live"), *TINY, "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    with closing(RunReader.open(tmp_path / "live" / "runs.db")) as reader:
        deadline = time.monotonic() + PATIENCE_S
        while (beat := reader.heartbeat()) is None or beat.state not in ("waiting", "drawing"):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
        beat = reader.heartbeat()
    assert process.returncode == 0
    assert json.loads(out)["serving"] == 0
    folder = tmp_path / "live"
    told = f"version 0 is served; waiting for votes in {folder} (serve with `tunesmith serve --dir {folder}`)\n"
    assert err.count(told) == 1  # before anybody says anything
    assert beat is not None and beat.state == "ended"


@pytest.mark.parametrize(("text", "expected"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("45", 45)])
def test_durations_have_units(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "ten", "-5s", "5 d", "nan"])
def test_a_duration_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="duration"):
        seconds(text)


def test_equal_scores_are_half_a_win() -> None:
    assert [hit(0.0, 0.5), hit(0.5, 0.0), hit(0.2, 0.22)] == [1.0, 0.0, 0.5]


@pytest.mark.slow
def test_raters_who_talk_in_the_arena_make_versions(tmp_path: Path) -> None:
    options = SimulationOptions(
        tmp_path / "live",
        num_raters=3,
        duration_s=90,
        traits=RaterTraits(pace_s=0.0),
        trainer_words=TINY,
        num_pairs=30,
        num_conversations=15,
    )
    found = run_simulation(options)
    assert found.problems == 0 and found.conversations == 15
    assert found.versions >= 1 and 15 <= found.votes_learnt <= found.votes
