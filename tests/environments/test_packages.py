"""Whole episodes of other packages as they are published, with answers by a script in place of a model.

Each test needs its package, which nothing else does: `pip install --no-deps --target DIR textarena ...` and DIR on
`PYTHONPATH` is enough. Their requirements contradict each other, so not all can be in one environment.
"""

import logging
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tunesmith.base.core.errors import EnvironmentFailedError, InputError
from tunesmith.learn.environments.calls import Calls
from tunesmith.learn.environments.contract import Call, Episode, Said
from tunesmith.learn.environments.dialects import episode_of
from tunesmith.learn.environments.packages import rows_of, source_factory

pytestmark = pytest.mark.nightly

SEED = 2**62 + 5
MOST_TURNS = 40

Policy = Callable[[str, int], str | Said]


def needs(module: str) -> Any:
    """The package's module; skips the test without it."""
    return pytest.importorskip(module, reason=f"needs the package {module}", exc_type=ImportError)


def opened(source: str, arguments: Mapping[str, Any] | None = None) -> Episode:
    return episode_of(source_factory(source, arguments or {})(), (), Calls(30.0))


def begun(episode: Episode, row: Mapping[str, Any]) -> str:
    """What the model reads first."""
    said = episode.reset({**row, "seed": SEED})
    if said is None:
        return row["prompt"][-1]["content"]
    return said if isinstance(said, str) else str(said[-1]["content"])


def played(episode: Episode, row: Mapping[str, Any], policy: Policy) -> list[tuple[str, float | None]]:
    """What is said and given in each turn of an episode."""
    seen, turns = begun(episode, row), []
    for turn in range(MOST_TURNS):
        answer = policy(seen, turn)
        reply = episode.step(answer if isinstance(answer, Said) else Said(answer))
        seen = "\n".join(str(message["content"]) for message in reply.messages)
        turns.append((seen, reply.reward))
        if reply.done:
            return turns
    raise AssertionError(f"the episode did not end in {MOST_TURNS} turns")


class Bisection:
    """Guesses a number between 1 and `most` by the hints `higher` and `lower`."""

    def __init__(self, form: str, most: int) -> None:
        self.form, self.most = form, most
        self.low = self.high = self.last = 0

    def __call__(self, seen: str, turn: int) -> str:
        if turn == 0:
            self.low, self.high = 1, self.most
        elif "higher" in seen:
            self.low = self.last + 1
        elif "lower" in seen:
            self.high = self.last - 1
        self.last = (self.low + self.high) // 2
        return f"I say {self.form.format(self.last)}."


def last_move(seen: str, turn: int) -> str:
    """The last move that a game lists."""
    return re.findall(r"\[[^\[\]]+\]", seen)[-1]


class TestTextArena:
    @pytest.fixture(autouse=True)
    def package(self) -> Any:
        return needs("textarena")

    def test_a_game_of_one_player(self) -> None:
        source = "textarena:GuessTheNumber-v0"
        (row,) = rows_of(source, {"num_rows": 1}) or ()
        game, outside = opened(source), random.getstate()
        turns = played(game, row, Bisection("[{}]", 20))
        assert turns[-1] == ("Congratulations! You guessed the correct number.", 1.0)
        assert all(said.startswith("[GAME] The target number is") for said, _ in turns[:-1])
        assert played(game, row, Bisection("[{}]", 20)) == turns
        assert random.getstate() == outside

    @pytest.mark.parametrize("name", ["TicTacToe-v0", "TicTacToe-v0-train", "SimpleTak-v0", "Othello-v0-tiny"])
    def test_a_game_against_random_moves(self, name: str) -> None:
        (row,) = rows_of(f"textarena:{name}", {"num_rows": 1}) or ()
        game = opened(f"textarena:{name}")
        turns = played(game, row, last_move)
        assert turns[-1][1] in (-1.0, 0.0, 1.0)
        assert played(game, row, last_move) == turns

    @pytest.mark.parametrize("name", ["2048-v0-ultra-easy", "Blackjack-v0", "Countdown-v0", "FrozenLake-v0", "Set-v0"])
    def test_invalid_moves_end_a_game(self, name: str) -> None:
        (row,) = rows_of(f"textarena:{name}", {"num_rows": 1}) or ()
        turns = played(opened(f"textarena:{name}"), row, lambda seen, turn: "I do not know.")
        assert len(turns) == 2

    @pytest.mark.parametrize(
        ("name", "error"),
        [
            ("ConnectFour-v0", "does not list the moves"),
            ("Poker-v0", "game of several players"),
            ("Wordl-v0", "did you mean `textarena:Wordle-v0`"),
        ],
    )
    def test_what_cannot_be_played_is_refused(self, name: str, error: str) -> None:
        with pytest.raises(InputError, match=error):
            begun(opened(f"textarena:{name}"), {"prompt": [{"role": "user", "content": "Play."}]})

    def test_episodes_at_the_same_time_have_the_game_of_their_seed(self) -> None:
        (row,) = rows_of("textarena:2048-v0-ultra-easy", {"num_rows": 1}) or ()
        moves = lambda seen, turn: ("[up]", "[left]", "[down]", "[right]")[turn % 4]  # noqa: E731
        games = [opened("textarena:2048-v0-ultra-easy") for _ in range(4)]
        results: list[Any] = [None] * 4

        def run(index: int) -> None:
            results[index] = [begun(games[index], row)]
            for turn in range(8):
                reply = games[index].step(Said(moves("", turn)))
                results[index].append(reply)
                if reply.done:
                    break

        threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results[1:] == results[:1] * 3


class TestGEM:
    @pytest.fixture(autouse=True)
    def package(self) -> None:
        handlers = list(logging.getLogger().handlers)
        needs("reasoning_gym")
        needs("gem")
        logging.getLogger().handlers[:] = handlers

    def test_a_game(self) -> None:
        source = "gem:game:GuessTheNumber-v0-easy"
        (row,) = rows_of(source, {"num_rows": 1}) or ()
        game = opened(source)
        turns = played(game, row, Bisection("\\boxed{{{}}}", 10))
        assert turns[-1][0].startswith("Congratulations!")
        assert turns[-1][1] == 1.0
        assert played(game, row, Bisection("\\boxed{{{}}}", 10)) == turns

    def test_a_wrong_answer_ends_it(self) -> None:
        (row,) = rows_of("gem:rg:chain_sum", {"num_rows": 1}) or ()
        ((_, reward),) = played(opened("gem:rg:chain_sum"), row, lambda seen, turn: "I do not know.")
        assert reward is not None
        assert reward < 0.5


class TestGymnasium:
    @pytest.fixture
    def registered(self) -> Iterator[str]:
        gymnasium = needs("gymnasium")

        class Echo(gymnasium.Env):
            observation_space = action_space = gymnasium.spaces.Text(100)

            def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
                super().reset(seed=seed)
                self.number = int(self.np_random.integers(5))
                return "Guess", {}

            def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
                right = str(self.number) in action
                return "right" if right else "wrong", float(right), right, False, {}

        gymnasium.register("TunesmithEcho-v0", Echo, max_episode_steps=3)
        yield "gymnasium:TunesmithEcho-v0"
        del gymnasium.registry["TunesmithEcho-v0"]

    def test_an_environment_of_texts(self, registered: str) -> None:
        (row,) = rows_of(registered, {"num_rows": 1}) or ()
        assert [reward for _, reward in played(opened(registered), row, lambda seen, turn: "none")] == [0.0] * 3
        turns = played(opened(registered), row, lambda seen, turn: "0 1 2 3 4")
        assert turns == [("right", 1.0)]

    def test_one_of_numbers_is_refused(self) -> None:
        needs("gymnasium")
        with pytest.raises(InputError, match="observation_space of TimeLimit is Box"):
            opened("gymnasium:CartPole-v1")


class TestSkyRL:
    ROW: Mapping[str, Any] = {
        "prompt": [{"role": "user", "content": "2 + 3?"}],
        "reward_spec": {"ground_truth": "5"},
        "max_turns": 3,
    }

    @pytest.fixture(autouse=True)
    def package(self) -> None:
        needs("skyrl_gym")

    def test_one_turn(self) -> None:
        assert rows_of("skyrl_gym:gsm8k", {}) is None
        game = opened("skyrl_gym:gsm8k")
        assert played(game, self.ROW, lambda seen, turn: "It is\n#### 5") == [("", 1.0)]
        assert played(game, self.ROW, lambda seen, turn: "It is\n#### 6") == [("", 0.0)]
        game.close()

    def test_several_turns(self) -> None:
        game = opened("skyrl_gym:gsm8k_multi_turn")
        turns = played(game, self.ROW, lambda seen, turn: ("Well.", "#### 4", "#### 5")[turn])
        assert [reward for _, reward in turns] == pytest.approx([0.0, 0.2 / 3, 1.0])
        assert "tentative numeric answer" in turns[0][0]

    def test_a_row_without_its_columns_breaks_the_episode(self) -> None:
        with pytest.raises(AssertionError, match="reward_spec"):
            begun(opened("skyrl_gym:gsm8k"), {"prompt": self.ROW["prompt"]})


class TestReasoningGym:
    @pytest.fixture(autouse=True)
    def package(self) -> None:
        needs("reasoning_gym")

    @pytest.mark.parametrize("name", ["chain_sum", "countdown", "leg_counting", "sudoku", "word_sorting"])
    def test_the_right_answer_is_worth_one(self, name: str) -> None:
        arguments = {"size": 3, "seed": 1, "system_prompt": "simple"}
        rows = rows_of(f"reasoning_gym:{name}", arguments) or []
        assert [row["task"] for row in rows] == [0, 1, 2]
        assert "<answer>" in rows[0]["prompt"][0]["content"]
        for row in rows:
            game = opened(f"reasoning_gym:{name}", arguments)
            assert played(game, row, lambda seen, turn, row=row: f"So <answer>{row['answer']}</answer>.") == [("", 1.0)]
            ((_, reward),) = played(game, row, lambda seen, turn: "Who knows?")
            assert reward is not None
            assert reward < 0.5

    def test_other_prompts_or_arguments_are_refused(self) -> None:
        row = (rows_of("reasoning_gym:chain_sum", {"size": 3, "seed": 1}) or [])[1]
        with pytest.raises(InputError, match="the same arguments"):
            played(opened("reasoning_gym:chain_sum", {"size": 3, "seed": 2}), row, lambda seen, turn: "1")
        with pytest.raises(InputError, match="unexpected keyword argument 'sizes'"):
            opened("reasoning_gym:chain_sum", {"sizes": 3})


TASKSETS = {
    "tunesmith_sums": """
class Data(vf.TaskData):
    answer: str

class Sum(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def turns(self, trace) -> float:
        return trace.num_turns

class Config(vf.TasksetConfig):
    first: int = 1

class Sums(vf.Taskset[Sum, Config]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            right = str(number + self.config.first)
            yield Sum(Data(prompt=f"{number} + {self.config.first}?", system_prompt="Count.", answer=right))
            number += 1
""",
    "tunesmith_sandbox": """
class Run(vf.Task[vf.TaskData]):
    @vf.reward
    async def ran(self, trace, runtime) -> float:
        return float((await runtime.run(["true"])).exit_code == 0)

class Runs(vf.Taskset[Run, vf.TasksetConfig]):
    def load(self):
        yield Run(vf.TaskData(prompt="Run."))
""",
    "tunesmith_silent": """
class Silent(vf.Task[vf.TaskData]):
    pass

class Silents(vf.Taskset[Silent, vf.TasksetConfig]):
    def load(self):
        yield Silent(vf.TaskData(prompt="Run."))
""",
}


class TestVerifiers:
    @pytest.fixture(autouse=True)
    def tasksets(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        needs("verifiers.v1")
        for name, text in TASKSETS.items():
            kind = re.findall(r"class (\w+)\(vf\.Taskset\[", text)[0]
            (tmp_path / f"{name}.py").write_text(f"import verifiers.v1 as vf\n\n__all__ = [{kind!r}]\n{text}")
        monkeypatch.syspath_prepend(str(tmp_path))
        yield
        for name in TASKSETS:
            sys.modules.pop(name, None)

    def test_tasks_are_prompts_and_their_rewards_score(self) -> None:
        rows = rows_of("verifiers:tunesmith_sums", {"first": 2, "num_rows": 3}) or []
        assert rows[1]["prompt"] == [{"role": "system", "content": "Count."}, {"role": "user", "content": "1 + 2?"}]
        game = opened("verifiers:tunesmith_sums", {"first": 2, "num_rows": 3})
        assert played(game, rows[1], lambda seen, turn: "It is 3.") == [("", 2.0)]
        assert played(game, rows[1], lambda seen, turn: "It is 4.") == [("", 0.0)]

    @pytest.mark.parametrize(
        ("name", "error"),
        [
            ("tunesmith_sandbox", "uses runtime.run"),
            ("tunesmith_silent", "has no @reward"),
            ("tunesmith_nothing", "is no task set of verifiers"),
        ],
    )
    def test_tasks_that_need_more_than_an_answer_are_refused(self, name: str, error: str) -> None:
        with pytest.raises(InputError, match=error):
            row = (rows_of(f"verifiers:{name}", {}) or [])[0]
            played(opened(f"verifiers:{name}"), row, lambda seen, turn: "x")


def guesses(seen: str, turn: int) -> str:
    """1, 2, 3, ..."""
    return f"I say {turn + 1}"


def adds(seen: str, turn: int) -> Said:
    """Two calls of a tool, then none."""
    return Said("", (Call("add", {"a": turn, "b": 1}),)) if turn < 2 else Said("Done.")


class Served:
    """Servers of OpenEnv in threads of this process."""

    def __init__(self) -> None:
        self.servers: list[Any] = []

    def start(self, environment: Any, action: Any, observation: Any, **settings: Any) -> str:
        """The source of a server that answers."""
        uvicorn = import_module("uvicorn")
        create = import_module("openenv.core.env_server.http_server").create_fastapi_app
        app = create(environment, action, observation, **settings)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
        threading.Thread(target=server.run, daemon=True).start()
        wait_until(lambda: server.started)
        self.servers.append(server)
        return f"openenv:http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        for server in self.servers:
            server.should_exit = server.force_exit = True
        wait_until(lambda: not any(server.started and server.servers[0].sockets for server in self.servers))


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end, "waited for 20 s"
        time.sleep(0.02)


class TestOpenEnv:
    ROW: Mapping[str, Any] = {"prompt": [{"role": "user", "content": "Play."}], "low": 3}

    @pytest.fixture
    def kinds(self) -> Any:
        interfaces = needs("openenv.core.env_server.interfaces")
        types = import_module("openenv.core.env_server.types")

        class Guess(types.Action):
            guess: str

        class Seen(types.Observation):
            text: str

        class Game(interfaces.Environment[Guess, Seen, types.State]):
            SUPPORTS_CONCURRENT_SESSIONS = True
            num_open = 0

            def __init__(self) -> None:
                super().__init__()
                Game.num_open += 1

            def reset(self, seed: Any = None, episode_id: Any = None, low: int = 1, **others: Any) -> Seen:
                self.number = random.Random(seed).randint(low, 9)
                return Seen(text=f"Guess from {low} to 9.")

            def step(self, action: Guess, timeout_s: Any = None, **others: Any) -> Seen:
                if action.guess == "crash":
                    raise RuntimeError("it broke")
                right = str(self.number) in action.guess
                return Seen(text="right" if right else "wrong", done=right, reward=float(right))

            @property
            def state(self) -> Any:
                return types.State()

            def close(self) -> None:
                Game.num_open -= 1

        return Game, Guess, Seen

    @pytest.fixture
    def served(self) -> Iterator[Served]:
        served = Served()
        yield served
        for server in served.servers:
            server.should_exit = server.force_exit = True

    @pytest.fixture
    def tools(self) -> Any:
        """An environment of MCP tools."""
        mcp = needs("openenv.core.env_server.mcp_environment")
        types = import_module("openenv.core.env_server.types")

        class Tools(mcp.MCPEnvironment):
            SUPPORTS_CONCURRENT_SESSIONS = True

            def __init__(self) -> None:
                server = import_module("fastmcp").FastMCP("adder")

                @server.tool
                def add(a: int, b: int) -> int:
                    """Adds two numbers."""
                    return a + b

                super().__init__(server)

            def reset(self, seed: Any = None, episode_id: Any = None, **others: Any) -> Any:
                return types.Observation()

            def _step_impl(self, action: Any, timeout_s: Any = None, **others: Any) -> Any:
                return types.Observation()

            @property
            def state(self) -> Any:
                return types.State()

        return Tools

    def test_an_environment_in_this_process_and_behind_a_server(self, kinds: Any, served: Served) -> None:
        game = kinds[0]
        turns = played(episode_of(game(), (), Calls(30.0)), self.ROW, guesses)
        assert turns[-1] == ("right", 1.0)
        game.num_open = 0
        remote = opened(served.start(*kinds, max_concurrent_envs=2))
        assert begun(remote, self.ROW) == "\n\nGuess from 3 to 9."
        assert played(remote, self.ROW, guesses) == turns == played(remote, self.ROW, guesses)
        remote.close()
        wait_until(lambda: game.num_open == 0)

    def test_mcp_tools(self, tools: Any, served: Served) -> None:
        types = import_module("openenv.core.env_server.mcp_types")
        source = served.start(tools, types.CallToolAction, types.CallToolObservation, max_concurrent_envs=2)
        typed = import_module("openenv.core.mcp_client").MCPToolClient(source.removeprefix("openenv:"))
        for made in (tools(), source_factory(source, {})(), typed):
            game = episode_of(made, (), Calls(30.0))
            assert [said for said, _ in played(game, self.ROW, adds)] == ["1", "2", ""]
            (tool,) = game.tools
            assert tool["function"]["parameters"]["required"] == ["a", "b"]
            game.close()

    def test_a_full_server_and_one_that_goes_away(self, kinds: Any, served: Served) -> None:
        source = served.start(*kinds, max_concurrent_envs=2)
        games = [opened(source) for _ in range(3)]
        begun(games[0], self.ROW)
        begun(games[1], self.ROW)
        with pytest.raises(InputError, match="larger max_concurrent_envs"):
            begun(games[2], self.ROW)
        with pytest.raises(RuntimeError, match="it broke"):
            games[0].step(Said("crash"))
        wait_until(lambda: kinds[0].num_open == 1)
        begun(games[2], self.ROW)
        served.stop()
        with pytest.raises(ConnectionError):
            games[1].step(Said("1"))
        with pytest.raises(InputError, match="no OpenEnv server answers"):
            source_factory(source, {})


def test_a_game_whose_data_is_missing_says_so() -> None:
    needs("textarena")
    nltk = import_module("nltk")
    try:
        nltk.data.find("corpora/words")
    except LookupError:
        with pytest.raises(EnvironmentFailedError, match="'textarena:Wordle-v0' cannot be made: LookupError"):
            opened("textarena:Wordle-v0")
    else:
        (row,) = rows_of("textarena:Wordle-v0", {"num_rows": 1}) or ()
        assert len(played(opened("textarena:Wordle-v0"), row, lambda seen, turn: "I do not know.")) == 2
