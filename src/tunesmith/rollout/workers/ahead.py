"""Completions drawn while training goes on: those of step k are of the weights before step k - staleness.

The weights of each step follow from its number, not from what is ready when, so that a run depends on its recipe and
seed alone.
"""

import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

from tunesmith.batch.rollout import Completion, Group, SamplingParams
from tunesmith.core.errors import InputError
from tunesmith.core.trace import Trace, count, include, trace
from tunesmith.rollout.engine import Engine, OnGroup, OnProgress, OnText
from tunesmith.rollout.workers.engine import Asked, WorkerEngine
from tunesmith.schema.records import Prompt

Arguments = tuple[Sequence[Prompt], int, SamplingParams]
"""Prompts, completions of each, and sampling parameters of a call of `generate`."""

_Drawn = tuple[list[Group], Trace]
_Job = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Ahead:
    """Limit of drawing ahead: at most `staleness` steps, up to the last. `arguments_of` gives the call of
    `generate` that the step of an index makes.
    """

    staleness: int
    num_steps: int
    arguments_of: Callable[[int], Arguments]


class AheadEngine:
    """Draws the completions of later steps with `inner` in a second thread, from the weights of earlier ones.

    The call of `generate` that `ahead` knows as that of the next step begins the draws of the steps after it, from the
    weights as they are, and returns what was drawn for its own. Any other call, such as an evaluation, is drawn from
    the weights as they are, before all draws that wait.
    """

    is_exact = False
    """The log-probs of completions are those of older weights, so the trainer computes its own."""

    def __init__(self, inner: WorkerEngine, ahead: Ahead, weight_version: Callable[[], int]) -> None:
        self.inner = inner
        self._ahead, self._weight_version = ahead, weight_version
        self._step = 0  # the next one
        self._begun: dict[int, Future[_Drawn]] = {}
        self._jobs: queue.PriorityQueue[tuple[int, int, _Job | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        # A daemon: at the end of a run that failed, nobody waits for what is being drawn.
        threading.Thread(target=_work, args=(self._jobs,), name="draw-ahead", daemon=True).start()
        weakref.finalize(self, self._jobs.put, (-1, -1, None))

    def unload(self) -> None:
        """Nothing: workers draw during the update."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: SamplingParams,
        *,
        on_progress: OnProgress | None = None,
        on_text: OnText | None = None,
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        """See `engine.Engine.generate`; `on_group` is called at the end.

        Raises:
            InputError: for the other callbacks.
            ServerError: a worker was lost several times in a row.
        """
        if on_progress or on_text:
            raise InputError("completions that are drawn ahead are not reported one by one; set scale.staleness to 0")
        is_step = (list(prompts), n, sampling) == self._arguments(self._step)
        with self.inner.waiting():
            if is_step:
                groups, work = self._of_next_step().result()
            else:
                groups, work = self._begin((prompts, n, sampling), is_urgent=True).result()
            include(work)
        if is_step:
            count("versions_behind", self._weight_version() - groups[0].weight_version)
        if on_group:
            for index, group in enumerate(groups):
                on_group(index, group)
        return groups

    def state_dict(self) -> Mapping[str, object]:
        """The completions of the steps to come that were asked for; waits for them."""
        drawn = {str(step): [_as_json(group) for group in one.result()[0]] for step, one in self._begun.items()}
        return {"step": self._step, "drawn": drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the completions of `state_dict`."""
        self._step, self._begun = state["step"], {}
        for step, groups in state["drawn"].items():
            prompts = self._ahead.arguments_of(int(step))[0]
            done = self._begun[int(step)] = Future[_Drawn]()
            done.set_result(([_group(*both) for both in zip(prompts, groups, strict=True)], Trace()))

    def _arguments(self, step: int) -> Arguments:
        prompts, n, sampling = self._ahead.arguments_of(step)
        return list(prompts), n, sampling

    def _of_next_step(self) -> Future[_Drawn]:
        """The completions of the next step, perhaps not drawn yet; draws up to `staleness` steps later have begun."""
        step, last = self._step, self._ahead.num_steps - 1
        for later in range(step, max(step, min(step + self._ahead.staleness, last)) + 1):
            if later not in self._begun:
                self._begun[later] = self._begin(self._arguments(later))
        self._step += 1
        return self._begun.pop(step)

    def _begin(self, arguments: Arguments, is_urgent: bool = False) -> Future[_Drawn]:
        asked, future, inner = self.inner.ask(*arguments, ahead=True), Future[_Drawn](), self.inner
        self._jobs.put((0 if is_urgent else 1, next(self._numbers), lambda: _draw(inner, asked, future)))
        return future


def drawn_ahead(engine: Engine) -> Mapping[str, AheadEngine]:
    """The part of a checkpoint with what `engine` has drawn ahead, by name; empty if it does not."""
    return {"drawn_ahead": engine} if isinstance(engine, AheadEngine) else {}


def _work(jobs: "queue.PriorityQueue[tuple[int, int, _Job | None]]") -> None:
    """Do jobs, in the order of their numbers, until there is None in the place of one."""
    while (job := jobs.get()[-1]) is not None:
        job()


def _draw(inner: WorkerEngine, asked: Asked, future: Future[_Drawn]) -> None:
    try:
        with trace() as work:
            groups = inner.draw(asked)
        future.set_result((groups, work))
    except BaseException as error:  # noqa: BLE001 - raised in the thread that waits for it
        future.set_exception(error)


def _as_json(group: Group) -> dict[str, object]:
    return {
        "weight_version": group.weight_version,
        "prompt_token_ids": group.prompt_token_ids,
        "completions": [asdict(completion) for completion in group.completions],
    }


def _group(prompt: Prompt, values: Mapping[str, Any]) -> Group:
    completions = tuple(_completion(one) for one in values["completions"])
    return Group(prompt, tuple(values["prompt_token_ids"]), completions, values["weight_version"])


def _completion(values: Mapping[str, Any]) -> Completion:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return Completion(**fields)
