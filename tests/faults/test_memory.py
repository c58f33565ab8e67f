"""Memory that runs out ends a run with the stage and with what to lower; its checkpoints are whole and it goes on."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from jobs import forked, go_on, outcome, the_run, train
from spoilt import told, train_in_little_memory

from tunesmith.base.runs.checkpoint import list_steps, load

Uninterrupted = Callable[[str], Mapping[str, object]]


@pytest.mark.parametrize(
    ("trainer", "stage", "visit", "advice"),
    [
        ("sft", "update/backward", 6, "sft.micro_batch_tokens (2000)"),
        ("reward", "update/forward", 6, "reward_model.micro_batch_size (8)"),
        ("reward", "evaluate", 2, "reward_model.micro_batch_size (8)"),
        ("ppo", "rollout", 6, "rollout.num_slots (128), rollout.kv_cache_mb or rollout.max_new_tokens"),
        ("ppo", "update/backward", 25, "ppo.micro_batch_size (2)"),
        ("grpo", "evaluate", 2, "rollout.num_slots (128), rollout.kv_cache_mb or rollout.max_new_tokens"),
        ("grpo", "update/forward", 12, "grpo.micro_batch_size (4)"),
        ("grpo", "update/optimizer", 12, "grpo.micro_batch_size (4)"),
    ],
)
def test_memory_that_runs_out_names_the_stage_and_what_to_lower(
    trainer: str, stage: str, visit: int, advice: str, tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    message, runs = tmp_path / "message", tmp_path / "runs"
    runs.mkdir()
    assert forked(told, message, train, trainer, runs, fault=f"{stage}:memory:{visit}") == 1
    run_dir = the_run(runs)
    assert f"memory ran out in `{stage}`; lower {advice}" in message.read_text()
    assert f"The checkpoints in {run_dir} are whole" in message.read_text()
    steps = list_steps(run_dir / "checkpoints")
    assert steps
    assert [load(run_dir / "checkpoints" / f"step-{step:06d}").step for step in steps] == steps
    assert forked(go_on, run_dir) == 0
    assert outcome(run_dir) == uninterrupted(trainer)


def test_a_real_lack_of_memory_is_told_the_same_way(tmp_path: Path) -> None:
    """The kernel refuses the memory of one large micro-batch."""
    message, runs = tmp_path / "message", tmp_path / "runs"
    runs.mkdir()
    assert forked(told, message, train_in_little_memory, runs, 500_000_000) == 1
    assert "memory ran out in `update/forward`; lower reward_model.micro_batch_size (256)" in message.read_text()
    assert "set model.gradient_checkpointing, or train fewer layers" in message.read_text()
    assert not (the_run(runs) / "result.json").exists()
