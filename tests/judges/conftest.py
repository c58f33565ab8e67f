"""A judge's server, and judges that ask it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from judge_server import JudgeServer
from tunesmith.base.config.judge import JudgeSettings
from tunesmith.learn.judges.judge import Judge, PairText, open_judge


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    made = JudgeServer()
    yield made
    made.close()


@pytest.fixture
def judge_of(server: JudgeServer, tmp_path: Path) -> Callable[..., Judge]:
    """`judge_of(most_requests=3)`: a judge of the server with these settings, and one file of answers for all."""

    def make(**settings: object) -> Judge:
        given = {"model": server.url, "answers": str(tmp_path / "answers.db"), "timeout_s": 60, **settings}
        return open_judge(JudgeSettings.model_validate(given))

    return make


@pytest.fixture
def pairs() -> list[PairText]:
    """Six pairs, of which the second answer of every other one is longer, and one whose answers are as long."""
    texts = [("short", "a long answer"), ("quite a long answer", "brief"), ("same", "size")]
    return [PairText(f"Prompt {i}", f"{a} {i}", f"{b} {i}", f"pair {i}") for i in range(2) for a, b in texts]
