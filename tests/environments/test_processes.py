"""Environments in processes of their own: the same trajectories as in threads, and what becomes of one that ends."""

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch

from tests.environments.played import (
    Dies,
    Echo,
    Talks,
    crashes,
    echo,
    ends_at_once,
    exits,
    hangs,
    killed,
    looks_up,
    raises,
)
from tunesmith import train
from tunesmith.base.config.sections import EnvironmentSection
from tunesmith.base.core.errors import EnvironmentFailedError, InputError
from tunesmith.base.runs.folder import MEASURED
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Completion, SamplingParams, Trajectory
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.rollout.factory import open_engine
from tunesmith.learn.environments.calls import Calls
from tunesmith.learn.environments.contract import Call, Said
from tunesmith.learn.environments.episodes import Conversations
from tunesmith.learn.environments.processes import ProcessEpisode
from tunesmith.learn.environments.sources import opener

PROMPTS = [Prompt(str(i), ({"role": "user", "content": text},)) for i, text in enumerate("abcd")]
LOADED = tiny_model("llama", dtype=torch.float32)


def talks_of(factory: Callable[[], object] | None, processes: int, **options: Any) -> Conversations:
    given = {"max_turns": 3, "timeout_s": 5.0, "max_reply_tokens": 24, "processes": processes, **options}
    section = EnvironmentSection(**given)
    open_episode = opener(section, environment_factory=factory)
    assert open_episode is not None
    return Conversations(open_episode, LOADED.tokenizer, section, max_new_tokens=6, context=256)


def drawn(talks: Conversations, n: int = 1, prompts: list[Prompt] = PROMPTS) -> list[list[Completion]]:
    groups = talks.draw(open_engine(LOADED.model, LOADED.tokenizer), prompts, n, SamplingParams(seed=3))
    return [list(group.completions) for group in groups]


def draw(factory: Callable[[], object], processes: int, n: int = 1, **options: Any) -> list[list[Completion]]:
    talks = talks_of(factory, processes, **options)
    try:
        return drawn(talks, n)
    finally:
        talks.close()


def of(completion: Completion) -> Trajectory:
    assert completion.trajectory is not None
    return completion.trajectory


def children() -> set[int]:
    """The processes of environments that this process has."""
    found: set[int] = set()
    for one in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # also one that nobody has waited for yet
            if "tunesmith.learn.environments.process" in one.cmdline():
                found.add(one.pid)
    return found


def run(folder: Path, processes: int, factory: Callable[[], object] = Talks, steps: int = 2, **given: Any) -> Any:
    options = {
        "environment": {"max_turns": 3, "max_reply_tokens": 16, "processes": processes},
        "rollout.max_new_tokens": 8,
        "rollout.prompts_per_step": 3,
        "rollout.completions_per_prompt": 4,
        "run.dir": str(folder),
        "optimizer.learning_rate": 1e-3,
        "model.dtype": "float32",
        "environment_factory": factory,
        **given,
    }
    return train.grpo(model="tiny:llama", prompts=["a", "b", "c"], steps=steps, progress=False, **options)


def digests(result: Any) -> tuple[object, bytes]:
    """All metrics that are not measured, and the policy."""
    rows = [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in result.metrics]
    return rows, (result.run_dir / "final" / "model.safetensors").read_bytes()


def test_trajectories_and_rewards_are_those_of_threads(tmp_path) -> None:
    results = [run(tmp_path / str(processes), processes) for processes in (0, 2)]
    assert digests(results[0]) == digests(results[1])
    assert children() == set()


@pytest.mark.parametrize(
    ("breaks", "reason", "error"),
    [
        (raises, "error", "ZeroDivisionError: in the environment"),
        (hangs, "time_limit", "longer than 2 s"),
        (exits, "error", "ended with exit code 7"),
        (crashes, "error", "was ended by SIGSEGV"),
        (killed, "error", "was ended by SIGKILL"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_process_that_ends_breaks_the_trajectories_that_it_held(breaks, reason, error) -> None:
    usual = draw(Echo, 0)
    found = draw(echo(breaks), 2, timeout_s=2.0)
    bad = of(found[1][0])
    assert bad.stop_reason == reason
    assert error in str(bad.error)
    assert [turn.stop for turn in bad.turns] == [turn.stop for turn in of(usual[1][0]).turns][:2]
    broken = [number for number in range(4) if of(found[number][0]).error is not None]
    assert len(broken) <= (1 if breaks is raises else 2)  # a process holds two
    for number in set(range(4)) - set(broken):
        assert found[number][0].token_ids == usual[number][0].token_ids
        assert of(found[number][0]).reward == 3.0


def test_a_process_that_ends_between_two_steps_breaks_nothing() -> None:
    talks = talks_of(Echo, 2)
    try:
        first = drawn(talks)
        before = children()
        assert len(before) == 2
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        while any(map(psutil.pid_exists, before)):
            time.sleep(0.01)
        again = drawn(talks)
        assert len(children()) == 2
    finally:
        talks.close()
    assert [one[0].token_ids for one in again] == [one[0].token_ids for one in first]
    assert all(of(one[0]).error is None for one in again)
    assert children() == set()


def test_processes_that_end_before_they_are_used_end_the_run() -> None:
    with pytest.raises(EnvironmentFailedError, match=r"exit code 7, as did the 3 before it.*processes: 0"):
        draw(ends_at_once, 1)


def test_an_environment_that_cannot_be_made_is_named() -> None:
    with pytest.raises(InputError, match=r"the environment cannot be made .ZeroDivisionError: in the environment"):
        draw(raises, 1)
    with pytest.raises(InputError, match=r"the environment cannot be made: it took longer than 0.5 s"):
        draw(hangs, 1, timeout_s=0.5)
    assert children() == set()


def test_what_cannot_be_sent_is_refused(monkeypatch) -> None:
    with pytest.raises(InputError, match=r"tools or environment_factory cannot be sent .*at its top.*processes: 0"):
        draw(lambda: Echo(), 1)
    script = ModuleType("only_here")
    script.Echo = type("Echo", (Echo,), {"__module__": "only_here"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "only_here", script)
    with pytest.raises(InputError, match=r"cannot be loaded in a process .No module named 'only_here'.: a script"):
        draw(script.Echo, 1)
    talks = talks_of(Echo, 1)
    try:
        with pytest.raises(InputError, match="a column of the prompts cannot be sent to a process"):
            drawn(talks, prompts=[Prompt("0", PROMPTS[0].content, {"lock": threading.Lock()})])
    finally:
        talks.close()


def test_every_episode_is_closed_in_its_process(tmp_path) -> None:
    log = tmp_path / "log"
    talks = talks_of(None, 2, source="tests.environments.played:Noted", arguments={"log": str(log)})
    drawn(talks, n=2)
    talks.close()
    lines = [line.split(maxsplit=1) for line in log.read_text().splitlines()]
    made, closed = ([who for what, who in lines if what == word] for word in ("made", "closed"))
    assert len(made) == 8
    assert sorted(made) == sorted(closed)
    assert len({who.split()[0] for who in made}) == 2


def test_tools_are_called_in_the_process(tmp_path) -> None:
    section = EnvironmentSection(tools=("calculator",), processes=1)
    open_episode = opener(section, tools=[looks_up])
    assert open_episode is not None
    episode = open_episode(Calls(5.0))
    try:
        assert isinstance(episode, ProcessEpisode)
        assert [one["function"]["name"] for one in episode.tools] == ["calculator", "looks_up"]
        assert episode.reset({"prompt": []}) is None
        reply = episode.step(Said("", (Call("calculator", {"expression": "6 * 7"}), Call("looks_up", {"word": "a"}))))
        texts = [str(message["content"]) for message in reply.messages]
        assert texts[0] == "42"
        assert re.fullmatch(r"a is known to \d+", texts[1])
        assert {int(texts[1].split()[-1])} == children()
    finally:
        episode.close()
        open_episode.close()  # type: ignore[attr-defined]


@pytest.mark.nightly
def test_a_run_goes_on_through_a_hundred_kills(tmp_path) -> None:
    usual = run(tmp_path / "raises", 0, partial(Dies, raises), steps=25)
    found = run(tmp_path / "killed", 12, partial(Dies, killed), steps=25)  # as many as a step has trajectories
    errors = [row["environment/errors"] for row in found.metrics]
    assert sum(round(12 * share) for share in errors) == 100
    assert digests(found) == digests(usual)
    rows = [json.loads(line) for line in (found.run_dir / "samples.jsonl").read_text().splitlines()]
    lost = [row for row in rows if row["stop_reason"] == "error"]
    assert lost and all(row["messages"] for row in lost)
    assert children() == set()
