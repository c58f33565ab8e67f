"""Environments in the forms of other packages, by stand-ins with their methods; `test_packages` has the real ones."""

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from tunesmith.base.config.sections import EnvironmentSection
from tunesmith.base.core.errors import InputError, MissingDependencyError
from tunesmith.base.core.extras import EXTRA_OF
from tunesmith.learn.environments import packages
from tunesmith.learn.environments.calls import Calls
from tunesmith.learn.environments.contract import Call, Episode, Reply, Said, ToolEpisode
from tunesmith.learn.environments.dialects import episode_of
from tunesmith.learn.environments.openenv import Server
from tunesmith.learn.environments.packages import as_factory, rows_of, source_factory
from tunesmith.learn.environments.sources import opener
from tunesmith.learn.environments.tasks import ReasoningTasks
from tunesmith.learn.environments.text import opening

PROMPT = [{"role": "user", "content": "Play."}]
ROW: dict[str, Any] = {"prompt": PROMPT, "seed": 2**62 + 5}
OWN_ROW = {**ROW, "prompt": [{"role": "user", "content": "Task 3"}], "task": 3}


def episode(made: object, functions: tuple[Callable[..., Any], ...] = ()) -> Episode:
    return episode_of(made, functions, Calls(5.0))


def said(text: str, *calls: Call) -> Said:
    return Said(text, calls)


def texts(reply: Reply) -> list[str]:
    return [str(message["content"]) for message in reply.messages]


class Gymnasium:
    """Guess a number below 10 in three turns: the 5-tuple of Gymnasium and GEM."""

    closed = False

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.number, self.turns = random.Random(seed).randrange(10), 0
        return "Guess.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turns += 1
        return f"It is not {action}.", 1.0, action == str(self.number), self.turns >= 3, {}

    def close(self) -> None:
        self.closed = True


def test_an_answer_is_the_action_and_the_observation_a_message_of_the_user() -> None:
    made = Gymnasium()
    game = episode(made)
    assert game.reset(ROW) == "\n\nGuess."
    first = game.step(said("11"))
    assert first == Reply(({"role": "user", "content": "It is not 11."},), 1.0, False, "tool_ended")
    assert game.step(said(str(made.number))).done
    game.reset(ROW)
    assert [game.step(said("11")).done for _ in range(3)] == [False, False, True]
    assert game.reward() is None
    assert game.tools == []
    game.close()
    assert made.closed


def test_the_opening_replaces_a_prompt_that_a_source_brought_itself() -> None:
    system = {"role": "system", "content": "Be brief."}
    replaced = [{"role": "user", "content": "Guess."}]
    assert episode(Gymnasium()).reset(OWN_ROW) == replaced
    assert opening({**OWN_ROW, "prompt": [system, *OWN_ROW["prompt"]]}, "Guess.") == [system, *replaced]
    assert opening(ROW, "") is None


def test_older_gym_returns_four_values_and_no_info_from_reset() -> None:
    class Gym:
        def reset(self) -> str:
            return "Go."

        def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
            return "Gone.", 0.5, True, {}

    game = episode(Gym())
    assert game.reset(ROW) == "\n\nGo."
    assert game.step(said("x")) == Reply(({"role": "user", "content": "Gone."},), 0.5, True, "tool_ended")


def test_reset_and_step_may_be_coroutines_and_take_columns_by_name() -> None:
    class Async:
        async def reset(self, question: str) -> tuple[str, dict[str, Any]]:
            return question, {}

        async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return "Yes.", 1.0, True, False, {}

    game = episode(Async())
    assert game.reset({**ROW, "question": "Who?", "other": 1}) == "\n\nWho?"
    assert game.step(said("me")).reward == 1.0


def test_a_call_of_a_tool_is_a_turn_that_the_game_does_not_see() -> None:
    def double(number: int) -> int:
        """Doubles.

        Args:
            number: Any number.
        """
        return 2 * number

    made = Gymnasium()
    game = episode(made, (double,))
    game.reset(ROW)
    assert texts(game.step(said("", Call("double", {"number": 4})))) == ["8"]
    assert made.turns == 0
    game.step(said("5"))
    assert made.turns == 1


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        ((None, 0.0, False, False, {}), "observation of type NoneType"),
        ("text", "step returned str"),
        (None, "NoneType"),
    ],
)
def test_a_step_without_text_is_told_apart_from_a_game_that_goes_on(returned: object, error: str) -> None:
    class Wrong(Gymnasium):
        def step(self, action: str) -> Any:
            return returned

    game = episode(Wrong())
    game.reset(ROW)
    with pytest.raises(TypeError, match=error):
        game.step(said("x"))


def test_spaces_that_are_no_text_are_refused() -> None:
    class Box:
        def contains(self, x: object) -> bool:
            return True

    class Pole(Gymnasium):
        observation_space = Box()

    with pytest.raises(InputError, match=r"observation_space of Pole .* reads and writes text"):
        episode(Pole())


class SkyRL:
    """Adds turns until the row's `limit`: skyrl-gym's BaseTextEnv."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        self.limit, self.turns = (extras or {})["limit"], 0
        self.config = env_config

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        return [{"role": "system", "content": "S"}, *prompt], {}

    def step(self, action: str) -> dict[str, Any]:
        self.turns += 1
        if action == "nothing":
            return {"observations": [], "reward": 0.0, "done": False, "metadata": {}}
        done = self.turns >= self.limit
        seen = [] if done else [{"role": "user", "content": f"{self.turns} {action}"}]
        return {"observations": seen, "reward": 0.5, "done": done, "metadata": {}, "postprocessed_action": action[:1]}

    def close(self) -> None:
        pass


def test_an_environment_of_skyrl_gym_is_made_for_each_row() -> None:
    game = episode(as_factory(SkyRL, {"level": 3})())
    for limit in (1, 2):
        assert game.reset({**ROW, "limit": limit}) == [{"role": "system", "content": "S"}, *PROMPT]
        replies = [game.step(said("hello")) for _ in range(limit)]
        assert [reply.reward for reply in replies] == [0.5] * limit
        assert [reply.done for reply in replies] == [False] * (limit - 1) + [True]
    game.reset({**ROW, "limit": 9})
    with pytest.raises(ValueError, match="no observations"):
        game.step(said("nothing"))
    game.close()
    with pytest.raises(InputError, match="made anew for each row"):
        episode(SkyRL(extras={"limit": 1}))


def test_the_opener_takes_classes_of_any_form() -> None:
    opened = opener(EnvironmentSection(), environment_factory=SkyRL)
    assert opened is not None
    assert opened(Calls(5.0)).reset({**ROW, "limit": 1}) is not None
    opened = opener(EnvironmentSection(), environment_factory=Gymnasium)
    assert opened is not None
    assert opened(Calls(5.0)).reset(ROW) == "\n\nGuess."


class Kind(Enum):
    PROMPT = 1
    PLAYER_ACTION = 2
    GAME_BOARD = 5


class SinglePlayerState:
    num_players = 1


class TwoPlayerState:
    num_players = 2


class TextArena:
    """Take one of the numbers on a board in turn; whoever takes the 0 loses. The methods of TextArena's games."""

    env_id = "Numbers-v0"

    def __init__(self, *, listed: bool = True, players: int = 2) -> None:
        self.listed, self.players = listed, players

    def reset(self, num_players: int, seed: int | None = None) -> None:
        assert num_players == self.players
        random.seed(seed)
        self.state: Any = {1: SinglePlayerState, 2: TwoPlayerState}.get(num_players, object)()
        self.state.role_mapping = {0: "Player 0", 1: "Player 1", -1: "GAME"}
        self.state.current_player_id = 0
        self.board = random.sample(range(6), 6)
        self.new: dict[int, list[Any]] = {0: [(-1, "Do not take the 0.", Kind.PROMPT)], 1: []}
        self.rewards: dict[int, Any] | None = None
        self._show()

    def _show(self) -> None:
        moves = ", ".join(f"'[{number}]'" for number in self.board)
        for player in (0, 1):
            self.new[player].append((-1, f"Available Moves: {moves}" if self.listed else "Go.", Kind.GAME_BOARD))

    def get_observation(self) -> tuple[int, list[Any]]:
        player = self.state.current_player_id
        seen, self.new[player] = self.new[player], []
        return player, seen

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        player = self.state.current_player_id
        for other in (0, 1):
            self.new[other].append((player, action, Kind.PLAYER_ACTION))
        if action == "[0]":
            self.rewards = {player: -1, 1 - player: 1}
            return True, {}
        if action == "wrong":
            self.rewards = {0: "Invalid move"}  # as Countdown of TextArena 0.7.4
            return True, {}
        self.board.remove(int(action[1:-1]))
        self.state.current_player_id = (player + 1) % self.players
        self._show()
        return False, {}

    def close(self) -> tuple[Any, Any]:
        return self.rewards, {0: {"reason": "The 0 was taken."}, 1: {}}


class LLMObservationWrapper:
    """Repeats all that was seen at each turn, and does not forget it at reset: as TextArena's."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.full_observations: dict[int, list[Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def get_observation(self) -> tuple[int, str]:
        player, seen = self.env.get_observation()
        self.full_observations.setdefault(player, []).extend(seen)
        return player, "\n".join(message for _, message, _ in self.full_observations[player])


class OtherWrapper(LLMObservationWrapper):
    """Another one, whose text is passed on."""


def play(game: Episode) -> tuple[list[str], list[float | None]]:
    """All that a player sees who takes the largest number, and the rewards."""
    opened = game.reset(OWN_ROW)
    assert not isinstance(opened, str)
    assert opened is not None
    seen, rewards = [str(opened[-1]["content"])], []
    for _ in range(6):
        moves = seen[-1].rpartition("Available Moves:")[2]
        reply = game.step(said(f"[{max(int(one) for one in moves if one.isdigit())}]"))
        seen += texts(reply)
        rewards.append(reply.reward)
        if reply.done:
            return seen, rewards
    raise AssertionError("the game did not end")


def test_a_game_shows_what_is_new_and_its_opponent_moves_by_the_seed() -> None:
    outside = random.getstate()
    game = episode(LLMObservationWrapper(TextArena()))
    seen, rewards = play(game)
    assert seen[0].count("Do not take") == 1
    assert not any("Do not take" in one for one in seen[1:])
    assert "[Player 1] [" in "".join(seen)
    assert "[Player 0] [" not in "".join(seen)
    assert seen[-1] == "The 0 was taken."
    assert abs(rewards[-1] or 0.0) == 1.0
    assert set(rewards[:-1]) <= {0.0}
    assert play(game) == (seen, rewards) == play(episode(TextArena()))
    assert random.getstate() == outside


def test_what_another_wrapper_says_is_passed_on_and_forgotten_at_reset() -> None:
    game = episode(OtherWrapper(TextArena()))
    seen, _ = play(game)
    assert all(one.startswith("Do not take the 0.") for one in seen[:-1])
    assert play(game)[0] == seen


def test_games_of_one_player_and_an_invalid_move() -> None:
    game = episode(TextArena(players=1))
    play(game)
    game.reset(ROW)
    assert game.step(said("wrong")) == Reply(({"role": "user", "content": "Invalid move"},), -1.0, True, "tool_ended")


@pytest.mark.parametrize(
    ("made", "error"),
    [(TextArena(listed=False), "does not list the moves"), (TextArena(players=3), "game of several players")],
)
def test_games_without_an_opponent_are_refused(made: object, error: str) -> None:
    with pytest.raises(InputError, match=f"Numbers-v0 is a .*{error.split()[-1]}"):
        episode(made).reset(ROW)


class Action(BaseModel):
    model_config = ConfigDict(extra="forbid")
    metadata: dict[str, Any] = Field(default_factory=dict)


class Observation(BaseModel):
    done: bool = False
    reward: float | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class Guess(Action):
    guess: str
    note: int = 0


class Move(Action):
    x: int
    y: int = 0


class Seen(Observation):
    text: str
    board: list[int] = Field(default_factory=list)


class OpenEnv:
    """OpenEnv's Environment."""

    SUPPORTS_CONCURRENT_SESSIONS = False
    closed = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        return Seen(text=f"Level {kwargs.get('level', 0)}.")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        if action.guess == "crash":
            raise RuntimeError("it broke")
        return Seen(text="right", board=[1, 2], done=action.guess == "5", reward=1.0)

    def close(self) -> None:
        self.closed += 1


def test_the_single_text_of_an_action_is_the_answer() -> None:
    made = OpenEnv()
    game = episode(made)
    assert game.reset({**ROW, "level": 7}) == "\n\nLevel 7."
    assert texts(game.step(said("4"))) == ["text: right\nboard: [1, 2]"]
    assert game.step(said("5")).done
    with pytest.raises(RuntimeError, match="it broke"):
        game.step(said("crash"))
    assert made.closed == 1


def test_an_action_of_several_fields_is_a_tool() -> None:
    class Mover(OpenEnv):
        def step(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Observation:  # type: ignore[override]
            return Seen(text=f"at {action.x}", done=action.x == 3, reward=float(action.x))

    game = episode(Mover())
    game.reset(ROW)
    (tool,) = game.tools
    assert tool["function"]["name"] == "act"
    assert tool["function"]["parameters"]["required"] == ["x"]
    assert set(tool["function"]["parameters"]["properties"]) == {"x", "y"}
    wrong = game.step(said("", Call("act", {"x": "q"})))
    assert wrong.num_failed == 1
    assert texts(wrong)[0].startswith("Error: x: Input should be a valid integer")
    assert texts(game.step(said("", Call("walk")))) == ["Error: there is no tool 'walk'; there are act"]
    last = game.step(said("", Call("act", {"x": 3})))
    assert (texts(last), last.reward, last.done) == (["at 3"], 3.0, True)
    assert game.step(said("I stop.")).reason == "completed"


def test_an_action_without_a_type_is_refused() -> None:
    class Untyped(OpenEnv):
        def step(self, action, **kwargs: Any) -> Observation:  # type: ignore[no-untyped-def, override]
            return Seen(text="")

    with pytest.raises(InputError, match="Untyped does not say what an action is"):
        episode(Untyped())


class StepResult:
    def __init__(self, observation: Mapping[str, Any], reward: float | None = None, *, done: bool = False) -> None:
        self.observation, self.reward, self.done = observation, reward, done


class Client:
    """A client of OpenEnv whose server offers MCP tools, other ones at each reset."""

    def __init__(self) -> None:
        self.num_resets, self.closed, self.full, self._ws = 0, 0, False, object()
        self.async_client = self

    def sync(self) -> "Client":
        return self

    def _step_payload(self, action: Any) -> Any:
        return action

    def reset(self, **kwargs: Any) -> StepResult:
        if self.full:
            raise RuntimeError("Server error: Server at capacity (code: CAPACITY_REACHED)")
        self.num_resets += 1
        return StepResult({})

    def step(self, action: Mapping[str, Any]) -> StepResult:
        name = f"tool_{self.num_resets}"
        if action["type"] == "list_tools":
            return StepResult({"tools": [{"name": name, "description": "D", "input_schema": {"type": "object"}}]})
        if action["arguments"].get("gone"):
            self._ws = object()
        result = {"content": [{"type": "text", "text": "21"}], "data": None}
        return StepResult({"tool_name": action["tool_name"], "result": result, "error": None}, 0.5)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def client() -> Iterator[Client]:
    yield Client()


def test_mcp_tools_are_asked_for_at_each_reset(client: Client) -> None:
    game = episode(Server("http://x", {"properties": {"tool_name": {}, "arguments": {}}}, lambda timeout_s: client))
    for number in (1, 2):
        assert game.reset(ROW) is None
        assert [tool["function"]["name"] for tool in game.tools] == [f"tool_{number}"]
    reply = game.step(said("", Call("tool_2", {"a": 1}), Call("tool_1")))
    assert texts(reply) == ["21", "Error: there is no tool 'tool_1'; there are tool_2"]
    assert (reply.reward, reply.done, reply.num_failed) == (0.5, False, 1)


def test_a_lost_session_is_an_error_and_is_closed(client: Client) -> None:
    game = episode(Server("http://x", {}, lambda timeout_s: client))
    game.reset(ROW)
    with pytest.raises(ConnectionError, match="went away"):
        game.step(said("", Call("tool_1", {"gone": True})))
    assert client.closed == 1
    client.full = True
    with pytest.raises(InputError, match="larger max_concurrent_envs"):
        game.reset(ROW)
    assert client.closed == 2


def test_environments_as_trl_takes_them_and_episodes_stay_what_they_are() -> None:
    class Counter:
        def reset(self) -> None: ...

        def step(self) -> None: ...

        def get_reward(self) -> float:
            return 1.0

    assert isinstance(episode(Counter()), ToolEpisode)
    assert isinstance(episode(None), ToolEpisode)
    own = ToolEpisode(None, (), Calls(5.0).wait)
    assert episode(own) is own


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in packages.KINDS:
        monkeypatch.setitem(sys.modules, "verifiers.v1" if kind == "verifiers" else kind, None)
    for kind in packages.KINDS:
        name = "http://127.0.0.1:1" if kind == "openenv" else "x"
        with pytest.raises(MissingDependencyError, match=rf"pip install 'tunesmith\[{EXTRA_OF[kind]}\]'"):
            source_factory(f"{kind}:{name}", {})
    with pytest.raises(InputError, match="write `openenv:http://host:port`"):
        source_factory("openenv:localhost", {})


def test_other_sources_bring_no_prompts() -> None:
    assert rows_of("prompts.jsonl", {}) is None
    assert rows_of("skyrl_gym:gsm8k", {}) is None
    rows = rows_of("openenv:http://localhost:1", {"num_rows": 2})
    assert rows is not None
    assert [row["task"] for row in rows] == [0, 1]
    assert opening({**rows[1], "seed": 0}, "Hello.") == [{"role": "user", "content": "Hello."}]


def test_tasks_of_one_turn_score_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = ReasoningTasks.__new__(ReasoningTasks)
    monkeypatch.setattr(tasks, "_source", "reasoning_gym:sums", raising=False)
    monkeypatch.setattr(tasks, "_system", None, raising=False)

    class Data(list[dict[str, str]]):
        def score_answer(self, answer: str, entry: dict[str, str]) -> float:
            return float(answer == entry["answer"])

    class Utils:
        @staticmethod
        def extract_answer(text: str) -> str | None:
            return text[3:-4] if text.startswith("<a>") else None

    data = Data([{"question": "1+1", "answer": "2"}, {"question": "2+2", "answer": "4"}])
    monkeypatch.setattr(tasks, "_data", data, raising=False)
    monkeypatch.setattr(tasks, "_utils", Utils, raising=False)
    rows = tasks.rows(5)
    assert rows[1] == {"prompt": [{"role": "user", "content": "2+2"}], "task": 1, "answer": "4"}
    game = episode(tasks)
    for answer, reward in (("4", 1.0), (" 4\n", 1.0), ("<a>4</a>", 1.0), ("5", 0.0)):
        assert game.reset({**rows[1], "seed": 0}) is None
        assert game.step(said(answer)) == Reply(reward=reward, done=True)
    for row, error in (({"prompt": PROMPT, "task": 1}, "the same arguments"), ({"prompt": PROMPT}, "tasks 0 to 1")):
        game.reset({**row, "seed": 0})
        with pytest.raises(InputError, match=error):
            game.step(said("4"))
