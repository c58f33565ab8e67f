"""Our AdamW in TRL's trainers: torch's numbers, torch's state, torch's step for all that the kernel does not know."""

from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from same import arguments, model, tokenizer
from test_sft import completions

from tunesmith.integrations.trl import SFTTrainer
from tunesmith.integrations.trl.optimizer import FusedAdamW

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-7}


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in ((40, 30), (30,), (7, 300))]


def groups(parameters: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[:1], "weight_decay": 0.1}, {"params": parameters[1:], "weight_decay": 0.0}]


def run(optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        draw = torch.Generator().manual_seed(step)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=draw).to(p.dtype) if p.dim() > 1 or step else None
        optimizer.step()


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": False}, {"amsgrad": True}, {"maximize": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_those_of_torch(options: dict[str, bool], dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    run(FusedAdamW(groups(ours), **OPTIONS, **options), 0, 5)
    run(torch.optim.AdamW(groups(theirs), **OPTIONS, **options), 0, 5)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("kinds", [(FusedAdamW, torch.optim.AdamW), (torch.optim.AdamW, FusedAdamW)])
def test_each_resumes_from_the_state_of_the_other(kinds: tuple[Any, Any], tmp_path: Path) -> None:
    expected = parameters()
    run(torch.optim.AdamW(groups(expected), **OPTIONS, fused=True), 0, 6)
    first, second = parameters(), parameters()
    before = kinds[0](groups(first), **OPTIONS, fused=True)
    run(before, 0, 3)
    torch.save(before.state_dict(), tmp_path / "optimizer.pt")
    for p, q in zip(first, second, strict=True):
        q.data.copy_(p.data)
    after = kinds[1](groups(second), **OPTIONS, fused=True)
    after.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    run(after, 3, 6)
    for mine, other in zip(second, expected, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-6, rtol=2e-6)
    theirs = torch.optim.AdamW(groups(parameters()), **OPTIONS, fused=True).state_dict()["param_groups"]
    assert [group.keys() for group in after.state_dict()["param_groups"]] == [group.keys() for group in theirs]


def test_hooks_closures_and_versions() -> None:
    (p, *_) = parameters()
    optimizer, seen = FusedAdamW([p], **OPTIONS), []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    version = p._version
    assert float(optimizer.step(lambda: loss_of(p)).detach()) > 0
    assert seen == [1]
    assert p._version > version


def loss_of(p: torch.Tensor) -> torch.Tensor:
    loss = p.square().sum()
    loss.backward()
    return loss


def test_a_trainer_resumes_from_a_checkpoint_of_trl_and_the_other_way_round(tmp_path: Path) -> None:
    def train(kind: Any, folder: Path, resume: str | None = None, **changes: Any) -> Any:
        fixed = {"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 2, "seed": 1}
        trainer = kind(
            model(0),
            trl.SFTConfig(**arguments(folder, **fixed, **changes)),
            train_dataset=completions(),
            processing_class=tokenizer(),
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = train(trl.SFTTrainer, tmp_path / "whole", max_steps=4)
    for first, second in ((trl.SFTTrainer, SFTTrainer), (SFTTrainer, trl.SFTTrainer)):
        folder = tmp_path / first.__module__
        train(first, folder, max_steps=4)
        resumed = train(second, folder, str(folder / "checkpoint-2"), max_steps=4)
        assert type(resumed.optimizer.optimizer) is (FusedAdamW if second is SFTTrainer else torch.optim.AdamW)
        for mine, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
            torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-3)


def test_an_optimizer_of_the_user_and_other_kinds_are_left_alone(tmp_path: Path) -> None:
    policy = model(0)
    given = torch.optim.AdamW(policy.parameters(), lr=1e-3)

    def created(optimizers: tuple[Any, Any], **changes: Any) -> Any:
        config = trl.SFTConfig(**arguments(tmp_path, **changes))
        rows = completions()
        trainer = SFTTrainer(policy, config, train_dataset=rows, processing_class=tokenizer(), optimizers=optimizers)
        return trainer.create_optimizer()

    assert created((given, None)) is given
    assert type(created((None, None), optim="sgd")) is torch.optim.SGD
    assert type(created((None, None), optim="adamw_torch")) is FusedAdamW
