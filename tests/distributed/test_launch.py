"""How several processes start, fail and are resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from on_ranks import on_ranks, weights_of
from recipes import PROMPTS, demonstrations, grpo_recipe, sft_recipe, training

from tunesmith.core.errors import InputError, TrainingError
from tunesmith.distributed.ranks import gathered, rank, share_of
from tunesmith.trainers.api import Inputs
from tunesmith.trainers.resume import resume


def leave_alone(how: str) -> list[int]:
    """Rank 1 ends, or never arrives, where the others wait for it."""
    if rank() == 1:
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
    ],
)
def test_a_rank_that_does_not_come_is_named(how: str, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        on_ranks(2, partial(leave_alone, how), timeout_s=3)
    assert not [child for child in psutil.Process().children(recursive=True) if "rank" in child.name()]


def test_a_reward_that_no_other_process_can_import_is_refused(tmp_path: Path) -> None:
    cfg = grpo_recipe(tmp_path, scale={"ranks": 2})
    with pytest.raises(InputError, match=r"cannot be sent to the other ranks .*\./file\.py:name"):
        training(cfg, prompts=PROMPTS, rewards=[lambda completions, **_: [0.0 for _ in completions]])


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    inputs = Inputs(demonstrations=demonstrations())
    run = {"steps": 4, "checkpoint_every": 1}
    whole = training(sft_recipe(tmp_path / "whole", run=run), demonstrations=inputs.demonstrations)
    first = training(
        sft_recipe(tmp_path / "first", run={**run, "steps": 2}, scale={"ranks": 2}),
        demonstrations=inputs.demonstrations,
    )
    resume(first.run_dir, overrides={"run.steps": 3, "scale.ranks": 1}, inputs=inputs, progress=False)
    last = resume(first.run_dir, overrides={"run.steps": 4, "scale.ranks": 3}, inputs=inputs, progress=False)
    for name, tensor in weights_of(whole).items():
        assert (tensor - weights_of(last)[name]).abs().max() < 1e-4, name  # rates of 0.01, so 1 % of an update
    assert [row["loss"] for row in last.metrics] == pytest.approx([row["loss"] for row in whole.metrics], rel=1e-4)


@pytest.mark.slow
def test_the_processes_of_torchrun_are_used(tmp_path: Path) -> None:
    rows = [{"prompt": prompt, "completion": " is good"} for prompt in PROMPTS]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["train", "sft", "--model", "tiny:llama", "--demonstrations", str(data), "--steps", "2", "--json"]
    words += ["--run.dir", str(tmp_path), "--sft.micro-batch-tokens", "8", "--demonstrations.heldout-fraction", "0"]
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*started, "-m", "tunesmith", *words], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)  # of one process: the other prints nothing
    assert json.loads((Path(facts["run_dir"]) / "setup.json").read_text())["num_ranks"] == 2
    assert len(list(tmp_path.glob("*-sft-*"))) == 1
