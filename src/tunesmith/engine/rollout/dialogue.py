"""Conversations of several turns in one call of an engine: a turn that ends is handed out, and its reply comes back.

A conversation is a prompt with one completion at a time. The noise of all its turns belongs to its first prompt, its
number among equal ones, and the position; so the tokens depend neither on the other conversations nor on how long a
reply takes, nor on whether an engine goes on with the others meanwhile or draws in rounds.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue

from tunesmith.base.core.trace import span
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Group, SamplingParams
from tunesmith.engine.rollout.engine import Dialogue, OnTurn, Reply, completion_of
from tunesmith.engine.rollout.sampler import NoiseKey, noise_keys
from tunesmith.engine.rollout.scheduler import PromptRequest, Scheduler
from tunesmith.engine.rollout.sequence import Limits
from tunesmith.engine.rollout.sequence import Sequence as DrawnSequence


class Replies:
    """The conversations of a call whose turn has ended and whose reply is awaited."""

    def __init__(self, on_turn: OnTurn, limits: Limits) -> None:
        self._on_turn = on_turn
        self._limits = limits
        self._come: SimpleQueue[tuple[int, Reply]] = SimpleQueue()
        self._num_awaited = 0

    def ask(self, ended: Sequence[DrawnSequence]) -> None:
        """Hand out turns that ended."""
        for sequence in ended:
            index = sequence.request
            reply = self._on_turn(index, completion_of(sequence))
            self._num_awaited += 1
            reply.add_done_callback(lambda done, index=index: self._come.put((index, done)))

    def resume(self, scheduler: Scheduler, *, wait: bool) -> bool:
        """Let `scheduler` go on with the conversations whose reply has come; with `wait`, as soon as one has. False if
        none is awaited.
        """
        if not self._num_awaited:
            return False
        if wait:
            with span("reply"):
                first = self._come.get()
            self._resume(scheduler, *first)
        while not self._come.empty():
            self._resume(scheduler, *self._come.get())
        return True

    def _resume(self, scheduler: Scheduler, index: int, reply: Reply) -> None:
        self._num_awaited -= 1
        continuation = reply.result()
        if continuation is None:
            scheduler.release(index)
            return
        limits = replace(self._limits, max_new_tokens=continuation.max_new_tokens)
        scheduler.resume(PromptRequest(index, continuation.prompt_ids, 1, limits))


Draw = Callable[[Sequence[Prompt], SamplingParams, Sequence[NoiseKey]], list[Group]]
"""Draws one completion of each prompt, with the noise of these keys."""


def in_rounds(draw: Draw, prompts: Sequence[Prompt], sampling: SamplingParams, dialogue: Dialogue) -> int:
    """`Engine.converse` by calls of `draw`, for engines that draw nothing while a reply is awaited: all conversations
    that go on have their next turn once all replies have come. The prompts have token ids.
    """
    keys = dialogue.keys or noise_keys([prompt.token_ids or () for prompt in prompts], 1)
    version, awaited = 0, list(range(len(prompts)))
    fronts = list(prompts)
    lengths = [sampling.max_new_tokens] * len(prompts) if dialogue.first is None else list(dialogue.first)
    while awaited:
        replies: dict[int, Reply] = {}
        for length in sorted({lengths[index] for index in awaited}, reverse=True):  # a call has one limit for all
            part = [index for index in awaited if lengths[index] == length]
            own = [keys[index] for index in part]
            groups = draw([fronts[index] for index in part], replace(sampling, max_new_tokens=length), own)
            version = groups[0].weight_version
            replies |= {i: dialogue.on_turn(i, group.completions[0]) for i, group in zip(part, groups, strict=True)}
        with span("reply"):
            come = {index: reply.result() for index, reply in sorted(replies.items())}
        going = {index: continuation for index, continuation in come.items() if continuation is not None}
        awaited = list(going)
        for index, continuation in going.items():
            fronts[index] = replace(prompts[index], token_ids=continuation.prompt_ids)
            lengths[index] = continuation.max_new_tokens
    return version
