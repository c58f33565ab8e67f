"""The contract of an environment: TRL's `environment_factory` and `tools`, and an episode of any kind from inside.

An environment as TRL 1.16 takes it is a class whose instances have `reset(**row) -> str | None` (its text is added to
the last message of the prompt), public methods that are tools, and perhaps `get_reward() -> float`. Beyond that, one
may have `done` (an attribute, a property or a method; true once the episode has ended) and `close()`; a tool may return
a `ToolResult`, which also rewards its turn or ends the episode. Any of them may be `async def`. Environments of other
packages are recognised by `dialects`.
"""

import contextlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional, Protocol, get_type_hints, runtime_checkable

from pydantic import ConfigDict, PydanticSchemaGenerationError, TypeAdapter, ValidationError

from tunesmith.base.core.errors import InputError
from tunesmith.base.schema.records import Message
from tunesmith.engine.batch.rollout import StopReason
from tunesmith.engine.models.tool_messages import schema_of

NO_TOOLS = ("reset", "get_reward", "close", "done")
"""Public methods of an environment that are not offered to the model."""

MOST_SHOWN = 100
"""Characters of a wrong argument that the model is shown."""

_IN_JSON = {"True": "true", "False": "false", "None": "null"}
"""Values of Python that models write into JSON as texts."""

_AS_MEANT = ConfigDict(coerce_numbers_to_str=True)

EnvironmentFactory = Callable[[], object] | Mapping[str, Callable[[], object]]
"""Makes an environment; or, for environments of several kinds, makes that which a row names in its column
`environment`."""

GYM_METHODS = ("step", "seed")
"""Methods that an environment of another form may have beside its tools, for which nobody writes a docstring."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A tool's result in place of a text: its text, a reward for the turn, and whether the episode ends here.

    Example: `return ToolResult("You won.", reward=1.0, done=True)`.
    """

    content: object
    reward: float | None = None
    done: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of the model. `error` says why it cannot be made, for the model to read."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Said:
    """A turn of the model: its text without special tokens, and the calls in it."""

    text: str
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer of an environment to a turn. Without `messages`, or with `done`, the episode ends."""

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    done: bool = False
    reason: StopReason = "completed"
    num_failed: int = 0


@runtime_checkable
class Episode(Protocol):
    """One conversation's side of an environment. Instances are used again: each `reset` begins another episode."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of the tools that the model may call; empty where it answers in plain text."""
        ...

    def reset(self, row: Mapping[str, object]) -> str | Sequence[Message] | None:
        """Begin: text to add to the prompt's last message, messages in place of the prompt, or nothing."""
        ...

    def step(self, said: Said) -> Reply:
        """The answer to a turn."""
        ...

    def reward(self) -> float | None:
        """The reward of the whole episode, beside those of its turns; None if there is none."""
        ...

    def close(self) -> None:
        """Free what the episode holds; it is not used again."""
        ...


Await = Callable[[Any], Any]
"""The result of a call: itself, or that of the coroutine that the call returned."""


class ToolEpisode:
    """Tools, and perhaps an environment in TRL's form, whose methods are tools too.

    An answer without a call ends the episode. A tool that raises is answered with the error as text: the model made the
    call; but `reset` and `get_reward` are the environment's own, and what they raise breaks the episode.
    """

    def __init__(self, environment: object | None, functions: Sequence[Callable[..., Any]], wait: Await) -> None:
        self._environment = environment
        methods = [] if environment is None else methods_of(environment)
        named = {function.__name__: function for function in (*functions, *methods)}
        if len(named) < len(functions) + len(methods):
            raise InputError(f"two tools have the same name; the names are {', '.join(sorted(named))}: rename one")
        is_environment = any(hasattr(environment, name) for name in ("reset", "get_reward"))
        if environment is not None and not named and not is_environment:
            raise InputError(
                f"{type(environment).__name__} is no environment: it has neither tools (public methods) nor `reset`, "
                "`get_reward` or `step`; write one of them"
            )
        self._functions = named
        self.tools = [schema_of(function) for function in named.values()]
        self._kinds = {name: kinds_of(function) for name, function in named.items()}
        self._wait = wait

    @property
    def environment(self) -> object | None:
        """See `instance_in`."""
        return self._environment

    def reset(self, row: Mapping[str, object]) -> str | None:
        """See `Episode.reset`."""
        reset = getattr(self._environment, "reset", None)
        if reset is None:
            return None
        opening = self._wait(reset(**accepted(reset, row)))
        if not (opening is None or isinstance(opening, str)):
            raise TypeError(f"reset returned {type(opening).__name__}; return a text, or None")
        return opening

    def step(self, said: Said) -> Reply:
        """See `Episode.step`."""
        if not said.calls:
            return Reply(done=True)
        messages: list[Message] = []
        rewards: list[float] = []
        done, num_failed = False, 0
        for call in said.calls:
            result, failed = self._called(call)
            num_failed += failed
            role = {"role": "tool", "name": call.name} if call.error is None else {"role": "user"}
            messages.append({**role, "content": text_of(result.content)})
            if result.reward is not None:
                rewards.append(float(result.reward))
            if done := result.done or self._is_done():
                break
        return Reply(tuple(messages), sum(rewards) if rewards else None, done, "tool_ended", num_failed)

    def _called(self, call: Call) -> tuple[ToolResult, bool]:
        """The result of a call, and whether it could not be made."""
        if call.error is not None:
            return ToolResult(f"Error: {call.error}"), True
        function = self._functions.get(call.name)
        if function is None:
            return ToolResult(f"Error: there is no tool {call.name!r}; there are {', '.join(self._functions)}"), True
        try:
            inspect.signature(function).bind(**call.arguments)
            arguments = converted(call.arguments, self._kinds[call.name])
        except TypeError as error:
            return ToolResult(f"Error: {call.name}: {error}"), True
        try:
            result = self._wait(function(**arguments))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever a tool raises, the model is told
            return ToolResult(f"Error: {type(error).__name__}: {error}"), False
        return (result if isinstance(result, ToolResult) else ToolResult(result)), False

    def _is_done(self) -> bool:
        done = getattr(self._environment, "done", False)
        return bool(self._wait(done()) if callable(done) else done)

    def reward(self) -> float | None:
        """See `Episode.reward`. Without `get_reward` a trajectory is worth what its turns earned, perhaps nothing."""
        get_reward = getattr(self._environment, "get_reward", None)
        return 0.0 if get_reward is None else self._wait(get_reward())

    def close(self) -> None:
        """See `Episode.close`."""
        close = getattr(self._environment, "close", None)
        if close is not None:
            self._wait(close())


def instance_in(episode: Episode) -> object | None:
    """The environment that takes part in an episode, which reward functions are given: `episode.environment`, else, of
    an episode that somebody wrote, itself. None of tools alone, of tasks, and of one in another process.
    """
    return getattr(episode, "environment", episode)


def methods_of(environment: object) -> list[Callable[..., Any]]:
    """The public methods of an environment's class, in the order in which they are written."""
    kinds = type(environment).__mro__[:-1]
    found = {name: value for kind in reversed(kinds) for name, value in vars(kind).items()}  # no property is evaluated
    public = {name: value for name, value in found.items() if not name.startswith("_") and name not in NO_TOOLS}
    public = {name: value for name, value in public.items() if name not in GYM_METHODS or value.__doc__}
    functions = [name for name, value in public.items() if inspect.isfunction(value) or isinstance(value, staticmethod)]
    return [getattr(environment, name) for name in functions]


def kinds_of(function: Callable[..., Any]) -> dict[str, TypeAdapter[Any]]:
    """The kinds of a tool's arguments, of those whose type hints say them."""
    hints = get_type_hints(function)
    found: dict[str, TypeAdapter[Any]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name in hints:
            hint = Optional[hints[name]] if parameter.default is None else hints[name]  # noqa: UP045 - made of a value
            with contextlib.suppress(PydanticSchemaGenerationError):
                found[name] = TypeAdapter(hint, config=_AS_MEANT)
    return found


def converted(arguments: Mapping[str, Any], kinds: Mapping[str, TypeAdapter[Any]]) -> dict[str, Any]:
    """`arguments` as the kinds that they are to be. Raises TypeError for one that is of another kind.

    A model may write a number, a truth value, null or a list as a text, an integer as a number with a point, and a
    number where a text is meant. Nothing is rounded, and a truth value is no number.
    """
    return {name: value if name not in kinds else _as(kinds[name], name, value) for name, value in arguments.items()}


def _as(kind: TypeAdapter[Any], name: str, value: Any) -> Any:
    meant = [value]
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            meant.append(json.loads(_IN_JSON.get(value.strip(), value)))
    for one in meant:
        with contextlib.suppress(ValidationError):
            found = kind.validate_python(one)
            if not isinstance(one, bool) or isinstance(found, bool):
                return found
    schema = {key: part for key, part in kind.json_schema().items() if key != "title"}
    given, expected = json.dumps(value, ensure_ascii=False, default=str), json.dumps(schema, ensure_ascii=False)
    given = given if len(given) <= MOST_SHOWN else f"{given[:MOST_SHOWN]}..."
    raise TypeError(f"the argument {name!r} is {given}, expected is {expected}")


def accepted(function: Callable[..., Any], arguments: Mapping[str, object]) -> dict[str, object]:
    """Those of `arguments` that `function` takes by name."""
    parameters = inspect.signature(function).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}


def text_of(content: object) -> str:
    """The result of a tool, as the text that the model reads."""
    if isinstance(content, dict | list):
        with contextlib.suppress(TypeError, ValueError):
            return json.dumps(content, ensure_ascii=False)
    return content if isinstance(content, str) else "" if content is None else str(content)


def clean(text: str) -> str:
    """`text` without halves of surrogate pairs, which tokenizers refuse; files and processes bring them."""
    return text.encode("utf-8", "replace").decode("utf-8")
