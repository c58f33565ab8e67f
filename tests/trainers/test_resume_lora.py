"""A run of adapters that was interrupted ends as one that was not: the same adapters, metrics and tokens."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from jobs import TRAINERS, forked, go_on, outcome, the_run, train
from safetensors.torch import load_file

from tunesmith.base.core import faults
from tunesmith.base.core.errors import RunError, StoppedError
from tunesmith.base.core.faults import VARIABLE
from tunesmith.base.runs.checkpoint import list_steps

KILLED = -9
LORA = {"rank": 4}
VISITS = {"sft": 7, "reward": 7, "dpo": 19, "ppo": 25, "grpo": 13, "best_of_n": 13, "distill": 13}
"""Which backward pass is the first of step 7."""


def backward(trainer: str) -> str:
    """The plan of a kill in step 7."""
    return f"update/backward:kill:{VISITS[trainer]}"


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Plans a fault in this process; an empty plan takes it back."""

    def plan(text: str) -> None:
        monkeypatch.setenv(VARIABLE, text)
        faults._plan.cache_clear()

    yield plan
    plan("")


@pytest.mark.parametrize("trainer", TRAINERS)
def test_killed_and_resumed_in_another_process_a_run_ends_the_same(trainer: str, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    assert forked(train, trainer, whole, "float32", LORA) == 0
    assert forked(train, trainer, killed, "float32", LORA, fault=backward(trainer)) == KILLED
    assert list_steps(the_run(killed) / "checkpoints")[-1] >= 4
    assert forked(go_on, the_run(killed)) == 0
    assert outcome(the_run(killed)) == outcome(the_run(whole))


@pytest.mark.parametrize(
    ("trainer", "dtype", "lora"),
    [
        ("sft", "bfloat16", {"use_dora": True, "dropout": 0.2}),
        ("reward", "float32", {"dropout": 0.2}),
        ("dpo", "bfloat16", {"dropout": 0.2}),
        ("live", "bfloat16", {"use_dora": True}),
        ("kto", "float32", {}),
        ("ppo", "bfloat16", {"use_rslora": True}),
        ("grpo", "bfloat16", {"use_dora": True}),
        *((trainer, "bfloat16", {"base": "int8"}) for trainer in (*TRAINERS, "live")),
        ("grpo", "float32", {"base": "int8"}),
    ],
)
def test_stopped_by_a_signal_and_resumed_a_run_ends_the_same(
    trainer: str, dtype: str, lora: Mapping[str, object], tmp_path: Path, fault: Callable[[str], None]
) -> None:
    lora = {**LORA, **lora}
    whole = train(trainer, tmp_path / "whole", dtype, lora, steps=5)
    fault("update/forward:term:3")
    with pytest.raises(StoppedError):
        train(trainer, tmp_path / "stopped", dtype, lora, steps=5)
    fault("")
    run_dir = the_run(tmp_path / "stopped")
    assert outcome(go_on(run_dir)) == outcome(whole)


@pytest.mark.parametrize("trainer", ["dpo", "live"])
def test_adapters_that_are_trained_on_are_the_reference_of_a_resumed_run_too(
    trainer: str, tmp_path: Path, fault: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = train("sft", tmp_path / "first", lora=LORA, steps=2)
    monkeypatch.setattr("jobs.BASE", str(first))
    whole = train(trainer, tmp_path / "whole", steps=5)
    fault("update/forward:term:3")
    with pytest.raises(StoppedError):
        train(trainer, tmp_path / "stopped", steps=5)
    fault("")
    assert outcome(go_on(the_run(tmp_path / "stopped"))) == outcome(whole)
    adapters, started = (load_file(run / "final" / "adapter_model.safetensors") for run in (whole, first))
    assert adapters.keys() == started.keys() and any(not adapters[key].equal(started[key]) for key in adapters)


def test_a_base_that_changed_is_refused(
    tmp_path: Path, fault: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = (train("sft", tmp_path / name, steps=steps) for name, steps in (("first", 1), ("other", 2)))
    monkeypatch.setattr("jobs.BASE", str(first))
    fault("update/forward:term:3")
    with pytest.raises(StoppedError):
        train("dpo", tmp_path / "stopped", lora=LORA, steps=5)
    fault("")
    (other / "final" / "model.safetensors").replace(first / "final" / "model.safetensors")
    with pytest.raises(RunError, match=r"the model .* changed since its checkpoint"):
        go_on(the_run(tmp_path / "stopped"))
