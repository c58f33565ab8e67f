"""Training by several processes, against one process."""

from pathlib import Path

import pytest
from on_ranks import difference, runs_of_all, samples_of, trained

MEASURED = ("time/", "memory/", "cpu/", "io/", "gil/", "samples_per_s", "tokens_per_s", "flop_per_s", "mfu")


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_ranks_train_as_one_process_does(tmp_path: Path, num_ranks: int) -> None:
    alone = dict(zip(names := list(runs_of_all(tmp_path)), trained(1, [*runs_of_all(tmp_path).values()]), strict=True))
    together = dict(zip(names, trained(num_ranks, [*runs_of_all(tmp_path).values()]), strict=True))
    for name in names:
        one, several = alone[name], together[name]
        assert difference(one, several) < 1e-6, name
        assert samples_of(one) == samples_of(several), name
        for row, other in zip(one.metrics, several.metrics, strict=True):
            for key in ("loss", "reward", "num_tokens", "entropy", "kl", "eval/reward", "eval/loss", "accuracy"):
                assert (key in row) == (key in other), (name, key)
                assert row.get(key, 0.0) == pytest.approx(other.get(key, 0.0), rel=1e-4, abs=1e-6), (name, key)
