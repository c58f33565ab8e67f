"""What an operation runs in: by device and dtype, said where it falls back, refused where asked for in vain."""

import logging
import re
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tunesmith.base.core.errors import NativeUnavailableError, TritonUnavailableError
from tunesmith.engine.kernels import native
from tunesmith.engine.kernels.native import Kernels, shared


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Operations written in both, in C++ alone, in Triton alone, and in neither; nothing has been warned of yet."""
    native.warn_once.cache_clear()
    for op, files in {"both": ("cpu.cpp", "triton_impl.py"), "cpp": ("cpu.cpp",), "tri": ("triton_impl.py",)}.items():
        (tmp_path / op).mkdir()
        for name in files:
            (tmp_path / op / name).write_text("")
    (tmp_path / "neither").mkdir()
    return tmp_path


@pytest.fixture
def cache(tmp_path, monkeypatch, require) -> None:
    require("c++", "g++", "clang++")
    monkeypatch.setenv("TUNESMITH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def no_interpreter(monkeypatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def on_gpu() -> torch.Tensor:
    """A tensor that says it stands on a GPU, without memory."""
    with FakeTensorMode():
        return torch.empty(2, device="cuda")


CPU = torch.zeros(2)


def test_auto_takes_native_on_a_cpu_where_there_is_one(sources: Path, cache: None):
    kernels = Kernels("auto", sources=sources)
    assert [kernels.picked(op, CPU) for op in ("both", "cpp", "tri", "neither")] == [
        "native",
        "native",
        "torch",
        "torch",
    ]


def test_other_dtypes_run_in_torch(sources: Path, cache: None, caplog):
    kernels = Kernels("auto", sources=sources)
    with caplog.at_level(logging.WARNING, logger="tunesmith"):
        assert kernels.picked("both", CPU.half()) == "torch"
        assert kernels.picked("both", CPU.bfloat16()) == "native"
    assert not caplog.records


def test_torch_is_what_it_says(sources: Path):
    kernels = Kernels("torch", sources=sources)
    assert [kernels.picked(op, tensor) for op in ("both", "neither") for tensor in (CPU, on_gpu())] == ["torch"] * 4


def test_without_a_compiler_auto_takes_torch(sources: Path, tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING, logger="tunesmith"):
        assert Kernels("auto", sources=sources).picked("both", CPU) == "torch"
    assert "no C++ compiler" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so nothing has to fall back")
def test_auto_says_once_why_a_gpu_gets_torch_and_says_nothing_where_there_is_no_kernel(sources: Path, caplog):
    kernels = Kernels("auto", sources=sources)
    with caplog.at_level(logging.WARNING, logger="tunesmith"):
        assert [kernels.picked(op, on_gpu()) for op in ("cpp", "neither", "tri", "tri")] == ["torch"] * 4
    (record,) = caplog.records
    assert "using torch instead of Triton for tri" in record.getMessage()


def test_native_that_cannot_run_raises(sources: Path):
    kernels = Kernels("native", sources=sources)
    with pytest.raises(NativeUnavailableError, match="tri has no native kernel; choose auto or torch"):
        kernels.picked("tri", CPU)
    with pytest.raises(NativeUnavailableError, match=r"cpp is for bfloat16 and float32 and was given torch\.float16"):
        kernels.picked("cpp", CPU.half())
    with pytest.raises(NativeUnavailableError, match="runs on the CPU and was given tensors on cuda"):
        kernels.picked("cpp", on_gpu())


def test_triton_that_cannot_run_raises(sources: Path, no_interpreter: None):
    kernels = Kernels("triton", sources=sources)
    with pytest.raises(TritonUnavailableError, match="cpp cannot run: there is none for this operation"):
        kernels.picked("cpp", CPU)
    with pytest.raises(TritonUnavailableError, match=r"given torch\.float64; give bfloat16, float16 or float32"):
        kernels.picked("tri", CPU.double())
    with pytest.raises(TritonUnavailableError, match=r"tensors on cpu; choose auto or torch.*set TRITON_INTERPRET=1"):
        kernels.picked("tri", CPU)
    with pytest.raises(TritonUnavailableError, match="cpp has no Triton kernel; choose auto, native or torch"):
        kernels.library("cpp", CPU.device)
    with pytest.raises(TritonUnavailableError, match="tensors on meta"):
        kernels.picked("tri", CPU.to("meta"))


def test_triton_runs_on_a_cpu_in_its_interpreter(sources: Path, monkeypatch):
    pytest.importorskip("triton", reason="needs Triton, which comes with torch's builds for CUDA")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert Kernels("triton", sources=sources).picked("tri", CPU) == "triton"
    assert Kernels("auto", sources=sources).picked("tri", CPU) == "torch"


@pytest.mark.parametrize(
    ("installed", "found", "least", "why"),
    [
        (True, (9, 0), (8, 0), ""),
        (True, (7, 0), (7, 0), ""),
        (True, (7, 5), (8, 0), r"needs compute capability 8\.0 and this GPU has 7\.5"),
        (True, None, (7, 0), "sees no CUDA device"),
        (False, (9, 0), (7, 0), r"not installed; run `pip install 'tunesmith\[gpu\]'`"),
    ],
)
def test_a_gpu_must_be_there_and_new_enough(installed: bool, found, least, why: str, monkeypatch):
    monkeypatch.setattr(native, "_triton_is_installed", lambda: installed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: found)
    problem = native.why_not_on(torch.device("cuda"), least)
    assert bool(problem) == bool(why)
    assert re.search(why, problem)


def test_shared_kernels_are_one_for_each_choice():
    assert shared("torch") is shared("torch")
    assert shared("torch").choice == "torch"
    assert native.has_native("preference") and native.has_triton("preference")
    assert not native.has_triton("adamw")
