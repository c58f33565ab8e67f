"""A run that is killed inside of a trajectory and resumed equals one that was not."""

import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from jobs import forked, outcome, the_run
from recipes import PROMPTS, grpo_recipe, ppo_recipe, training

from tunesmith.learn.trainers.resume import Inputs, resume

RECIPES = {"grpo": grpo_recipe, "ppo": ppo_recipe}
KILLED = -9
NUM_KILLS = 100
VISITS = {"prefill": 12, "decode": 45, "sample": 60, "reply": 12}
"""Visits of each fault point in a whole run, about: a model reads and draws, and waits for what it is answered."""


def train(algorithm: str, folder: Path, processes: int = 0) -> Path:
    """A run of four steps below `folder` with conversations of several turns; its run folder."""
    source = "tests.environments.played:Talks"
    environment = {"source": source, "max_turns": 3, "max_reply_tokens": 16, "processes": processes}
    section = {"dir": str(folder), "steps": 4, "checkpoint_every": 1, "sample_every": 1, "num_threads": 1}
    return training(RECIPES[algorithm](folder, environment=environment, run=section), prompts=PROMPTS).run_dir


def go_on(run_dir: Path) -> None:
    resume(run_dir, inputs=Inputs(prompts=PROMPTS), progress=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], object]:
    """The outcome of a run of each algorithm to which nothing happened."""

    @cache
    def outcome_of(algorithm: str) -> object:
        folder = tmp_path_factory.mktemp(algorithm)
        assert forked(train, algorithm, folder) == 0
        return outcome(the_run(folder))

    return outcome_of


EVERY = [
    pytest.param(algorithm, place, visit, processes, marks=pytest.mark.nightly)
    for algorithm in RECIPES
    for place, visits in {"prefill": (2, 7, 11), "decode": (3, 18, 40), "sample": (4, 26, 55)}.items()
    for visit in visits
    for processes in (0, 2)
]


@pytest.mark.parametrize(("algorithm", "place", "visit", "processes"), [("grpo", "decode", 25, 0), *EVERY])
def test_a_run_that_is_killed_inside_of_a_trajectory_equals_one_that_was_not(
    algorithm: str, place: str, visit: int, processes: int, whole: Callable[[str], object], tmp_path: Path
) -> None:
    assert forked(train, algorithm, tmp_path, processes, fault=f"rollout/{place}:kill:{visit}") == KILLED
    cut = the_run(tmp_path)
    assert not (cut / "final").exists()
    again = resume(cut, inputs=Inputs(prompts=PROMPTS), progress=False).run_dir
    assert outcome(again) == whole(algorithm)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_kills_inside_of_trajectories_change_nothing(whole: Callable[[str], object], tmp_path: Path) -> None:
    """Runs are killed again while they are resumed, until one comes to its end."""
    draw, kills, num_runs = random.Random("kills"), Counter[str](), 0

    def at() -> tuple[str, str]:
        place = draw.choice(list(VISITS))
        return place, f"rollout/{place}:kill:{draw.randint(1, VISITS[place])}"

    while kills.total() < NUM_KILLS:
        algorithm, processes, folder = draw.choice(list(RECIPES)), draw.choice((0, 0, 2)), tmp_path / str(num_runs)
        place, fault = at()
        code = forked(train, algorithm, folder, processes, fault=fault)
        while code == KILLED:
            kills[place] += 1
            place, fault = at()
            code = forked(go_on, the_run(folder), fault=fault)
        assert code == 0
        assert outcome(the_run(folder)) == whole(algorithm), (algorithm, processes, kills)
        num_runs += 1
    print(f"\n{kills.total()} kills over {num_runs} runs: {dict(kills)}")
    assert set(kills) == set(VISITS)
