"""Kernels in C++: compiled once, never stale, safe beside each other, and without a compiler torch takes over aloud."""

import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from tunesmith.base.core.errors import InputError, NativeUnavailableError
from tunesmith.engine.kernels import native
from tunesmith.engine.kernels.native import Kernels, load

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TUNESMITH_CACHE", str(tmp_path / "cache"))
    native.warn_once.cache_clear()  # another test may have had the same to say
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def sources(tmp_path, require) -> Path:
    """A folder with one operation, `answer`, which gives 41 plus a number of a shared header."""
    require("c++", "g++", "clang++")
    (tmp_path / "sources" / "answer").mkdir(parents=True)
    (tmp_path / "sources" / "shared.hpp").write_text("constexpr int kMore = 1;\n")
    write(tmp_path / "sources", '#include "shared.hpp"\nextern "C" int answer() { return 41 + kMore; }\n')
    return tmp_path / "sources"


@pytest.fixture
def no_compiler(monkeypatch, cache):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)


def write(sources: Path, text: str) -> None:
    (sources / "answer" / "cpu.cpp").write_text(text)


def run(code: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )


def test_functions_that_were_called_can_be_wrapped_for_a_while(sources, cache):
    library, calls = load("answer", sources=sources), []
    plain = library.answer
    with native.wrapped(lambda function: lambda: calls.append(function.__name__) or function() + 1):
        assert library.answer() == 43
    assert library.answer is plain and library.answer() == 42
    assert calls == ["answer"]


def test_a_kernel_is_compiled_once_and_taken_from_the_cache_afterwards(sources, cache, monkeypatch, caplog):
    with caplog.at_level(logging.INFO, logger="tunesmith"):
        assert load("answer", sources=sources).answer() == 42
    (record,), (library,) = caplog.records, cache.iterdir()
    assert record.getMessage().startswith("compiled the kernel answer in ") and str(cache) in record.getMessage()
    monkeypatch.setattr(native, "_build", lambda *_: pytest.fail("compiled a second time"))
    assert load("answer", sources=sources).answer() == 42
    assert list(cache.iterdir()) == [library]


def test_a_changed_source_is_compiled_anew(sources, cache):
    assert load("answer", sources=sources).answer() == 42
    write(sources, 'extern "C" int answer() { return 7; }\n')
    assert load("answer", sources=sources).answer() == 7


def test_a_changed_header_is_compiled_anew(sources, cache):
    assert load("answer", sources=sources).answer() == 42
    (sources / "shared.hpp").write_text("constexpr int kMore = 2;\n")
    assert load("answer", sources=sources).answer() == 43


@pytest.mark.parametrize("what", ["flags", "compiler"])
def test_other_flags_or_another_compiler_have_their_own_entry(what, sources, cache, monkeypatch, require):
    load("answer", sources=sources)
    if what == "flags":
        monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-DMORE"))
    else:
        monkeypatch.setenv("CXX", f"{require('g++', 'clang++')} -mno-avx")
    load("answer", sources=sources)
    assert len(list(cache.iterdir())) == 2


def test_processes_that_compile_at_once_all_get_the_library(sources, cache):
    code = f"""
        from pathlib import Path
        from tunesmith.engine.kernels.native import load
        print("ready", flush=True)
        input()
        print(load("answer", sources=Path({str(sources)!r})).answer())
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.communicate(timeout=120)[0] for process in processes] == ["42\n"] * 3
    assert [path.suffix for path in cache.iterdir()] == [".so"]


def test_denormals_survive_loading_a_kernel(require):
    require("c++", "g++", "clang++")
    code = """
        import torch
        from tunesmith.engine.kernels.native import Kernels

        def smallest():
            torch.set_num_threads(2)
            single, double = torch.full((1 << 20,), 1e-40), torch.full((8,), 1e-310, dtype=torch.float64)
            return (single * 1.0).min().item(), (double * 1.0).min().item()

        before = smallest()
        assert Kernels("native").library("sample", torch.device("cpu")) is not None
        assert smallest() == before and min(before) > 0, (before, smallest())
    """
    process = run(code)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors


def test_without_a_compiler_auto_takes_torch_and_says_so_once(sources, no_compiler, caplog):
    objects = [Kernels("auto", sources=sources) for _ in range(2)]
    (sources / "other").mkdir()
    (sources / "other" / "cpu.cpp").write_text("")
    with caplog.at_level(logging.WARNING, logger="tunesmith"):
        for kernels in objects:
            assert [kernels.library(op, CPU) for op in ("answer", "other", "answer")] == [None] * 3
    (record,) = caplog.records
    assert "using torch instead of compiled kernels" in record.getMessage()
    assert "none of c++, g++, clang++ on PATH" in record.getMessage()


def test_a_compiler_that_fails_is_named_once_and_training_goes_on(tmp_path, cache):
    code = f"""
        from tunesmith.base.core import log
        from tunesmith import train
        log.configure()
        made = train.grpo(
            model="tiny:llama",
            prompts=["a", "b"],
            reward=lambda completions, **_: [float(len(text)) for text in completions],
            steps=2,
            **{{"run.dir": {str(tmp_path)!r}, "rollout.max_new_tokens": 4}},
        )
        assert len(made.metrics) == 2
    """
    process = run(code, CXX="/bin/false", TUNESMITH_CACHE=str(tmp_path / "cache"))
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert errors.count("/bin/false") == errors.count("using torch instead of compiled kernels") == 1, errors


def test_a_compiler_without_openmp_is_refused_by_the_survey(tmp_path, monkeypatch):
    """Apple's clang++, as found on a Mac."""
    compiler = tmp_path / "clang++"
    compiler.write_text("#!/bin/sh\necho \"clang: error: unsupported option '-fopenmp'\" >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    picks = {pick.op: pick for pick in native.survey() if pick.device == "cpu"}
    assert picks["linear"].backend == "torch"
    assert "unsupported option '-fopenmp'" in picks["linear"].why


def test_without_a_compiler_a_requested_native_kernel_raises(sources, no_compiler):
    with pytest.raises(NativeUnavailableError, match=r"no C\+\+ compiler.*Install g\+\+"):
        Kernels("native", sources=sources).library("answer", CPU)


def test_a_compiler_named_by_the_environment_must_exist(monkeypatch, cache, sources):
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    with pytest.raises(NativeUnavailableError, match="CXX names 'no-such-compiler'"):
        load("answer", sources=sources)


def test_a_source_that_does_not_compile_is_reported_with_the_compilers_first_lines(sources, cache, caplog):
    write(sources, "int answer( { return 42; }\n" * 100)
    with pytest.raises(NativeUnavailableError, match=r"cannot compile .*cpu.cpp:\n.*error") as raised:
        load("answer", sources=sources)
    assert len(str(raised.value).splitlines()) <= 7
    with caplog.at_level(logging.WARNING, logger="tunesmith"):
        assert Kernels("auto", sources=sources).library("answer", CPU) is None
    assert "cannot compile" in caplog.text
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(sources, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TUNESMITH_CACHE", str(tmp_path / "file"))
    with pytest.raises(NativeUnavailableError, match="set TUNESMITH_CACHE"):
        load("answer", sources=sources)


def test_a_damaged_library_is_an_error_not_a_crash(sources, cache):
    code = f"""
        from pathlib import Path
        from tunesmith.engine.kernels.native import load
        load("answer", sources=Path({str(sources)!r}))
    """
    assert run(code).wait(timeout=120) == 0
    (library,) = cache.iterdir()
    library.write_bytes(b"no library")
    with pytest.raises(NativeUnavailableError, match="cannot write or load"):
        load("answer", sources=sources)


def test_torch_is_never_compiled_and_other_devices_are_left_to_it(sources, no_compiler):
    assert Kernels("torch", sources=sources).library("answer", CPU) is None
    assert Kernels("auto", sources=sources).library("answer", torch.device("meta")) is None
    with pytest.raises(NativeUnavailableError, match="runs on the CPU and was given tensors on meta"):
        Kernels("native", sources=sources).library("answer", torch.device("meta"))


def test_an_unknown_choice_is_refused():
    with pytest.raises(InputError, match="'fast'; allowed: auto, native, triton, torch"):
        Kernels("fast")
