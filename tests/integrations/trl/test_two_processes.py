"""Two processes on a CPU: the gradients are reduced as with TRL's own forward pass."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("trl")

SCRIPT = """
import sys
import datasets, torch, trl
from transformers import AutoModelForCausalLM, TrainerCallback
from tunesmith.integrations.trl import GRPOTrainer

folder, out = sys.argv[1:]

class Keep(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **objects):
        self.found = [parameter.grad.clone() for parameter in objects["model"].parameters()]

def run(trainer_class):
    keep = Keep()
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(folder),
        reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
        args=trl.GRPOConfig(
            output_dir=out, use_cpu=True, bf16=False, per_device_train_batch_size=2, num_generations=4,
            gradient_accumulation_steps=2, max_completion_length=6, max_steps=1, save_strategy="no",
            report_to="none", disable_tqdm=True, max_grad_norm=1e9,
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["one", "two words", "three", "x"]}),
        callbacks=[keep],
    )
    rank = trainer.accelerator.process_index
    def draw(prompt_ids, *_, **__):
        rows = range(len(prompt_ids))
        return [[3 + (17 * rank + 5 * row + at) % 250 for at in range(1 + row + rank)] for row in rows], None
    trainer._generate_single_turn = draw
    trainer.train()
    return keep.found, trainer

ours, trainer = run(GRPOTrainer)
theirs, _ = run(trl.GRPOTrainer)
assert trainer.accelerator.num_processes == 2
assert trainer.live_models.get(trainer.model) is not None
assert all(torch.allclose(mine, other, atol=1e-5, rtol=1e-3) for mine, other in zip(ours, theirs, strict=True))
both = [torch.zeros_like(ours[0]) for _ in range(2)]
torch.distributed.all_gather(both, ours[0])
assert torch.equal(*both)
assert bool(ours[0].any())
print("EQUAL", trainer.accelerator.process_index, flush=True)
"""


@pytest.mark.slow  # two processes that each import TRL and train twice
def test_gradients_of_two_processes_are_those_of_trl(folders: Callable[[str], str], tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, str(script), folders("llama"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.stdout.count("EQUAL") == 2, done.stderr[-3000:]
