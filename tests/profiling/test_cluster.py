"""`tunesmith doctor --cluster`: ranks measured against each other, and what is wrong with them."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tunesmith.apps.cli.main import main
from tunesmith.observe.profiling.cluster import RankFacts, as_rows, problems

VERSIONS = {"tunesmith": "1", "python": "3.11", "torch": "2.13", "cpu": "EPYC"}
FIRST = RankFacts(0, "a", VERSIONS, 8, 0.0, 0.0, 0.0, 0.0, 500.0, 100.0, sees_folder=True)
OTHERS = [replace(FIRST, rank=rank, host="b", latency_us=50.0, gb_per_s=2.0) for rank in (1, 2, 3)]


def test_real_ranks_measure_clocks_links_and_disks(tmp_path: Path):
    words = ["--standalone", "--nproc-per-node", "2", "-m", "tunesmith", "doctor", "--cluster", "--json"]
    command = [sys.executable, "-m", "torch.distributed.run", *words, "--dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    first, other = facts["ranks"]
    assert (first["rank"], other["rank"]) == (0, 1)
    assert first["versions"] == other["versions"]
    assert abs(other["clock_s"]) <= other["clock_error_s"] + 0.01  # one machine has one clock
    assert other["gb_per_s"] > 0 < other["latency_us"]
    assert min(first["disk_mb_per_s"], other["disk_mb_per_s"]) > 0
    assert first["sees_folder"] and other["sees_folder"]
    assert list(tmp_path.iterdir()) == []


def test_a_healthy_cluster_has_no_problem():
    assert problems([FIRST, *OTHERS]) == []
    assert len(as_rows([FIRST, *OTHERS])) == 5


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (replace(OTHERS[0], versions={**VERSIONS, "torch": "2.12"}), "torch 2.12, rank 0 has 2.13: install the same"),
        (replace(OTHERS[0], versions={**VERSIONS, "cpu": "Xeon"}), "cpu Xeon, rank 0 has EPYC: sums may differ"),
        (replace(OTHERS[0], clock_s=-5.0, clock_error_s=0.1), "its clock is -5.0 s off"),
        (replace(OTHERS[0], gb_per_s=0.5), "0.5 GB/s to rank 0, less than half of the usual 2"),
        (replace(OTHERS[0], disk_mb_per_s=3.0), "writes 3 MB/s"),
        (replace(OTHERS[0], sees_folder=False), "does not see what rank 0 writes"),
    ],
)
def test_each_problem_is_named_with_its_rank(bad: RankFacts, said: str):
    (line,) = problems([FIRST, bad, *OTHERS[1:]])
    assert line.startswith("rank 1 (b)")
    assert said in line


def test_a_clock_that_is_not_known_well_is_not_blamed():
    assert problems([FIRST, replace(OTHERS[0], clock_s=5.0, clock_error_s=4.5), *OTHERS[1:]]) == []


def test_one_process_is_told_how_to_start_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--cluster", "--dir", str(tmp_path)]) == 2
    assert "torchrun" in capsys.readouterr().err
    assert main(["doctor", "--cluster", "--dir", str(tmp_path / "none")]) == 2
    assert "--dir is" in capsys.readouterr().err
