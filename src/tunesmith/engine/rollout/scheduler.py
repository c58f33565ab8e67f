"""Continuous batching: the tokens to compute in the next step, and the completions to sample from them.

A running completion holds one of a fixed number of slots; when it ends, the next one takes it. A prompt is computed
once, in chunks, and its completions share its blocks. Their first tokens are all sampled from its last logits, even if
there are fewer free slots than completions; those without a slot wait and hold only the prompt's blocks.

Order: longest first, so that the last to start ends soon: by `max_new_tokens`, then prompt length, then index. Requests
of one call of `add` go before those of the next, and none overtakes, so none starves.

There is no preemption. A completion starts only if the cache can hold its maximum length beside all running ones, and a
prompt only if that holds for one of its completions. So nothing is computed twice and there is no deadlock: if nothing
runs, the first waiting completion fits.

Conversations (`keeps_blocks`): a completion that ends leaves its slot and keeps its blocks, until `resume` queues the
next turn, the longer prompt that begins with it, of which the new tokens alone are computed. If blocks are short, those
that are kept go, the longest kept first; the conversation's next turn computes them again.
"""

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from tunesmith.base.core.trace import gauge
from tunesmith.engine.rollout.kv_cache import BLOCK_TOKENS, BlockCopy, KVCache, Table, blocks_for
from tunesmith.engine.rollout.sequence import Decode, Limits, Sequence
from tunesmith.engine.rollout.usage import Usage

Run = tuple[list[int], list[float], list[float], list[float]]
"""Consecutive new tokens of one completion, with their log-probs and raw log-probs, and the values of the states before
them, if there is a value head."""


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """A prompt with `n` completions. `index` is unique within a scheduler, but for further turns of a conversation."""

    index: int
    prompt_ids: tuple[int, ...]
    n: int
    limits: Limits


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens to compute, flat: id, position in the sequence, and row of `KVCache.block_tables` of each."""

    token_ids: list[int] = field(default_factory=list[int])
    positions: list[int] = field(default_factory=list[int])
    table_rows: list[int] = field(default_factory=list[int])


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `stop` of the prompt in table row `table_row`.

    `sequences` are sampled from the last token's logits: all completions if the chunk ends the prompt, else none.
    """

    table_row: int
    start: int
    stop: int
    sequences: tuple[Sequence, ...]


class Drafter(Protocol):
    """Guesses the next tokens of the running completions, so that one step computes several rows of each."""

    def ready(self, sequences: list[Sequence]) -> list[Sequence]:
        """Those of the running `sequences` whose next row an earlier step computed."""
        ...

    def propose(self, sequences: list[Sequence]) -> list[list[int]]:
        """Tokens that may follow each of `sequences`, fewer than it may yet draw; an empty list if there are none."""
        ...


@dataclass(slots=True, eq=False)
class Plan:
    """One step of the model. First do `copies`; then, in each layer, write the keys and values of all tokens before
    reading any.

    `decode` has the last token of each of `sequences`; the next is sampled from its logits. `prefill` has the tokens of
    all `chunks`, concatenated without padding.

    Example: two completions of a prompt `(5, 6, 7)` run, with 9 and 4 as their first tokens, while the first two tokens
    of a prompt `(8, 8, 8)` are computed: `decode.token_ids == [9, 4]`, `decode.positions == [3, 3]`, `prefill.token_ids
    == [8, 8]`, `prefill.positions == [0, 1]`, `chunks[0].stop == 2`, and `drawn` are the two completions.

    Up to `num_steps` tokens of each of `sequences` may be drawn before the plan is accepted; the cache has slots for
    them. `drawn` are the completions sampled in this step: those that decode, then those whose prompt ends.

    With `drafts`, each of `sequences` has so many further rows in `decode`, behind that of its last token. With
    `is_computed`, an earlier step computed the rows of `sequences`, which are some of those that run; there are no
    tokens to compute.
    """

    copies: list[BlockCopy]
    sequences: list[Sequence]
    decode: Rows
    chunks: list[Chunk]
    prefill: Rows
    num_steps: int = 1
    drafts: list[list[int]] = field(default_factory=list[list[int]])
    is_computed: bool = False
    drawn: list[Sequence] = field(init=False)

    def __post_init__(self) -> None:
        self.drawn = self.sequences + [sequence for chunk in self.chunks for sequence in chunk.sequences]


@dataclass(slots=True, eq=False)
class _Group:
    """An admitted prompt. `reserved` blocks are kept for one completion until the prompt is computed."""

    request: PromptRequest
    table: Table
    waiting: deque[Sequence]
    num_planned: int
    reserved: int


@dataclass(slots=True, eq=False)
class _Running:
    """A completion in a slot. `reserved` blocks are kept for it, beyond those that it holds."""

    sequence: Sequence
    table: Table
    reserved: int


class Scheduler:
    """Plans steps until every completion of every request has ended.

    A step decodes at most `num_slots` completions and computes at most `prefill_tokens` prompt tokens. The engine's
    loop:

        while (plan := scheduler.plan()) is not None:
            ended = scheduler.accept(plan, run(plan))

    The cache must have two tables per slot (a completion's, and that of a prompt that is computed), and blocks for the
    longest sequence and a copy of its prompt's last block. The scheduler's work per step is linear in active rows and
    computed tokens, and independent of the context length. `usage` is of the steps that were accepted.
    """

    def __init__(
        self,
        cache: KVCache,
        decode: Decode,
        *,
        num_slots: int = 64,
        prefill_tokens: int = 512,
        keeps_blocks: bool = False,
        is_open: bool = False,
    ) -> None:
        self._cache = cache
        self._decode = decode
        self._num_slots = num_slots
        self._prefill_tokens = prefill_tokens
        self._queue: deque[PromptRequest] = deque()
        self._is_blocked = False  # the head of the queue did not fit; nothing was freed since
        self._prefilling: deque[_Group] = deque()
        self._ready: deque[_Group] = deque()
        self._running: list[_Running] = []
        self._reserved = 0
        self._num_claimed = 0  # slots that the completions of prompts in prefill will need
        self._keeps_blocks = keeps_blocks
        self._is_open = is_open
        self._cancelled: set[int] = set()  # requests in prefill that are dropped behind it
        self._kept: dict[int, Table] = {}  # of conversations between two turns, by request, the longest kept first
        self._planned: Plan | None = None
        self._planned_at_s = 0.0
        self.usage = Usage(num_slots, starved_s=0.0)
        self.resumed_tokens = 0  # of the prompts of `resume`
        self._finished: list[Sequence] = []

    @property
    def finished(self) -> list[Sequence]:
        """Completions that have ended, in the order of request and sample."""
        return sorted(self._finished, key=lambda sequence: (sequence.request, sequence.sample))

    def add(self, requests: Iterable[PromptRequest]) -> None:
        """Queue `requests`, the longest first, after those of earlier calls."""
        self._queue += sorted(requests, key=lambda one: (-one.limits.max_new_tokens, -len(one.prompt_ids), one.index))

    def resume(self, request: PromptRequest) -> None:
        """Queue the next turn of the conversation `request.index`, before what has not begun: `request.prompt_ids` are
        all tokens so far and the new ones.
        """
        self._queue.appendleft(request)
        self.resumed_tokens += len(request.prompt_ids)
        self._is_blocked = False

    def release(self, index: int) -> None:
        """Free the blocks that are kept for the conversation `index`, if any are."""
        if (table := self._kept.pop(index, None)) is not None:
            self._cache.free(table)
            self._is_blocked = False

    def cancel(self, index: int) -> bool:
        """Drop the completions of the request `index` that have not ended, if there are any. Not between `plan` and
        `accept`. False if its prompt is still computed, because others may share it; its first tokens are drawn then.
        """
        self._queue = deque(one for one in self._queue if one.index != index)
        self._cancelled |= {index for group in self._prefilling if group.request.index == index}
        for group in [one for one in self._ready if one.request.index == index]:
            self._ready.remove(group)
            self._cache.free(group.table)
        for running in [one for one in self._running if one.sequence.request == index]:
            self._running.remove(running)
            self._reserved -= running.reserved
            self._cache.free(running.table)
        self._is_blocked = False
        return index not in self._cancelled

    def plan(self, max_steps: int = 1, drafter: Drafter | None = None) -> Plan | None:
        """The next step; None if every completion has ended. Each plan must be accepted before the next.

        Plans up to `max_steps` tokens of each running completion, but only one while prompts are computed, so that
        their completions can start. A `drafter` adds rows to a step without prompts.

        Raises:
            RuntimeError: the last plan was not accepted, or the cache is too small.
        """
        if self._planned is not None:
            raise RuntimeError("a plan was not accepted before the next one was asked for")
        if drafter is not None and (ready := drafter.ready([running.sequence for running in self._running])):
            return self._hand_out(Plan([], ready, Rows(), [], Rows(), is_computed=True))
        self._start_completions()
        self._admit_prompts()
        if not self._running and not self._prefilling:
            if self._ready or self._queue:
                raise RuntimeError("nothing runs and no waiting completion fits the cache")
            return None
        copies: list[BlockCopy] = []
        decode = Rows()
        num_steps = 1 if self._prefilling else min(max_steps, max(item.sequence.num_left for item in self._running))
        sequences = [running.sequence for running in self._running]
        drafts = drafter.propose(sequences) if drafter is not None and not self._prefilling else []
        for index, running in enumerate(self._running):
            guessed = drafts[index] if drafts else []
            num_rows = len(guessed) + min(num_steps, running.sequence.num_left)
            copies += self._grow(running, num_rows)
            first = running.sequence.position - 1
            decode.token_ids.append(running.sequence.token_ids[-1])
            decode.positions.append(first)
            decode.table_rows.append(running.table.row)
            if guessed:
                decode.token_ids.extend(guessed)
                decode.positions.extend(range(first + 1, first + 1 + len(guessed)))
                decode.table_rows.extend([running.table.row] * len(guessed))
        chunks, prefill = self._chunks()
        return self._hand_out(Plan(copies, sequences, decode, chunks, prefill, num_steps, drafts))

    def _hand_out(self, plan: Plan) -> Plan:
        self._planned = plan
        self._planned_at_s = time.perf_counter()
        gauge("engine slots in use", len(self._running))
        return plan

    def accept(self, plan: Plan, runs: list[Run]) -> list[Sequence]:
        """Take the tokens of each of `plan.drawn`; returns the completions that ended.

        Up to `plan.num_steps` tokens of each running completion, and one of each new one.

        Raises:
            RuntimeError: another number of runs, or not the last plan.
        """
        if plan is not self._planned:
            raise RuntimeError("this is not the plan that was made last, or it was accepted before")
        drawn = plan.drawn
        if len(drawn) != len(runs):
            raise RuntimeError(f"{len(drawn)} completions were to be drawn, {len(runs)} came")
        self._planned = None
        self._count(plan, runs)
        for group, chunk in zip(self._prefilling, plan.chunks, strict=False):
            self._cache.mark_written(group.table, chunk.stop)
        ended = [sequence for sequence, run in zip(drawn, runs, strict=True) if sequence.extend(*run)]
        if not self._is_open:
            self._finished += ended
        self._retire()
        while self._prefilling and self._prefilling[0].num_planned == len(self._prefilling[0].request.prompt_ids):
            self._open(self._prefilling.popleft())
        return ended

    def _count(self, plan: Plan, runs: list[Run]) -> None:
        """Add a step to `usage`, before anything of it is accepted."""
        self.usage.prefill_tokens += len(plan.prefill.token_ids)
        num_running = len(plan.sequences)
        if not num_running:
            return
        duration_s = time.perf_counter() - self._planned_at_s
        if plan.is_computed:
            num_running = len(self._running)  # the others' slots are in use too
        # In a single step, as on a CPU, each draws one token: counting them would take longer than the rest of this.
        num_drawn = num_running if plan.num_steps == 1 else sum(len(run[0]) for run in runs[:num_running])
        self.usage.add(
            duration_s,
            num_drawn / plan.num_steps,
            num_steps=0 if plan.is_computed else plan.num_steps,
            others_wait=bool(self._queue or self._ready or self._prefilling),
            cache_is_full=num_running < self._num_slots and bool(self._ready or self._is_blocked),
        )

    def cancel_all(self) -> list[Sequence]:
        """Drop all running and waiting completions and free their blocks; returns `finished`.

        May be called between `plan` and `accept`, which voids the plan. Requests may be added again afterwards.
        """
        tables = [running.table for running in self._running]
        tables += self._kept.values()
        tables += [group.table for group in (*self._ready, *self._prefilling)]
        gauge("engine slots in use", 0)
        for table in reversed(tables):  # a prompt that shares blocks of one still in prefill is freed first
            self._cache.free(table)
        self._queue.clear()
        self._prefilling.clear()
        self._ready.clear()
        self._running.clear()
        self._kept.clear()
        self._cancelled.clear()
        self._reserved = self._num_claimed = 0
        self._is_blocked = False
        self._planned = None
        return self.finished

    def _start_completions(self) -> None:
        """Give free slots to completions whose first token is drawn."""
        while self._ready and len(self._running) < self._num_slots:
            group = self._ready[0]
            is_last = len(group.waiting) == 1
            growth = _growth(group.request, shares_prompt=not is_last)
            if not self._has_room(growth):
                return
            table = group.table if is_last else self._cache.fork(group.table)
            self._running.append(_Running(group.waiting.popleft(), table, growth))
            self._reserved += growth
            if is_last:
                self._ready.popleft()

    def _admit_prompts(self) -> None:
        """Start prompts while there are slots that no completion waits for."""
        while self._queue and not self._ready and not self._is_blocked:
            if len(self._running) + self._num_claimed >= self._num_slots:
                return
            request = self._queue[0]
            growth = _growth(request, shares_prompt=request.n > 1)
            kept = self._kept.pop(request.index, None)
            if kept is None:
                num_needed = self._cache.num_needed(request.prompt_ids)
            else:
                num_needed = blocks_for(len(request.prompt_ids)) - len(kept.blocks)
            if not self._has_room(num_needed + growth):
                if kept is not None:
                    self._kept[request.index] = kept
                self._is_blocked = True
                return
            self._queue.popleft()
            if kept is None:
                table = self._cache.allocate(request.prompt_ids)
            else:
                self._cache.extend(kept, request.prompt_ids)
                table = kept
            waiting = deque(
                Sequence(request.index, sample, request.prompt_ids, request.limits, self._decode)
                for sample in range(request.n)
            )
            self._prefilling.append(_Group(request, table, waiting, table.num_found, growth))
            self._reserved += growth
            self._num_claimed += request.n

    def _has_room(self, num_blocks: int) -> bool:
        """True if as many blocks are free that no completion reserved; blocks that are kept are freed for it."""
        while num_blocks > self._cache.num_free - self._reserved:
            if not self._kept:
                return False
            self._cache.free(self._kept.pop(next(iter(self._kept))))
        return True

    def _end(self, sequence: Sequence, table: Table) -> None:
        """Free the blocks of a completion that ended, or keep them for its conversation's next turn."""
        self._is_blocked = False
        if self._keeps_blocks:
            table.num_tokens = sequence.position - 1  # the keys of the last token are not computed
            self._kept[sequence.request] = table
            return
        if self._is_open:
            self._cache.remember(table, (*sequence.prompt_ids, *sequence.token_ids[:-1]))
        self._cache.free(table)

    def _grow(self, running: _Running, num_tokens: int) -> list[BlockCopy]:
        """Add cache slots for the tokens of this step. Slots of drafts that were wrong are there, and written again."""
        num_free = self._cache.num_free
        num_new = running.sequence.position - 1 + num_tokens - running.table.num_tokens
        if num_new <= 0:
            return []
        copy = self._cache.append(running.table, num_new)
        taken = num_free - self._cache.num_free
        running.reserved -= taken
        self._reserved -= taken
        return [] if copy is None else [copy]

    def _chunks(self) -> tuple[list[Chunk], Rows]:
        """The next prompt tokens, in order of admission: a prompt may share blocks that an earlier one computes."""
        chunks: list[Chunk] = []
        rows = Rows()
        for group in self._prefilling:
            budget = self._prefill_tokens - len(rows.token_ids)
            if budget == 0:
                break
            prompt_ids, start = group.request.prompt_ids, group.num_planned
            stop = min(start + budget, len(prompt_ids))
            sequences = tuple(group.waiting) if stop == len(prompt_ids) else ()
            chunks.append(Chunk(group.table.row, start, stop, sequences))
            rows.token_ids.extend(prompt_ids[start:stop])
            rows.positions.extend(range(start, stop))
            rows.table_rows.extend([group.table.row] * (stop - start))
            group.num_planned = stop
        return chunks, rows

    def _retire(self) -> None:
        """Remove the completions that ended and free their blocks."""
        going: list[_Running] = []
        for running in self._running:
            if running.sequence.finish_reason is None:
                going.append(running)
                continue
            self._end(running.sequence, running.table)
            self._reserved -= running.reserved
        self._running = going

    def _open(self, group: _Group) -> None:
        """Let the completions of a computed prompt, whose first tokens are drawn, wait for slots."""
        self._num_claimed -= group.request.n
        self._reserved -= group.reserved
        self._is_blocked = False
        group.reserved = 0
        last = group.waiting[-1]
        group.waiting = deque(sequence for sequence in group.waiting if sequence.finish_reason is None)
        if group.request.index in self._cancelled:
            self._cancelled.discard(group.request.index)
            self._cache.free(group.table)
        elif group.waiting:
            self._ready.append(group)
        else:
            self._end(last, group.table)


def _growth(request: PromptRequest, *, shares_prompt: bool) -> int:
    """Blocks that a completion may take beyond its prompt's. The last token's keys are never computed.

    With a shared prompt, its last block counts too if it is partly full: the completion writes into a copy.
    """
    if request.limits.max_new_tokens == 1:
        return 0
    length = len(request.prompt_ids)
    prompt_blocks = length // BLOCK_TOKENS if shares_prompt else blocks_for(length)
    return blocks_for(length + request.limits.max_new_tokens - 1) - prompt_blocks
