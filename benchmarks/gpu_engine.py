"""The rollout engine on a GPU beside transformers' `generate`: speed, roofline, log-probs, launches of a decoding step.

The model has random weights in the shape of Qwen2.5-0.5B, made on the device: nothing is downloaded, and speed does not
depend on what weights say. Shapes: B sequences, T tokens of a completion.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks import baselines
from benchmarks.gpu_clock import Clock, Timing
from benchmarks.gpu_floor import generation_floors
from benchmarks.gpu_launches import Launches, count_launches
from benchmarks.gpu_records import Measured
from benchmarks.kernel_case import Setting
from benchmarks.workloads import Workload
from tunesmith.batch.pack import pack
from tunesmith.batch.rollout import Group, SamplingParams
from tunesmith.core.errors import TrainingError
from tunesmith.kernels.native import Kernels
from tunesmith.models.language_model import language_model
from tunesmith.models.loaded import LoadedModel
from tunesmith.models.logprob import token_logps
from tunesmith.models.tiny import tiny_model
from tunesmith.rollout.engine import Engine
from tunesmith.rollout.factory import open_engine

QWEN: dict[str, object] = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}
"""The sizes of Qwen2.5-0.5B, after its published configuration."""

_SMALL: dict[str, object] = {"vocab_size": 300, "tie_word_embeddings": True}
_OURS, _THEIRS, _QUICK = (17, 49), (5, 13), (2, 4)
"""New tokens of the two calls whose difference is that of decoding steps: of ours, which may take several steps at a
time, and of `generate`, whose steps are slow to profile."""

Draw = Callable[[int], object]


def random_model(setting: Setting) -> LoadedModel:
    """Random bfloat16 weights in the shape of Qwen2.5-0.5B on the setting's device; in a quick run a tiny Qwen2."""
    with torch.device(setting.device):
        loaded = tiny_model("qwen2", setting.seed, dtype=torch.bfloat16, **(_SMALL if setting.quick else QWEN))
    model = loaded.model.to(setting.device)  # pyright: ignore[reportArgumentType]
    return replace(loaded, model=model)


def workload(setting: Setting, num_sequences: int, num_tokens: int) -> Workload:
    """Prompts of 32 random tokens, no two alike, with one completion of exactly `num_tokens` each."""
    vocabulary_size = int(str((_SMALL if setting.quick else QWEN)["vocab_size"]))
    ids_BT = setting.whole(vocabulary_size - 3, num_sequences, setting.sized(32, 8)) + 3
    sampling = SamplingParams(num_tokens, min_new_tokens=num_tokens, seed=setting.seed)
    return Workload("random", tuple(map(tuple, ids_BT.tolist())), 1, sampling, is_exact_length=True)


class Contenders:
    """Our engine and `generate` on one model. The weights' version changes before each call, as in training."""

    def __init__(self, setting: Setting, work: Workload) -> None:
        self.loaded = random_model(setting)
        self.work = work
        self._version = 0
        self.engine: Engine = open_engine(
            self.loaded.model,
            self.loaded.tokenizer,
            weight_version=lambda: self._version,
            batch_size=len(work.rows),
            num_slots=len(work.rows),
        )

    def ours(self, num_tokens: int) -> list[Group]:
        """Our groups of one completion each, of `num_tokens` new tokens."""
        self._version += 1
        sampling = replace(self.work.sampling, max_new_tokens=num_tokens, min_new_tokens=num_tokens)
        groups = self.engine.generate(self.work.prompts, 1, sampling)
        _check([len(group.completions[0].token_ids) for group in groups], num_tokens)
        return groups

    def theirs(self, num_tokens: int) -> None:
        """The same by `generate`, all sequences at a time."""
        sampling = replace(self.work.sampling, max_new_tokens=num_tokens)
        model, rows = self.loaded.model, self.work.rows
        _check([len(ids) for ids in baselines.generate(model, rows, sampling, (), batch_size=len(rows))], num_tokens)


def drawing(setting: Setting, clock: Clock) -> Measured:
    """256 completions of 256 tokens by our engine and by `generate`."""
    num_sequences, num_tokens = setting.sized(256, 3), setting.sized(256, 6)
    work = workload(setting, num_sequences, num_tokens)
    sides = Contenders(setting, work)
    sides.ours(num_tokens)  # captures what it captures, and compiles
    sides.theirs(setting.sized(8, 2))
    ours, theirs = _in_turns(lambda: sides.ours(num_tokens), lambda: sides.theirs(num_tokens), clock)
    num_drawn = num_sequences * num_tokens
    return Measured(
        size=f"{num_sequences} prompts of {len(work.rows[0])} tokens, {num_tokens} new tokens each",
        picked=type(sides.engine).__name__,
        against="transformers' generate, all sequences in one batch",
        floors=generation_floors(sides.loaded.model, num_sequences, len(work.rows[0]), num_tokens),
        timings={"ours": ours, "eager": theirs},
        facts={"tokens_per_s": num_drawn / ours.median_s, "eager_tokens_per_s": num_drawn / theirs.median_s},
    )


def mismatch(setting: Setting, clock: Clock) -> Measured:
    """How far the log-probs that our engine gives are from transformers' forward pass over the same tokens."""
    num_sequences, num_tokens = setting.sized(64, 3), setting.sized(128, 6)
    sides = Contenders(setting, workload(setting, num_sequences, num_tokens))
    sequences = pack(sides.ours(num_tokens), pad_id=0, device=setting.device)
    clock.wait()
    model = sides.loaded.model
    of_trainer = language_model(model, Kernels())
    facts: dict[str, object] = {}
    for name, scorer in (("transformers", model), ("trainer", of_trainer)):
        with torch.no_grad():
            scores = token_logps(
                scorer, sequences.ids_BS, sequences.lengths_B, prompt_lengths_B=sequences.prompt_lengths_B
            )
        difference = (scores.logp_BT - sequences.raw_logp_BT).abs()[sequences.mask_BT]
        facts[f"logp_diff_mean_{name}"], facts[f"logp_diff_max_{name}"] = (
            float(difference.mean()),
            float(difference.max()),
        )
    return Measured(
        size=f"{num_sequences} completions of {num_tokens} tokens",
        picked=type(sides.engine).__name__,
        against="transformers' forward pass, and the trainer's",
        floors=(),
        timings={},
        facts=facts,
    )


def decode_launches(setting: Setting, clock: Clock) -> Measured:
    """What one decoding step asks of the device, before (transformers) and after (our engine)."""
    num_sequences = setting.sized(64, 3)
    sides = Contenders(setting, workload(setting, num_sequences, _OURS[1]))
    facts: dict[str, object] = {}
    for name, draw, counts in (("after", sides.ours, _OURS), ("before", sides.theirs, _THEIRS)):
        short, long = _QUICK if setting.quick else counts
        draw(long)
        draw(short)
        facts[name] = _per_step(draw, short, long, setting.device)
    clock.wait()
    return Measured(
        size=f"{num_sequences} sequences, one decoding step",
        picked=type(sides.engine).__name__,
        against="transformers' generate",
        floors=(),
        timings={},
        facts=facts,
    )


def _per_step(draw: Draw, short: int, long: int, device: torch.device) -> dict[str, float]:
    """Counts of a step, from two calls that differ by some steps; what a call does once cancels."""
    counts: list[Launches] = [count_launches(lambda tokens=tokens: draw(tokens), device) for tokens in (short, long)]
    return counts[1].per(counts[0], long - short)


def _in_turns(ours: Callable[[], object], theirs: Callable[[], object], clock: Clock) -> tuple[Timing, Timing]:
    """Both by the wall: three calls of ours, with two of theirs, which take long, between them."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for index in range(2 if clock.quick else 5):
        work = theirs if index % 2 else ours
        clock.wait()
        start_s = time.perf_counter()
        work()
        clock.wait()
        seconds[index % 2].append(time.perf_counter() - start_s)
    first, second = (Timing(statistics.median(x), min(x), statistics.median(x), len(x)) for x in seconds)
    return first, second


def _check(lengths: list[int], num_tokens: int) -> None:
    if set(lengths) != {num_tokens}:
        raise TrainingError(f"completions of {min(lengths)} to {max(lengths)} tokens came, not of {num_tokens}")
