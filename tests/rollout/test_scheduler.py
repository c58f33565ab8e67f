"""A completion is the same whatever is drawn beside it, everything ends exactly once, and no block is lost.

The model of these tests is a hash of (seed, prompt, sample, position, all tokens so far), where the tokens are read
back through the block tables, so that a wrong table, copy or order changes what is drawn.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from integrity import check_scheduler

from tunesmith.base.core.seeds import derive
from tunesmith.engine.rollout.kv_cache import BLOCK_TOKENS, KVCache, blocks_for
from tunesmith.engine.rollout.scheduler import Plan, PromptRequest, Rows, Run, Scheduler
from tunesmith.engine.rollout.sequence import Decode, Limits, Sequence

STOP_ID = 0
VOCABULARY = 23
Drawn = dict[tuple[int, int], tuple[tuple[int, ...], str | None]]


def decode(token_ids: list[int]) -> str:
    return "".join(chr(ord("a") + token_id) for token_id in token_ids)


def draw(sequence: Sequence, tokens: list[int], seed: int = 0) -> int:
    token = derive(seed, sequence.request, sequence.sample, sequence.position, *tokens) % VOCABULARY
    return token + 1 if token in sequence.limits.stop_ids and sequence.masks_stop_ids else token


def alone(requests: list[PromptRequest]) -> Drawn:
    """Every completion drawn by itself, without cache and scheduler."""
    results: Drawn = {}
    for request in requests:
        for sample in range(request.n):
            sequence = Sequence(request.index, sample, request.prompt_ids, request.limits, Decode(decode))
            while not sequence.append(draw(sequence, [*request.prompt_ids, *sequence.token_ids]), -1.0, -2.0):
                pass
            results[request.index, sample] = tuple(sequence.token_ids), sequence.finish_reason
    return results


@dataclass
class Runner:
    """Does what a plan says on a store of (token, position), and checks that the plan keeps its promises."""

    cache: KVCache
    num_slots: int = 64
    prefill_tokens: int = 512
    store: np.ndarray = field(init=False)
    plans: list[Plan] = field(default_factory=list)
    num_computed: int = 0

    def __post_init__(self) -> None:
        self.store = np.full((self.cache.num_blocks, BLOCK_TOKENS, 2), -1)

    def __call__(self, plan: Plan) -> list[int]:
        assert len(plan.sequences) == len(plan.decode.token_ids) <= self.num_slots
        assert sum(chunk.stop - chunk.start for chunk in plan.chunks) == len(plan.prefill.token_ids)
        assert len(plan.prefill.token_ids) <= self.prefill_tokens
        assert not {copy.source for copy in plan.copies} & {copy.target for copy in plan.copies}
        for copy in reversed(plan.copies):
            self.store[copy.target] = self.store[copy.source]
        self._write(plan.decode)
        self._write(plan.prefill)
        self.plans.append(plan)
        self.num_computed += len(plan.prefill.token_ids)
        last = list(zip(plan.decode.table_rows, plan.decode.positions, strict=True))
        last += [(chunk.table_row, chunk.stop - 1) for chunk in plan.chunks for _ in chunk.sequences]
        return [draw(s, self._read(*place)) for s, place in zip(plan.drawn, last, strict=True)]

    def runs(self, plan: Plan) -> list[Run]:
        """As a device does that draws several tokens in a row: it knows stop ids and lengths, and no stop strings."""
        drawn: list[Run] = []
        for place, token_id in enumerate(self(plan)):
            given = plan.drawn[place]
            limits, drawn_ids = replace(given.limits, stop_strings=()), list(given.token_ids)
            ghost = replace(given, limits=limits, token_ids=drawn_ids, logps=[], raw_logps=[])
            steps = plan.num_steps if place < len(plan.sequences) else 1
            while not ghost.append(token_id, -1.0, -2.0) and steps > 1:
                steps -= 1
                row = plan.decode.table_rows[place]
                self._write(Rows([token_id], [ghost.position - 1], [row]))
                token_id = draw(ghost, self._read(row, ghost.position - 1))
            drawn.append((ghost.token_ids[len(given.token_ids) :], ghost.logps, ghost.raw_logps, []))
        return drawn

    def _write(self, rows: Rows) -> None:
        for token_id, position, row in zip(rows.token_ids, rows.positions, rows.table_rows, strict=True):
            block = self.cache.block_tables[row, position // BLOCK_TOKENS]
            self.store[block, position % BLOCK_TOKENS] = token_id, position

    def _read(self, row: int, position: int) -> list[int]:
        blocks = self.cache.block_tables[row, : blocks_for(position + 1)].numpy()
        tokens, positions = self.store[blocks].reshape(-1, 2)[: position + 1].T.tolist()
        assert positions == list(range(position + 1))
        return tokens


def _setup(num_slots: int, *, num_blocks: int = 400, prefill_tokens: int = 512) -> tuple[Scheduler, Runner]:
    cache = KVCache(num_blocks, max_tokens=160, max_tables=2 * num_slots)
    scheduler = Scheduler(cache, Decode(decode), num_slots=num_slots, prefill_tokens=prefill_tokens)
    return scheduler, Runner(cache, num_slots, prefill_tokens)


def _step(scheduler: Scheduler, runner: Runner, max_steps: int = 1) -> list[Sequence] | None:
    plan = scheduler.plan(max_steps)
    check_scheduler(scheduler)
    if plan is None:
        return None
    if max_steps > 1:
        return scheduler.accept(plan, runner.runs(plan))
    return scheduler.accept(plan, _runs(*runner(plan)))


def _runs(*token_ids: int) -> list[Run]:
    """One token of each completion."""
    return [([token_id], [-1.0], [-2.0], []) for token_id in token_ids]


def _drain(
    scheduler: Scheduler, runner: Runner, each: Callable[[], None] = lambda: None, max_steps: int = 1
) -> list[Sequence]:
    ended: list[Sequence] = []
    while (more := _step(scheduler, runner, max_steps)) is not None:
        check_scheduler(scheduler)
        ended += more
        each()
    assert runner.cache.num_free == runner.cache.num_blocks, "all blocks are free in the end"
    return ended


def _results(sequences: list[Sequence]) -> Drawn:
    results = {(s.request, s.sample): (tuple(s.token_ids), s.finish_reason) for s in sequences}
    assert len(results) == len(sequences), "a completion ended twice"
    return results


def _request(index: int, length: int = 5, *, n: int = 1, new: int = 8, **limits: object) -> PromptRequest:
    prompt_ids = tuple(100 + index if position % 3 else 99 for position in range(length))
    return PromptRequest(index, prompt_ids, n, Limits(max_new_tokens=new, **limits))  # type: ignore[arg-type]


def _mixed(count: int = 17, seed: int = 0) -> list[PromptRequest]:
    """Prompts of mixed length with few beginnings, groups of 1 to 5, limits of all kinds."""
    rng = random.Random(seed)
    requests: list[PromptRequest] = []
    for index in range(count):
        shared = rng.choice([(), (7,) * 16, (7,) * 32, (7,) * 16 + (8,) * 16])
        prompt_ids = shared + tuple(rng.randrange(50) for _ in range(rng.choice([1, 3, 15, 16, 17, 40])))
        new = rng.choice([1, 2, 15, 16, 17, 40])
        stops = ("ab", "c") if rng.random() < 0.3 else ()
        limits = Limits(new, rng.randrange(min(new, 4)), frozenset({STOP_ID}), stops)
        requests.append(PromptRequest(index, prompt_ids, rng.randint(1, 5), limits))
    return requests


@pytest.mark.parametrize("num_slots", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("prefill_tokens", [1, 24, 512])
def test_completions_do_not_depend_on_slots_or_chunks(num_slots: int, prefill_tokens: int):
    requests = _mixed()
    scheduler, runner = _setup(num_slots, prefill_tokens=prefill_tokens)
    scheduler.add(requests)
    assert _results(_drain(scheduler, runner)) == alone(requests)


@pytest.mark.parametrize("num_slots", [1, 3, 64])
@pytest.mark.parametrize("max_steps", [2, 5, 100])
def test_completions_do_not_depend_on_how_many_steps_are_planned_at_a_time(num_slots: int, max_steps: int):
    requests = _mixed()
    scheduler, runner = _setup(num_slots, prefill_tokens=24)
    scheduler.add(requests)
    assert _results(_drain(scheduler, runner, max_steps=max_steps)) == alone(requests)
    assert all(plan.num_steps == 1 for plan in runner.plans if plan.chunks), "prompts do not wait for many steps"
    assert 1 < max(plan.num_steps for plan in runner.plans) <= max_steps


REQUESTS = st.builds(
    lambda start, tail, n, new, least, stops: (start, tail, n, Limits(new, min(least, new), frozenset({0}), stops)),
    st.sampled_from([(), (7,) * 16, (7,) * 32, (7,) * 16 + (8,) * 16]),
    st.lists(st.integers(0, 3), min_size=1, max_size=20).map(tuple),
    st.integers(1, 4),
    st.integers(1, 36),
    st.integers(0, 3),
    st.sampled_from([(), ("a",), ("bc", "d")]),
)


@settings(max_examples=60, deadline=None)
@given(
    drawn=st.lists(REQUESTS, min_size=1, max_size=8),
    num_slots=st.sampled_from([1, 2, 3, 7, 64]),
    spare=st.integers(0, 12),
    prefill_tokens=st.sampled_from([1, 10, 64]),
    order=st.randoms(use_true_random=False),
    max_steps=st.sampled_from([1, 4]),
)
def test_completions_do_not_depend_on_arrival_or_budget(drawn, num_slots, spare, prefill_tokens, order, max_steps):
    requests = [PromptRequest(i, start + tail, n, limits) for i, (start, tail, n, limits) in enumerate(drawn)]
    fewest = max(
        blocks_for(len(r.prompt_ids) + max(r.limits.max_new_tokens - 1, 0)) + (r.n > 1 and r.limits.max_new_tokens > 1)
        for r in requests
    )
    scheduler, runner = _setup(num_slots, num_blocks=fewest + spare, prefill_tokens=prefill_tokens)
    arriving = list(requests)
    order.shuffle(arriving)

    def arrive() -> None:
        if arriving and order.random() < 0.5:
            scheduler.add([arriving.pop()])

    scheduler.add([arriving.pop()])
    ended = _drain(scheduler, runner, arrive, max_steps)
    scheduler.add(arriving)
    ended += _drain(scheduler, runner, max_steps=max_steps)
    assert _results(ended) == alone(requests)
    assert [(s.request, s.sample) for s in scheduler.finished] == sorted(_results(ended))


def test_a_prompt_is_computed_once_for_all_its_completions_and_beginnings_once_for_all_prompts():
    scheduler, runner = _setup(8)
    scheduler.add([PromptRequest(i, (5,) * 64 + (i,), 16, Limits(4)) for i in range(4)])
    _drain(scheduler, runner)
    assert runner.num_computed == 64 + 4
    scheduler.add([PromptRequest(9, (5,) * 64 + (9,), 2, Limits(4))])
    _drain(scheduler, runner)
    assert runner.num_computed == 64 + 5, "what is known outlives the prompts that computed it"
    runner.cache.invalidate()
    scheduler.add([PromptRequest(10, (5,) * 64 + (10,), 2, Limits(4))])
    _drain(scheduler, runner)
    assert runner.num_computed == 64 + 5 + 65, "other weights, other keys"


def test_the_first_plans_of_a_group_are_as_documented():
    scheduler, runner = _setup(2)
    scheduler.add([PromptRequest(0, (5, 6, 7), 3, Limits(3))])
    plan = scheduler.plan()
    assert plan is not None and plan.sequences == [] and plan.copies == []
    assert plan.prefill == Rows([5, 6, 7], [0, 1, 2], [plan.chunks[0].table_row] * 3)
    assert [s.sample for s in plan.drawn] == [0, 1, 2], "also the one that has no slot yet"
    runner(plan)
    scheduler.accept(plan, _runs(9, 4, 8))
    plan = scheduler.plan()
    assert plan is not None and plan.chunks == [] and len(plan.copies) == 2
    assert plan.decode.token_ids == [9, 4] and plan.decode.positions == [3, 3]
    runner(plan)
    scheduler.accept(plan, _runs(1, 1))
    plan = scheduler.plan()
    assert plan is not None and plan.decode.token_ids == [1, 1] and plan.decode.positions == [4, 4]
    assert {s.sample for s in scheduler.accept(plan, _runs(2, 2))} == {0, 1}
    plan = scheduler.plan()
    assert plan is not None and plan.decode.token_ids == [8] and plan.copies == [], "the last one takes the prompt over"


def test_long_completions_start_first_then_long_prompts_then_the_lower_index():
    scheduler, runner = _setup(1)
    scheduler.add([_request(3, 5), _request(1, 5), _request(2, 9), _request(0, 2, new=4), _request(4, 2, new=12)])
    started: list[int] = []
    _drain(scheduler, runner)
    for plan in runner.plans:
        started += [s.request for chunk in plan.chunks for s in chunk.sequences]
    assert started == [4, 2, 1, 3, 0]


def test_no_slot_stays_empty_while_something_waits():
    requests = [_request(index, 3, n=1 + index % 3, new=2 + index % 7) for index in range(30)]
    scheduler, runner = _setup(4)
    scheduler.add(requests)
    _drain(scheduler, runner)
    num_tokens = sum(len(tokens) - 1 for tokens, _ in alone(requests).values())
    busy = [len(plan.sequences) for plan in runner.plans]
    # A prompt takes one step in which its slots are not decoded, and the tail of the queue leaves slots empty.
    assert sum(busy) == num_tokens
    last_admission = max(number for number, plan in enumerate(runner.plans) if plan.chunks)
    assert all(
        len(plan.sequences) + len([s for s in plan.drawn if s not in plan.sequences]) >= 4
        for plan in runner.plans[: last_admission - 1]
    )


def test_later_arrivals_never_overtake_so_nothing_starves():
    scheduler, runner = _setup(2)
    scheduler.add([_request(0, new=2), *(_request(index, new=20) for index in (1, 2, 3))])
    arrivals = iter(range(10, 30))

    def arrive() -> None:
        if (index := next(arrivals, None)) is not None:
            scheduler.add([_request(index, new=40)])

    ended = [sequence.request for sequence in _drain(scheduler, runner, arrive)]
    starts = [s.request for plan in runner.plans for chunk in plan.chunks for s in chunk.sequences]
    assert starts == [1, 2, 3, 0, *range(10, 30)]
    assert sorted(ended) == sorted(starts)


def test_a_large_request_is_not_overtaken_by_small_ones_that_would_fit():
    scheduler, runner = _setup(8, num_blocks=8)
    scheduler.add([_request(0, 60, new=60), _request(1, 60, new=50), *(_request(i, 2, new=3) for i in range(2, 6))])
    _drain(scheduler, runner)
    starts = [s.request for plan in runner.plans for chunk in plan.chunks for s in chunk.sequences]
    assert starts == [0, 1, 2, 3, 4, 5]


def test_no_prompt_begins_while_completions_of_another_wait():
    scheduler, runner = _setup(8, num_blocks=8)
    scheduler.add([_request(0, 40, n=3, new=40)])
    _step(scheduler, runner)
    scheduler.add([_request(1, 3, new=3)])  # would fit beside the first completion, where the second does not
    _drain(scheduler, runner)
    begun = next(number for number, plan in enumerate(runner.plans) if number and plan.chunks)
    assert {s.sample for plan in runner.plans[:begun] for s in plan.sequences} == {0, 1, 2}


def test_a_prompt_that_waits_for_room_begins_when_one_ends_with_its_first_token():
    requests = [_request(index, 60, new=1) for index in range(3)]
    scheduler, runner = _setup(4, num_blocks=5)
    scheduler.add(requests)
    assert _results(_drain(scheduler, runner)) == alone(requests)
    assert [len(plan.chunks) for plan in runner.plans] == [1, 1, 1]


def test_prompts_that_share_what_is_not_computed_yet_can_be_cancelled():
    scheduler, runner = _setup(4, prefill_tokens=10)
    scheduler.add([PromptRequest(index, (5,) * 40 + (index,), 1, Limits(4)) for index in range(4)])
    _step(scheduler, runner)
    assert runner.cache.num_free == runner.cache.num_blocks - 3 - 3, "two blocks are shared, the last is each one's own"
    assert scheduler.cancel_all() == []
    check_scheduler(scheduler)
    assert runner.cache.num_free == runner.cache.num_blocks


def test_cancelling_returns_what_is_finished_and_frees_the_rest():
    requests = _mixed(30)
    expected = alone(requests)
    for steps in (0, 1, 2, 5, 20, 60):
        scheduler, runner = _setup(3, prefill_tokens=20)
        scheduler.add(requests)
        ended = [s for _ in range(steps) for s in _step(scheduler, runner) or []]
        scheduler.plan()  # the interrupt comes while the model runs
        finished = scheduler.cancel_all()
        assert _results(finished) == _results(ended) == {key: expected[key] for key in _results(ended)}
        check_scheduler(scheduler)
        assert runner.cache.num_free == runner.cache.num_blocks
        assert scheduler.plan() is None
        again = [PromptRequest(100 + r.index, r.prompt_ids, r.n, r.limits) for r in requests[:5]]
        scheduler.add(again)
        assert _results(_drain(scheduler, runner)) == alone(again)


def test_a_budget_of_exactly_one_sequence_suffices():
    for n, num_blocks in ((1, 8), (2, 9)):
        request = _request(0, 70, new=59, n=n)  # the last token that is drawn needs no place: 128 are written
        scheduler, runner = _setup(2, num_blocks=num_blocks)
        scheduler.add([request])
        assert _results(_drain(scheduler, runner)) == alone([request])


def test_plans_are_accepted_once_and_in_order():
    scheduler, _ = _setup(2)
    scheduler.add([_request(0)])
    plan = scheduler.plan()
    assert plan is not None
    with pytest.raises(RuntimeError, match="not accepted before"):
        scheduler.plan()
    with pytest.raises(RuntimeError, match="1 completions were to be drawn, 2 came"):
        scheduler.accept(plan, _runs(1, 2))
    scheduler.accept(plan, _runs(1))
    with pytest.raises(RuntimeError, match="accepted before"):
        scheduler.accept(plan, _runs(1))
