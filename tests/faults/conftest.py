"""Makes `spoilt.py` and the small jobs of the trainers' tests importable; what tests of several faults share."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "trainers")]

Outcome = Mapping[str, object]


@pytest.fixture(scope="package")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """The outcome of a whole run of each trainer to which nothing happened, in a process of its own."""
    from jobs import forked, outcome, the_run, train

    known: dict[str, Outcome] = {}

    def outcome_of(trainer: str) -> Outcome:
        if trainer not in known:
            folder = tmp_path_factory.mktemp(trainer)
            assert forked(train, trainer, folder) == 0
            known[trainer] = outcome(the_run(folder))
        return known[trainer]

    return outcome_of
