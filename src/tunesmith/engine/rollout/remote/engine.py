"""The engine of the backend `vllm`: pushes weights and proves them, asks again for what was lost, returns groups."""

import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Unpack

import torch
from torch.nn.utils.rnn import pad_sequence

from tunesmith.base.core.errors import InputError, ServerError
from tunesmith.base.core.log import get_logger
from tunesmith.base.core.trace import count, span
from tunesmith.base.core.turns import Turns
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Group, SamplingParams
from tunesmith.engine.models.export import save_weights
from tunesmith.engine.models.fingerprint import Fingerprint, fingerprint
from tunesmith.engine.models.language_model import LanguageModel
from tunesmith.engine.models.loaded import PreTrainedTokenizerBase
from tunesmith.engine.models.logprob import token_logps
from tunesmith.engine.rollout import sequence
from tunesmith.engine.rollout.dialogue import in_rounds
from tunesmith.engine.rollout.engine import Callbacks, Dialogue, Functions, Request, make_request
from tunesmith.engine.rollout.remote.connection import (
    VLLM,
    Connection,
    Drawn,
    Job,
    TransientError,
    WrongWeightsError,
    jobs_of,
    reshapes,
)
from tunesmith.engine.rollout.remote.in_process import InProcess
from tunesmith.engine.rollout.remote.proof import WeightProof
from tunesmith.engine.rollout.remote.server import Server

_log = get_logger(__name__)

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 15.0
_PROOF_ATTEMPTS = 3
"""Pushes of the same weights, each of which the server must have answered, before the run ends."""


class RemoteEngine:
    """Draws completions of `model` by a vLLM. See `factory.open_engine` for the arguments.

    A completion depends on prompt, sample and seed, so it may be asked for twice. It is used only if the server has the
    proven weights before and after it was drawn. Calls from several threads wait for each other.
    """

    name = "vllm"

    is_exact = False
    """Its arithmetic is another than the trainer's."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: VLLM,
        *,
        weight_version: Callable[[], int] = lambda: 0,
        num_slots: int = 128,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._settings = settings
        self._weight_version = weight_version
        self._num_slots = num_slots
        if settings.url is None:
            self._connection: Connection = InProcess(model.module, settings.options)
        else:
            self._connection = Server(settings.url, timeout_s=settings.timeout_s, num_slots=num_slots)
        self._proof = WeightProof(model)
        self._turns = Turns("engine", has_pipes=True)
        self._name = ""  # of the weights that were pushed last, for this engine alone
        self._pushed: Fingerprint | None = None  # which they were; None: push again
        self._proven_at: float | None = None  # the temperature of their proof; None: prove again

    def unload(self) -> None:
        """Nothing to free: the memory is the server's."""

    def generate(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, **functions: Unpack[Functions]
    ) -> list[Group]:
        """See `engine.Engine.generate`. Callbacks are called at the end; after Ctrl-C there are no completions.

        Raises:
            ServerError: the server is away, or has other weights, for longer than `timeout_s`.
        """
        with self._turns.next():
            return self._generate(prompts, n, sampling, functions)

    def converse(self, prompts: Sequence[Prompt], sampling: SamplingParams, dialogue: Dialogue) -> int:
        """See `engine.Engine.converse`; in rounds."""
        return in_rounds(lambda asked, own, _: self.generate(asked, 1, own), prompts, sampling, dialogue)

    def _generate(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, functions: Functions
    ) -> list[Group]:
        version = self._weight_version()
        request = make_request(self._model.module, self._tokenizer, prompts, n, sampling, self._num_slots, version)
        callbacks = Callbacks(request, **functions)
        jobs = jobs_of(request, sampling)
        try:
            # At 0.5 only a server passes that gives the log-probs of the distribution it drew from.
            drawn = self._draw(jobs, 0.5 if reshapes(sampling) else sampling.temperature or 1.0)
        except KeyboardInterrupt as interrupt:
            raise request.interrupted([]) from interrupt
        rows = self._rows(request, drawn, sampling)
        for row in rows:
            callbacks.note([row], [row])
        return request.groups(rows)

    def _draw(self, jobs: Mapping[int, Job], temperature: float) -> dict[int, list[Drawn]]:
        """The completions of all jobs, by their key, from proven weights."""
        done: dict[int, list[Drawn]] = {}
        patience = _Patience(self._connection.name, self._settings.timeout_s)
        while len(done) < len(jobs):
            fresh: dict[int, list[Drawn]] = {}
            try:
                with span("load"):
                    self._prepare_weights(temperature)
                left = {key: job for key, job in jobs.items() if key not in done}
                fresh, problem = self._connection.complete(left)
                self._require_same_weights(temperature)
            except TransientError as error:
                fresh, problem = {}, error
            if fresh:
                done |= fresh
                patience.begin()
            if problem is not None:
                patience.bear(problem)
        count("server_retries", patience.num_problems)
        return done

    def _prepare_weights(self, temperature: float) -> None:
        """Push the trainer's weights unless the server has them, and prove them unless that was done."""
        now = fingerprint(self._model.module, kernels=self._model.kernels)
        named = self._connection.version() if self._name else ""
        if self._pushed != now or named not in (None, self._name):
            self._pushed = self._proven_at = None
            self._name = f"{self._weight_version()}-{secrets.token_hex(8)}"
            with tempfile.TemporaryDirectory(prefix="tunesmith-weights-", dir=self._settings.folder) as folder:
                Path(folder).chmod(0o755)  # the server may be another user's
                save_weights(self._model.module, Path(folder))
                self._connection.push(Path(folder), self._name)
            self._pushed = now
        if self._proven_at != temperature or named is None:
            self._prove(temperature)
            self._proven_at = temperature

    def _require_same_weights(self, temperature: float) -> None:
        """Check that the server has had the proven weights all the time: it may have been started again meanwhile."""
        named = self._connection.version()
        if named is None:
            self._prove(temperature)
        elif named != self._name:
            raise TransientError(
                f"it has the weights {named or 'that it started with'} and not {self._name}, which were pushed: it was "
                "started again, or another run uses it"
            )

    def _prove(self, temperature: float) -> None:
        try:
            difference = self._proof.check(self._connection, temperature)
        except WrongWeightsError:
            self._pushed = None
            raise
        count("weight_check_diff", difference)

    def _rows(
        self, request: Request, drawn: Mapping[int, list[Drawn]], sampling: SamplingParams
    ) -> list[sequence.Sequence]:
        """The completions as sequences that have ended, in the order of the prompts."""
        rows: list[sequence.Sequence] = []
        for index, ids in enumerate(request.prompt_ids):
            raw = self._raw_logps(ids, drawn[index], sampling)
            for sample, (one, raw_logps) in enumerate(zip(drawn[index], raw, strict=True)):
                row = sequence.Sequence(index, sample, ids, request.limits, request.decode)
                if not row.extend(list(one.token_ids), list(one.logps), raw_logps, []):
                    raise InputError(
                        f"{self._connection.name} ended a completion after {len(one.token_ids)} tokens, which is "
                        f"neither a stop token nor {request.limits.max_new_tokens}, the limit; is its --max-model-len "
                        "below that of the model, or has it stop tokens of its own?"
                    )
                rows.append(row)
        return rows

    @torch.no_grad()
    def _raw_logps(self, ids: Sequence[int], drawn: Sequence[Drawn], sampling: SamplingParams) -> list[list[float]]:
        """Log-probs under the model itself. vLLM gives one number for a token, so they are those of the trainer where
        it draws from another distribution.
        """
        if not reshapes(sampling):
            return [list(one.logps) for one in drawn]
        device = self._model.module.device
        rows = [torch.tensor([*ids, *one.token_ids]) for one in drawn]
        length_B = torch.tensor([len(row) for row in rows], device=device)
        scores = token_logps(
            self._model,
            pad_sequence(rows, batch_first=True).to(device),
            length_B,
            prompt_lengths_B=torch.full_like(length_B, len(ids)),
            temperature=sampling.temperature or 1.0,
        )
        return [row[: len(one.token_ids)] for row, one in zip(scores.logp_BT.tolist(), drawn, strict=True)]


class _Patience:
    """Waits after each problem of the server `name`, longer each time, up to `timeout_s` after the first in a row."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self.num_problems = 0
        self.begin()

    def begin(self) -> None:
        """Forget the problems so far, because some work was done."""
        self._first_s: float | None = None
        self._wait_s = _FIRST_WAIT_S
        self._num_wrong = 0

    def bear(self, problem: TransientError) -> None:
        """Wait; or end it.

        Raises:
            ServerError: there were problems for `timeout_s`, or the weights were wrong several times.
        """
        now_s = time.monotonic()
        self._first_s = now_s if self._first_s is None else self._first_s
        self.num_problems += 1
        self._num_wrong += isinstance(problem, WrongWeightsError)
        left_s = self._first_s + self._timeout_s - now_s
        if left_s <= 0 or self._num_wrong == _PROOF_ATTEMPTS:
            advice = (
                f"Its weights were pushed {_PROOF_ATTEMPTS} times"
                if self._num_wrong == _PROOF_ATTEMPTS
                else f"It was waited for {self._timeout_s:g} s (rollout.server_timeout_s)"
            )
            raise ServerError(
                f"{self._name} cannot be used: {problem}. {advice}. See docs/engines.md; a run that was stopped by "
                "this goes on with `tunesmith resume`"
            ) from problem
        wait_s = min(self._wait_s, left_s)
        _log.warning("%s: %s; asking again in %.3g s, for %.0f s at most", self._name, problem, wait_s, left_s)
        time.sleep(wait_s)
        self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)
