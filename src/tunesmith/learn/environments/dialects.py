"""Episodes of other packages' environments, which are recognised by their methods: none of the packages is imported.

    Gymnasium, GEM  `reset(seed=) -> (text, info)`, `step(text) -> (text, reward, terminated, truncated, info)`
    older Gym       `reset() -> text`, `step(text) -> (text, reward, done, info)`
    skyrl-gym       `init(prompt) -> (prompt, info)`, `step(text) -> {"observations", "reward", "done", ...}`
    TextArena       `reset(num_players, seed)`, `get_observation()`, `step -> (done, info)`, `close() -> (rewards, ...)`
    OpenEnv         see `openenv`

To these the model's whole answer is the action, and what they say comes back as a message of the user.
"""

import random
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tunesmith.base.core.errors import InputError
from tunesmith.learn.environments.calls import Calls
from tunesmith.learn.environments.contract import Await, Episode, Message, Reply, Said, ToolEpisode, instance_in
from tunesmith.learn.environments.openenv import is_openenv, openenv_episode
from tunesmith.learn.environments.text import TextEpisode, seed_of, text_from, user

Functions = Sequence[Callable[..., Any]]


@runtime_checkable
class EpisodeMaker(Protocol):
    """A maker of episodes in place of an environment where one does not fit all rows, or is elsewhere."""

    def episode(self, functions: Functions, calls: Calls) -> Episode:
        """An episode; the model may also call `functions`."""
        ...


def episode_of(made: object, functions: Functions, calls: Calls) -> Episode:
    """The episode in which `made`, an environment of any kind, and `functions` take part.

    Raises:
        InputError: `made` is of a kind that does not talk in text.
    """
    if isinstance(made, EpisodeMaker):
        return made.episode(functions, calls)
    if isinstance(made, Episode):
        return made
    if made is None or not hasattr(made, "step") or hasattr(made, "get_reward"):
        return ToolEpisode(made, functions, calls.wait)
    if hasattr(made, "init"):
        raise InputError(
            f"{type(made).__name__} is an environment of skyrl-gym, which is made anew for each row; give its class, "
            "or `skyrl_gym:ID` if it is registered"
        )
    if is_openenv(made):
        return openenv_episode(made, functions, calls)
    if hasattr(made, "get_observation"):
        return TextArenaEpisode(made, functions, calls.wait)
    return GymEpisode(made, functions, calls.wait)


def opened(factory: Callable[[], object] | None, functions: Functions, calls: Calls) -> Episode:
    """The episode of what `factory` makes, which is closed if it cannot take part in one.

    Raises:
        InputError: see `episode_of`, and what the factory raises.
    """
    made = None if factory is None else calls.wait(factory())
    try:
        return episode_of(made, functions, calls)
    except InputError:
        if hasattr(made, "close"):
            calls.wait(made.close())  # type: ignore[union-attr]
        raise


ENVIRONMENT = "environment"
"""The column that names a row's environment, where there are several."""


def name_in(row: Mapping[str, object], names: Collection[str]) -> str:
    """The one of `names` that `row` names. Raises InputError if it names none."""
    name = row.get(ENVIRONMENT)
    if isinstance(name, str) and name in names:
        return name
    given = f"has no `{ENVIRONMENT}`" if name is None else f"has `{ENVIRONMENT}` {name!r}"
    raise InputError(f"a row of the prompts {given}; name one of {', '.join(map(repr, names))} in each row")


@dataclass(frozen=True, slots=True)
class ByName:
    """Makes episodes of several environments, of which each row names one: TRL's dictionary of factories."""

    factories: Mapping[str, Callable[[], object]]

    def episode(self, functions: Functions, calls: Calls) -> Episode:
        """See `EpisodeMaker`."""
        return NamedEpisode(self.factories, functions, calls)


class NamedEpisode:
    """An episode of the environment that a row names. Each is made once, and begins anew with each of its rows."""

    def __init__(self, factories: Mapping[str, Callable[[], object]], functions: Functions, calls: Calls) -> None:
        self._open = {name: partial(opened, factory, functions, calls) for name, factory in factories.items()}
        self._made: dict[str, Episode] = {}
        self._current: Episode | None = None

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """See `Episode.tools`: those of the row's environment; before the first row those of all, which are made."""
        episodes = [self._episode(name) for name in self._open] if self._current is None else [self._current]
        return [tool for episode in episodes for tool in episode.tools]

    def reset(self, row: Mapping[str, object]) -> str | Sequence[Message] | None:
        """See `Episode.reset`. Raises InputError for a row that names no environment."""
        name = name_in(row, self._open)
        self._current = self._episode(name)
        return self._current.reset({column: value for column, value in row.items() if column != ENVIRONMENT})

    @property
    def environment(self) -> object | None:
        """That of the row."""
        return instance_in(self._of_row())

    def step(self, said: Said) -> Reply:
        """See `Episode.step`."""
        return self._of_row().step(said)

    def reward(self) -> float | None:
        """See `Episode.reward`."""
        return self._of_row().reward()

    def _episode(self, name: str) -> Episode:
        if name not in self._made:
            self._made[name] = self._open[name]()
        return self._made[name]

    def _of_row(self) -> Episode:
        assert self._current is not None, "`reset` comes first"
        return self._current

    def close(self) -> None:
        """See `Episode.close`."""
        for made in self._made.values():
            made.close()


_SEEDING = threading.Lock()


class OwnRandomness:
    """Python's and NumPy's global generators as one episode has them, apart from other episodes and from the process.

    Games of TextArena and GEM seed them in `reset` and draw from them in every step, in threads that run at the same
    time: so a game follows from its seed and its moves.
    """

    def __init__(self) -> None:
        self._states: tuple[Any, Any] | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """A context in which the generators are the episode's; one at a time in the process."""
        with _SEEDING:
            outside = random.getstate(), np.random.get_state()
            _set_generators(self._states or outside)
            try:
                yield
            finally:
                self._states = random.getstate(), np.random.get_state()
                _set_generators(outside)


def _set_generators(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


class GymEpisode(TextEpisode):
    """An environment of Gymnasium or GEM, or of the older Gym."""

    def __init__(self, environment: Any, functions: Functions, wait: Await) -> None:
        super().__init__(functions, wait)
        for name in ("observation_space", "action_space"):
            space = getattr(environment, name, None)
            if hasattr(space, "contains") and "Text" not in (kind.__name__ for kind in type(space).__mro__):
                raise InputError(
                    f"the {name} of {type(environment).__name__} is {space}, but a language model reads and writes "
                    "text; wrap the environment in one whose spaces are gymnasium.spaces.Text"
                )
        self.environment = environment
        module = type(getattr(environment, "unwrapped", environment)).__module__
        own = OwnRandomness() if module.startswith("gem.") else None
        self._in_reset = nullcontext if own is None else own.entered
        self._in_step = (
            self._in_reset if module.startswith("gem.envs.game_env") else nullcontext
        )  # others may take long
        self._takes = frozenset(signature(environment.reset).parameters)

    def begin(self, row: Mapping[str, object]) -> str:
        """The first observation of an episode with the row's seed, and other columns that `reset` takes by name."""
        given = {name: value for name, value in row.items() if name in self._takes}
        if "seed" in given:
            given["seed"] = seed_of(row)
        with self._in_reset():
            result = self._wait(self.environment.reset(**given))
        return text_from(result[0] if isinstance(result, tuple) else result, "reset")

    def act(self, text: str) -> Reply:
        """See `TextEpisode.act`."""
        with self._in_step():
            result = self._wait(self.environment.step(text))
        match result:
            case (seen, reward, terminated, truncated, _):
                done = bool(terminated) or bool(truncated)
            case (seen, reward, done, _):
                pass
            case other:
                raise TypeError(
                    f"step returned {type(other).__name__}; return (text, reward, terminated, truncated, info)"
                )
        return Reply((user(text_from(seen, "step")),), reward, bool(done), "tool_ended")

    def close(self) -> None:
        """See `Episode.close`."""
        if hasattr(self.environment, "close"):
            self._wait(self.environment.close())


@dataclass(frozen=True, slots=True)
class PerRow:
    """Makes an environment of skyrl-gym for a row of the prompts."""

    make: Callable[[Mapping[str, object]], Any]

    def episode(self, functions: Functions, calls: Calls) -> Episode:
        """See `EpisodeMaker`."""
        return SkyRLEpisode(self.make, functions, calls.wait)


class SkyRLEpisode(TextEpisode):
    """Environments of skyrl-gym, one for each row.

    A `postprocessed_action` is not used: what the model said stays as it was drawn.
    """

    def __init__(self, make: Callable[[Mapping[str, object]], Any], functions: Functions, wait: Await) -> None:
        super().__init__(functions, wait)
        self._make = make
        self.environment: Any = None

    def reset(self, row: Mapping[str, object]) -> Sequence[Message]:
        """The messages with which the environment of `row` begins."""
        self.close()
        self.environment = self._make(row)
        prompt, _ = self._wait(self.environment.init([dict(one) for one in row["prompt"]]))  # type: ignore[union-attr]
        return prompt

    def act(self, text: str) -> Reply:
        """See `TextEpisode.act`."""
        output = self._wait(self.environment.step(text))
        messages, done = tuple(output["observations"]), bool(output["done"])
        if not (messages or done):
            raise ValueError("step returned no observations, and not done; return a message that the model answers")
        return Reply(messages, output["reward"], done, "tool_ended")

    def close(self) -> None:
        """See `Episode.close`."""
        if self.environment is not None:
            self._wait(self.environment.close())
            self.environment = None


_MOVES = re.compile(r"(?:available|valid|legal) moves?:((?:[\s,;|/']*\[[^\[\]]+\])+)", re.IGNORECASE)
"""The list of moves that may be made, as games write it: `Available Moves: '[0]', '[1]'`."""


INVALID_MOVE = -1.0
"""TextArena's reward for a game that ends with an invalid move."""


class TextArenaEpisode(TextEpisode):
    """A game of TextArena. The model is the first player; a second one makes random moves of those that the game lists.

    The usual LLMObservationWrapper repeats the whole game at each turn; of it the new messages alone are read. What
    other wrappers say is passed on as it is.
    """

    def __init__(self, game: Any, functions: Functions, wait: Await) -> None:
        super().__init__(functions, wait)
        self.environment, self._inner = game, game
        self._memories: list[Any] = []
        while "env" in vars(self._inner):
            if "full_observations" in vars(self._inner):
                self._memories.append(self._inner)
            self._inner = self._inner.env
        repeats = all(type(one).__name__ == "LLMObservationWrapper" for one in self._memories)
        self._shown = self._inner if repeats else game
        self._num_players: tuple[int, ...] = (1, 2)
        self._random = random.Random(0)
        self._randomness = OwnRandomness()

    def begin(self, row: Mapping[str, object]) -> str:
        """The text that the first player sees at the start."""
        seed = seed_of(row)
        self._random.seed(seed)
        for wrapper in self._memories:
            wrapper.full_observations = {}  # it remembers earlier games
        with self._randomness.entered():
            self._num_players = (self._start(seed),)
            self._let_others_move(done=False)
        seen = self._seen()
        if self._num_players == (2,):
            self._listed(seen)  # no list in front of the first move: none in front of the opponent's
        return seen

    def _start(self, seed: int) -> int:
        """Reset the game; returns the number of players, which games do not say but insist on."""
        for number in self._num_players:
            try:
                self.environment.reset(num_players=number, seed=seed)
            except (AssertionError, ValueError):
                continue
            kinds = {kind.__name__ for kind in type(getattr(self._inner, "state", None)).__mro__}
            if ("SinglePlayerState", "TwoPlayerState")[number - 1] in kinds:
                return number
        raise InputError(
            f"{self._name} is a game of several players; games of one player, and of two whose moves are listed, can "
            "be played"
        )

    def act(self, text: str) -> Reply:
        """See `TextEpisode.act`."""
        with self._randomness.entered():
            done, _ = self.environment.step(text)
            done = self._let_others_move(done=done)
        if not done:
            return Reply((user(self._seen()),), 0.0)
        rewards, info = self.environment.close()
        reward = (rewards or {}).get(0, 0.0)
        if isinstance(reward, str):  # Countdown, Cryptarithm and ThreeCardMonte put the reason of an invalid move here
            reward, info = INVALID_MOVE, {0: {"reason": reward}}
        reason = (info or {}).get(0, {}).get("reason") or "The game is over."
        return Reply((user(str(reason)),), float(reward), True, "tool_ended")

    def _let_others_move(self, *, done: bool) -> bool:
        """Make the moves of the second player, if it is its turn; returns whether the game is over."""
        while not done and self._inner.state.current_player_id != 0:
            done, _ = self.environment.step(self._random.choice(self._listed(self._seen())))
        return bool(done)

    def _listed(self, seen: str) -> list[str]:
        """The moves that `seen` lists. Raises InputError if there are none."""
        listed = _MOVES.findall(seen)
        if not listed:
            raise InputError(
                f"{self._name} is a game of two players that does not list the moves that may be made, so there is no "
                "opponent for the model; choose a game of one player, or TicTacToe-v0, SimpleTak-v0, Othello-v0"
            )
        return re.findall(r"\[[^\[\]]+\]", listed[-1])

    def _seen(self) -> str:
        """The text that the player whose turn it is sees, without its own moves where they are told apart."""
        player, seen = self._shown.get_observation()
        if not isinstance(seen, list):
            return text_from(seen, "get_observation").strip()
        roles = self._inner.state.role_mapping
        new = [(sender, message) for sender, message, kind in seen if sender != player or kind.name != "PLAYER_ACTION"]
        return "\n".join(f"[{roles.get(sender, f'Player {sender}')}] {message}" for sender, message in new).strip()

    @property
    def _name(self) -> str:
        return str(getattr(self._inner, "env_id", type(self._inner).__name__))

    def close(self) -> None:
        """See `Episode.close`. A game holds nothing, and its `close` asks for the rewards."""
