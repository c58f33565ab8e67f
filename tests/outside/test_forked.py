"""Programs that fork after they have loaded a model: servers with workers, and multiprocessing on Linux."""

import os
import subprocess
import sys

PROGRAM = """
import os, signal, sys
import torch
from tunesmith import SamplingParams, load_policy, load_prompts, open_engine

torch.set_num_threads(2)
loaded = load_policy("tiny:llama")
engine = open_engine(loaded.model, loaded.tokenizer)
prompts = load_prompts(["The film", "I liked"])

def tokens():
    groups = engine.generate(prompts, 2, SamplingParams(max_new_tokens=6, seed=1))
    product = torch.ones(400, 400) @ torch.ones(400, 400)
    return [list(one.token_ids) for group in groups for one in group.completions], product.sum().item()

before = tokens()
child = os.fork()
if child == 0:
    signal.alarm(60)  # ends a child that waits for threads that it does not have
    os._exit(0 if tokens() == before else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_computes() -> None:
    """Servers load the model, use it, then fork workers. Reported: pytorch/pytorch#49555."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
