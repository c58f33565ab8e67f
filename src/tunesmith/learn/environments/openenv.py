"""Episodes of OpenEnv: an `Environment` in this process, or the client of one behind a WebSocket.

How the model acts follows from the fields of the environment's action: of one with a single text the answer is that
text; MCP tools are tools; any other action is a tool `act` with its fields as arguments.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Literal, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from tunesmith.base.core.errors import InputError
from tunesmith.learn.environments.calls import Calls
from tunesmith.learn.environments.contract import (
    Await,
    Call,
    Episode,
    Message,
    Reply,
    ToolEpisode,
    ToolResult,
    accepted,
    text_of,
)
from tunesmith.learn.environments.text import TextEpisode, opening, seed_of, user

Functions = Sequence[Callable[..., Any]]

NOT_SHOWN = ("done", "reward", "metadata", "tool_name")
"""Fields of an observation that are not for the model to read."""


class BadActionError(Exception):
    """The model's action has wrong fields."""


@dataclass(frozen=True, slots=True)
class Form:
    """The form of the model's actions. `make` makes an action of its fields; `text_field` is the field of a text."""

    kind: Literal["text", "act", "mcp"]
    make: Callable[[Mapping[str, Any]], Any]
    schema: Mapping[str, Any]
    text_field: str = ""


def is_openenv(made: object) -> bool:
    """True for an environment of OpenEnv or a client of one."""
    return hasattr(type(made), "SUPPORTS_CONCURRENT_SESSIONS") or hasattr(type(made), "_step_payload")


def form_of(schema: Mapping[str, Any], make: Callable[[Mapping[str, Any]], Any]) -> Form:
    """The form of actions with the JSON schema `schema`."""
    fields = {name: one for name, one in schema.get("properties", {}).items() if name not in ("metadata", "type")}
    if not fields or {"tool_name", "arguments"} <= fields.keys():
        return Form("mcp", make, schema)
    texts = [name for name, one in fields.items() if _is_text(one)]
    if len(texts) == 1 and set(schema.get("required", ())) <= {*texts, "type"}:
        return Form("text", make, schema, texts[0])
    return Form("act", make, {**schema, "properties": fields})


def _is_text(field: Mapping[str, Any]) -> bool:
    return "enum" not in field and "string" in {one.get("type") for one in (field, *field.get("anyOf", ()))}


def openenv_episode(made: Any, functions: Functions, calls: Calls) -> Episode:
    """The episode of an environment of OpenEnv, or of a client.

    Raises:
        InputError: its type of action cannot be found.
    """
    client = made.sync() if hasattr(type(made), "_step_payload") else None
    kind = _action_type(made if client is None else client.async_client)
    if kind is None and client is None:
        raise InputError(
            f"{type(made).__name__} does not say what an action is; give the argument of its `step` a type, as in "
            "`def step(self, action: MyAction)`"
        )
    form = Form("mcp", _mcp_action, {})
    if kind is not None:
        adapter: TypeAdapter[Any] = TypeAdapter(kind)
        typed = form_of(adapter.json_schema(), adapter.validate_python)
        form = form if typed.kind == "mcp" else typed
    return episode_in(made if client is None else client, form, functions, calls.wait)


def _action_type(made: Any) -> Any:
    """The type of the actions of an environment or client; None if it does not say, as clients of MCP tools do."""
    with suppress(NameError, TypeError):
        hint = get_type_hints(type(made).step).get("action")
        if isinstance(hint, type):
            return hint
    bases = [base for kind in type(made).__mro__ for base in getattr(kind, "__orig_bases__", ())]
    return next((kind for base in bases for kind in get_args(base)[:1] if isinstance(kind, type)), None)


def _mcp_action(fields: Mapping[str, Any]) -> Any:
    types = import_module("openenv.core.env_server.mcp_types")
    kind = {"list_tools": types.ListToolsAction, "call_tool": types.CallToolAction}[fields["type"]]
    return kind(**fields)


@dataclass(frozen=True, slots=True)
class Server:
    """A server of OpenEnv: its address, the JSON schema of its actions, and `connect(timeout_s)` for a client."""

    address: str
    schema: Mapping[str, Any]
    connect: Callable[[float], Any]

    def episode(self, functions: Functions, calls: Calls) -> Episode:
        """See `EpisodeMaker`. The client's limit is shorter than that of `calls`, so that it ends the session."""
        client = self.connect(0.9 * calls.timeout_s).sync()
        return episode_in(client, form_of(self.schema, dict), functions, calls.wait)


def episode_in(environment: Any, form: Form, functions: Functions, wait: Await) -> Episode:
    """The episode of an environment, or of a client that waits for its answers, with actions of `form`."""
    session = Session(environment, form, wait)
    kind = TextSession if form.kind == "text" else ToolSession
    return kind(session, functions, wait)


class Session:
    """An environment or client that is closed once it raised: a server counts sessions that are left open."""

    def __init__(self, environment: Any, form: Form, wait: Await) -> None:
        self.form = form
        self.environment, self._wait = environment, wait
        self._begun_on: object = None

    def reset(self, row: Mapping[str, Any]) -> str:
        """Begin an episode with the row's columns; returns what is seen first."""
        columns = {name: value for name, value in row.items() if name != "prompt" and _is_json(value)}
        given = accepted(self.environment.reset, {**columns, "seed": seed_of(row)})
        result = self._guarded(partial(self.environment.reset, **given))
        self._begun_on = self._connection
        return text_of(_read(result).content)

    @property
    def _connection(self) -> object:
        return getattr(getattr(self.environment, "async_client", None), "_ws", None)

    def step(self, fields: Mapping[str, Any]) -> ToolResult:
        """The result of an action. Raises BadActionError if it has wrong fields."""
        return _read(self.send(fields))

    def send(self, fields: Mapping[str, Any]) -> Any:
        """The environment's own result of an action. Raises BadActionError if it has wrong fields."""
        try:
            action = self.form.make(fields)
        except ValidationError as error:
            faults = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            raise BadActionError("; ".join(faults)) from error
        result = self._guarded(partial(self.environment.step, action))
        if self._begun_on is not None and self._connection is not self._begun_on:  # the client connects again by itself
            self.close()
            raise ConnectionError("the OpenEnv server went away, and with it the session of this episode")
        return result

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return self._wait(call())
        except Exception as error:
            if "VALIDATION_ERROR" in str(error):  # the model's fault, and the session goes on
                raise BadActionError(str(error)) from error
            self.close()
            if "CAPACITY_REACHED" in str(error):
                raise InputError(
                    f"the OpenEnv server has no room for another session ({error}); each completion of a step has "
                    "one: start it with a larger max_concurrent_envs, or lower rollout.prompts_per_step"
                ) from error
            raise

    def close(self) -> None:
        """End the session, whatever state it is in."""
        with suppress(Exception):
            self._wait(self.environment.close())


class TextSession(TextEpisode):
    """A session whose action is a text."""

    def __init__(self, session: Session, functions: Functions, wait: Await) -> None:
        super().__init__(functions, wait)
        self._session, self.environment = session, session.environment

    def begin(self, row: Mapping[str, object]) -> str:
        """See `TextEpisode.begin`."""
        return self._session.reset(row)

    def act(self, text: str) -> Reply:
        """See `TextEpisode.act`."""
        try:
            result = self._session.step({self._session.form.text_field: text})
        except BadActionError as error:
            return Reply((user(f"Error: {error}"),), num_failed=1)
        return Reply((user(text_of(result.content)),), result.reward, result.done, "tool_ended")

    def close(self) -> None:
        """See `Episode.close`."""
        self._session.close()


class ToolSession(ToolEpisode):
    """A session whose actions are tool calls; its tools are asked for at each reset."""

    def __init__(self, session: Session, functions: Functions, wait: Await) -> None:
        super().__init__(None, functions, wait)
        self._session = session
        self._own = list(self.tools)
        self._offered: frozenset[str] = frozenset()

    @property
    def environment(self) -> object:
        """See `instance_in`."""
        return self._session.environment

    def reset(self, row: Mapping[str, object]) -> str | Sequence[Message] | None:  # type: ignore[override]
        """See `Episode.reset`."""
        said = opening(row, self._session.reset(row))
        tools = self._listed() if self._session.form.kind == "mcp" else [_act(self._session.form.schema)]
        self._offered = frozenset(tool["function"]["name"] for tool in tools)
        if double := self._offered & self._functions.keys():
            raise InputError(f"the environment and `tools` both have {', '.join(sorted(double))}; rename one")
        self.tools = [*self._own, *tools]
        return said

    def _listed(self) -> list[dict[str, Any]]:
        listed = _fields(_seen(self._session.send({"type": "list_tools"}))).get("tools")
        if not listed:
            raise ValueError("the environment lists no tools, and its action has no field for a text")
        return [_function(one["name"], one["description"], one["input_schema"]) for one in listed]

    def _called(self, call: Call) -> tuple[ToolResult, bool]:
        if call.error is not None or call.name in self._functions:
            return super()._called(call)
        if call.name not in self._offered:
            names = ", ".join([*self._functions, *sorted(self._offered)])
            return ToolResult(f"Error: there is no tool {call.name!r}; there are {names}"), True
        arguments = dict(call.arguments)
        if self._session.form.kind == "mcp":
            arguments = {"type": "call_tool", "tool_name": call.name, "arguments": arguments}
        try:
            return self._session.step(arguments), False
        except BadActionError as error:
            return ToolResult(f"Error: {error}"), True

    def close(self) -> None:
        """See `Episode.close`."""
        self._session.close()


def _act(schema: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {name: schema[name] for name in ("type", "properties", "required", "$defs") if name in schema}
    return _function("act", schema.get("description", "Acts in the environment."), parameters)


def _function(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _fields(seen: Any) -> dict[str, Any]:
    """The fields of an observation, which is a record or, from a server, a mapping."""
    if isinstance(seen, Mapping):
        return dict(seen)
    return seen.model_dump() if hasattr(seen, "model_dump") else dict(vars(seen))


def _read(result: Any) -> ToolResult:
    """The result of an environment or client: the text of an observation, its reward, and whether it is the last."""
    return ToolResult(observed(_fields(_seen(result))), result.reward, bool(result.done))


def _seen(result: Any) -> Any:
    return result.observation if type(result).__name__ == "StepResult" else result


def observed(fields: Mapping[str, Any]) -> str:
    """An observation as a text: its only field, or a line for each; empty ones are left out."""
    shown = {name: value for name, value in fields.items() if name not in NOT_SHOWN and value not in (None, "", [], {})}
    if error := shown.get("error"):
        return f"Error: {error.get('message', error) if isinstance(error, Mapping) else error}"
    if len(shown) == 1:
        return _plain(next(iter(shown.values())))
    return "\n".join(f"{name}: {_plain(value)}" for name, value in shown.items())


def _plain(value: Any) -> str:
    """A value as a text: of a result of MCP its data, else its contents."""
    value = vars(value) if hasattr(value, "structured_content") else value
    if isinstance(value, Mapping) and "content" in value:
        texts = [_fields(one).get("text") for one in value["content"]]
        data = value.get("data")
        value = data if data is not None else "\n".join(text for text in texts if text)
    return value if isinstance(value, str) else json.dumps(value, default=str)
