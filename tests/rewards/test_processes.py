"""Reward functions in processes of their own: the same scores, and what ends or hangs there."""

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tunesmith.base.config.sections import ModelSection, RewardSource
from tunesmith.base.core.errors import RewardError
from tunesmith.engine.batch.rollout import Group
from tunesmith.engine.models.load import new_reward_model
from tunesmith.engine.models.tiny import byte_tokenizer
from tunesmith.learn.rewards.outcome import TrainerState
from tunesmith.learn.rewards.scorer import Scorer

GroupMaker = Callable[..., Group]

FUNCTIONS = """
import os, signal, sys, time
from pathlib import Path

MARK = Path(__file__).with_suffix(".mark")

def share_of_step(prompts, completions, trainer_state, log_metric, log_extra, **kwargs):
    log_metric("completions", len(completions))
    log_extra("process", [os.getpid()] * len(completions))
    log_extra("heavy", [sorted({"torch", "transformers"} & sys.modules.keys())] * len(completions))
    longest = {prompt: max(len(c) for p, c in zip(prompts, completions) if p == prompt) for prompt in prompts}
    return [trainer_state.global_step + len(c) / longest[p] for p, c in zip(prompts, completions)]

def ends_once(completions, **kwargs):
    if "end" in completions and not MARK.exists():
        MARK.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(text)) for text in completions]

def ends(completions, **kwargs):
    if "end" in completions:
        os._exit(3)
    return [float(len(text)) for text in completions]

def hangs(completions, **kwargs):
    if "end" in completions:
        time.sleep(600)
    return [float(len(text)) for text in completions]

def needs_column(completions, answer, **kwargs):
    return [0.0 for _ in completions]

def logs_a_lock(completions, log_extra, **kwargs):
    import threading
    log_extra("lock", [threading.Lock() for _ in completions])
    return [0.0 for _ in completions]

async def waits(completions, **kwargs):
    return [0.0 for _ in completions]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def groups(make_group: GroupMaker) -> list[Group]:
    return [make_group(f"Prompt {n}", "a" * (n + 1), "end" if n == 1 else "bb", id=f"p:{n}") for n in range(3)]


def scorer(file: Path, name: str, **settings: Any) -> Scorer:
    settings = {"workers": 2, **settings}
    while_drawing = settings.pop("while_drawing", False)
    return Scorer([RewardSource(source=f"{file}:{name}", **settings)], while_drawing=while_drawing)


def test_the_scores_are_those_of_a_call_in_this_process(file: Path, groups: list[Group]):
    state = TrainerState(global_step=7)
    expected = scorer(file, "share_of_step", workers=0).score(groups, state=state)
    scores = scorer(file, "share_of_step").score(groups, state=state)
    assert scores.total_PG.equal(expected.total_PG)
    processes = scores.columns["process"]
    assert len(set(processes)) == 2  # whole groups: three of them, one for the first process
    assert processes[0] == processes[1] != processes[2] == processes[3] == processes[4] == processes[5]
    assert scores.logged == {"completions": 3.0}  # the mean of 2 and 4
    assert scores.columns["heavy"] == [[]] * 6, "a process takes 40 MB, not half a GB"


def test_groups_are_scored_while_others_are_drawn(file: Path, groups: list[Group]):
    scoring, state = scorer(file, "share_of_step", while_drawing=True), TrainerState()
    with scoring.ahead(len(groups), 2, state) as ahead:
        for place, group in reversed([*enumerate(groups)]):
            ahead.add(place, group)
        scores = scoring.score(groups, state=state, ahead=ahead)
    assert scores.total_PG.equal(scorer(file, "share_of_step", workers=0).score(groups, state=state).total_PG)
    assert len(set(scores.columns["process"])) == 2


def test_a_process_that_is_killed_is_started_again_and_its_call_repeated(
    file: Path, groups: list[Group], caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        scores = scorer(file, "ends_once").score(groups)
    assert scores.total_PG.tolist() == [[1.0, 2.0], [2.0, 3.0], [3.0, 2.0]]
    assert "a process of the reward `ends_once` was ended by SIGKILL; it is started again" in caplog.text


def test_samples_whose_process_ends_each_time_follow_the_policy(file: Path, groups: list[Group]):
    scores = scorer(file, "ends", on_error="drop", workers=3).score(groups)
    assert scores.valid_PG.tolist() == [[True, True], [False, False], [True, True]]
    assert "its process ended with exit code 3, 2 times, scoring 2 completions from prompt p:1" in str(
        scores.failures[0].reason
    )
    with pytest.raises(RewardError, match="ended with exit code 3"):
        scorer(file, "ends").score(groups)


def test_a_call_that_hangs_follows_the_policy_and_its_process_is_killed(file: Path, groups: list[Group]):
    scoring = scorer(file, "hangs", on_error="zero", workers=3, timeout_s=1.0)
    for _ in range(2):  # the next call has a process again
        scores = scoring.score(groups)
        assert scores.total_PG.tolist() == [[1.0, 2.0], [0.0, 0.0], [3.0, 2.0]]
        assert "did not return within timeout_s" in scores.failures[0].reason


def test_what_cannot_be_called_or_sent_is_named(file: Path, groups: list[Group]):
    with pytest.raises(RewardError, match="needs `answer`, but the prompts have no such column"):
        scorer(file, "needs_column").score(groups)
    with pytest.raises(RewardError, match="`logs_a_lock` logged what cannot be sent"):
        scorer(file, "logs_a_lock").score(groups)
    with pytest.raises(RewardError, match="is an `async def`, whose calls overlap anyway; remove its `workers`"):
        scorer(file, "waits")


def test_a_built_in_runs_in_processes_too(groups: list[Group]):
    scores = Scorer([RewardSource(source="length", workers=2)]).score(groups)
    assert scores.total_PG.equal(Scorer(["length"]).score(groups).total_PG)


def test_a_reward_model_in_processes_gives_the_same_bits(tmp_path: Path, make_group: GroupMaker):
    drawn = new_reward_model(ModelSection(name="tiny:llama", dtype="float32"))
    torch.nn.init.normal_(drawn.model.score.weight, generator=torch.Generator().manual_seed(0))
    drawn.model.save_pretrained(tmp_path / "judge")
    drawn.tokenizer.save_pretrained(tmp_path / "judge")
    groups = [make_group(f"Prompt {n}", "a" * (n + 1), "bb" * n, id=f"p:{n}") for n in range(20)]  # three portions
    source, state = str(tmp_path / "judge"), TrainerState()
    tokenizer = byte_tokenizer()
    expected = Scorer([source], policy_tokenizer=tokenizer).score(groups).total_PG
    scoring = Scorer([RewardSource(source=source, workers=2)], policy_tokenizer=tokenizer, while_drawing=True)
    assert scoring.score(groups).total_PG.equal(expected) and len(expected.unique()) > 20
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # one of another test that has ended
            if "tunesmith.learn.rewards.process" in child.cmdline():
                child.kill()
    with scoring.ahead(len(groups), 2, state) as ahead:
        for place, group in reversed([*enumerate(groups)]):
            ahead.add(place, group)
        assert scoring.score(groups, state=state, ahead=ahead).total_PG.equal(expected), "after a kill, while drawing"
