"""GRPO with completions by a real vLLM server, and with ours: what both learn, how far their log-probs are apart, and
what the death of the server costs.

`TUNESMITH_VLLM_PYTHON` names a Python that has vLLM (its CPU build will do). The server is killed with all its
processes at step 7, while a thread starts it again. Prints one JSON object.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

import psutil

import tunesmith
from benchmarks.common import machine_facts
from benchmarks.process import free_port
from benchmarks.vllm_engine import vllm_python
from tunesmith.base.config.algorithms.grpo import GRPORecipe
from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import InputError
from tunesmith.engine.models.export import ModelCard, save_final
from tunesmith.engine.models.load import load_policy
from tunesmith.learn.trainers.api import Inputs
from tunesmith.learn.trainers.run import run

KILL_AT = 7
_PROMPTS = ("The film was", "My weekend in town", "In the old house", "She opened the letter and")
_START_S = 600.0
_ENVIRONMENT = {
    "PYTHONPATH": str(Path(tunesmith.__file__).parent.parent),
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
"""One GiB for keys and values, no pinned threads, no reports to anybody."""


class VLLMServer:
    """A vLLM server of the float32 model in `folder`, on a free port, in processes of its own."""

    def __init__(self, python: str, folder: Path, log: Path, *, max_model_len: int = 256) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._command = [
            *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--dtype", "float32"),
            *("--host", "127.0.0.1", "--port", str(port), "--enforce-eager"),
            *("--max-model-len", str(max_model_len), "--logprobs-mode", "processed_logprobs"),
            *("--worker-extension-cls", "tunesmith.engine.rollout.remote.worker.WeightLoader"),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers.

        Raises:
            InputError: it ended, or took too long; with the end of its log.
        """
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env={**os.environ, **_ENVIRONMENT}, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            except OSError:
                time.sleep(0.5)
        raise InputError(f"vLLM did not start:\n{self._log.read_text(errors='replace')[-4000:]}")

    def kill(self) -> None:
        """Kill it and all its processes."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Vowels:
    """The reward: the share of e, a and o among the letters. At the call of step `kill_at` the server dies."""

    def __init__(self, server: VLLMServer | None, kill_at: int) -> None:
        self._server, self._kill_at = server, kill_at
        self._num_calls = 0

    def __call__(self, completions: Sequence[str], **_: object) -> list[float]:
        """Score the completions of one step."""
        self._num_calls += 1
        if self._server is not None and self._num_calls == self._kill_at:
            self._server.kill()
            threading.Thread(target=self._server.start).start()
        letters = ["".join(filter(str.isalpha, text.lower())) for text in completions]
        return [sum(map(text.count, "eao")) / max(1, len(text)) for text in letters]


def train(folder: Path, model: str, num_steps: int, server: VLLMServer | None, kill_at: int = 0) -> dict[str, object]:
    """Figures of a run on the own engine, or on `server`, which dies at step `kill_at`."""
    drawing: dict[str, object] = {}
    if server is not None:
        drawing = {"backend": "vllm", "server_url": server.url, "server_timeout_s": _START_S}
    recipe = GRPORecipe.model_validate(
        {
            "model": {"name": model, "dtype": "float32", "num_trainable_layers": 6},
            "rollout": {"prompts_per_step": 4, "completions_per_prompt": 8, "max_new_tokens": 16, **drawing},
            "grpo": {"micro_batch_size": 8},
            "optimizer": {"learning_rate": 1e-4},
            "run": {"dir": str(folder), "steps": num_steps, "checkpoint_every": 0},
        }
    )
    started_s = time.monotonic()
    result = run(recipe, Inputs(prompts=list(_PROMPTS), rewards=[Vowels(server, kill_at)]), progress=False)
    rows, third = result.metrics, max(1, num_steps // 3)
    rewards = [row["reward"] for row in rows]
    figures: dict[str, object] = {
        "steps": len(rows),
        "reward_first_third": sum(rewards[:third]) / third,
        "reward_last_third": sum(rewards[-third:]) / third,
        "logp_diff_max": max(row["rollout/logp_diff_max"] for row in rows),
        "logp_diff_mean": sum(row["rollout/logp_diff_mean"] for row in rows) / len(rows),
        "minutes": (time.monotonic() - started_s) / 60,
        "rollout_s_median": sorted(row["time/rollout_s"] for row in rows)[len(rows) // 2],
    }
    if server is not None:
        figures["retries"] = sum(row["rollout/server_retries"] for row in rows)
        figures["weight_check_diff_max"] = max(row.get("rollout/weight_check_diff", 0.0) for row in rows)
        figures["load_s_median"] = sorted(row["time/rollout/load_s"] for row in rows)[len(rows) // 2]
    return figures


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, and return 0 if the run with the killed server took all its steps and learnt."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(words)
    python = vllm_python()
    load = psutil.getloadavg()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        loaded = load_policy(ModelSection(name=options.model, dtype="float32"))  # type: ignore[call-arg]
        served = save_final(loaded.model, loaded.tokenizer, folder / "served", ModelCard(options.model, "none"))
        own = train(folder / "own", options.model, options.steps, None)
        server = VLLMServer(python, served, folder / "vllm.log")
        server.start()
        try:
            drawn = train(folder / "vllm", options.model, options.steps, server, KILL_AT)
        finally:
            server.kill()
    facts = {**machine_facts(), "load_before": load, "load_after": psutil.getloadavg()}
    print(json.dumps({"ours": own, "vllm_killed_at_step_7": drawn, "machine": facts}, indent=1))
    learnt = float(str(drawn["reward_last_third"])) > float(str(drawn["reward_first_third"]))
    return 0 if drawn["steps"] == options.steps and learnt else 1


if __name__ == "__main__":
    sys.exit(main())
