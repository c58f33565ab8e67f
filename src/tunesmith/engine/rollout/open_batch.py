"""Requests that come and go, drawn together step by step: what a server needs of an engine.

The native engine's batch is continuous: each step draws a token for every completion, whatever its request's settings,
and the cache keeps what was computed, so that the next turn of a chat computes its new tokens alone. Other engines draw
one request after the other. As far as the engine is exact, a completion is the one that a request with the same seed
has by itself.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from tunesmith.base.core.errors import ContextFullError, InputError, TrainingError, TunesmithError
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Completion, SamplingParams
from tunesmith.engine.rollout.engine import Engine, completion_of
from tunesmith.engine.rollout.kv_cache import BLOCK_TOKENS, blocks_for, copy_blocks
from tunesmith.engine.rollout.native_engine import NativeEngine
from tunesmith.engine.rollout.runner import StepOutput
from tunesmith.engine.rollout.sampler import RequestSampling, Sampler, noise_keys
from tunesmith.engine.rollout.scheduler import Plan, PromptRequest, Scheduler
from tunesmith.engine.rollout.sequence import Sequence, TextStream

MOST_TOP = 20
"""Most likely tokens that can be asked for beside each drawn one, as in OpenAI's API."""

NUM_SLOTS = 64
"""Completions that are drawn at a time."""

_PREFILL_TOKENS = 256
"""Prompt tokens per step: whoever reads an answer waits for each step, so fewer than in a training."""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """The log-prob of a token under the model at temperature 1, in nats; `top` are the most likely ones with theirs."""

    token_id: int
    logp: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of completion `sample`: their ids, and the text that is settled now, of whole
    characters and without a possible beginning of a stop string. `scores` of the ids if they were asked for. The last
    piece has the whole `completion`.
    """

    sample: int
    token_ids: tuple[int, ...]
    text: str
    scores: tuple[TokenScore, ...] = ()
    completion: Completion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request for `n` completions of a prompt; its functions are called by the thread that calls `step`.

    `on_piece` is given what is drawn, and must return at once. `on_error` is called instead of further pieces if it
    cannot be drawn after all. Once `is_stopped()` says so, nobody waits for the rest. `num_top` most likely tokens are
    scored beside each drawn one; None: no scores. The penalties are those of `RequestSampling`.
    """

    prompt: Prompt
    n: int
    sampling: SamplingParams
    on_piece: Callable[[Piece], None]
    on_error: Callable[[TunesmithError], None]
    is_stopped: Callable[[], bool] = lambda: False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    num_top: int | None = None


class OpenBatch(Protocol):
    """Requests that are drawn now; for one thread. The model must not change meanwhile."""

    def add(self, ask: Ask) -> None:
        """Take a request.

        Raises:
            ContextFullError: the prompt and `max_new_tokens` are longer than the model's context, or than the cache.
            InputError: it cannot be served; the message says why.
        """
        ...

    def step(self) -> bool:
        """Draw on, and hand out what was drawn; False if there is nothing to draw."""
        ...


def open_batch(engine: Engine, *, num_slots: int = NUM_SLOTS, kv_cache_mb: int | None = None) -> OpenBatch:
    """A batch on `engine`, with at most `num_slots` completions at a time; None: a cache of a tenth of the memory.

    Raises:
        InputError: the cache is too small.
        TrainingError: the packed weights do not reproduce the trainer's log-probs.
    """
    if isinstance(engine, NativeEngine):
        return ContinuousBatch(engine, num_slots=num_slots, kv_cache_mb=kv_cache_mb)
    return OneByOne(engine)


@dataclass(slots=True, eq=False)
class _Open:
    """A request that is drawn, with the text of each of its completions."""

    ask: Ask
    num_left: int
    streams: dict[int, TextStream] = field(default_factory=dict[int, TextStream])


class ContinuousBatch:
    """See `OpenBatch`: all requests together, by the native engine."""

    def __init__(self, engine: NativeEngine, *, num_slots: int, kv_cache_mb: int | None) -> None:
        self._engine = engine
        self._cache = engine.open_cache(num_slots, kv_cache_mb)
        self._scheduler = Scheduler(
            self._cache.tables,
            engine.decode,
            num_slots=num_slots,
            prefill_tokens=_PREFILL_TOKENS,
            is_open=True,
        )
        self._drafts = engine.open_drafts()
        self._sampling: dict[int, RequestSampling] = {}
        self._sampler = Sampler(self._sampling, engine.vocabulary_size, engine.kernels)
        self._open: dict[int, _Open] = {}
        self._next = 0

    def add(self, ask: Ask) -> None:
        """See `OpenBatch.add`."""
        if ask.num_top is not None and not 0 <= ask.num_top <= MOST_TOP:
            raise InputError(f"{ask.num_top} most likely tokens of each; ask for 0 to {MOST_TOP}")
        request = self._engine.request([ask.prompt], ask.n, ask.sampling)
        num_blocks = self._cache.tables.num_blocks
        if blocks_for(request.longest) + 1 > num_blocks:
            raise ContextFullError(
                f"prompt and answer have up to {request.longest} tokens, and the cache of the server holds "
                f"{BLOCK_TOKENS * (num_blocks - 1)}; shorten the prompt or lower max_new_tokens"
            )
        number, self._next = self._next, self._next + 1
        (key,) = noise_keys(request.prompt_ids, ask.n)
        stop_ids = request.limits.stop_ids
        self._sampling[number] = RequestSampling(
            ask.sampling, request.seed, key, stop_ids, ask.presence_penalty, ask.frequency_penalty
        )
        self._open[number] = _Open(ask, ask.n)
        self._scheduler.add([PromptRequest(number, request.prompt_ids[0], ask.n, request.limits)])

    def step(self) -> bool:
        """See `OpenBatch.step`."""
        for number in [number for number, one in self._open.items() if one.ask.is_stopped()]:
            del self._open[number]
            if self._scheduler.cancel(number):
                del self._sampling[number]
        plan = self._scheduler.plan(drafter=self._drafts)
        if plan is None:
            self._sampling.clear()
            return False
        try:
            self._draw(plan)
        except TrainingError as error:
            self._fail(error)
        return True

    def _draw(self, plan: Plan) -> None:
        """Compute a step, sample, and hand out the tokens."""
        copy_blocks(self._cache.storage, plan.copies)
        with self._engine.free_threads():
            output = self._run(plan)
        if not plan.drawn:
            self._scheduler.accept(plan, [])
            return
        sampled = self._sampler.draw(plan, output.logits_RV)
        columns = (column_B[:, None].tolist() for column_B in (sampled.token_B, sampled.logp_B, sampled.raw_logp_B))
        no_values: list[list[float]] = [[]] * len(plan.drawn)
        ended = self._scheduler.accept(plan, list(zip(*columns, no_values, strict=True)))
        self._sampler.release(ended)
        for row, sequence in enumerate(plan.drawn):
            if (one := self._open.get(sequence.request)) is not None:  # else its prompt was computed for others
                one.ask.on_piece(_piece(one, sequence, output.logits_RV[row]))
        for sequence in ended:
            self._end(sequence.request)

    def _run(self, plan: Plan) -> StepOutput:
        """The rows to sample from."""
        runner, storage, block_tables = self._cache.runner, self._cache.storage, self._cache.tables.block_tables
        if self._drafts is None:
            return runner.run(plan, storage, block_tables)
        return self._drafts.run(runner, plan, storage, block_tables)

    def _end(self, number: int) -> None:
        """Note the end of a completion of the request `number`."""
        if (one := self._open.get(number)) is None:
            return
        one.num_left -= 1
        if one.num_left == 0:
            del self._open[number], self._sampling[number]

    def _fail(self, error: TrainingError) -> None:
        """End all requests with `error`, and forget what is cached, which may hold numbers that are not finite."""
        self._scheduler.cancel_all()
        self._cache.tables.invalidate()
        failed = list(self._open.values())
        self._open.clear()
        self._sampling.clear()
        for one in failed:
            one.ask.on_error(error)


def _piece(one: _Open, sequence: Sequence, logits_V: torch.Tensor) -> Piece:
    """The last token of `sequence`, which was drawn from `logits_V`."""
    stream = one.streams.get(sequence.sample)
    if stream is None:
        stops = sequence.limits.stop_strings
        stream = one.streams[sequence.sample] = TextStream(sequence.decode, sequence.context, stops)
    has_ended = sequence.finish_reason is not None
    text = stream.finish(sequence.text) if has_ended else stream.push(sequence.token_ids)
    num_top = one.ask.num_top
    scores = () if num_top is None else (_score(sequence.token_ids[-1], logits_V, num_top),)
    completion = completion_of(sequence) if has_ended else None
    return Piece(sequence.sample, (sequence.token_ids[-1],), text, scores, completion)


def _score(token_id: int, logits_V: torch.Tensor, num_top: int) -> TokenScore:
    logp_V = torch.log_softmax(logits_V.float(), dim=-1)
    best = torch.topk(logp_V, num_top)
    top = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return TokenScore(token_id, float(logp_V[token_id]), tuple(top))


class _StoppedError(Exception):
    """Nobody waits for what is drawn."""


class OneByOne:
    """See `OpenBatch`: one request after the other, by an engine that draws a call at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: deque[Ask] = deque()

    def add(self, ask: Ask) -> None:
        """See `OpenBatch.add`; whether the prompt fits is known when it is drawn."""
        if ask.num_top is not None or ask.presence_penalty or ask.frequency_penalty:
            raise InputError(
                f"this model is drawn by the engine {self._engine.name}, which has neither the log-probs of other "
                "tokens nor presence and frequency penalties; leave them out"
            )
        self._waiting.append(ask)

    def step(self) -> bool:
        """See `OpenBatch.step`: draws the whole request that came first."""
        if not self._waiting:
            return False
        ask = self._waiting.popleft()

        def on_text(_: int, sample: int, text: str) -> None:
            if ask.is_stopped():
                raise _StoppedError
            ask.on_piece(Piece(sample, (), text))

        if ask.is_stopped():
            return True
        try:
            (group,) = self._engine.generate([ask.prompt], ask.n, ask.sampling, on_text=on_text)
        except _StoppedError:
            return True
        except TunesmithError as error:
            ask.on_error(error)
            return True
        for sample, completion in enumerate(group.completions):
            ask.on_piece(Piece(sample, completion.token_ids, "", (), completion))
        return True
