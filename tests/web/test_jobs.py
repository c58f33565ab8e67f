"""Runs that pages start: one process for each request, whatever is killed; their order, their end."""

import json
import os
import signal
import time

import pytest

from job_parts import WANTED, add_until_killed, kill_runs, lines, num_steps, open_jobs, wait_for
from server_parts import context
from tunesmith.base.core.errors import ConfigError, RunError, StoreError
from tunesmith.collect.web import jobs as jobs_module
from tunesmith.collect.web.access import API
from tunesmith.collect.web.jobs import Jobs
from tunesmith.collect.web.wanted import Wanted

SMALL = {
    "model.name": "tiny:llama",
    "prompts.source": "films",
    "reward.0.source": "unique_chars",
    "rollout.prompts_per_step": "2",
    "rollout.completions_per_prompt": "2",
    "rollout.max_new_tokens": "4",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder whose runs are all told to end afterwards."""
    monkeypatch.setattr(jobs_module, "command", jobs_module.command)
    monkeypatch.setattr(jobs_module, "POLL_S", 0.02)
    yield tmp_path
    kill_runs(tmp_path / "jobs")
    kill_runs(tmp_path / "runs" / ".studio" / "jobs")


@pytest.fixture
def jobs(folder):
    with open_jobs(folder) as opened:
        yield opened


def states(jobs: Jobs, *of) -> list[str]:
    return [jobs.state(job) for job in of]


def end(jobs: Jobs, job) -> None:
    """Let the run of a job come to its end."""
    (wait_for(lambda: jobs.path(job)) / "end").touch()
    wait_for(lambda: jobs.state(job) not in ("running", "starting"))


@pytest.mark.parametrize(
    "fault", ["fsync:kill:1", "fsync:kill:2", "job/claimed:kill", "job/started:kill", "fsync:kill:3"]
)
def test_a_server_killed_at_any_moment_neither_loses_nor_doubles_a_run(folder, fault):
    server = context().Process(target=add_until_killed, args=(folder, fault))
    server.start()
    server.join(60)
    assert server.exitcode == -signal.SIGKILL
    with open_jobs(folder) as jobs:
        job = jobs.add(WANTED, "key")  # the page, which has no answer yet, asks again
        wait_for(lambda: jobs.state(job) == "running")
        assert [one.id for one in jobs._newest()] == [job.id]
    with open_jobs(folder) as jobs:
        assert jobs.state(job) == "running"
        end(jobs, job)
        assert jobs.state(job) == "stopped"
        jobs._start_next()
    assert lines(folder, "began") == [f"x-{job.id}"]
    assert not list((folder / "jobs").glob(".*"))


def test_runs_wait_for_their_turn_and_start_in_order(folder, jobs):
    first, second, third = (jobs.add(WANTED, key) for key in "abc")
    wait_for(lambda: jobs.state(first) == "running")
    assert states(jobs, second, third) == ["queued", "queued"]
    assert [jobs.num_before(job) for job in (second, third)] == [0, 1]
    assert jobs.shown() == [third, second]
    jobs.stop(second)
    assert jobs.state(second) == "cancelled" and jobs.shown() == [third]
    end(jobs, first)
    wait_for(lambda: jobs.state(third) == "running")
    assert lines(folder, "began") == [f"x-{first.id}", f"x-{third.id}"]
    assert jobs.of(jobs.path(third)) == third and jobs.of(folder / "runs") is None


def test_as_many_run_at_a_time_as_allowed(folder):
    with open_jobs(folder, max_runs=2) as jobs:
        made = [jobs.add(WANTED, key) for key in "abc"]
        wait_for(lambda: states(jobs, *made) == ["running", "running", "queued"])


def test_a_repeated_request_is_one_run_and_another_one_under_its_key_is_refused(folder, jobs):
    job = jobs.add(WANTED, "key")
    assert jobs.add(WANTED, "key") == job
    with pytest.raises(RunError, match="Idempotency-Key"):
        jobs.add(Wanted("dpo"), "key")
    wait_for(lambda: jobs.state(job) == "running")
    assert jobs.add(WANTED, "key") == job
    assert len(lines(folder, "began")) == 1


def test_a_stop_is_one_signal_however_often_it_is_asked_for(folder, jobs):
    job = jobs.add(WANTED, "key")
    wait_for(lambda: jobs.state(job) == "running")
    (jobs.path(job) / "go_on").touch()  # it takes its time to finish a step
    for _ in range(3):
        jobs.stop(job)
    wait_for(lambda: lines(folder, "signals"))
    with open_jobs(folder) as restarted:
        restarted.stop(job)
        assert restarted.state(job) == "stopping"
    end(jobs, job)
    assert lines(folder, "signals") == [f"x-{job.id}"]


def test_another_process_under_the_number_of_a_run_is_not_stopped(folder, jobs):
    job = jobs.add(WANTED, "key")
    wait_for(lambda: jobs.state(job) == "running")
    lock = folder / "jobs" / job.id / "run.lock"
    number = lock.read_text()
    lock.write_text(str(os.getpid()))
    with pytest.raises(RunError, match="not to be found"):
        jobs.stop(job)
    lock.write_text(number)


def test_a_run_that_is_killed_has_stopped_and_is_not_started_again(folder, jobs):
    job = jobs.add(WANTED, "key")
    wait_for(lambda: jobs.state(job) == "running")
    os.kill(int((folder / "jobs" / job.id / "run.lock").read_text()), signal.SIGKILL)
    wait_for(lambda: jobs.state(job) == "stopped")
    assert "this run has begun" in jobs.output(job)
    for _ in range(3):
        jobs._start_next()
    assert len(lines(folder, "began")) == 1


def test_a_stopped_run_is_resumed_once_at_a_time(folder, jobs):
    job = jobs.add(WANTED, "key")
    wait_for(lambda: jobs.state(job) == "running")
    run = jobs.path(job)
    again = Wanted("grpo", resume=run.name)
    with pytest.raises(RunError, match="in use"):
        jobs.add(again, "resume")
    end(jobs, job)
    (run / "end").unlink()
    resumed = jobs.add(again, "resume")
    with pytest.raises(RunError, match="in use"):
        jobs.add(again, "another")
    wait_for(lambda: jobs.state(resumed) == "running")
    assert jobs.of(run) == resumed and jobs.path(resumed) == run
    assert lines(folder, "began") == [run.name]
    assert lines(folder / "runs", "began") == [run.name]


def test_what_the_admin_does_not_allow_any_more_is_not_started(folder):
    (folder / "p.jsonl").write_text("")
    wanted = Wanted("grpo", settings=(("prompts.source", str(folder / "p.jsonl")),))
    with open_jobs(folder, max_runs=0, words=(str(folder),)) as jobs:
        job = jobs.add(wanted, "key")
    with open_jobs(folder) as jobs:
        wait_for(lambda: jobs.state(job) == "cancelled")
        assert "prompts.source" in jobs.output(job) and jobs.shown() == [job]
        with pytest.raises(ConfigError, match="not allowed"):
            jobs.add(wanted, "again")


def test_a_process_that_ends_before_it_has_a_folder_has_failed_with_its_words(folder, jobs):
    jobs_module.command = lambda words: ["/bin/sh", "-c", "echo error: no such model >&2; exit 2", *words]
    job = jobs.add(WANTED, "key")
    wait_for(lambda: jobs.state(job) == "failed")
    assert jobs.output(job) == "error: no such model\n" and jobs.shown() == [job]


def test_damaged_requests_are_passed_over(folder):
    for name, text in (("a", "{"), ("b", "[]"), ("c", '{"id": "c"}'), ("d", json.dumps({"id": "e", "number": 1}))):
        (folder / "jobs" / name).mkdir(parents=True)
        (folder / "jobs" / name / "request.json").write_text(text)
    with open_jobs(folder) as jobs:
        assert jobs.shown() == []
        wait_for(lambda: jobs.state(jobs.add(WANTED, "key")) == "running")


def test_a_full_disk_is_said_and_nothing_is_started(folder, jobs, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(jobs_module, "fsync", full)
        with pytest.raises(StoreError, match="No space left"):
            jobs.add(WANTED, "key")
    assert jobs.shown() == []
    wait_for(lambda: jobs.state(jobs.add(WANTED, "key")) == "running")


def test_not_more_wait_than_there_is_room_for(folder, monkeypatch):
    monkeypatch.setattr(jobs_module, "MAX_WAITING", 2)
    with open_jobs(folder, max_runs=0) as jobs:
        for key in "ab":
            jobs.add(WANTED, key)
        with pytest.raises(RunError, match="2 runs are waiting"):
            jobs.add(WANTED, "c")


def test_a_server_that_is_killed_finds_its_runs_again(studio, folder):
    server = studio()
    admin = server.admin()

    def start(steps):
        body = {"algorithm": "grpo", "settings": [*SMALL.items(), ["run.steps", str(steps)]]}
        answer = admin.send("POST", f"{API}/jobs", body, {"Idempotency-Key": str(steps)})
        assert answer.status == 202, answer.body
        return answer.json["id"]

    def state(job):
        time.sleep(0.1)  # an admin may not ask more than 50 times a second
        return admin.get(f"/jobs/{job}").json["state"]

    first, second = start(1_000_000), start(2)
    (run,) = wait_for(lambda: list((folder / "runs").glob(f"*-{first}")), 120)
    wait_for(lambda: num_steps(run) > 0, 120)
    server.kill()
    before = num_steps(run)
    wait_for(lambda: num_steps(run) > before)
    server.start()
    assert (state(first), state(second)) == ("running", "queued")
    assert [start(1_000_000), start(2)] == [first, second]
    assert admin.send("POST", f"{API}/jobs/{first}/stop").status == 202
    wait_for(lambda: state(first) == "stopped", 60)
    wait_for(lambda: state(second) == "finished", 120)
    assert len([path for path in (folder / "runs").iterdir() if path.name[0] != "."]) == 2
