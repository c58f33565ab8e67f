"""Two processes of `accelerate launch` on a CPU: gradients, weights and logged losses are those of TRL's trainer."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("trl")

SCRIPT = """
import sys
import datasets, torch, trl
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from tunesmith.integrations.trl import GRPOTrainer, SFTTrainer

algorithm, folder, out = sys.argv[1:]
common = dict(
    output_dir=out, use_cpu=True, bf16=False, per_device_train_batch_size=2, gradient_accumulation_steps=2,
    max_steps=2, learning_rate=1e-3, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
    max_grad_norm=1e9,
)

class Keep(TrainerCallback):
    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, **objects):
        self.gradients += [parameter.grad.clone() for parameter in objects["model"].parameters()]

def sft(trainer_class, given):
    texts = [f"row {row} is " + "long " * (row % 5) for row in range(16)]
    args = trl.SFTConfig(**common)
    return trainer_class(args=args, train_dataset=datasets.Dataset.from_dict({"text": texts}), **given)

def grpo(trainer_class, given):
    trainer = trainer_class(
        reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
        args=trl.GRPOConfig(num_generations=4, max_completion_length=6, **common),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["one", "two words", "three", "x"]}),
        **given,
    )
    rank = trainer.accelerator.process_index
    def draw(prompt_ids, *_, **__):
        rows = range(len(prompt_ids))
        return [[3 + (17 * rank + 5 * row + at) % 250 for at in range(1 + row + rank)] for row in rows], None
    trainer._generate_single_turn = draw
    return trainer

def run(trainer_class):
    keep = Keep()
    given = dict(
        model=AutoModelForCausalLM.from_pretrained(folder),
        processing_class=AutoTokenizer.from_pretrained(folder),
        callbacks=[keep],
    )
    trainer = {"sft": sft, "grpo": grpo}[algorithm](trainer_class, given)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return trainer, keep.gradients, [parameter.detach() for parameter in trainer.model.parameters()], losses

trainer, *ours = run({"sft": SFTTrainer, "grpo": GRPOTrainer}[algorithm])
_, *theirs = run({"sft": trl.SFTTrainer, "grpo": trl.GRPOTrainer}[algorithm])
assert trainer.accelerator.num_processes == 2
assert trainer.live_models.get(trainer.model) is not None
assert bool(ours[0][0].any())
torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)
both = [torch.zeros_like(ours[0][0]) for _ in range(2)]
torch.distributed.all_gather(both, ours[0][0])
assert torch.equal(*both)
print("EQUAL", trainer.accelerator.process_index, flush=True)
"""


@pytest.mark.slow  # two processes that each import TRL and train twice
@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_two_processes_train_as_those_of_trl(folders: Callable[[str], str], tmp_path: Path, algorithm: str):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # With --cpu accelerate starts one process unless mpirun starts the others; this is its launcher by torchrun.
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    settings = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    done = subprocess.run(
        [*launch, *settings, str(script), algorithm, folders("llama"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.stdout.count("EQUAL") == 2, done.stderr[-3000:]
