"""PPO's critic in a process of its own: values, gradients and runs are those of one process, also after kills."""

import contextlib
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from jobs import outcome
from recipes import PROMPTS, ppo_recipe, training

from tunesmith.base.config.algorithms.ppo import PPORecipe
from tunesmith.engine.models.heads import Critic
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.learn.trainers.critic import CriticProcess


def kill_critics() -> int:
    """End the critics' processes of this one; their number."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.ZombieProcess):  # of an earlier test
            if "tunesmith.learn.trainers.critic" in child.cmdline():
                found.append(child)
                child.kill()
    psutil.wait_procs(found, timeout=30)
    return len(found)


def test_values_and_gradients_are_those_of_this_process_also_if_the_other_is_killed() -> None:
    model = tiny_model("llama").model
    critic = Critic.from_policy(model)
    with torch.no_grad():
        critic.value_head.weight.normal_(generator=torch.Generator().manual_seed(0))
    plain, process = copy.deepcopy(critic), CriticProcess(critic)
    ids_BS = torch.randint(0, 200, (3, 9), generator=torch.Generator().manual_seed(1))
    rows = ids_BS, torch.tensor([9, 7, 4]), torch.tensor([3, 2, 1])
    for kills in ((), ("values",), ("gradients",)):
        with torch.no_grad():
            assert torch.equal(process.begin(*rows)(), plain(*rows))
        begun = process.begin(*rows)
        assert "values" not in kills or kill_critics() == 1
        value_BT, expected_BT = begun(), plain(*rows)
        assert torch.equal(value_BT, expected_BT)
        assert "gradients" not in kills or kill_critics() == 1
        for values in (value_BT, expected_BT):
            values.square().sum().backward()
        for one, other in zip(critic.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)
            with torch.no_grad():  # the process sees changes of the weights, but not of those that it reads
                one.add_(one.grad, alpha=-0.01)
                other.add_(other.grad, alpha=-0.01)
            one.grad = other.grad = None


def few_low(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    return [sum(token < 130 for token in ids) / len(ids) for ids in completion_ids]


def test_a_run_is_that_of_one_process(tmp_path: Path) -> None:
    num_killed: list[int] = []

    def killing(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
        num_killed.append(kill_critics())
        return few_low(completion_ids)

    killing.__name__ = "few_low"  # names of metrics

    def trained(name: str, reward: Any, **section: object) -> object:
        run = {"steps": 3, "num_threads": 1, "dir": str(tmp_path / name)}
        sections = {"run": run, "ppo": {"critic": "separate", **section}, "optimizer": {"learning_rate": 1e-2}}
        return outcome(training(ppo_recipe(tmp_path, **sections), prompts=PROMPTS, rewards=[reward]).run_dir)

    assert trained("process", killing, critic_process=True) == trained("alone", few_low)
    assert sum(num_killed) == 3
    with pytest.raises(ValueError, match=r"critic_process is true, but critic is shared"):
        PPORecipe.model_validate({"ppo": {"critic_process": True}})
