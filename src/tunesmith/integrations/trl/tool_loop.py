"""TRL's tool loop, drawn as conversations of our engine: a later turn computes no token of the earlier ones again.

The loop is TRL's own code, so the order of calls, failures, truncation and limits are TRL's. It asks for turns in
rounds, which `Turns` draws behind those before them; the engine runs in a thread of its own and waits in between. By
`loop_at_once` it runs for each completion by itself, in a thread of its own: then no tool holds up the others.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

from trl.trainer import grpo_trainer

from tunesmith.engine.batch.rollout import Completion
from tunesmith.engine.rollout.engine import Continuation, Dialogue

Converse = Callable[[Dialogue], Any]
"""Draws the conversations of a batch, until none of them goes on."""

Drawn = Sequence[Completion | None]
"""A turn of each, None where there is no room for one."""

AsTRL = Callable[[Drawn], tuple[list[list[int]], Any]]
"""Turns as TRL has them: ids and log-probs of each."""


class Turns:
    """The turns of a batch, drawn by `converse`. Behind each of `fronts` come at most `max_tokens`, with the results of
    tools. To be ended.
    """

    def __init__(self, converse: Converse, fronts: Sequence[Sequence[int]], max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_before = [len(front) for front in fronts]
        self._histories = [tuple(front) for front in fronts]
        self._turns: list[Future[Completion]] = [Future() for _ in fronts]
        self._replies: dict[int, Future[Continuation | None]] = {}
        self._is_over = False
        self._lock = threading.Lock()
        work = copy_context().run, (self._run, converse)
        self._thread = threading.Thread(target=work[0], args=work[1], name="tunesmith-turns", daemon=True)
        self._thread.start()

    def _run(self, converse: Converse) -> None:
        error: BaseException = RuntimeError("the conversations have ended")
        try:
            converse(Dialogue(self._ended, self._max_tokens))
        except BaseException as raised:  # noqa: BLE001 - those that wait for a turn raise it
            error = raised
        for turn in self._turns:
            if not turn.done():
                turn.set_exception(error)

    def _ended(self, index: int, turn: Completion) -> "Future[Continuation | None]":
        reply = Future[Continuation | None]()
        with self._lock:
            self._histories[index] += turn.token_ids
            if self._is_over:
                reply.set_result(None)
            else:
                self._replies[index] = reply
        self._turns[index].set_result(turn)
        return reply

    def first(self) -> Drawn:
        """The first turn of each. Raises what the engine raises."""
        return [turn.result() for turn in self._turns]

    def round(self, fronts: Sequence[Sequence[int]]) -> Drawn:
        """A turn behind each of `fronts`, which begin with the history of a conversation; those of none have ended.

        Raises:
            LookupError: one begins with no history.
        """
        waiting = sorted(self._replies, key=lambda index: -len(self._histories[index]))
        places: list[int] = []
        for front in map(tuple, fronts):
            found = (index for index in waiting if front[: len(self._histories[index])] == self._histories[index])
            if (place := next(found, None)) is None:
                raise LookupError("these ids begin with no history")
            waiting.remove(place)
            places.append(place)
        for index in waiting:
            self.finish(index)
        turns = [self._go_on(place, front) for place, front in zip(places, fronts, strict=True)]
        return [None if turn is None else turn.result() for turn in turns]

    def behind(self, index: int, front: Sequence[int]) -> Drawn:
        """The turn of one conversation behind `front`."""
        turn = self._go_on(index, front)
        return [None if turn is None else turn.result()]

    def _go_on(self, index: int, front: Sequence[int]) -> "Future[Completion] | None":
        room = self._num_before[index] + self._max_tokens - len(front)
        if room < 1:
            self.finish(index)
            return None
        with self._lock:
            reply = self._replies.pop(index)
            self._histories[index] = tuple(front)
            turn = self._turns[index] = Future[Completion]()
        reply.set_result(Continuation(tuple(front), room))
        return turn

    def finish(self, index: int) -> None:
        """Let a conversation end, if it waits."""
        with self._lock:
            reply = self._replies.pop(index, None)
        if reply is not None:
            reply.set_result(None)

    def end(self) -> None:
        """Let all conversations end, with the turn that they are in."""
        with self._lock:
            self._is_over = True
        for index in range(len(self._turns)):
            self.finish(index)
        self._thread.join()


class _Row:
    """A trainer as TRL's tool loop sees it for the completion `index` alone."""

    def __init__(self, trainer: Any, index: int, turns: Turns, as_trl: AsTRL) -> None:
        self._trainer, self._index, self._turns, self._as_trl = trainer, index, turns, as_trl
        for name in ("_sync_tool_dicts", "_async_tool_dicts", "_batch_environments"):
            if (of_all := getattr(trainer, name, None)) is not None:
                setattr(self, name, [of_all[index]])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def _generate_single_turn(self, prompt_ids: Sequence[Sequence[int]], *_: object, **__: object) -> Any:
        return self._as_trl(self._turns.behind(self._index, prompt_ids[0]))


def loop_at_once(trainer: Any, turns: Turns, as_trl: AsTRL, batch: Sequence[Sequence[Any] | None]) -> tuple[Any, ...]:
    """The result of TRL's `_tool_call_loop`; `batch` has prompts and their ids, completions, these, log-probs."""

    def loop(index: int) -> tuple[Any, ...]:
        own = [None if values is None else [values[index]] for values in batch]
        try:
            row: Any = _Row(trainer, index, turns, as_trl)
            return grpo_trainer.GRPOTrainer._tool_call_loop(row, *own, images=None, multimodal_fields={})
        finally:
            turns.finish(index)

    num_rows = len(batch[0] or ())
    with ThreadPoolExecutor(num_rows, thread_name_prefix="tunesmith-tools") as pool:
        rows = list(pool.map(loop, range(num_rows)))
    lists, counts = (0, 1, 2, 3, 6), (4, 5)
    joined: dict[int, Any] = {place: sum(row[place] for row in rows) for place in counts}
    for place in lists:
        joined[place] = None if rows[0][place] is None else [value for row in rows for value in row[place]]
    return tuple(joined[place] for place in sorted(joined))
