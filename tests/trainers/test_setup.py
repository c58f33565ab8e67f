"""Number of threads of a run whose recipe names none."""

import pytest

from tunesmith.base.config.scale_sections import ScaleSection
from tunesmith.learn.trainers import setup

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
