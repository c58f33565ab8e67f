"""Training by several processes, against one process."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from on_ranks import difference, runs_of_all, samples_of, trained

MEASURED = ("time/", "memory/", "cpu/", "io/", "gil/", "samples_per_s", "tokens_per_s", "flop_per_s", "mfu")


BY_DAY = ("sft", "dpo", "ppo", "grpo", "environment")
ALL = tuple(runs_of_all(Path()))


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [
        (2, BY_DAY),
        pytest.param(2, tuple(name for name in ALL if name not in BY_DAY), marks=pytest.mark.nightly),
        pytest.param(4, ALL, marks=pytest.mark.slow),
    ],
)
def test_several_ranks_train_as_one_process_does(tmp_path: Path, num_ranks: int, names: Sequence[str]) -> None:
    alone, together = (
        dict(zip(names, trained(number, [runs_of_all(tmp_path)[name] for name in names]), strict=True))
        for number in (1, num_ranks)
    )
    for name in names:
        one, several = alone[name], together[name]
        assert difference(one, several) < 1e-6, name
        assert samples_of(one) == samples_of(several), name
        for row, other in zip(one.metrics, several.metrics, strict=True):
            for key in ("loss", "reward", "num_tokens", "entropy", "kl", "eval/reward", "eval/loss", "accuracy"):
                assert (key in row) == (key in other), (name, key)
                assert row.get(key, 0.0) == pytest.approx(other.get(key, 0.0), rel=1e-4, abs=1e-6), (name, key)
