"""The facts of a run as its page gets them, and the samples by step."""

import json

import pytest

from app_parts import RUN, RUN_ID, app_in
from tunesmith.collect.web.access import API
from tunesmith.collect.web.studio import MAX_SAMPLES, SampleLog

ONE = f"{API}/runs/{RUN_ID}"


@pytest.fixture
def run(tmp_path):
    return tmp_path / "runs" / RUN


@pytest.fixture
def client(tmp_path):
    with app_in(tmp_path) as parts:
        yield parts.client(parts.admin)


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_the_facts_of_a_run_are_those_in_its_files(client, run):
    (run / "provenance.json").write_text(json.dumps({"model.name": "command line --model", "algorithm": "default"}))
    (run / "findings.jsonl").write_text(lines({"step": 4, "severity": "warning", "name": "kl", "message": "high"}))
    (run / "result.json").write_text('{"minutes": 2, "reward": NaN}')
    slow = {"time/step_s": 10.0, "time/evaluate_s": 8.0}
    (run / "metrics.jsonl").write_text(lines(*({"step": step, **slow} for step in range(1, 9))))
    facts = client.get(ONE).json()
    assert ["model.name", "smollm2", "command line --model"] in facts["recipe"]
    assert facts["findings"] == [["4", "warning", "kl", "high"]]
    assert facts["status"] == "finished" and ["minutes", "2"] in facts["result"]
    assert facts["commands"]["why slow"] == f"tunesmith diagnose {run}"
    assert "of the run" in facts["verdict"]
    assert dict(facts["files"])["provenance.json"] == (run / "provenance.json").stat().st_size


def test_metrics_are_those_of_this_run(client, run):
    (run / "metrics.jsonl").write_text(lines({"step": 1, "reward": 0.25}, {"step": 2, "reward": 0.5}))
    client.get(f"{ONE}/metrics/names")
    for _ in range(200):
        (series,) = client.get(f"{ONE}/metrics", params={"name": "reward"}).json()["series"]
        if len(series["points"]) == 2:
            break
    assert [point[3] for point in series["points"]] == [0.25, 0.5]
    assert client.get(f"{API}/metrics/names").json()["names"] == []


def test_a_run_that_is_not_there_is_404_everywhere(client):
    for path in (f"{API}/runs/nothing", f"{API}/runs/{'0' * 12}/samples?step=1", f"/runs/{'0' * 12}", f"/runs/{RUN}"):
        assert client.get(path).status_code == 404, path


def test_files_are_plain_ones_of_the_folder_alone(client, run, tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    (run / "link.txt").symlink_to(tmp_path / "secret.txt")
    (run / ".hidden").write_text("secret")
    (run / "final").mkdir()
    (run / "final" / "model.bin").write_text("secret")
    answer = client.get(f"/runs/{RUN_ID}/files/recipe.yaml")
    assert answer.text.startswith("algorithm: ppo")
    assert answer.headers["content-disposition"].startswith("attachment")
    assert answer.headers["content-type"] == "application/octet-stream"
    for name in ("link.txt", ".hidden", "final", "final/model.bin", "..%2f..%2fsecret.txt", "%2e%2e", "nothing"):
        answer = client.get(f"/runs/{RUN_ID}/files/{name}")
        assert answer.status_code == 404 and b"secret" not in answer.content, name


def test_a_report_runs_in_an_origin_of_its_own(client, run):
    policy = client.get(f"/runs/{RUN_ID}/report").headers["content-security-policy"]
    assert policy.startswith("sandbox allow-scripts;") and "allow-same-origin" not in policy
    (run / "report.html").unlink()
    assert client.get(f"/runs/{RUN_ID}/report").status_code == 404


def test_samples_are_found_by_step_as_they_are_written(tmp_path):
    file = tmp_path / "samples.jsonl"
    log = SampleLog(file)
    assert log.steps() == []
    row = {"prompt": "p", "completion": "c", "reward": 0.5, "rewards": {"a": 0.25, "b": 0.25}, "num_tokens": 3}
    file.write_text(lines(*({"step": step, **row, "completion": f"{step}.{k}"} for step in (0, 5) for k in range(2))))
    assert log.steps() == [0, 5]
    assert [one["completion"] for one in log.at(5)] == ["5.0", "5.1"]
    assert log.at(0)[0]["rewards"] == [("a", "0.25"), ("b", "0.25")]
    assert log.at(3) == []
    with file.open("a") as more:
        more.write(lines({"step": 10, **row}) + '{"step": 15, "pro')
    assert log.steps() == [0, 5, 10]


def test_samples_that_a_resumed_run_removed_are_gone(tmp_path):
    file = tmp_path / "samples.jsonl"
    log = SampleLog(file)
    file.write_text(lines(*({"step": step, "completion": "x" * 50} for step in (1, 2, 3))))
    assert log.steps() == [1, 2, 3]
    file.write_text(lines({"step": 1, "completion": "x" * 50}))
    assert log.steps() == [1]
    file.write_text(lines(*({"step": step, "completion": "y"} for step in range(1, 30))))
    assert log.steps() == list(range(1, 30))
    file.unlink()
    assert log.steps() == []


def test_a_damaged_or_endless_log_costs_its_samples_alone(tmp_path):
    file = tmp_path / "samples.jsonl"
    file.write_bytes(
        b"\xff\xfe\n[1]\nnull\n" + lines(*({"step": 1, "completion": "x" * 10_000} for _ in range(99))).encode()
    )
    log = SampleLog(file)
    assert log.steps() == [1]
    rows = log.at(1)
    assert len(rows) == MAX_SAMPLES and len(rows[0]["completion"]) < 5_000
