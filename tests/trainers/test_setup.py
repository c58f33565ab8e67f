"""Number of threads of a run whose recipe names none; memory that a run gives back."""

from pathlib import Path

import pytest
from recipes import pairs, reward_recipe, training

from tunesmith.base.config.scale_sections import ScaleSection
from tunesmith.learn.trainers import session, setup

TORCHRUN = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost"}


@pytest.mark.parametrize(("named", "expected"), [(None, 4), ("3", 3), ("0", 4), ("4,2", 4), ("", 4)])
def test_the_variable_of_the_user_wins_over_the_cores(
    named: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if named is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", named)
    monkeypatch.setattr(setup, "usable_cores", lambda: 8)
    assert setup.default_threads(ScaleSection(ranks=2)) == expected


def test_the_variable_of_torchrun_is_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TORCHRUN, "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(setup, "usable_cores", lambda: 8)
    assert setup.default_threads(ScaleSection()) == 4


@pytest.mark.parametrize(("available_gb", "is_trimmed"), [(0.5, True), (2.0, False)])
def test_freed_memory_is_given_back_after_a_step_only_if_there_is_more_than_the_system_has_left(
    available_gb: float, is_trimmed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[None] = []
    monkeypatch.setattr(session, "available_gb", lambda: available_gb)
    monkeypatch.setattr(session, "unused_heap_gb", lambda: 1.0)
    monkeypatch.setattr(session, "trim_memory", lambda: steps.append(None))
    result = training(reward_recipe(tmp_path, reward_model={"num_epochs": 1}), pairs=pairs())
    assert len(steps) == (result.metrics[-1]["step"] if is_trimmed else 0)
