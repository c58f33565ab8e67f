"""The engine of `scale.workers`: divides a request into leases, which workers draw from the weights of one version."""

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self, Unpack

from torch import nn

from tunesmith.base.config.scale_sections import SamplingScaleSection
from tunesmith.base.core.errors import InputError
from tunesmith.base.core.log import Once, get_logger
from tunesmith.base.core.trace import count, span, went_on
from tunesmith.base.core.turns import Turns
from tunesmith.base.schema.records import Prompt
from tunesmith.base.schema.weights import Weights
from tunesmith.engine.batch.rollout import Completion, Group, SamplingParams
from tunesmith.engine.models.fingerprint import fingerprint_of, parts_of, same_parts
from tunesmith.engine.models.language_model import LanguageModel
from tunesmith.engine.models.loaded import PreTrainedTokenizerBase
from tunesmith.engine.models.tokenizer import decode_after
from tunesmith.engine.rollout import weight_check
from tunesmith.engine.rollout.dialogue import in_rounds
from tunesmith.engine.rollout.engine import Callbacks, Dialogue, Functions, GenerationInterrupted, Request, make_request
from tunesmith.engine.rollout.sampler import NoiseKey, noise_keys
from tunesmith.engine.rollout.workers import weights
from tunesmith.engine.rollout.workers.actors import RayTransport
from tunesmith.engine.rollout.workers.local import LocalTransport, Transport
from tunesmith.engine.rollout.workers.messages import Draw, Drawn, Load, Loaded, Setup
from tunesmith.engine.rollout.workers.pool import Pool
from tunesmith.engine.rollout.workers.queue import Rates, WorkQueue, lease_size

_log = get_logger(__name__)

_POLL_S = 0.5
_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class Workers:
    """`count` processes that draw by the native engine, each with `num_threads` CPU threads.

    `lease` is the largest number of completions that one is given at a time; one that gives no answer for longer than
    `timeout_s` seconds is killed and started again. With an `address` ("auto", or "HOST:PORT") they are actors of the
    Ray cluster there, of which this machine is one; without, processes of this machine. `weights` and `drafts` are as
    of `Native`.

    Raises:
        InputError: a number is too small.
    """

    count: int
    num_threads: int = 1
    lease: int = 16
    timeout_s: float = 600.0
    address: str | None = None
    weights: Weights = "model"
    drafts: bool = True

    def __post_init__(self) -> None:
        if min(self.count, self.num_threads, self.lease) < 1 or self.timeout_s <= 0:
            raise InputError(f"{self}: give at least 1 worker, 1 thread, 1 completion, and a time above 0")

    @classmethod
    def of(cls, section: SamplingScaleSection, weights: Weights = "model", *, drafts: bool = True) -> Self:
        """Those of a recipe's section."""
        given = (section.workers, section.threads_per_worker, section.lease, section.timeout_s, section.address)
        return cls(*given, weights, drafts)


@dataclass(frozen=True, slots=True)
class Lease:
    """Samples `first_sample` to `first_sample + n - 1` of each prompt in `indices`, as numbered within its group."""

    indices: tuple[int, ...]
    first_sample: int
    n: int


def leases_of(num_prompts: int, n: int, size: int) -> list[Lease]:
    """A request of `n` completions of each prompt as leases of at most `size` completions, see `queue.lease_size`.

    They depend on these numbers alone. In dtypes in which a row's bits depend on the rows that are computed with it,
    the tokens are therefore the same whatever the number of workers.
    """
    size = lease_size(num_prompts * n, size)
    if n <= size:
        step = size // n
        starts = range(0, num_prompts, step)
        return [Lease(tuple(range(start, min(start + step, num_prompts))), 0, n) for start in starts]
    num_parts = -(-n // size)
    bounds = [part * n // num_parts for part in range(num_parts + 1)]
    parts = list(pairwise(bounds))
    return [Lease((index,), first, end - first) for index in range(num_prompts) for first, end in parts]


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A checked request, the noise of its prompts, and the weights that it is drawn from, which are kept until then.

    `logps` are those of fixed tokens under these weights, by the trainer; None to compute them when they are needed.
    """

    request: Request
    sampling: SamplingParams
    keys: Sequence[NoiseKey]
    weights: Load
    logps: tuple[float, ...] | None

    def going_on(self, prefixes: Sequence[tuple[int, int, tuple[int, ...]]], sampling: SamplingParams) -> Self:
        """The request to go on with completions that have begun: (index of the prompt, sample, tokens so far) of each.
        The noise of a token depends on its position alone, so it is that which one draw of the whole would take.
        """
        request = self.request
        ids = tuple((*request.prompt_ids[index], *begun) for index, _, begun in prefixes)
        prompts = [Prompt("", "", token_ids=one) for one in ids]
        keys = [replace(self.keys[index], first_sample=self.keys[index].first_sample + n) for index, n, _ in prefixes]
        return replace(
            self, request=replace(request, prompts=prompts, prompt_ids=ids, n=1), keys=keys, sampling=sampling
        )


class WorkerEngine:
    """Draws completions of `model` in other processes. See `factory.open_engine` for the arguments.

    Calls of `generate` from several threads wait for each other; one `draw` at a time is for the caller to see to.
    """

    name = "workers"

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        workers: Workers,
        weight_version: Callable[[], int] = lambda: 0,
        num_slots: int = 128,
        kv_cache_mb: int | None = None,
        value_head: nn.Module | None = None,
        is_trained: bool = True,
    ) -> None:
        if model.decoder is None or model.module.device.type != "cpu":
            raise InputError(
                "rollout workers draw by the native engine of a CPU, but the model is on a "
                f"{model.module.device.type}; set scale.workers to 0"
            )
        self._decoder, self._module, self._tokenizer = model.decoder, model.module, tokenizer
        self._kernels, self._is_trained, self._kv_cache_mb = model.kernels, is_trained, kv_cache_mb
        self._value_head = value_head
        self._workers, self._weight_version, self._num_slots = workers, weight_version, num_slots
        everything = nn.ModuleDict({"policy": model.module})
        if value_head is not None:
            everything["value_head"] = value_head
        self._transport: Transport = LocalTransport()
        if workers.address is not None:
            self._transport = RayTransport(workers.address, workers.count * workers.num_threads)
        weakref.finalize(self, self._transport.close)
        self._everything = everything
        self._publisher = weights.Publisher(everything, self._transport.publish, self._transport.discard, model.kernels)
        self._setup = self._current_setup()
        self._pool: Pool | None = None
        self._turns = Turns("engine", has_pipes=True)
        self._is_exact: bool | None = None  # None: no worker has proven weights yet
        self._own_logps: tuple[int, tuple[float, ...]] | None = None  # of the weights of an edition
        self._open: list[Load] = []
        self._num_calls = 0
        self._busy_s = 0.0  # of all workers, so far
        self._collected: tuple[float, float] | None = None  # when completions were last waited for, and `_busy_s` then
        self._rates: Rates = {}
        self._lengths: dict[int, float] = {}  # mean of the latest completions of a prompt, by the hash of its ids
        self._warnings = Once(_log)

    @property
    def is_exact(self) -> bool:
        """True if raw log-probs equal the trainer's to the bit, as far as the workers that have weights have shown."""
        with self._turns.next():
            self._look_again()
            pool = self._pool_with(self._publisher.current())
            while self._is_exact is None:
                pool.receive(_POLL_S)
            return self._is_exact

    def process_of(self, worker: int) -> int:
        """The id of the process of `worker`, from 0, which may be another after it was started again."""
        return self._transport.pid(worker)

    def text(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> str:
        """The text of `token_ids` behind a prompt, without special tokens."""
        return decode_after(self._tokenizer, prompt_ids, token_ids)

    def unload(self) -> None:
        """Free the workers' caches and packed weights; the next `generate` rebuilds them."""
        with self._turns.next():
            if self._pool is not None:
                self._pool.unload()

    def generate(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, **functions: Unpack[Functions]
    ) -> list[Group]:
        """See `engine.Engine.generate`. A completion's text is reported when the completions of its lease have ended.

        Raises:
            ServerError: a worker was lost several times in a row.
        """
        with self._turns.next(), self.waiting():
            return self.draw(self.ask(prompts, n, sampling), **functions)

    def converse(self, prompts: Sequence[Prompt], sampling: SamplingParams, dialogue: Dialogue) -> int:
        """See `engine.Engine.converse`; in rounds, with the tokens of one process."""

        def draw(asked: Sequence[Prompt], own: SamplingParams, keys: Sequence[NoiseKey]) -> list[Group]:
            return self.draw(self.ask(asked, 1, own, keys=keys))

        with self._turns.next(), self.waiting():
            return in_rounds(draw, prompts, sampling, dialogue)

    def ask(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: SamplingParams,
        *,
        ahead: bool = False,
        keys: Sequence[NoiseKey] | None = None,
    ) -> Asked:
        """A request of the weights as they are now, to be drawn once. With `ahead` this can be later, or in another
        thread, and the model may change meanwhile. `keys` have the noise of each prompt, as in the native engine.
        """
        version = self._weight_version()
        request = make_request(self._module, self._tokenizer, prompts, n, sampling, self._num_slots, version)
        with span("load"):
            self._look_again()
            load = self._publisher.current(tuple(self._open))
            logps = tuple(weight_check.trained_logps(self._decoder).tolist()) if ahead else None
        self._open.append(load)
        keys = keys or noise_keys(request.prompt_ids, n)
        return Asked(
            request,
            replace(sampling, seed=request.seed, stop_token_ids=tuple(sorted(request.limits.stop_ids))),
            keys,
            load,
            logps,
        )

    def draw(self, asked: Asked, **functions: Unpack[Functions]) -> list[Group]:
        """The groups of a request of `ask`; see `generate`."""
        results = _Results(asked.request, Callbacks(asked.request, **functions))
        self._num_calls += 1
        if asked.logps is not None:
            self._own_logps = asked.weights.edition, asked.logps
        with span("load"):
            pool = self._pool_with(asked.weights)
        pool.num_restarts, pool.load_s = 0, 0.0
        try:
            self._draw(pool, asked, results)
        except KeyboardInterrupt as interrupt:
            pool.reset()
            raise GenerationInterrupted([group for group in results.groups() if group.completions]) from interrupt
        finally:
            self._open.remove(asked.weights)
            pool.settle(_GRACE_S)
        return results.groups()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as waiting for completions, and that of workers without any to draw since the
        block before.
        """
        start_s = time.monotonic()
        since_s, busy_s = self._collected or (start_s, self._busy_s)
        yield
        self._collected = end_s, end_busy_s = time.monotonic(), self._busy_s
        count("wait_s", end_s - start_s)
        count("worker_idle_s", max(0.0, end_s - since_s - (end_busy_s - busy_s) / self._workers.count))

    def _draw(self, pool: Pool, asked: Asked, results: "_Results") -> None:
        """The loop: leases go to the workers that are ready, answers to `results`."""
        start_s, busy_s, num_workers = time.monotonic(), 0.0, self._workers.count
        request, keys, sampling = asked.request, asked.keys, asked.sampling
        leases = leases_of(len(request.prompts), request.n, self._workers.lease)
        budget = sampling.max_new_tokens
        expected = [min(self._lengths.get(key.prompt, budget), budget) for key in keys]
        queue = WorkQueue([lease.n * sum(expected[index] for index in lease.indices) for lease in leases], self._rates)
        answers: dict[int, Drawn] = {}
        while not queue.is_done:
            for worker in pool.ready():
                number = queue.take(worker, time.monotonic())
                if number is not None:
                    lease = leases[number]
                    ids = tuple(request.prompt_ids[index] for index in lease.indices)
                    noise = tuple(
                        replace(keys[index], first_sample=keys[index].first_sample + lease.first_sample)
                        for index in lease.indices
                    )
                    edition = asked.weights.edition
                    pool.send(worker, Draw(edition, self._num_calls, number, ids, noise, lease.n, sampling))
            for worker, task, answer in pool.receive(_POLL_S):
                if task.call != self._num_calls:
                    continue
                if not isinstance(answer, Drawn):
                    queue.release(worker)
                    continue
                busy_s += answer.busy_s
                self._busy_s += answer.busy_s
                drawn = [one for completions in answer.completions for one in completions]
                num_tokens = sum(len(one.token_ids) for one in drawn)
                if queue.finish(worker, time.monotonic(), num_tokens):
                    answers[task.lease] = answer
                    results.add(leases[task.lease], answer.completions)
                    _count_work(answer, num_workers)
                elif answer.completions != answers[task.lease].completions:
                    self._warnings.warning(
                        f"rollout worker {worker} drew other tokens or log-probs than another worker, from the same "
                        "weights and noise: are the machines of one kind?"
                    )
        for key, group in zip(keys, results.groups(), strict=True):
            self._lengths[key.prompt] = sum(len(one.token_ids) for one in group.completions) / request.n
        count("workers_busy", busy_s, out_of=num_workers * max(time.monotonic() - start_s, 1e-9))
        count("worker_restarts", pool.num_restarts)
        count("stolen_leases", queue.num_stolen)
        count("worker_load_s", pool.load_s / num_workers)

    def _current_setup(self) -> Setup:
        """All of the workers' engine but its weights, with a note of what it is made of."""
        buffers = dict(self._everything.named_buffers())
        self._made_of = parts_of(self._module), fingerprint_of(buffers, kernels=self._kernels)
        content = self._module, self._tokenizer, self._value_head
        return Setup(
            weights.pickled(content, dict(self._everything.named_parameters())),
            self._kernels.choice,
            self._workers.num_threads,
            self._num_slots,
            self._kv_cache_mb,
            self._workers.weights,
            self._is_trained,
            self._workers.drafts,
        )

    def _look_again(self) -> None:
        """Start the workers again if the model has other parts now than theirs, such as a layer that was replaced."""
        self._decoder.refresh()
        parts, buffers = self._made_of
        now = fingerprint_of(dict(self._everything.named_buffers()), kernels=self._kernels)
        if buffers == now and same_parts(parts, parts_of(self._module)):
            return
        self._setup, self._is_exact, self._own_logps = self._current_setup(), None, None
        if self._pool is not None:
            self._pool.reset(self._setup)

    def _pool_with(self, load: Load) -> Pool:
        """The workers, which are started if need be, with these weights on their way to them."""
        if self._pool is None:
            self._pool = Pool(
                self._transport,
                self._setup,
                self._workers.count,
                timeout_s=self._workers.timeout_s,
                check=self._compare_logps,
            )
        self._pool.use(load)
        return self._pool

    def _compare_logps(self, worker: int, proof: Loaded) -> None:
        """Find out whether the worker's log-probs are those of this process to the bit, and not only its own."""
        if self._own_logps is None or self._own_logps[0] != proof.edition:
            self._own_logps = proof.edition, tuple(weight_check.trained_logps(self._decoder).tolist())
        is_same = proof.logps == self._own_logps[1]
        if proof.is_exact and not is_same:
            self._warnings.warning(
                f"rollout worker {worker} computes other bits than this process, so the trainer computes log-probs "
                "itself: is its processor of another kind?"
            )
        self._is_exact = proof.is_exact and is_same and self._is_exact is not False


class _Results:
    """The completions of a request as they arrive, and the caller's functions."""

    def __init__(self, request: Request, callbacks: Callbacks) -> None:
        self._request, self._callbacks = request, callbacks
        self._drawn: list[dict[int, Completion]] = [{} for _ in request.prompts]

    def add(self, lease: Lease, completions: Sequence[Sequence[Completion]]) -> None:
        """Take the completions of a lease, by prompt, and report them."""
        went_on()
        call = self._callbacks
        for index, of_prompt in zip(lease.indices, completions, strict=True):
            for sample, one in enumerate(of_prompt, start=lease.first_sample):
                self._drawn[index][sample] = one
                if call.on_text and one.text:
                    call.on_text(index, sample, one.text)
                if call.on_progress:
                    call.on_progress(sum(map(len, self._drawn)), self._request.num_completions)
            if call.on_group and len(self._drawn[index]) == self._request.n:
                call.on_group(index, self._group(index))

    def groups(self) -> list[Group]:
        """All groups, in the order of the request."""
        return [self._group(index) for index in range(len(self._drawn))]

    def _group(self, index: int) -> Group:
        request, drawn = self._request, self._drawn[index]
        ordered = tuple(drawn[sample] for sample in sorted(drawn))
        return Group(request.prompts[index], request.prompt_ids[index], ordered, request.version)


def _count_work(answer: Drawn, num_workers: int) -> None:
    """Add the figures of a lease to the open trace: seconds are a mean over the workers."""
    for figure, value in answer.work.sums.items():
        name = figure.rpartition("/")[2]
        out_of = answer.work.out_of.get(figure)
        count(name, value / num_workers if name.endswith("_s") else value, out_of=out_of)
