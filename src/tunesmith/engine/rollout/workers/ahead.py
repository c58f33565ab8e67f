"""Completions drawn while training goes on: those of step k are of the weights before step k - staleness.

The weights of each token follow from the number of its step and its place in the completion, not from what is ready
when, so that a run depends on its recipe and seed alone.
"""

import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from typing import Any, Unpack

from tunesmith.base.core.errors import InputError
from tunesmith.base.core.trace import Trace, count, include, trace
from tunesmith.base.core.turns import Turns
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Completion, Group, SamplingParams
from tunesmith.engine.rollout.engine import Dialogue, Engine, Functions, OnGroup
from tunesmith.engine.rollout.workers.engine import Asked, WorkerEngine

Arguments = tuple[Sequence[Prompt], int, SamplingParams]
"""Prompts, completions of each, and sampling parameters of a call of `generate`."""

_Drawn = tuple[list[Group], Sequence[Trace]]
_Job = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Ahead:
    """Limit of drawing ahead: at most `staleness` steps, up to the last. `arguments_of` gives the call of
    `generate` that the step of an index makes. With `swap_tokens` a completion gets as many tokens from the weights
    before each of these steps, and all that are left from those before the last of them.
    """

    staleness: int
    num_steps: int
    arguments_of: Callable[[int], Arguments]
    swap_tokens: int = 0

    def end(self, step: int, now: int, max_new_tokens: int) -> int:
        """Tokens that completions of `step` have at most before those weights change which step `now` begins with."""
        num_left = step - now
        if num_left <= 1 or not self.swap_tokens:
            return max_new_tokens
        return min(max_new_tokens, (self.staleness - num_left + 1) * self.swap_tokens)


class AheadEngine:
    """Draws the completions of later steps with `inner` in a second thread, from the weights of earlier ones.

    The call of `generate` that `ahead` knows as that of the next step begins the draws of the steps after it, from the
    weights as they are, and returns what was drawn for its own. Any other call, such as an evaluation, is drawn from
    the weights as they are, before all draws that wait.
    """

    name = "workers"

    is_exact = False
    """The log-probs of completions are those of older weights, so the trainer computes its own."""

    def __init__(self, inner: WorkerEngine, ahead: Ahead, weight_version: Callable[[], int]) -> None:
        self.inner = inner
        self._ahead, self._weight_version = ahead, weight_version
        # The training's thread alone reads and changes `_step` and `_begun`, so they need no lock; the other one only
        # does jobs and ends their futures. `inner.ask` fixes prompts, noise and weights before a job is queued, so its
        # tokens do not depend on when it is done. An evaluation is urgent, because the training stands still for it.
        self._step = 0  # the next one
        self._begun: dict[int, Future[_Drawn]] = {}
        self._jobs: queue.PriorityQueue[tuple[int, int, _Job | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._turns = Turns("engine", has_pipes=True)
        # A daemon: at the end of a run that failed, nobody waits for what is being drawn.
        threading.Thread(target=_work, args=(self._jobs,), name="draw-ahead", daemon=True).start()
        weakref.finalize(self, self._jobs.put, (-1, -1, None))

    def unload(self) -> None:
        """Nothing: workers draw during the update."""

    def generate(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, **functions: Unpack[Functions]
    ) -> list[Group]:
        """See `engine.Engine.generate`; `on_group` is called at the end.

        Raises:
            InputError: for the other callbacks.
            ServerError: a worker was lost several times in a row.
        """
        on_group = functions.pop("on_group", None)
        if any(functions.values()):
            raise InputError("completions that are drawn ahead are not reported one by one; set scale.staleness to 0")
        with self._turns.next():
            return self._generate(prompts, n, sampling, on_group)

    def converse(self, prompts: Sequence[Prompt], sampling: SamplingParams, dialogue: Dialogue) -> int:
        """See `engine.Engine.converse`; by the engine's workers, of the weights as they are now."""
        with self._turns.next():
            return self.inner.converse(prompts, sampling, dialogue)

    def _generate(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, on_group: OnGroup | None
    ) -> list[Group]:
        is_step = (list(prompts), n, sampling) == self._arguments(self._step)
        with self.inner.waiting():
            if is_step:
                groups, works = self._of_next_step().result()
            else:
                asked = self.inner.ask(prompts, n, sampling, ahead=True)
                groups, works = self._begin(lambda: self.inner.draw(asked), is_urgent=True).result()
            for work in works:
                include(work)
        if is_step:
            groups = [self._with_texts(group) for group in groups]
            _count_versions(groups, self._weight_version())
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
            done.set_result(([_group(*both) for both in zip(prompts, groups, strict=True)], ()))

    def _arguments(self, step: int) -> Arguments:
        prompts, n, sampling = self._ahead.arguments_of(step)
        return list(prompts), n, sampling

    def _of_next_step(self) -> Future[_Drawn]:
        """The completions of the next step, perhaps not drawn yet; draws up to `staleness` steps later have begun."""
        step, last = self._step, self._ahead.num_steps - 1
        for later in range(step, max(step, min(step + self._ahead.staleness, last)) + 1):
            self._go_on(later)
        self._step += 1
        return self._begun.pop(step)

    def _go_on(self, step: int) -> None:
        """Begin to draw the tokens that completions of `step` may have from the weights as they are."""
        arguments, before, inner = self._arguments(step), self._begun.get(step), self.inner
        max_new_tokens = arguments[-1].max_new_tokens
        end = self._ahead.end(step, self._step, max_new_tokens)
        if before is not None and end == self._ahead.end(step, self._step - 1, max_new_tokens):
            return
        asked = inner.ask(*arguments, ahead=True)
        self._begun[step] = self._begin(lambda: _drawn_on(inner, asked, end, before and before.result()[0]), before)

    def _begin(
        self, draw: Callable[[], list[Group]], before: Future[_Drawn] | None = None, is_urgent: bool = False
    ) -> Future[_Drawn]:
        future = Future[_Drawn]()
        self._jobs.put((0 if is_urgent else 1, next(self._numbers), lambda: _do(draw, before, future)))
        return future

    def _with_texts(self, group: Group) -> Group:
        """`group`, with texts of those drawn in parts; decoded here, because a tokenizer is not for several threads."""

        def with_text(one: Completion) -> Completion:
            ids = one.token_ids[:-1] if one.finish_reason == "stop" else one.token_ids
            return replace(one, text=self.inner.text(group.prompt_token_ids, ids))

        drawn = (one if one.weight_versions is None else with_text(one) for one in group.completions)
        return replace(group, completions=tuple(drawn))


def drawn_ahead(engine: Engine) -> Mapping[str, AheadEngine]:
    """The part of a checkpoint with what `engine` has drawn ahead, by name; empty if it does not."""
    return {"drawn_ahead": engine} if isinstance(engine, AheadEngine) else {}


def _work(jobs: "queue.PriorityQueue[tuple[int, int, _Job | None]]") -> None:
    """Do jobs, in the order of their numbers, until there is None in the place of one."""
    while (job := jobs.get()[-1]) is not None:
        job()


def _do(draw: Callable[[], list[Group]], before: Future[_Drawn] | None, future: Future[_Drawn]) -> None:
    try:
        with trace() as work:
            groups = draw()
        future.set_result((groups, [*(before.result()[1] if before else ()), work]))
    except BaseException as error:  # noqa: BLE001 - raised in the thread that waits for it
        future.set_exception(error)


def _drawn_on(inner: WorkerEngine, asked: Asked, end: int, begun: Sequence[Group] | None) -> list[Group]:
    """The groups of `asked` up to token `end`; those that have `begun` go on from there. Recipes name no stop strings,
    which might be cut in two.
    """
    sampling = asked.sampling
    if begun is None:
        first = replace(sampling, max_new_tokens=end, min_new_tokens=min(sampling.min_new_tokens, end))
        return inner.draw(replace(asked, sampling=first))
    parts = [
        (index, sample, one.token_ids)
        for index, group in enumerate(begun)
        for sample, one in enumerate(group.completions)
        if one.finish_reason == "length"
    ]
    start = len(parts[0][2]) if parts else 0  # the same for all
    rest = replace(
        sampling, max_new_tokens=end - start, min_new_tokens=max(0, min(sampling.min_new_tokens, end) - start)
    )
    drawn = {
        (index, sample): new
        for (index, sample, _), new in zip(parts, inner.draw(asked.going_on(parts, rest)), strict=True)
    }
    return [
        replace(
            group,
            completions=tuple(
                _joined(group.weight_version, one, drawn.get((index, sample)))
                for sample, one in enumerate(group.completions)
            ),
        )
        for index, group in enumerate(begun)
    ]


def _joined(first_version: int, begun: Completion, rest: Group | None) -> Completion:
    """A completion and the tokens that were drawn after those that it has, without its text."""
    if rest is None:
        return begun
    (new,) = rest.completions
    versions = begun.weight_versions or (first_version,) * len(begun.token_ids)
    return Completion(
        begun.token_ids + new.token_ids,
        begun.logps + new.logps,
        begun.raw_logps + new.raw_logps,
        "",
        new.finish_reason,
        None if begun.values is None or new.values is None else begun.values + new.values,
        versions + (rest.weight_version,) * len(new.token_ids),
    )


def _count_versions(groups: Sequence[Group], now: int) -> None:
    """Add the mean over tokens of the updates since they were drawn to the open trace."""
    versions = [
        version
        for group in groups
        for one in group.completions
        for version in one.weight_versions or (group.weight_version,) * len(one.token_ids)
    ]
    count("versions_behind", now * len(versions) - sum(versions), out_of=len(versions))


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
