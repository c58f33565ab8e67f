"""`benchmarks.int8_learning` on small sizes, and the picture of batches."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import batches_picture
from benchmarks.int8_learning import TASKS, main, time_to


@pytest.mark.nightly
def test_each_task_trains_with_both_weights(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--quick", "--seeds", "2", "--votes", "16", "--every", "8", "--pairs", "40")
    assert main([*words, "--json", "--quiet"]) == 0
    tasks = json.loads(capsys.readouterr().out)["tasks"]
    assert list(tasks) == list(TASKS)
    for one in tasks.values():
        assert one["difference"] == pytest.approx(one["int8"] - one["model"])
        assert len(one["trainings"]) == 2
    assert tasks["demo"]["logp_diff_mean"] > 0
    assert all(one["model"]["logp_diff_max"] == 0 for one in tasks["demo"]["trainings"])


def test_the_time_to_a_reward_is_that_of_the_first_steps_whose_mean_has_it() -> None:
    found = {"seconds": [2.0] * 8, "rewards": [0, 0, 0, 1, 1, 1, 1, 1]}
    assert time_to(found, 0.6) == 12.0
    assert time_to(found, 1.0) == 16.0
    assert time_to(found, 1.1) is None


def test_the_picture_has_a_line_for_each_contender(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, drawn = tmp_path / "figures.json", tmp_path / "picture.svg"
    speeds = {"transformers-sdpa@4": 50.0, "transformers-eager@4": 70.0, "native": 100.0, "llamacpp-q8_0": 200.0}
    batches = {
        f"batch{size}": {
            "decode_tokens_per_s": 150.0 * size,
            "contenders": {name: {"decode_tokens_per_s": speed * size} for name, speed in speeds.items()},
        }
        for size in (1, 4, 16)
    }
    figures.write_text(json.dumps({"model": "smollm2", "weights": "int8", "workloads": batches}))
    assert batches_picture.main([str(figures), str(drawn)]) == 0
    texts = {one.text for one in ElementTree.fromstring(drawn.read_text()).iter() if one.tag.endswith("text")}
    assert {"tunesmith, int8", "tunesmith", "llamacpp-q8_0", "transformers", "1", "4", "16"} <= texts
    curves = dict(batches_picture.curves_of(json.loads(figures.read_text())))
    assert curves["transformers"] == [(1, 70.0), (4, 280.0), (16, 1120.0)]
    figures.write_text(json.dumps({"model": "smollm2", "workloads": {"plain": batches["batch1"]}}))
    assert batches_picture.main([str(figures), str(drawn)]) == 2
    assert "no batches" in capsys.readouterr().err
