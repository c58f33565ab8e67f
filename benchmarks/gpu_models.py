"""Rollout engine and update of `benchmarks.gpu`, beside transformers, with their rooflines.

Roofline of drawing and learning, for W weights, B sequences, P tokens of a prompt, L layers, X numbers of a token's
queries; N tokens of all rows, M tokens that are scored:

    prefill: 2 W_trunk B P + 2 W_head B + 2 L X B P^2 operations, and every weight read once
    decoding step t: 2 (W_trunk + W_head) B + 4 L X B (P + t) operations; every weight read once, and B (P + t) tokens
        of keys and values read, B written
    update: 6 W_trunk N + 6 W_head M operations

A part takes the longer of its bytes at the bandwidth of a copy and its operations at the rate of a matrix product, both
measured in the same run; the steps of decoding count as one part.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from benchmarks.cases import Setting
from benchmarks.common import peak_gb
from benchmarks.contenders import generate
from benchmarks.gpu_measure import Clock, Floor, Measured, Timing, count_launches, longest_kernels
from benchmarks.roofline import linear_weights
from benchmarks.update import OurUpdate, UpdateSize, batch_of
from benchmarks.workloads import Workload
from tunesmith.base.core.errors import TrainingError
from tunesmith.engine.batch.pack import pack
from tunesmith.engine.batch.rollout import Group, SamplingParams
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models.language_model import FullForward, LanguageModel, language_model
from tunesmith.engine.models.loaded import LoadedModel, PreTrainedModel, quiet_transformers
from tunesmith.engine.models.logprob import token_logps
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.rollout.factory import open_engine

_QWEN: Mapping[str, object] = {
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

_SMALL: Mapping[str, object] = {"vocab_size": 300, "tie_word_embeddings": True}
_SIZE, _SMALL_SIZE = UpdateSize(8, 64, 8, 64, 256), UpdateSize(2, 5, 2, 2, 5)


def random_model(setting: Setting) -> LoadedModel:
    """Random bfloat16 weights in the shape of Qwen2.5-0.5B on the setting's device; in a quick run a tiny Qwen2."""
    with torch.device(setting.device):
        loaded = tiny_model("qwen2", setting.seed, dtype=torch.bfloat16, **(_SMALL if setting.quick else _QWEN))
    return replace(loaded, model=loaded.model.to(setting.device))  # pyright: ignore[reportArgumentType]


class Contenders:
    """Our engine and `generate` on one random model: prompts of 32 random tokens, no two alike.

    The weights' version changes before each call, as in training.
    """

    def __init__(self, setting: Setting, num_sequences: int) -> None:
        vocabulary_size = int(str((_SMALL if setting.quick else _QWEN)["vocab_size"]))
        ids_BT = setting.whole(vocabulary_size - 3, num_sequences, setting.sized(32, 8)) + 3
        self.work = Workload("random", tuple(map(tuple, ids_BT.tolist())), 1, SamplingParams(1), is_exact_length=True)
        self.loaded = random_model(setting)
        self._sampling, self._version = SamplingParams(1, seed=setting.seed), 0
        self.engine = open_engine(
            self.loaded.model,
            self.loaded.tokenizer,
            weight_version=lambda: self._version,
            batch_size=num_sequences,
            num_slots=num_sequences,
        )

    def ours(self, num_tokens: int) -> list[Group]:
        """Our groups of one completion each, of `num_tokens` new tokens."""
        self._version += 1
        sampling = replace(self._sampling, max_new_tokens=num_tokens, min_new_tokens=num_tokens)
        groups = self.engine.generate(self.work.prompts, 1, sampling)
        _check([len(group.completions[0].token_ids) for group in groups], num_tokens)
        return groups

    def theirs(self, num_tokens: int) -> None:
        """The same by `generate`, all sequences at a time."""
        sampling, rows = replace(self._sampling, max_new_tokens=num_tokens), self.work.rows
        _check([len(ids) for ids in generate(self.loaded.model, rows, sampling, (), batch_size=len(rows))], num_tokens)


def _check(lengths: list[int], num_tokens: int) -> None:
    if set(lengths) != {num_tokens}:
        raise TrainingError(f"completions of {min(lengths)} to {max(lengths)} tokens came, not of {num_tokens}")


def drawing(setting: Setting, clock: Clock) -> Measured:
    """256 completions of 256 tokens by our engine and by `generate`."""
    num_sequences, num_tokens = setting.sized(256, 3), setting.sized(256, 6)
    sides = Contenders(setting, num_sequences)
    sides.ours(num_tokens)  # captures what it captures, and compiles
    sides.theirs(num_tokens)  # without it, two calls differed by a factor of three
    seconds: dict[str, list[float]] = {"ours": [], "eager": []}
    for index in range(2 if clock.quick else 5):  # theirs take long: two between three of ours
        name, draw = (("ours", sides.ours), ("eager", sides.theirs))[index % 2]
        seconds[name].append(clock.wall_s(lambda draw=draw: draw(num_tokens)))
    timings = {name: Timing.of(found) for name, found in seconds.items()}
    prompt_tokens, num_drawn = len(sides.work.rows[0]), num_sequences * num_tokens
    speeds = [num_drawn / timings[name].median_s for name in ("ours", "eager")]
    return Measured(
        size=f"{num_sequences} prompts of {prompt_tokens} tokens, {num_tokens} new tokens each",
        picked=type(sides.engine).__name__,
        against="transformers' generate, all sequences in one batch",
        floors=generation_floors(sides.loaded.model, num_sequences, prompt_tokens, num_tokens),
        timings=timings,
        facts={
            "tokens_per_s": speeds[0],
            "eager_tokens_per_s": speeds[1],
            "kernel_ms": longest_kernels(lambda: sides.ours(num_tokens), setting.device),
        },
    )


def mismatch(setting: Setting, clock: Clock) -> Measured:
    """Difference of our engine's log-probs to transformers' forward pass over the same tokens, and to the trainer's."""
    num_sequences, num_tokens = setting.sized(64, 3), setting.sized(128, 6)
    sides = Contenders(setting, num_sequences)
    sequences = pack(sides.ours(num_tokens), pad_id=0, device=setting.device)
    clock.wait()
    model = sides.loaded.model
    facts: dict[str, object] = {}
    for name, scorer in (("transformers", model), ("trainer", language_model(model, Kernels()))):
        with torch.no_grad():
            scores = token_logps(
                scorer, sequences.ids_BS, sequences.lengths_B, prompt_lengths_B=sequences.prompt_lengths_B
            )
        difference = (scores.logp_BT - sequences.raw_logp_BT).abs()[sequences.mask_BT]
        facts[f"logp_diff_mean_{name}"] = float(difference.mean())
        facts[f"logp_diff_max_{name}"] = float(difference.max())
    size, against = (
        f"{num_sequences} completions of {num_tokens} tokens",
        "transformers' forward pass, and the trainer's",
    )
    return Measured(size, type(sides.engine).__name__, against, facts=facts)


def decode_launches(setting: Setting, clock: Clock) -> Measured:
    """Launches of one decoding step, before (transformers) and after (our engine).

    From two calls that differ by some steps, so that what a call does once cancels: more steps of ours, which may take
    several at a time, than of `generate`, whose steps are slow to profile.
    """
    num_sequences = setting.sized(64, 3)
    sides = Contenders(setting, num_sequences)
    facts: dict[str, object] = {}
    for name, draw, counts in (("after", sides.ours, (17, 49)), ("before", sides.theirs, (5, 13))):
        short, long = (2, 4) if setting.quick else counts
        draw(long)
        draw(short)
        few, many = (count_launches(lambda draw=draw, n=n: draw(n), setting.device) for n in (short, long))
        facts[name] = {key: (many[key] - few[key]) / (long - short) for key in many}
    clock.wait()
    size = f"{num_sequences} sequences, one decoding step"
    return Measured(size, type(sides.engine).__name__, "transformers' generate", facts=facts)


def generation_floors(
    model: PreTrainedModel, num_sequences: int, num_prompt_tokens: int, num_new_tokens: int
) -> tuple[Floor, Floor]:
    """(prefill, decoding) of `num_sequences` completions. The first token of each comes from the prefill."""
    config = model.config.get_text_config()
    trunk, head = _num_weights(model)
    element = model.dtype.itemsize
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries = config.num_hidden_layers * config.num_attention_heads * head_dim
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * element
    rows, prompt, steps = num_sequences, num_prompt_tokens, num_new_tokens - 1
    context = sum(prompt + step for step in range(1, steps + 1))  # tokens that a sequence reads in all of its steps
    prefill = Floor(
        element * (trunk + head) + rows * prompt * token_bytes,
        2 * trunk * rows * prompt + 2 * head * rows + 2 * queries * rows * prompt**2,
    )
    decoding = Floor(
        steps * element * (trunk + head) + rows * (context + steps) * token_bytes,
        2 * (trunk + head) * rows * steps + 4 * queries * rows * context,
    )
    return prefill, decoding


def update_floor(model: PreTrainedModel, num_tokens: int, num_scored: int) -> Floor:
    """Forward and backward pass over `num_tokens`, of which `num_scored` go through the output layer."""
    trunk, head = _num_weights(model)
    return Floor(3 * model.dtype.itemsize * (trunk + head), 6 * trunk * num_tokens + 6 * head * num_scored)


def _num_weights(model: PreTrainedModel) -> tuple[int, int]:
    """Numbers of the linear layers' weights, and of the output layer's."""
    trunk, head = linear_weights(model)
    return sum(weight_OI.numel() for weight_OI in trunk), head.numel()


def update(setting: Setting, clock: Clock) -> Measured:
    """Seconds, memory and launches of one update: with transformers' forward pass and torch's kernels, and ours."""
    size = _SMALL_SIZE if setting.quick else _SIZE
    with tempfile.TemporaryDirectory() as folder:
        loaded = random_model(setting)
        with quiet_transformers():
            loaded.model.save_pretrained(folder)
            loaded.tokenizer.save_pretrained(folder)
        batch = batch_of(size, int(loaded.model.config.get_text_config().vocab_size), setting.seed)
        learner, task = OurUpdate(folder, batch, torch.get_num_threads(), min(16, size.num_rows)).build()
    ours = learner.policy
    if ours.module.device.type != setting.device.type:
        raise TrainingError(f"trainers take {ours.module.device} on this machine, not {setting.device}")
    plain = LanguageModel(ours.module, FullForward(), Kernels("torch"))
    timings: dict[str, Timing] = {}
    facts: dict[str, object] = {}
    for name, label, policy in (("ours", "after", ours), ("eager", "before", plain)):
        learner.policy = policy
        steps = iter(range(100_000))
        work: Callable[[], Any] = lambda steps=steps: learner.step(task.batch(0), next(steps))  # noqa: E731
        clock.warm_up(work)
        timings[name] = Timing.of([clock.wall_s(work) for _ in range(1 if clock.quick else 4)])
        facts[label] = count_launches(work, setting.device)
        facts[f"kernel_ms_{label}"] = longest_kernels(work, setting.device)
        facts[f"memory_gb_{label}"] = peak_gb(work, setting.device)
    scored = sum(len(ids) for _, ids in batch.rows)
    return Measured(
        size=f"{size.num_rows} completions of {size.shortest} to {size.longest} tokens, {batch.num_tokens} in all",
        picked="the flat decoder" if ours.decoder is not None else "transformers, and our output layer",
        against="transformers' forward pass with all logits, and torch's kernels",
        floors=(update_floor(ours.module, batch.num_tokens, scored),),
        timings=timings,
        facts=facts,
    )
