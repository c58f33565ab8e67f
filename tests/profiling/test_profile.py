"""`tunesmith profile` on real runs of a tiny model: the trace, the figures, attaching, comparing, errors."""

import gzip
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import jobs
import pytest

from tunesmith.apps.cli.main import main
from tunesmith.observe.profiling import chrome
from tunesmith.observe.profiling.profile import read_profile

NUM_SLOTS = 3
GRPO = ["grpo", "--model", "tiny:llama", "--reward", "unique_chars", "--rollout.max-new-tokens", "24"]
GRPO += ["--rollout.prompts-per-step", "2", "--rollout.num-slots", str(NUM_SLOTS), "--rollout.min-new-tokens", "24"]
Capture = pytest.CaptureFixture[str]


def training(folder: Path, *words: str) -> list[str]:
    return [*GRPO, "--run.dir", str(folder), "--quiet", *words]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was started for a profile of two steps."""
    folder = tmp_path_factory.mktemp("profile")
    assert main(["profile", *training(folder, "--steps", "2")]) == 0
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def trace(run_dir: Path) -> dict:
    with gzip.open(run_dir / "profile" / "trace.json.gz", "rt") as file:
        return json.load(file)


def spans(trace: dict, category: str) -> list[dict]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] == category]


FIELDS = {
    "X": {"name": str, "cat": str, "ts": (int, float), "dur": (int, float), "pid": int, "tid": int},
    "C": {"name": str, "ts": (int, float), "pid": int, "args": dict},
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
}
"""Fields that Chrome's trace format demands of each phase that we write."""


def test_every_event_has_the_fields_of_its_phase(trace: dict):
    assert isinstance(trace["traceEvents"], list) and trace["displayTimeUnit"] in ("ms", "ns")
    assert {event["ph"] for event in trace["traceEvents"]} == set(FIELDS)
    for event in trace["traceEvents"]:
        for name, kind in FIELDS[event["ph"]].items():
            assert isinstance(event.get(name), kind), event
        assert event["name"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert [type(value) for value in event["args"].values()] in ([int], [float])
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")


def test_times_of_each_track_do_not_go_back_and_begin_at_the_first_step(trace: dict):
    last: dict[object, float] = defaultdict(float)
    for event in trace["traceEvents"]:
        if event["ph"] == "M":
            continue
        track = (event["pid"], event["tid"]) if event["ph"] == "X" else event["name"]
        assert event["ts"] >= last[track]
        last[track] = event["ts"]
    assert min(step["ts"] for step in spans(trace, chrome.STEP)) == 0


def test_events_of_a_track_are_nested_as_viewers_draw_them(trace: dict):
    tracks: dict[object, list[tuple[float, float]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["cat"] in (chrome.STEP, chrome.STAGE):
            tracks[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for events in tracks.values():
        ends: list[float] = []
        for start, end in events:
            while ends and start >= ends[-1] - 0.002:  # times are rounded to nanoseconds
                ends.pop()
            assert not ends or end <= ends[-1] + 0.002
            ends.append(end)


def test_every_track_has_a_name_and_stages_come_first(trace: dict):
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    order = {
        (e["pid"], e["tid"]): e["args"]["sort_index"] for e in trace["traceEvents"] if e["name"] == "thread_sort_index"
    }
    assert {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["ph"] == "X"} == set(named) == set(order)
    assert named[min(order, key=order.__getitem__)] == "stages of MainThread"
    assert "MainThread" in named.values()


def test_the_steps_after_the_one_that_warmed_up_are_recorded(trace: dict, run_dir: Path):
    assert [step["name"] for step in spans(trace, chrome.STEP)] == ["step 2", "step 3"]
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 3
    assert json.loads((run_dir / "result.json").read_text())["steps"] == 3


def test_the_stages_of_the_trainer_are_tracks(trace: dict):
    names = {stage["name"] for stage in spans(trace, chrome.STAGE)}
    assert {"rollout", "rollout/prefill", "rollout/decode", "reward", "update/forward", "update/backward"} <= names
    marks = (chrome.SPAN_MARK, chrome.STEP_MARK)
    assert not any(event["name"].startswith(marks) for event in trace["traceEvents"])


def test_slots_in_use_are_counted_on_the_clock_of_the_stages(trace: dict):
    rollouts = [
        (stage["ts"], stage["ts"] + stage["dur"]) for stage in spans(trace, chrome.STAGE) if stage["name"] == "rollout"
    ]
    points = [(e["ts"], e["args"]["value"]) for e in trace["traceEvents"] if e["name"] == "engine slots in use"]
    assert max(value for _, value in points) == NUM_SLOTS
    for time_us, value in points:
        assert 0 <= value <= NUM_SLOTS
        # Both clocks are the system's; torch computes it from the processor's counter.
        assert any(start - 2000 <= time_us <= end + 2000 for start, end in rollouts)


def test_memory_is_a_counter(run_dir: Path):
    memory = read_profile(run_dir).counters["resident memory (GB)"]
    assert 0.05 < memory["mean"] <= memory["max"] < 64


def test_figures_are_means_of_a_step_and_add_up(run_dir: Path):
    found = read_profile(run_dir)
    assert [name for name, _ in found.steps] == ["step 2", "step 3"]
    main_stages = [stage for stage in found.stages if stage["is_main"]]
    assert sum(stage["self_s"] for stage in main_stages) == pytest.approx(found.step_s, rel=1e-3)
    for stage in main_stages:
        assert 0 <= stage["operator_s"] <= stage["self_s"] * 1.001 + 1e-6
        assert stage["operator_s"] + stage["gap_s"] == pytest.approx(stage["self_s"], rel=1e-3, abs=1e-6)
    stages = {stage["stage"]: stage for stage in main_stages}
    assert stages["rollout/decode"]["calls"] == pytest.approx(round(stages["rollout/decode"]["calls"]))
    assert stages["rollout/decode"]["dispatches"] > stages["rollout/decode"]["calls"]
    assert any(use["operator"].startswith("aten::") and use["stage"] == "update/forward" for use in found.operators)
    assert all(0 <= use["self_s"] <= use["total_s"] + 1e-9 for use in found.operators)


def test_pythons_stacks_are_those_of_the_trainer(run_dir: Path):
    text = (run_dir / "profile" / "stacks.txt").read_text()
    assert "trainers/policy_step.py:PolicyStep.step" in text
    assert all(line.rpartition(" ")[2].isdecimal() for line in text.splitlines())


def test_only_the_files_of_the_profile_stay(run_dir: Path):
    names = {path.name for path in (run_dir / "profile").iterdir()}
    assert names == {"trace.json.gz", "operators.json", "stacks.txt", "profile.html"}


def wait_for(path: Path, training: BaseProcess) -> None:
    end_s = time.monotonic() + 120
    while not path.exists():
        assert training.is_alive(), "the training has ended"
        assert time.monotonic() < end_s
        time.sleep(0.05)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[BaseProcess, Path]]:
    """A training in a process of its own that has done a step, and its folder."""
    words = ["train", *training(tmp_path / "runs", "--steps", "100000"), "--run.checkpoint-every", "0"]
    process = jobs.start(main, words)
    try:
        wait_for(tmp_path / "runs", process)
        (path,) = (tmp_path / "runs").iterdir()
        wait_for(path / "metrics.jsonl", process)
        yield process, path
    finally:
        process.terminate()
        process.join(timeout=60)


def test_a_running_training_is_profiled_and_goes_on(running: tuple[BaseProcess, Path], capsys: Capture):
    process, path = running
    assert main(["profile", "--attach", path.name[-4:], "--dir", str(path.parent), "--steps", "1", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    (step,) = facts["steps"]
    assert step[0].startswith("step ") and facts["run"] == path.name
    assert {"rollout", "reward", "update/forward"} <= {stage["stage"] for stage in facts["stages"]}
    assert (path / "profile" / "profile.html").is_file()
    num_done = len((path / "metrics.jsonl").read_text().splitlines())
    end_s = time.monotonic() + 60
    while len((path / "metrics.jsonl").read_text().splitlines()) <= num_done:
        assert process.is_alive() and time.monotonic() < end_s
        time.sleep(0.05)
    assert not list(path.glob("*request*"))


def test_a_profiled_training_learns_the_same_to_the_bit(run_dir: Path, tmp_path: Path):
    assert main(["train", *training(tmp_path, "--steps", "4")]) == 0
    (plain,) = tmp_path.iterdir()
    rows = [
        [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()] for path in (run_dir, plain)
    ]
    for profiled, row in zip(*rows, strict=False):
        for name in ("reward", "grad_norm", "entropy", "loss/policy_avg", "completions/mean_length"):
            assert profiled[name] == row[name], name


def test_a_reward_that_is_computed_beside_the_rollout_has_a_track_of_its_own(tmp_path: Path):
    (tmp_path / "slow.py").write_text(
        "import time\ndef slow(completions, **kwargs):\n    time.sleep(0.01)\n    return [1.0] * len(completions)\n"
    )
    words = training(tmp_path / "runs", "--steps", "1", "--rollout.score-while-drawing", "true")
    assert main(["profile", *words, "--reward", f"{tmp_path}/slow.py:slow"]) == 0
    (path,) = (tmp_path / "runs").iterdir()
    stages = {stage["stage"]: stage for stage in read_profile(path).stages}
    assert not stages["slow"]["is_main"] and stages["slow"]["total_s"] >= 0.01
    assert stages["rollout"]["is_main"]
    events = chrome.read(path / "profile" / "trace.json.gz")["traceEvents"]
    (track,) = {event["tid"] for event in events if event["name"] == "slow"}
    assert track not in {event["tid"] for event in events if event["name"] == "rollout"}


def test_two_profiles_are_compared(run_dir: Path, tmp_path: Path, capsys: Capture):
    words = ["profile", "--compare", str(run_dir), str(run_dir / "profile"), "--html", str(tmp_path / "c.html")]
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["step"]["ratio"] == 1
    assert {row["name"]: row["ratio"] for row in facts["stages"]}["rollout"] == 1
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "update/forward" in shown and "1.00" in shown
    assert "takes 1.00 times as long" in (tmp_path / "c.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give one of ALGORITHM, --attach RUN and --compare A B"),
        (["grpo", "--attach", "x"], "give one of"),
        (["gropo"], "did you mean"),
        (["live"], "there is no algorithm"),
        (["grpo", "--steps", "0"], "--steps is 0; it must be from 1 to 100"),
        (["grpo", "--model", "tiny:llama", "--dry-run"], "--dry-run is a flag of `tunesmith train grpo`"),
        (["grpo", "--model", "tiny:llama", "--no.such-key", "1"], "no.such"),
        (["--attach", "nothing"], "there is no run 'nothing'"),
        (["--compare", "a", "b"], "there is no run 'a'"),
        (["--nonsense"], "is no flag of `tunesmith profile`"),
    ],
)
def test_wrong_words_are_refused(words: list[str], message: str, tmp_path: Path, monkeypatch, capsys: Capture):
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *words]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_live_loop_cannot_be_attached_to(tmp_path: Path, capsys: Capture):
    (tmp_path / "recipe.yaml").write_text("algorithm: live\n")
    assert main(["profile", "--attach", str(tmp_path)]) == 2
    assert "is a live loop" in capsys.readouterr().err


def test_a_run_that_has_ended_cannot_be_attached_to(run_dir: Path, capsys: Capture):
    assert main(["profile", "--attach", str(run_dir)]) == 2
    assert "does not run" in capsys.readouterr().err


def test_a_run_without_a_profile_cannot_be_compared(run_dir: Path, tmp_path: Path, capsys: Capture):
    (tmp_path / "recipe.yaml").write_text("algorithm: grpo\n")
    assert main(["profile", "--compare", str(run_dir), str(tmp_path)]) == 2
    assert "has no profile" in capsys.readouterr().err
