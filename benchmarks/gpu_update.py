"""One GRPO update on a GPU: with transformers' own forward pass and torch's kernels, and as our trainer takes it."""

import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.gpu_clock import Clock, Timing
from benchmarks.gpu_engine import random_model
from benchmarks.gpu_floor import update_floor
from benchmarks.gpu_launches import count_launches
from benchmarks.gpu_records import Measured
from benchmarks.kernel_case import Setting
from benchmarks.memory import peak_gb
from benchmarks.step_contenders import token_sum
from benchmarks.update_contenders import (
    GivenCompletions,
    OurUpdate,
    UpdateSize,
    batch_of,
    given_groups,
    recipe,
)
from tunesmith.core.errors import TrainingError
from tunesmith.kernels.native import Kernels
from tunesmith.models.language_model import FullForward, LanguageModel
from tunesmith.models.loaded import quiet_transformers
from tunesmith.trainers import grpo

_SIZE = UpdateSize(num_prompts=8, num_prompt_tokens=64, num_completions=8, shortest=64, longest=256)
_SMALL = UpdateSize(num_prompts=2, num_prompt_tokens=5, num_completions=2, shortest=2, longest=5)
_MICRO_ROWS = 16
_CALLS = 4


def update(setting: Setting, clock: Clock) -> Measured:
    """Seconds, memory and launches of one update, before and after, from the same completions."""
    size = _SMALL if setting.quick else _SIZE
    with tempfile.TemporaryDirectory() as folder:
        vocabulary_size = _save_model(setting, Path(folder))
        batch = batch_of(size, vocabulary_size, setting.seed)
        rows = min(_MICRO_ROWS, size.num_rows)
        state = grpo.build(
            recipe(OurUpdate(folder, batch, torch.get_num_threads(), rows)),
            prompts=[f"prompt {index}" for index in range(size.num_prompts)],
            rewards=[token_sum],
        )
    if state.device.type != setting.device.type:
        raise TrainingError(f"trainers take {state.device} on this machine, and {setting.device} was asked for")
    state.engine = GivenCompletions(given_groups(state, batch))
    ways = {"ours": state.policy, "eager": _plain(state.policy)}
    timings: dict[str, Timing] = {}
    facts: dict[str, object] = {}
    for name, policy in ways.items():
        state.policy = policy
        steps = _Steps(state)
        timings[name] = _timing(steps, clock)
        label = "after" if name == "ours" else "before"
        facts[label] = count_launches(steps, setting.device).facts()
        facts[f"memory_gb_{label}"] = peak_gb(steps, setting.device)
    scored = sum(len(ids) for group in batch.completions for ids in group)
    return Measured(
        size=f"{size.num_rows} completions of {size.shortest} to {size.longest} tokens, {batch.num_tokens} in all",
        picked="the flat decoder" if ways["ours"].decoder is not None else "transformers, and our output layer",
        against="transformers' forward pass with all logits, and torch's kernels",
        floors=(update_floor(state.policy.module, batch.num_tokens, scored),),
        timings=timings,
        facts=facts,
    )


def _save_model(setting: Setting, folder: Path) -> int:
    """The size of the vocabulary of the random model that now lies in `folder`."""
    loaded = random_model(setting)
    with quiet_transformers():
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
    return int(loaded.model.config.get_text_config().vocab_size)


def _plain(policy: LanguageModel) -> LanguageModel:
    return LanguageModel(policy.module, FullForward(), Kernels("torch"))


class _Steps:
    """Calls that each take the next step of a trainer."""

    def __init__(self, state: grpo.State) -> None:
        self._state = state
        self._index = 0

    def __call__(self) -> None:
        grpo.step(self._state, self._state.prompts.train, self._index)
        self._index += 1


def _timing(steps: _Steps, clock: Clock) -> Timing:
    """Steps by the wall, the first left out."""
    clock.warm_up(steps)
    seconds: list[float] = []
    for _ in range(1 if clock.quick else _CALLS):
        clock.wait()
        start_s = time.perf_counter()
        steps()
        clock.wait()
        seconds.append(time.perf_counter() - start_s)
    return Timing(statistics.median(seconds), min(seconds), statistics.median(seconds), len(seconds))
