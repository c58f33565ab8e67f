"""A contender in a process of its own: answers, refusals, death, memory counted apart."""

import os

import pytest

from benchmarks.contenders import ModelSettings, Setting
from benchmarks.process import Process
from benchmarks.workloads import Drawn, workload
from tunesmith.base.core.errors import InputError, TrainingError
from tunesmith.engine.models.tiny import byte_tokenizer

pytestmark = pytest.mark.nightly  # each starts a process that imports torch and transformers

TARGET = "benchmarks.contenders:Transformers"
MODEL = ModelSettings("tiny:llama", "float32", 1)


def test_a_contender_answers_and_counts_its_own_memory():
    work = workload("plain", byte_tokenizer(), 256, quick=True)
    with Process(TARGET, MODEL, num_threads=1) as process:
        setting = Setting("eager", 3)
        drawn: Drawn = process.call("draw", work, 1, keeps_tokens=True, setting=setting)
        again: Drawn = process.call("draw", work, 1, keeps_tokens=True, setting=setting)
        peak_gb = process.call("peak")
    assert drawn.lengths == (8,) * 8
    assert drawn.tokens == again.tokens
    assert 0.1 < peak_gb < 5
    assert drawn.seconds > 0


def test_input_that_a_contender_refuses_is_refused_here():
    with pytest.raises(InputError, match="nowhere"):
        Process(TARGET, ModelSettings("tiny:nowhere", "float32", 1), num_threads=1)


def test_a_contender_that_dies_says_what_it_wrote_last():
    with pytest.raises(TrainingError, match=r"no_such_function"):
        Process("benchmarks.contenders:no_such_function", MODEL, num_threads=1)


def test_a_contender_that_takes_too_long_is_ended():
    work = workload("plain", byte_tokenizer(), 256, quick=True)
    process = Process(TARGET, MODEL, num_threads=1)
    with pytest.raises(TrainingError, match=r"no answer within 0\.001 s"):
        process.call("draw", work, 1, setting=Setting("eager", 3), timeout_s=0.001)
    assert process._process.poll() is not None
    process.close()


def test_a_process_that_is_closed_ends():
    process = Process(TARGET, MODEL, num_threads=1)
    pid = process._process.pid
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
