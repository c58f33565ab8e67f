"""Contenders of `benchmarks.rollout`: our engine, and the two ways of transformers to generate, as a user calls them.

Each runs in a process of its own (`process.py`). Shape legend: B sequences, T positions.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from benchmarks.process import Contender
from benchmarks.workloads import Drawn, Workload, checked
from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.system import keep_freed_memory
from tunesmith.base.schema.weights import Weights
from tunesmith.engine.batch.pack import pack
from tunesmith.engine.batch.rollout import Group, SamplingParams
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models.language_model import language_model
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.models.loaded import LoadedModel
from tunesmith.engine.models.tokenizer import stop_token_ids
from tunesmith.engine.rollout.factory import open_engine
from tunesmith.engine.rollout.native_engine import Native
from tunesmith.learn.trainers.passes import logps

_SCORED_ROWS = 16  # rows of one pass of the trainer while log-probs are compared
_NO_TOKEN = -1  # continuous batching takes this for "no end-of-sequence token"
_PAGE_SIZE = 256  # its default: fewer tokens in a page made no difference


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Model, precision ("auto": bfloat16 where the machine has it), threads; backend, slots, weights of our engine."""

    name: str
    dtype: str
    num_threads: int
    backend: str = "native"
    num_slots: int | None = None
    weights: Weights = "model"
    drafts: bool = True

    @property
    def own_backend(self) -> str | Native:
        """The backend of our engine, with its weights, and guesses of tokens or none."""
        return Native(self.weights, self.drafts) if self.backend == "native" else self.backend

    def load(self) -> LoadedModel:
        """The model, in this process."""
        torch.set_num_threads(self.num_threads)
        return load_policy(ModelSection.model_validate({"name": self.name, "dtype": self.dtype}))


@dataclass(frozen=True, slots=True)
class Setting:
    """Attention, sequences at a time, and way ("generate" or "continuous") of transformers."""

    attention: str
    batch_size: int
    way: str = "generate"


class Engine(Contender):
    """Our engine. Its weight version changes before each call, as in training.

    So nothing is carried over from an earlier round: no packed weights, no cached prompts.
    """

    def __init__(self, settings: ModelSettings) -> None:
        keep_freed_memory()  # as our trainings and commands do
        loaded = settings.load()
        self._policy = language_model(loaded.model, Kernels())  # as the trainers have it
        self._version = 0
        slots = {} if settings.num_slots is None else {"num_slots": settings.num_slots}
        options: dict[str, Any] = {"backend": settings.own_backend, **slots}
        self._engine = open_engine(self._policy, loaded.tokenizer, weight_version=lambda: self._version, **options)

    def draw(self, work: Workload, seed: int, *, keeps_tokens: bool = False, setting: Setting | None = None) -> Drawn:
        """The completions of `work`; `setting` is for transformers."""
        start_s = time.perf_counter()
        groups = self._groups(work, seed)
        seconds = time.perf_counter() - start_s
        return checked(work, seconds, [item.token_ids for group in groups for item in group.completions], keeps_tokens)

    def logp_difference(self, work: Workload, seed: int) -> float:
        """Largest difference in nats of the engine's raw log-probs to the trainer's."""
        groups = self._groups(work, seed)
        sequences = pack(groups, pad_id=0, device=torch.device("cpu"))
        trained_BT = logps(self._policy, sequences, work.sampling.temperature or 1.0, _SCORED_ROWS)
        completions = [item for group in groups for item in group.completions]
        return max(
            (trained_BT[row, : len(item.raw_logps)] - torch.tensor(item.raw_logps)).abs().max().item()
            for row, item in enumerate(completions)
        )

    def _groups(self, work: Workload, seed: int) -> list[Group]:
        least = work.sampling.max_new_tokens if work.is_exact_length else 0
        self._version += 1
        sampling = replace(work.sampling, seed=seed, min_new_tokens=least)
        return self._engine.generate(work.prompts, work.num_completions, sampling)


class Transformers(Contender):
    """`model.generate` and `model.generate_batch`."""

    def __init__(self, settings: ModelSettings) -> None:
        loaded = settings.load()
        self._model = loaded.model
        self._stop_ids = stop_token_ids(loaded.model, loaded.tokenizer)

    def draw(self, work: Workload, seed: int, *, keeps_tokens: bool = False, setting: Setting) -> Drawn:
        """The completions of `work`."""
        self._model.set_attn_implementation(setting.attention)
        torch.manual_seed(seed)
        stop_ids = () if work.is_exact_length else self._stop_ids
        start_s = time.perf_counter()
        if setting.way == "continuous":
            tokens = generate_continuously(self._model, work.rows, work.sampling, stop_ids, seed)
        else:
            tokens = generate(self._model, work.rows, work.sampling, stop_ids, batch_size=setting.batch_size)
        return checked(work, time.perf_counter() - start_s, tokens, keeps_tokens)

    @torch.no_grad()
    def margins(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Lead of the best logit over the second at each of `tokens`, which follow `prompt`; float64."""
        logits_TV = self._model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].double()
        best_T2 = logits_TV.topk(2, dim=-1).values
        return (best_T2[:, 0] - best_T2[:, 1]).tolist()


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    rows: Sequence[Sequence[int]],
    sampling: SamplingParams,
    stop_ids: Sequence[int],
    *,
    batch_size: int,
) -> list[list[int]]:
    """New tokens of each row by `model.generate`, `batch_size` rows at a time, the longest prompts first.

    Rows of one length are neighbours, so that little is padded. Without `stop_ids` every row gets `max_new_tokens`.
    """
    config = _generation_config(sampling, stop_ids)
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
    outputs: list[list[int]] = [[] for _ in rows]
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        width = max(len(rows[index]) for index in chosen)
        ids_BT = torch.tensor([[0] * (width - len(rows[i])) + list(rows[i]) for i in chosen])
        mask_BT = torch.tensor([[0] * (width - len(rows[i])) + [1] * len(rows[i]) for i in chosen])
        ids_BT, mask_BT = ids_BT.to(model.device), mask_BT.to(model.device)
        all_BT = model.generate(ids_BT, attention_mask=mask_BT, generation_config=config)  # type: ignore[operator]
        for index, tokens in zip(chosen, all_BT[:, width:].tolist(), strict=True):
            outputs[index] = _cut(tokens, stop_ids)
    return outputs


def generate_continuously(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], sampling: SamplingParams, stop_ids: Sequence[int], seed: int
) -> list[list[int]]:
    """New tokens of each row by `model.generate_batch`, the library's continuous batching.

    Its cache holds all rows at once; by default it fills half of the memory, which on a CPU takes seconds in each call.
    It has no repetition penalty, and leaves it out.
    """
    attention = str(model.config._attn_implementation)
    longest = max(map(len, rows)) + sampling.max_new_tokens
    config = ContinuousBatchingConfig(
        page_size=_PAGE_SIZE,
        num_blocks=len(rows) * math.ceil(longest / _PAGE_SIZE) + 1,
        max_batch_tokens=max(2048, longest),
        max_requests_per_batch=len(rows),
        seed=seed,
    )
    try:
        found = model.generate_batch(  # type: ignore[operator]
            [list(row) for row in rows],
            generation_config=_generation_config(sampling, stop_ids or [_NO_TOKEN]),
            continuous_batching_config=config,
            progress_bar=False,
            warmup=False,
        )
    finally:
        model.set_attn_implementation(attention)
    return [_cut(list(output.generated_tokens), stop_ids) for output in found.values()]


def _generation_config(sampling: SamplingParams, stop_ids: Sequence[int]) -> GenerationConfig:
    samples = sampling.temperature > 0
    return GenerationConfig(
        do_sample=samples,
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature if samples else 1.0,
        top_k=sampling.top_k if samples else None,
        top_p=sampling.top_p if samples else 1.0,
        repetition_penalty=sampling.repetition_penalty,
        eos_token_id=list(stop_ids) or None,
        pad_token_id=0,
        num_beams=1,
        use_cache=True,
    )


def _cut(tokens: list[int], stop_ids: Sequence[int]) -> list[int]:
    """`tokens` up to the first that ends a sequence, inclusive; padding follows it."""
    end = next((index + 1 for index, token in enumerate(tokens) if token in stop_ids), len(tokens))
    return tokens[:end]
