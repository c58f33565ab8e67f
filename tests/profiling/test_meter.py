"""The meter: what it measures, to which stage it belongs, what happens where a figure cannot be had, and its end.

No amount of time and no share of it is asserted that a busy machine could change.
"""

import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tunesmith import train
from tunesmith.base.config.load import load_recipe
from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core import system
from tunesmith.base.core.trace import span, trace
from tunesmith.base.runs import cgroup, environment
from tunesmith.base.runs.folder import MEASURED, read_jsonl
from tunesmith.engine.models.load import new_reward_model
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.learn.trainers.estimate import training_estimate
from tunesmith.learn.trainers.work import Rows, RunWork, Work
from tunesmith.observe.profiling import meter
from tunesmith.observe.profiling.meter import Meter, metering
from tunesmith.observe.profiling.sampler import api
from tunesmith.observe.profiling.sampler.api import Sampler, Samples

NUM_ASKS = 10


@pytest.fixture
def always_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow readings are due at each step."""
    monkeypatch.setattr(meter, "_SHORTEST_S", 0.0)
    monkeypatch.setattr(meter, "_PARTS_OF_COST", 0)


def sampled(sampler: Sampler, stage: str, work: Callable[[], object]) -> Samples:
    """What the sampler saw of `stage` while `work` was called again and again."""
    sampler.enter(stage)
    sampler.take()
    total = Samples(0, 0, 0, 0, 0, 0)
    while total.num_asks < NUM_ASKS:
        work()
        one = sampler.take().get(stage, Samples(0, 0, 0, 0, 0, 0))
        sums = (a + b for a, b in zip(astuple(total)[:-1], astuple(one)[:-1], strict=True))
        total = Samples(*sums, max(total.peak_bytes, one.peak_bytes))
    sampler.enter("")
    return total


@pytest.fixture
def sampler(require: Callable[..., str]) -> Any:
    require("c++", "g++", "clang++")
    sampler = Sampler()
    yield sampler
    sampler.stop()


def test_python_code_holds_the_lock_and_sleep_does_not(sampler: Sampler) -> None:
    busy = sampled(sampler, "python", lambda: sum(range(200_000)))
    idle = sampled(sampler, "sleep", lambda: time.sleep(0.05))
    assert 2 * busy.num_blocked > busy.num_asks
    assert busy.waited_ns / busy.num_asks > idle.waited_ns / idle.num_asks


def test_training_waits_for_the_lock_only_where_another_thread_has_it(sampler: Sampler) -> None:
    own = sampled(sampler, "own", lambda: sum(range(200_000)))
    is_over = threading.Event()
    other = threading.Thread(target=lambda: [sum(range(20_000)) for _ in iter(is_over.is_set, True)])
    other.start()
    waiting = sampled(sampler, "waiting", lambda: time.sleep(0.0001))
    is_over.set()
    other.join()
    assert own.num_training_waits < own.num_blocked
    assert waiting.num_training_waits * own.num_asks > own.num_training_waits * waiting.num_asks


def test_the_peak_of_memory_is_that_of_the_stage(sampler: Sampler) -> None:
    small = sampled(sampler, "small", lambda: time.sleep(0.02))
    held = bytearray(b"x") * 300_000_000
    big = sampled(sampler, "big", lambda: time.sleep(0.02))
    assert len(held) == 300_000_000
    assert big.peak_bytes - small.peak_bytes > 200_000_000


def test_more_stages_than_there_is_room_for_count_as_no_stage(sampler: Sampler) -> None:
    for index in range(100):
        sampler.enter(f"stage {index}")
    while not (taken := sampler.take()):
        time.sleep(0.02)
    assert set(taken) <= {"", *(f"stage {index}" for index in range(63))}


def test_stopping_twice_and_asking_a_stopped_sampler_is_harmless(sampler: Sampler) -> None:
    sampler.stop()
    sampler.stop()
    sampler.enter("late")
    assert sampler.take() == {}


SCRIPTS = {
    "exit": "",
    "error": "raise SystemExit(3)",
    "fork": "pid = os.fork()\nif not pid:\n    sampler.stop()\n    sys.exit(3)\nsys.exit(os.waitpid(pid, 0)[1] >> 8)",
    "forked pool": "import multiprocessing as m\n"
    "with m.get_context('fork').Pool(2) as pool: sys.exit(sum(pool.map(abs, [-1, -2])))",
    "many": "for _ in range(20): Sampler().stop()\nsys.exit(3)",
    "thread": "import threading\nthreading.Thread(target=lambda: sum(range(10**7))).start()\nsys.exit(3)",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_sampler_that_nobody_stops_lets_the_process_end(name: str, require: Callable[..., str]) -> None:
    require("c++", "g++", "clang++")
    # From 3.12 on Python warns of every fork beside threads.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script(SCRIPTS[name])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0 if name == "exit" else 3, "")


def test_ctrl_c_reaches_the_main_thread(require: Callable[..., str]) -> None:
    require("c++", "g++", "clang++")
    waits = "signal.signal(signal.SIGINT, signal.default_int_handler)\nprint('ready', flush=True)\n"
    waits += "while True: time.sleep(0.1)"  # a signal just before a sleep is seen after it
    with subprocess.Popen(
        [sys.executable, "-c", script(waits)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors


def script(body: str) -> str:
    return (
        "import os, signal, sys, time\nfrom tunesmith.observe.profiling.sampler.api import Sampler\n"
        f"sampler = Sampler()\ntime.sleep(0.1)\n{body}"
    )


@pytest.mark.usefixtures("always_slow")
def test_every_figure_of_this_machine_is_a_number_that_makes_sense(tmp_path: Path) -> None:
    with metering() as measured, trace():
        with span("work"), (tmp_path / "file").open("wb") as file:
            held = mmap.mmap(-1, 200_000_000)  # not from the heap, which may have kept as much that was freed before
            held.write(bytes(200_000_000))
            file.write(bytes(100_000))
            system.fsync(file.fileno())
            wait_for_samples()
        figures = measured.step()
    assert len(held) == 200_000_000
    assert all(name.startswith(MEASURED) for name in figures)
    assert min(value for name, value in figures.items() if name != "memory/growth_mb") >= 0
    assert figures["memory/growth_mb"] > 150
    assert figures["faults/minor"] > 0
    assert figures["io/fsync_s"] > 0
    assert figures["cpu/process"] > 0
    assert figures["cpu/stage/work"] > 0
    assert figures["cpu/cores"] <= psutil.cpu_count()
    assert any(name.startswith("gpu/") for name in figures) == torch.cuda.is_available()
    if psutil.LINUX:
        cores = [value for name, value in figures.items() if name.startswith("cpu/core/")]
        assert len(cores) == psutil.cpu_count() and max(cores) <= 1
        assert figures["cpu/threads"] >= threading.active_count()
        assert {"cpu/machine", "cpu/others", "cpu/stolen", "io/written_mb", "memory/available_gb"} <= set(figures)


def wait_for_samples() -> None:
    time.sleep(0.2)


def test_slow_readings_are_rare_and_fast_ones_are_not() -> None:
    with metering() as measured:
        rows = [measured.step() for _ in range(20)]
    assert all("cpu/process" in row and "faults/minor" in row for row in rows)
    assert sum("cpu/cores" in row for row in rows) <= 2


def test_nested_spans_and_spans_of_other_threads_belong_to_the_outermost_stage() -> None:
    measured = Meter()
    other = threading.Thread(target=lambda: (measured.enter("elsewhere"), measured.leave("elsewhere")))
    measured.enter("update")
    measured.enter("update/forward")
    other.start()
    other.join()
    measured.leave("update/forward")
    measured.leave("update")
    stages = {name for name in measured.step() if name.startswith("cpu/stage/")}
    assert stages == {"cpu/stage/update"}
    assert not any(name.startswith("cpu/stage/") for name in measured.step())


def test_a_stage_that_fails_is_closed() -> None:
    with metering() as measured, trace():
        with pytest.raises(KeyError), span("rollout"), span("decode"):
            raise KeyError
        with span("update"):
            pass
        assert {name for name in measured.step() if name.startswith("cpu/stage/")} == {
            "cpu/stage/rollout",
            "cpu/stage/update",
        }


def test_without_a_compiler_the_native_figures_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    api._library.cache_clear()
    with metering() as measured, trace():
        with span("work"):
            wait_for_samples()
        figures = measured.step()
    assert "cpu/process" in figures
    assert not [name for name in figures if name.startswith(("gil/", "memory/stage_peak_gb/"))]


@pytest.mark.usefixtures("always_slow")
def test_what_the_system_does_not_show_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "cpu_times", refuse)
    monkeypatch.setattr(psutil.Process, "io_counters", refuse)
    figures = Meter().step()
    assert not [name for name in figures if name.startswith(("io/read", "cpu/core/", "cpu/machine", "cpu/stolen"))]
    assert "cpu/process" in figures


@pytest.mark.parametrize(
    ("mine", "quota", "expected"),
    [
        ({0, 1, 2, 3}, None, 2.25),
        ({0, 1}, None, 0.75),
        ({3}, None, 0.0),  # a core that nobody else uses: a job bound to it, beside busy ones
        ({0, 1, 2, 3}, 1.0, 0.0),  # three cores are more than the quota would let it use
        ({0, 1, 2, 3}, 3.0, 1.25),
    ],
)
def test_others_are_those_that_take_cores_that_this_process_could_use(
    mine: set[int], quota: float | None, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment.os, "sched_getaffinity", lambda _: mine)
    monkeypatch.setattr(cgroup, "quota_cores", lambda: quota)
    busy = {f"cpu/core/{number}": seconds for number, seconds in enumerate((1.0, 0.0, 1.5, 0.0))}
    process_s = 0.25 if 0 in mine else 0.0
    figures = meter._slow_metrics({"wall_s": 1.0, "process_s": process_s, **busy})
    assert figures["cpu/machine"] == 2.5
    assert figures["cpu/others"] == pytest.approx(expected)


GROUPS = {
    "version 2": (
        "0::/a/b",
        {"a/cpu.max": "max 100000", "a/b/cpu.max": "150000 100000", "a/memory.max": "4000000000"},
        {"a/b/cpu.stat": "usage_usec 5\nthrottled_usec 2500000", "a/b/memory.max": "max"},
    ),
    "version 1": (
        "5:cpu,cpuacct:/a\n4:memory:/a\n0::/",
        {"cpu/a/cpu.cfs_quota_us": "150000", "cpu/a/cpu.cfs_period_us": "100000", "cpu/cpu.cfs_quota_us": "-1"},
        {"cpu/a/cpu.stat": "nr_throttled 3\nthrottled_time 2500000000", "memory/a/memory.limit_in_bytes": "4000000000"},
    ),
}


@pytest.mark.parametrize("version", GROUPS)
def test_limits_of_the_control_group_are_read(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group, *contents = GROUPS[version]
    for name, text in {**contents[0], **contents[1]}.items():
        (tmp_path / "sys" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys" / name).write_text(text)
    (tmp_path / "cgroup").write_text(group)
    monkeypatch.setattr(cgroup, "_ROOT", tmp_path / "sys")
    monkeypatch.setattr(cgroup, "_GROUPS", tmp_path / "cgroup")
    cgroup._folders.cache_clear()
    try:
        assert (cgroup.quota_cores(), cgroup.throttled_s(), cgroup.memory_bytes()) == (1.5, 2.5, 4_000_000_000)
        (tmp_path / "cgroup").unlink()
        cgroup._folders.cache_clear()
        assert (cgroup.quota_cores(), cgroup.throttled_s(), cgroup.memory_bytes()) == (None, None, None)
    finally:
        cgroup._folders.cache_clear()


def low_ids(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    return [sum(token < 130 for token in ids) / len(ids) for ids in completion_ids]


def trained(folder: Path, **settings: object) -> Path:
    """The folder of a run of four GRPO steps."""
    keys = {"run.dir": str(folder), "run.checkpoint_every": 2, "run.eval_every": 2, "prompts.heldout_fraction": 0.3}
    rollout = {"prompts_per_step": 2, "completions_per_prompt": 4, "max_new_tokens": 6}
    prompts = [f"{start} {index}" for start in ("The film", "A story") for index in range(8)]
    given: Mapping[str, Any] = {**keys, "rollout": rollout, **settings}
    return train.grpo(model="tiny:llama", prompts=prompts, reward=low_ids, steps=4, progress=False, **given).run_dir


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A run in float32, and the seconds that it took."""
    start_s = time.perf_counter()
    run_dir = trained(tmp_path_factory.mktemp("timed"), **{"model.dtype": "float32"})
    return run_dir, time.perf_counter() - start_s


def test_stages_are_the_time_between_steps_with_logging_checkpoints_and_evaluation(timed: tuple[Path, float]) -> None:
    run_dir, elapsed_s = timed
    rows: list[dict[str, Any]] = read_jsonl(run_dir / "metrics.jsonl")  # type: ignore[assignment]
    for row in rows:
        stages = {name: value for name, value in row.items() if name.startswith("time/") and name.count("/") == 1}
        step_s = stages.pop("time/step_s")
        assert sum(stages.values()) == pytest.approx(step_s)
        assert {"time/log_s", "time/data_s", "time/rollout_s", "time/update_s"} <= set(stages)
    assert [("time/evaluate_s" in row) for row in rows] == [False, True, False, True]
    # The copy for a checkpoint after step 2 delays step 3; the last one delays no step.
    assert rows[2]["time/checkpoint_s"] > 0
    assert sum(row["time/step_s"] for row in rows) < elapsed_s


def test_measuring_changes_nothing_but_what_is_measured(timed: tuple[Path, float], tmp_path: Path) -> None:
    first, second = timed[0], trained(tmp_path, **{"model.dtype": "float32", "run.measure": False})
    rows, plain = read_jsonl(first / "metrics.jsonl"), read_jsonl(second / "metrics.jsonl")
    assert (first / "final" / "model.safetensors").read_bytes() == (second / "final" / "model.safetensors").read_bytes()
    assert [unmeasured(row) for row in rows] == [unmeasured(row) for row in plain]
    assert all("cpu/process" in row and "faults/minor" in row for row in rows)
    measured_only = {name for row in rows for name in row} - {name for row in plain for name in row}
    assert measured_only and not {name for row in plain for name in row if name.startswith(("cpu/", "gil/", "faults/"))}


def unmeasured(row: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in row.items() if not name.startswith(MEASURED)}


KEYS = {
    *("engine", "engine_reason", "engine_exact", "forward", "device", "dtype", "best_dtype", "kernels"),
    *("kernels_reason", "num_ranks", "num_threads", "usable_cores", "cpu_quota", "num_parameters", "num_trained"),
    *("num_layers", "hidden_size", "vocab_size", "peak_flop_per_s", "memory_gb", "estimate_gb"),
    *("rollout_weights", "products_s", "int8_needs_old_policy"),
}


def test_the_record_of_how_a_run_computes_has_its_keys(timed: tuple[Path, float]) -> None:
    facts = json.loads((timed[0] / "setup.json").read_text())
    assert set(facts) == KEYS
    assert (facts["engine"], facts["engine_reason"], facts["forward"]) == ("native", "", "decoder")
    assert (facts["device"], facts["dtype"], facts["engine_exact"] in (True, False)) == ("cpu", "float32", True)
    assert facts["num_parameters"] == facts["num_trained"] > 0
    assert facts["peak_flop_per_s"]["float32"] > 0
    assert facts["estimate_gb"]["weights"] > 0


def test_the_record_says_why_the_engine_and_the_kernels_are_not_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    rollout = {"backend": "transformers", "prompts_per_step": 2, "completions_per_prompt": 2, "max_new_tokens": 4}
    facts = json.loads((trained(tmp_path, rollout=rollout) / "setup.json").read_text())
    assert (facts["engine"], facts["engine_exact"]) == ("transformers", False)
    assert "rollout.backend" in facts["engine_reason"]
    assert facts["kernels"] == "torch"
    assert "/nonexistent/compiler" in facts["kernels_reason"]


def test_a_preference_run_has_no_engine(tmp_path: Path) -> None:
    pairs = [{"prompt": f"Say {index}", "chosen": "yes", "rejected": f"no {index}"} for index in range(8)]
    result = train.reward(model="tiny:llama", pairs=pairs, steps=2, progress=False, **{"run.dir": str(tmp_path)})
    facts = json.loads((result.run_dir / "setup.json").read_text())
    assert set(facts) == KEYS
    assert (facts["engine"], facts["engine_exact"], facts["forward"]) == (None, None, "decoder")
    assert os.path.exists(result.run_dir / "metrics.jsonl")


@pytest.mark.parametrize("kind", ["tied", "untied", "reward"])
def test_operations_are_those_of_the_products_with_weights(kind: str) -> None:
    if kind == "reward":
        model = new_reward_model(ModelSection(name="tiny:llama", dtype="float32"), device=torch.device("cpu")).model
    else:
        model = tiny_model("llama", tie_word_embeddings=kind == "tied").model
    estimate = training_estimate(model, load_recipe("sft").recipe, RunWork(Rows(1, 1), Work()), micro_tokens=7)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.ones(1, 7, dtype=torch.long)).logits.sum().backward()
    found = counter.get_flop_counts()["Global"]
    products = sum(found.get(product, 0) for product in (torch.ops.aten.mm, torch.ops.aten.addmm))
    assert estimate.flop(7, 7) == pytest.approx(products, rel=0.05)


def test_the_rates_are_of_the_positions_that_were_computed(timed: tuple[Path, float]) -> None:
    run_dir, _ = timed
    facts = json.loads((run_dir / "setup.json").read_text())
    rows: list[dict[str, Any]] = read_jsonl(run_dir / "metrics.jsonl")  # type: ignore[assignment]
    for row in rows:
        assert row["samples_per_s"] == pytest.approx(8 / row["time/step_s"])
        assert row["mfu"] == pytest.approx(row["flop_per_s"] / facts["peak_flop_per_s"][facts["dtype"]])
        # At least one pass without gradients over each drawn token, at most four and a backward pass over each of all.
        all_tokens = row["num_tokens"] + row["rollout/prefill_tokens"] + row["rollout/shared_tokens"]
        flop = row["flop_per_s"] * row["time/step_s"]
        assert 2 * facts["num_parameters"] * row["num_tokens"] < flop < 12 * facts["num_parameters"] * all_tokens
