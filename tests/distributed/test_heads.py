"""Reward models with several heads on several ranks: trained, and as a pessimistic reward of a policy; killed too."""

import os
import signal
from pathlib import Path

import pytest
import torch
from jobs import context, outcome, the_run
from on_ranks import HELDOUT, difference, samples_of, trained
from recipes import PROMPTS, grpo_recipe, pairs, ppo_recipe, reward_recipe

from tunesmith.base.config.algorithms.reward import HeadsSection
from tunesmith.base.config.recipe import Recipe
from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.faults import VARIABLE
from tunesmith.engine.models.export import ModelCard, save_final
from tunesmith.engine.models.load import new_reward_model
from tunesmith.learn.trainers.api import Inputs
from tunesmith.learn.trainers.resume import resume
from tunesmith.learn.trainers.run import run

RUN = {"steps": 4, "eval_every": 2, "checkpoint_every": 1, "sample_every": 1}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a reward model whose five heads differ, and whose spread is known."""
    model = new_reward_model(ModelSection(name="tiny:llama", dtype="float32"), heads=HeadsSection(count=5), seed=1)
    torch.nn.init.normal_(model.model.score.weight, generator=torch.Generator().manual_seed(0))
    model.know(torch.randn(20, 5, generator=torch.Generator().manual_seed(1)).double())
    folder = tmp_path_factory.mktemp("heads")
    return save_final(model, model.tokenizer, folder / "heads", ModelCard("tiny:llama", "reward"))


def recipes(folder: Path, heads: Path) -> dict[str, tuple[Recipe, Inputs]]:
    several = {"heads": {"count": 3}, "micro_batch_size": 3, "committee": {"confidence": 0.501, "after": 0.3}}
    expert = {"heads": {"count": 3}, "length": "expert", "average_from": 0.4, "label_smoothing": 0.1}
    post_hoc = {"heads": {"count": 3}, "length": "post_hoc"}
    careful = [{"source": str(heads), "pessimism": 1.5}]
    worst = [{"source": str(heads), "pessimism": "worst"}]
    ppo = {"kl": {"coef": 0.1, "target": 1.0, "horizon": 50}, "whiten_rewards": True}
    preferred, drawn = Inputs(pairs=pairs()), Inputs(prompts=PROMPTS)
    return {
        "committee": (reward_recipe(folder, run=RUN, pairs=HELDOUT, reward_model=several), preferred),
        "expert": (reward_recipe(folder, run=RUN, pairs=HELDOUT, reward_model=expert), preferred),
        "post_hoc": (reward_recipe(folder, run=RUN, pairs=HELDOUT, reward_model=post_hoc), preferred),
        "ppo": (ppo_recipe(folder, run=RUN, prompts=HELDOUT, ppo=ppo, reward=careful), drawn),
        "grpo": (grpo_recipe(folder, run=RUN, prompts=HELDOUT, reward=worst), drawn),
    }


def test_several_ranks_have_the_heads_and_rewards_of_one_process(heads: Path, tmp_path: Path) -> None:
    names = list(recipes(tmp_path, heads))
    alone, together = (trained(number, list(recipes(tmp_path / str(number), heads).values())) for number in (1, 2))
    for name, one, several in zip(names, alone, together, strict=True):
        assert difference(one, several) < 1e-6, name
        assert samples_of(one) == samples_of(several), name
        for row, other in zip(one.metrics, several.metrics, strict=True):
            measured = {key for key in row.keys() | other.keys() if key.startswith(("rewards/", "eval/", "margin"))}
            for key in {"loss", "accuracy", "reward", "left_out", *measured}:
                assert (key in row) == (key in other), (name, key)
                assert row.get(key, 0.0) == pytest.approx(other.get(key, 0.0), rel=1e-4, abs=1e-6), (name, key)


def go_on_or_begin(folder: Path, heads: Path, name: str, fault: str) -> None:
    """The run `name` below `folder` on two ranks, or the rest of it if it has begun, with `fault`."""
    os.environ[VARIABLE] = fault
    cfg, inputs = recipes(folder, heads)[name]
    if begun := list(folder.glob("runs/*/environment.json")):
        resume(begun[0].parent, inputs=inputs, progress=False)
    else:
        scale = {"ranks": 2, "reduction": "exact", "rank_timeout_s": 60}
        run(type(cfg).model_validate({**cfg.model_dump(), "scale": scale}), inputs, progress=False)


def in_a_process(*arguments: object) -> int | None:
    """The exit code of `go_on_or_begin`, in a process that may have children."""
    process = context().Process(target=go_on_or_begin, args=arguments)
    process.start()
    process.join(timeout=240)
    return process.exitcode


@pytest.mark.parametrize(
    "name", ["expert", "grpo", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("committee", "ppo"))]
)
def test_a_killed_run_of_two_ranks_goes_on_to_the_same_bits(name: str, heads: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert in_a_process(whole, heads, name, "") == 0
    assert in_a_process(killed, heads, name, "log/metrics:kill:3") == -signal.SIGKILL
    assert len((the_run(killed / "runs") / "metrics.jsonl").read_text().splitlines()) == 2
    assert in_a_process(killed, heads, name, "") == 0
    assert outcome(the_run(killed / "runs")) == outcome(the_run(whole / "runs"))
