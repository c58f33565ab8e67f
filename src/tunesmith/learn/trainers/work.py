"""Time of a stage: its work, and the seconds that each kind of work takes by a trial of the model itself.

A trial makes a few short passes over random tokens, in rows of the lengths that the stage has. A run is the same to the
bit with and without it: it has an engine and generators of its own, and keeps no gradient.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import nn

from tunesmith.base.config.sections import OptimizerSection, RolloutSection
from tunesmith.base.core.trace import span, trace
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.kernels.adamw.api import adamw, sums_of_squares
from tunesmith.engine.kernels.adamw.torch_impl import AdamWSettings
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models.heads import RewardModel
from tunesmith.engine.models.language_model import LanguageModel
from tunesmith.engine.models.loaded import PreTrainedTokenizerBase
from tunesmith.engine.models.logprob import token_logps
from tunesmith.engine.models.slots import ParameterGroup, Part, Slot
from tunesmith.engine.rollout.engine import Engine
from tunesmith.engine.rollout.factory import open_engine, own_backend
from tunesmith.learn.trainers.setup import say
from tunesmith.observe.reports.text import duration

_TRIAL_TOKENS = 192
"""Tokens of a pass of a trial, about: enough to keep the matrix units busy."""

_TRIAL_PARAMETERS = 2**23
"""Parameters of a step of the optimizer in a trial: their state, over 100 MB, is more than most caches hold."""

_LEAST_S, _MOST_PASSES, _ROUNDS = 0.4, 4, 3
"""Passes are timed until this much time has passed, or for that many; rounds of drawing that are timed together."""


@dataclass(frozen=True, slots=True)
class Work:
    """Amounts of each kind of work; or, as the cost of a trial, the seconds that one unit of each takes.

    `scored` and `trained` are tokens of passes without and with gradients. The rollout engine draws the `drawn` tokens
    in `rounds`, in each of which every running completion gets one. `updates` are steps of the optimizer.
    """

    scored: float = 0.0
    trained: float = 0.0
    rounds: float = 0.0
    drawn: float = 0.0
    updates: float = 0.0

    def __add__(self, other: Self) -> "Work":
        return Work(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def __mul__(self, times: float) -> "Work":
        return Work(*(times * getattr(self, one.name) for one in fields(self)))

    def seconds(self, cost: Self) -> float:
        """Seconds of this work, at the cost of each unit."""
        return sum(getattr(self, one.name) * getattr(cost, one.name) for one in fields(self))

    @classmethod
    def drawing(cls, num_sequences: float, num_tokens: float, num_slots: int) -> "Work":
        """The work of drawing `num_tokens` for each of `num_sequences`, at most `num_slots` at a time."""
        return cls(rounds=num_tokens * -(-num_sequences // num_slots), drawn=num_tokens * num_sequences)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a stage: mean tokens of a prompt and of a completion, and completions that share a prompt."""

    prompt: float
    completion: float
    per_prompt: int = 1

    def tokens(self, num_rows: float) -> float:
        """Tokens of `num_rows` rows, each prompt counted once."""
        return num_rows * (self.prompt / self.per_prompt + self.completion)


@dataclass(frozen=True, slots=True)
class RunWork:
    """Work of a run: of a step, of an evaluation, of what is measured `once` before and after training, and of what is
    computed before the run begins (`preparation`).

    `num_slots` completions are drawn at a time; 0: none are drawn.
    """

    rows: Rows
    step: Work
    evaluation: Work = Work()
    once: Work = Work()
    preparation: Work = Work()
    num_slots: int = 0

    def remaining(self, num_steps: int, eval_every: int) -> Work:
        """The work of `num_steps` steps, with their evaluations, and of what is measured once."""
        num_evaluations = -(-num_steps // eval_every) if eval_every else 1
        return self.step * num_steps + self.evaluation * num_evaluations + self.once


def announce_time(seconds: float, what: str, by: str = "a trial of this model") -> None:
    """Print to stderr about how long `what` takes, as known by `by`."""
    say(f"time: about {duration(max(1.0, seconds))} for {what}, by {by}", enabled=True)


def trial_engine(policy: LanguageModel, tokenizer: PreTrainedTokenizerBase, rollout: RolloutSection) -> Engine:
    """An engine of its own for a trial; a vLLM, or workers, are taken to be as fast."""
    return open_engine(
        policy,
        tokenizer,
        backend=own_backend(rollout),
        batch_size=rollout.batch_size,
        num_slots=rollout.num_slots,
        kv_cache_mb=rollout.kv_cache_mb,
    )


def trial(
    model: LanguageModel | RewardModel,
    rows: Rows,
    engine: Engine | None = None,
    sampling: SamplingParams | None = None,
    num_slots: int = 1,
    *,
    optimizer: OptimizerSection | None = None,
) -> Work:
    """Seconds of each kind of work with `model`, which `optimizer` trains, if at all, and with `engine`, which draws
    `num_slots` completions at a time as `sampling` says. Takes a few seconds, most of them for large models.
    """
    module = model.model if isinstance(model, RewardModel) else model.module
    on_gpu = [module.device] if module.device.type == "cuda" else []
    with trace(), span("trial"), torch.random.fork_rng(on_gpu):
        with torch.no_grad():
            scored_s = _token_s(model, rows)
        trained_s = _token_s(model, rows) if optimizer else 0.0
        update_s = _update_s(model, optimizer) if optimizer else 0.0
        drawing = (0.0, 0.0) if engine is None or sampling is None else _drawing_s(engine, sampling, num_slots)
    return Work(scored_s, trained_s, *drawing, update_s)


def _token_s(model: LanguageModel | RewardModel, rows: Rows) -> float:
    """Seconds of a token of a pass over `rows`; with a backward pass where gradients are enabled."""
    module = model.model if isinstance(model, RewardModel) else model.module
    shrinking = min(1.0, _TRIAL_TOKENS / (rows.prompt + rows.completion))
    num_prompt, num_new = (max(1, int(size * shrinking)) for size in (rows.prompt, rows.completion))
    num_rows = max(1, round(_TRIAL_TOKENS / (num_prompt / rows.per_prompt + num_new)))
    vocabulary, generator = module.config.get_text_config().vocab_size, torch.Generator().manual_seed(0)
    # Drawn, because alike rows would be computed once.
    ids_BS = torch.randint(vocabulary, (num_rows, num_prompt + num_new), generator=generator)
    first_B = torch.arange(num_rows) - torch.arange(num_rows) % rows.per_prompt
    ids_BS[:, :num_prompt] = ids_BS[first_B, :num_prompt]
    ids_BS = ids_BS.to(module.device)
    lengths_B = torch.full_like(ids_BS[:, 0], num_prompt + num_new)

    def one_pass() -> None:
        if isinstance(model, RewardModel):
            loss = model(ids_BS, lengths_B).sum()
        else:
            prompt_lengths_B = torch.full_like(lengths_B, num_prompt)
            loss = token_logps(model, ids_BS, lengths_B, prompt_lengths_B=prompt_lengths_B).logp_BT.sum()
        if torch.is_grad_enabled():
            trained = [one for one in model_parameters if one.requires_grad]
            torch.autograd.grad(loss, trained, allow_unused=True)
        loss.item()  # waits for a GPU
        if module.device.type == "cuda":
            torch.cuda.synchronize(module.device)

    model_parameters = list(module.parameters())
    one_pass()  # compiles, and gets the memory
    num_tokens = num_prompt * len(first_B.unique()) + num_new * num_rows
    return _mean_s(one_pass) / num_tokens


def _update_s(model: LanguageModel | RewardModel, optimizer: OptimizerSection) -> float:
    """Seconds of a step of `optimizer` over the parameters that are trained, from a step over some of them."""
    module = model.model if isinstance(model, RewardModel) else model.module
    kernels = Kernels() if isinstance(model, RewardModel) else model.kernels
    trained = [one for one in module.parameters() if one.requires_grad]
    num_trained = sum(one.numel() for one in trained)
    if not num_trained:
        return 0.0
    num_tried = min(num_trained, _TRIAL_PARAMETERS)
    weight = nn.Parameter(trained[0].new_zeros(num_tried))
    slot = Slot("trial", weight, ParameterGroup((), optimizer.learning_rate, optimizer.weight_decay), kernels, Part())
    settings = AdamWSettings(*optimizer.betas, optimizer.eps, optimizer.fused)
    gradient = torch.zeros_like(weight)

    def one_step() -> None:
        sums_of_squares([gradient], kernels=kernels)
        adamw([slot.update(gradient, 1.0, coded=optimizer.state == "int8")], settings, 1.0, kernels=kernels)
        weight[0].item()  # waits for a GPU

    one_step()  # gets the memory
    return _mean_s(one_step) / num_tried * num_trained


def _drawing_s(engine: Engine, sampling: SamplingParams, num_slots: int) -> tuple[float, float]:
    """(Seconds of a round of a single completion, further seconds of each token of a round with more)."""
    prompt = Prompt("trial", "", token_ids=(1, 2, 3))
    brief = replace(sampling, seed=0, stop_strings=())

    def drawn_s(num: int, num_tokens: int) -> float:
        settings = replace(brief, max_new_tokens=num_tokens, min_new_tokens=num_tokens)
        start_s = time.perf_counter()
        engine.generate([prompt], num, settings)
        return time.perf_counter() - start_s

    def round_s(num: int) -> float:
        first_s = min(drawn_s(num, 1), drawn_s(num, 1))  # the very first packs the weights
        return max(1e-6, drawn_s(num, 1 + _ROUNDS) - first_s) / _ROUNDS

    one_s = round_s(1)
    if num_slots == 1:
        return one_s, 0.0
    token_s = max(0.0, round_s(num_slots) - one_s) / (num_slots - 1)
    return max(0.0, one_s - token_s), token_s


def _mean_s(work: Callable[[], None]) -> float:
    """Mean seconds of some calls: the best of them would be too short for a machine that is busy."""
    start_s, num_done = time.perf_counter(), 0
    while num_done < _MOST_PASSES and time.perf_counter() - start_s < _LEAST_S:
        work()
        num_done += 1
    return (time.perf_counter() - start_s) / num_done
