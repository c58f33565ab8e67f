"""The files for Slurm and Kubernetes: complete, consistent, and their commands are ours.

`kubernetes-validate --strict` and `bash -n` accept them; neither system is here to run them.
"""

import os
import re
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from tunesmith.apps.cli.doctor import DoctorOptions
from tunesmith.apps.cli.options import parse
from tunesmith.apps.cli.train import parse_train

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"

SBATCH_OPTIONS = {
    *("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "output"),
    *("open-mode", "requeue"),
}
"""Those of `man sbatch` that the script may use."""


def check_command(words: list[str]) -> None:
    """The words behind `-m tunesmith` are a command with its flags."""
    if words[0] == "doctor":
        assert parse(DoctorOptions, words[1:], "doctor").cluster
    else:
        assert words[0] == "train"
        options, rest = parse_train(words[1], words[2:])
        assert options.config == Path("recipe.yaml")
        assert options.run_id  # a job that is started again goes on
        assert rest == []


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose `srun` writes its words into `calls`, and whose `scontrol` knows two hosts."""
    for name, script in {
        "srun": f'#!/bin/bash\nprintf "%s\\t" "$@" >> {tmp_path}/calls; echo >> {tmp_path}/calls\n',
        "scontrol": "#!/bin/bash\nprintf 'node1\\nnode2\\n'\n",
    }.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, value in {"NNODES": "2", "JOB_ID": "7", "GPUS_ON_NODE": "8", "JOB_NODELIST": "node[1-2]"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    return tmp_path


def test_the_batch_script_measures_the_cluster_and_then_trains_on_all_gpus(slurm: Path):
    script = FOLDER / "slurm.sbatch"
    subprocess.run(["bash", str(script), "recipe.yaml", "ppo"], check=True, timeout=60)
    calls = [line.rstrip("\t").split("\t") for line in (slurm / "calls").read_text().splitlines()]
    assert len(calls) == 2
    for words, num_processes in zip(calls, ("1", "8"), strict=True):
        assert words[1] == "torchrun"
        assert words[words.index("--nnodes") + 1] == "2"
        assert words[words.index("--nproc-per-node") + 1] == num_processes
        assert words[words.index("--rdzv-endpoint") + 1] == "node1:29500"
        check_command(words[words.index("-m") + 2 :])
    assert subprocess.run(["bash", str(script)], capture_output=True, check=False).returncode != 0


def test_the_batch_script_asks_for_one_task_a_node_by_options_that_exist():
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", (FOLDER / "slurm.sbatch").read_text(), re.MULTILINE))
    assert set(options) <= SBATCH_OPTIONS
    assert options["ntasks-per-node"] == "1"


def test_the_pods_of_the_job_find_each_other_and_share_a_folder():
    service, job = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    words = container["args"]
    nodes = f"--nnodes={job['spec']['completions']}"
    assert job["spec"]["parallelism"] == job["spec"]["completions"]
    assert nodes in words
    assert f"--nproc-per-node={container['resources']['limits']['nvidia.com/gpu']}" in words
    # Pods of an indexed job are called JOB-INDEX, and are known under the name of the headless service.
    assert f"--master-addr={job['metadata']['name']}-0.{pod['spec']['subdomain']}" in words
    assert service["spec"]["clusterIP"] == "None"
    assert service["metadata"]["name"] == pod["spec"]["subdomain"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in pod["spec"]["volumes"]}
    check_command(words[words.index("-m") + 2 :])
