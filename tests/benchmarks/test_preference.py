"""The benchmark of votes measures both functions at each size of a block, and writes what it found."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import preference


@pytest.mark.nightly
def test_every_setting_of_the_smallest_batch_is_measured_and_written(tmp_path: Path):
    out, num_threads = tmp_path / "found.json", torch.get_num_threads()
    options = {"--device": "cpu", "--threads": num_threads, "--rounds": 2, "--most": 1000, "--out": out}
    assert preference.main([str(word) for option in options.items() for word in option]) == 0
    facts = json.loads(out.read_text(encoding="utf-8"))
    settings = [(one["function"], one["dtype"], one["block"]) for one in facts["measured"]]
    assert settings == [
        (function, dtype, block)
        for dtype in ("float32", "bfloat16")
        for block in (None, 64, 128, 256, 512)
        for function in ("process_user_preference", "iterative_tuning")
    ]
    assert all(one["num_pairs"] == 1000 and one["deterministic"] for one in facts["measured"])
    assert all(one["gb_per_s"] > 0 and one["copy_share"] > 0 for one in facts["measured"])
    assert facts["num_threads"] == num_threads
