"""How several processes start, fail and are resumed."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from on_ranks import on_ranks, weights_of
from recipes import PROMPTS, demonstrations, grpo_recipe, sft_recipe, training

from tunesmith.base.config.algorithms.sft import SFTRecipe
from tunesmith.base.core.errors import InputError, TrainingError
from tunesmith.base.core.faults import VARIABLE
from tunesmith.base.runs.checkpoint import list_steps
from tunesmith.engine.distributed import launch, ranks
from tunesmith.engine.distributed.ranks import gathered, rank, share_of
from tunesmith.learn.trainers.api import Inputs
from tunesmith.learn.trainers.resume import resume
from tunesmith.learn.trainers.run import run
from tunesmith.learn.trainers.setup import RunResult


def leave_alone(how: str) -> list[int]:
    """Rank 1 ends, never arrives, or stops where the others wait for it."""
    if how == "stops":
        if rank() == 1:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        else:
            time.sleep(1.5)
    elif rank() == 1:
        if how == "raises":
            raise ValueError("no more")
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    return gathered([rank()], "numbers")


def all_numbers() -> list[int]:
    return gathered(share_of(range(7)))


def test_the_results_of_all_ranks_are_in_the_order_of_the_items() -> None:
    assert on_ranks(3, all_numbers) == list(range(7))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", "rank 1 ended: ValueError: no more"),
        ("is killed", "rank 1 was ended by SIGKILL"),
        ("hangs", "waited in `numbers` in vain: rank 1 did not arrive, its last was `start`"),
        ("stops", "waited in `numbers` in vain: rank 1 arrived and answers no more"),
    ],
)
def test_a_rank_that_does_not_come_is_named(how: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (launch, ranks):
        monkeypatch.setattr(module, "_GRACE_S", 2.0)
    with pytest.raises(TrainingError, match=message):
        on_ranks(2, partial(leave_alone, how), timeout_s=3)
    assert not [child for child in psutil.Process().children(recursive=True) if "rank" in child.name()]


class Hanging:
    """Work that another process never finishes reading."""

    def __call__(self) -> None:
        raise AssertionError("no rank should begin")

    def __reduce__(self) -> tuple[object, tuple[float]]:
        return time.sleep, (60.0,)


def test_a_rank_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_START_LIMIT", timedelta(seconds=0.5))
    with pytest.raises(TrainingError, match=r"rank 1 did not start within 0:00:00.5"):
        on_ranks(2, Hanging())


def test_a_reward_that_no_other_process_can_import_is_refused(tmp_path: Path) -> None:
    cfg = grpo_recipe(tmp_path, scale={"ranks": 2})
    with pytest.raises(InputError, match=r"cannot be sent to the other ranks .*\./file\.py:name"):
        training(cfg, prompts=PROMPTS, rewards=[lambda completions, **_: [0.0 for _ in completions]])


def exact_sft(folder: Path, num_steps: int, num_ranks: int = 1) -> SFTRecipe:
    """A run with a checkpoint of each step, whose weights do not depend on the number of ranks."""
    run = {"steps": num_steps, "checkpoint_every": 1}
    return sft_recipe(folder, run=run, scale={"ranks": num_ranks, "reduction": "exact"})


def same_weights(one: RunResult, other: RunResult) -> bool:
    """True if the final weights are equal to the bit."""
    mine, others = weights_of(one), weights_of(other)
    return all(torch.equal(tensor, others[name]) for name, tensor in mine.items())


@pytest.mark.parametrize("ranks", [(2, 1, 3), pytest.param((4, 2, 1, 4), marks=pytest.mark.slow)])
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path, ranks: Sequence[int]) -> None:
    inputs = Inputs(demonstrations=demonstrations())
    whole = run(exact_sft(tmp_path / "whole", 1 + len(ranks)), inputs, progress=False)
    result = run(exact_sft(tmp_path / "parts", 2, ranks[0]), inputs, progress=False)
    for num_steps, num_ranks in enumerate(ranks[1:], start=3):
        changed = {"run.steps": num_steps, "scale.ranks": num_ranks}
        result = resume(result.run_dir, overrides=changed, inputs=inputs, progress=False)
    assert same_weights(whole, result)
    assert [row["loss"] for row in whole.metrics] == [row["loss"] for row in result.metrics]


def torchrun(folder: Path, num_ranks: int, *options: str, **environment: str) -> subprocess.Popen[str]:
    """`train sft` under torchrun."""
    rows = [{"prompt": prompt, "completion": " is good"} for prompt in PROMPTS]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["train", "sft", "--model", "tiny:llama", "--demonstrations", str(data), "--json", "--run.dir", str(folder)]
    words += ["--sft.micro-batch-tokens", "8", "--demonstrations.heldout-fraction", "0", "--run.num-threads", "1"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks), "--max-restarts", "2"]
    return subprocess.Popen(
        [*launch, "-m", "tunesmith", *words, *options],
        env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> Mapping[str, Any]:
    """What it prints: of one rank, since the others print nothing."""
    out, complaints = process.communicate(timeout=400)
    assert process.returncode == 0, complaints
    return json.loads(out)


@pytest.mark.slow
def test_the_processes_of_torchrun_are_used(tmp_path: Path) -> None:
    facts = ended(torchrun(tmp_path, 2, "--steps", "2"))
    assert json.loads((Path(facts["run_dir"]) / "setup.json").read_text())["num_ranks"] == 2
    assert len(list(tmp_path.glob("*-sft-*"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_torchrun_saves_and_leaves(tmp_path: Path, number: int) -> None:
    process = torchrun(tmp_path, 2, "--steps", "100000", "--run.checkpoint-every", "100000")
    try:
        end = time.monotonic() + 300
        while not any(file.stat().st_size for file in tmp_path.glob("*-sft-*/metrics.jsonl")):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        process.send_signal(number)
        process.communicate(timeout=60)
    finally:
        process.kill()
    (run_dir,) = tmp_path.glob("*-sft-*")
    assert list_steps(run_dir / "checkpoints")


@pytest.mark.slow
def test_a_run_with_an_id_goes_on_when_torchrun_starts_its_ranks_again(tmp_path: Path) -> None:
    exact = ("--scale.reduction", "exact", "--run.checkpoint-every", "1")
    (tmp_path / "whole").mkdir()
    whole = ended(torchrun(tmp_path / "whole", 2, "--steps", "4", *exact))
    # Rank 1 is killed when it writes its part of its second checkpoint, by each start that comes so far.
    fault = {VARIABLE: "checkpoint/rank_1:kill:2"}
    first = ended(torchrun(tmp_path, 2, "--steps", "3", "--run-id", "job", *exact, **fault))
    last = ended(torchrun(tmp_path, 3, "--steps", "4", "--run-id", "job", *exact))
    assert last["run_dir"] == first["run_dir"]
    assert len(list(tmp_path.glob("*-sft-*"))) == 1
    resumes = [json.loads(line) for line in (Path(last["run_dir"]) / "resumes.jsonl").read_text().splitlines()]
    assert [one["changes"] for one in resumes] == [{}, {}, {"run.steps": [3, 4], "scale.ranks": [2, 3]}]
    assert last["last_metrics"]["loss"] == whole["last_metrics"]["loss"]
