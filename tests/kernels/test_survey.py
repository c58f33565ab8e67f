"""What each operation would run in is what it is picked to run in, and nothing is compiled to find out."""

import torch

from tunesmith.engine.kernels.native import Kernels, has_native, operations, survey

OPERATIONS = ("sample", "logprob", "preference", "masked_softmax", "adamw")


def on_cpu() -> dict[str, tuple[str, str]]:
    return {pick.op: (pick.backend, pick.why) for pick in survey() if pick.device == "cpu"}


def test_every_operation_is_named_once_for_the_cpu_and_picked_as_said(native):
    found = on_cpu()
    assert list(found) == operations()
    assert set(OPERATIONS) <= set(found)
    assert "attention_gradient" not in found  # a part of attention
    for op, (backend, why) in found.items():
        assert backend == ("native" if has_native(op) else "torch")
        assert bool(why) == (backend == "torch")
    assert Kernels().picked("preference", torch.zeros(2)) == found["preference"][0]


def test_without_a_compiler_each_says_so_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNESMITH_CACHE", str(tmp_path / "cache"))
    survey()
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert on_cpu()["preference"][0] == "torch"
    assert "no C++ compiler" in on_cpu()["preference"][1]
    assert not (tmp_path / "cache").exists()
