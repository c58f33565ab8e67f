"""Tasks of one turn that other packages bring: data sets of reasoning-gym, and task sets of verifiers.

Of verifiers the tasks and their rewards are used, without its harness: that starts a process and an environment of its
own for each answer. So tasks with tools, a sandbox or a simulated user are refused.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import islice
from typing import Any

from tunesmith.base.core.errors import InputError
from tunesmith.learn.environments.calls import Calls
from tunesmith.learn.environments.contract import Await, Episode, Reply
from tunesmith.learn.environments.text import TASK, TextEpisode

Functions = Sequence[Callable[..., Any]]
Score = Callable[[Mapping[str, Any], str], Any]


class ScoredEpisode(TextEpisode):
    """A task of one turn."""

    def __init__(self, score: Score, functions: Functions, wait: Await) -> None:
        super().__init__(functions, wait)
        self._score = score
        self._row: Mapping[str, object] = {}

    def begin(self, row: Mapping[str, object]) -> str:
        """See `TextEpisode.begin`."""
        self._row = row
        return ""

    def act(self, text: str) -> Reply:
        """See `TextEpisode.act`."""
        return Reply(reward=float(self._wait(self._score(self._row, text))), done=True)


def task_of(row: Mapping[str, Any], source: str, count: int) -> int:
    """The number of a row's task. Raises InputError for a row of other prompts."""
    number = row.get(TASK)
    if not isinstance(number, int) or not 0 <= number < count:
        raise InputError(
            f"a prompt has `{TASK}` {number!r}, but {source} has tasks 0 to {count - 1}; take its own prompts, with "
            "the same arguments"
        )
    return number


class ReasoningTasks:
    """A data set of reasoning-gym, `size` tasks from `seed`.

    The answer is what stands between `<answer>` tags, else the whole turn. `system_prompt` is a name of reasoning-gym
    (`default`, `simple`, ...) or a text, and none unless given.
    """

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        package = import_module("reasoning_gym")
        self._utils = import_module("reasoning_gym.utils")
        settings = {"seed": 0, **arguments}  # without one the data set has another content each time
        system = settings.pop("system_prompt", None)
        self._system = self._utils.SYSTEM_PROMPTS.get(system, system)
        self._source = f"reasoning_gym:{name}"
        self._data = package.create_dataset(name, **settings)

    def rows(self, limit: int) -> list[dict[str, Any]]:
        """The prompts of at most `limit` tasks, with the answer that is sought."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        entries = [(number, self._data[number]) for number in range(min(limit, len(self._data)))]
        return [
            {
                "prompt": [*system, {"role": "user", "content": entry["question"]}],
                TASK: number,
                "answer": entry["answer"],
            }
            for number, entry in entries
        ]

    def score(self, row: Mapping[str, Any], text: str) -> float:
        """The reward of an answer."""
        entry = self._data[task_of(row, self._source, len(self._data))]
        if row["prompt"][-1]["content"] != entry["question"]:
            raise InputError(
                f"the prompt of task {row[TASK]} is another than {self._source} has; give the prompts and the "
                "environment the same arguments"
            )
        answer = self._utils.extract_answer(text)
        return self._data.score_answer(text.strip() if answer is None else answer, entry)

    def episode(self, functions: Functions, calls: Calls) -> Episode:
        """See `EpisodeMaker`."""
        return ScoredEpisode(self.score, functions, calls.wait)


class NoRuntime:
    """Stands where verifiers gives a task its sandbox. Raises InputError once a task uses it."""

    def __getattr__(self, name: str) -> Any:
        raise InputError(
            f"this task set of verifiers runs code in a sandbox (it uses runtime.{name}), which Tunesmith has none of; "
            "take one whose rewards read the answer alone"
        )


class VerifiersTasks:
    """A task set of verifiers 0.4 or later, whose tasks are answered in one turn without tools.

    The reward is the weighted sum of the tasks' `@reward` methods. Metrics are computed by verifiers, and not kept.
    """

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        loaders = import_module("verifiers.v1.utils.loaders")
        self._source = f"verifiers:{name}"
        try:
            config = loaders.taskset_config_type(name)(id=name, **arguments)
        except (ModuleNotFoundError, AttributeError) as error:
            raise InputError(f"{self._source} is no task set of verifiers: {error}") from error
        self._taskset = loaders.load_taskset(config)
        self._tasks: list[Any] = []

    def rows(self, limit: int) -> list[dict[str, Any]]:
        """The prompts of at most `limit` tasks."""
        return [{"prompt": _prompt(task), TASK: number} for number, task in enumerate(self._loaded(limit))]

    def _loaded(self, limit: int) -> list[Any]:
        """The first `limit` tasks. Raises InputError for one that cannot be run."""
        if len(self._tasks) < limit:
            self._tasks = list(islice(iter(self._taskset), limit))
        if self._tasks:
            self._check(self._tasks[0])
        return self._tasks[:limit]

    def _check(self, task: Any) -> None:
        reasons = {
            "runs in a container": task.NEEDS_CONTAINER,
            "has tools, which are servers of their own": task.toolsets(task.config)
            or self._taskset.toolsets(self._taskset.config),
            "has no @reward": not (task.hooks("reward") or task.config.judges),
            "has no prompt, so a simulated user begins": task.data.prompt is None,
        }
        if found := [reason for reason, holds in reasons.items() if holds]:
            raise InputError(
                f"{self._source}: {type(task).__name__} {' and '.join(found)}; Tunesmith runs tasks of one turn whose "
                "rewards read the answer"
            )

    async def score(self, row: Mapping[str, Any], text: str) -> float:
        """The reward of an answer."""
        number = row.get(TASK)
        tasks = self._loaded(number + 1 if isinstance(number, int) else 1)
        task = tasks[task_of(row, self._source, len(tasks))]
        trace, runtime = _trace(task, text), NoRuntime()
        try:
            await task.setup(trace, runtime)
            await task.finalize(trace, runtime)
            await task.score(trace, runtime)
        except Exception as error:  # verifiers wraps what a task raises
            if isinstance(error.__cause__, InputError):
                raise error.__cause__ from None
            raise
        return trace.reward

    def episode(self, functions: Functions, calls: Calls) -> Episode:
        """See `EpisodeMaker`."""
        return ScoredEpisode(self.score, functions, calls.wait)


def _prompt(task: Any) -> list[dict[str, str]]:
    """The messages with which a task begins."""
    text = import_module("verifiers.v1.types").content_text
    data = task.data
    given = (
        [{"role": "user", "content": data.prompt}]
        if isinstance(data.prompt, str)
        else [{"role": one.role, "content": text(one.content)} for one in data.prompt]
    )
    return given if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}, *given]


def _trace(task: Any, answer: str) -> Any:
    """The trace of verifiers for a task that was answered with `answer`."""
    types, trace = import_module("verifiers.v1.types"), import_module("verifiers.v1.trace")
    node = import_module("verifiers.v1.graph").MessageNode
    kinds = {"system": types.SystemMessage, "user": types.UserMessage, "assistant": types.AssistantMessage}
    messages = [kinds[one["role"]](content=one["content"]) for one in _prompt(task)]
    messages.append(types.AssistantMessage(content=answer))
    last = len(messages) - 1
    nodes = [
        node(parent=index - 1 if index else None, message=message, sampled=index == last)
        for index, message in enumerate(messages)
    ]
    return trace.Trace(
        task=trace.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=trace.AgentInfo(config=import_module("verifiers.v1.configs.agent").AgentConfig()),
        state=import_module("verifiers.v1.state").state_cls(type(task))(),
        nodes=nodes,
        is_completed=True,
        ok=True,
        stop_condition="agent_completed",
    )
