"""The rows of `python -m benchmarks.gpu`, in their order: what is asked for first stands first.

A row has settings, each measured on its own, so that one that fails takes no other along.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks import gpu_rates
from benchmarks.gpu_cases import Unit, unit
from benchmarks.gpu_clock import Clock
from benchmarks.gpu_records import Bar, Measured
from benchmarks.kernel_batches import gae_case, policy_loss_case, upload_case
from benchmarks.kernel_case import Case, Setting
from benchmarks.kernel_layers import attention_case, gated_case, rms_norm_case, shared_prefix_case
from benchmarks.kernel_logits import (
    head_case,
    logprob_logits_case,
    logprob_logits_gradient_case,
    sampling_case,
)
from benchmarks.kernel_outputs import masked_softmax_case, preference_case

_QWEN_HEAD, _LLAMA_HEAD = (896, 151936), (2048, 128256)
"""Width and vocabulary of Qwen2.5-0.5B and of Llama-3.2-1B."""

_SMALL_HEAD = (32, 300)
_CONTEXTS = {256: 256, 1024: 256, 4096: 256, 32768: 64}
"""Tokens of a context, and how many sequences have them."""

_DECODE_ROWS = 256


@dataclass(frozen=True, slots=True)
class Row:
    """Settings by name, what they are to reach, and how long the row is expected to take and a setting may take."""

    units: Mapping[str, Unit]
    bars: tuple[Bar, ...] = ()
    expected_s: float = 20.0
    most_s: float = 90.0


def _preference() -> dict[str, Unit]:
    units: dict[str, Unit] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for num_pairs in (1_000_000, 100_000, 10_000, 1_000):
            name = f"{num_pairs} pairs, {str(dtype).removeprefix('torch.')}"
            units[name] = unit(partial(_preference_of, num_pairs, dtype), compiles=num_pairs == 1_000_000)
    return units


def _preference_of(num_pairs: int, dtype: torch.dtype, setting: Setting) -> Case:
    return preference_case(setting, min(num_pairs, 40) if setting.quick else num_pairs, dtype, all_ways=True)


def _head(shape: tuple[int, int], with_gradients: bool, setting: Setting) -> Case:
    width, num_tokens = _SMALL_HEAD if setting.quick else shape
    return head_case(setting, width, num_tokens, with_gradients=with_gradients)


def _heads() -> dict[str, Unit]:
    units: dict[str, Unit] = {}
    for name, shape in (("Qwen2.5-0.5B", _QWEN_HEAD), ("Llama-3.2-1B", _LLAMA_HEAD)):
        is_first = shape == _QWEN_HEAD
        units[f"{name} forward"] = unit(partial(_head, shape, False), compiles=is_first)
        units[f"{name} forward and backward"] = unit(partial(_head, shape, True), compiles=is_first)
    return units


def _attention_of(context: int, num_rows: int, setting: Setting) -> Case:
    sizes = (min(context, 40), 2) if setting.quick else (context, num_rows)
    return attention_case(setting, *sizes)


def _layers(build: Callable[..., Case]) -> dict[str, Unit]:
    return {
        "forward": unit(build),
        "forward and backward": unit(partial(build, with_gradients=True)),
        "a decoding step": unit(partial(_decoding, build), compiles=False),
    }


def _decoding(build: Callable[..., Case], setting: Setting) -> Case:
    return build(setting, 4 if setting.quick else _DECODE_ROWS)


def _engine(setting: Setting, clock: Clock) -> Measured:
    from benchmarks.gpu_engine import drawing

    return drawing(setting, clock)


def _mismatch(setting: Setting, clock: Clock) -> Measured:
    from benchmarks.gpu_engine import mismatch

    return mismatch(setting, clock)


def _decode_launches(setting: Setting, clock: Clock) -> Measured:
    from benchmarks.gpu_engine import decode_launches

    return decode_launches(setting, clock)


def _update(setting: Setting, clock: Clock) -> Measured:
    from benchmarks.gpu_update import update

    return update(setting, clock)


CEILINGS = "ceilings"
"""The row that the shares of all others are of."""

_MILLION = "1000000 pairs, float32"
ROWS: Mapping[str, Row] = {
    CEILINGS: Row({"copy": gpu_rates.copy, "matrix": gpu_rates.matrix}, expected_s=15),
    "engine": Row(
        {"256 x 256": _engine, "log-probs": _mismatch, "launches": _decode_launches},
        (Bar("256 x 256", "times_eager", 20.0), Bar("256 x 256", "roofline_share", 0.25)),
        expected_s=75,
        most_s=180,
    ),
    "preference": Row(
        _preference(),
        (Bar(_MILLION, "copy_share", 0.85), Bar("1000000 pairs, bfloat16", "copy_share", 0.85)),
        expected_s=45,
    ),
    "masked_softmax": Row({"causal": unit(masked_softmax_case)}, (Bar("causal", "copy_share", 0.85),)),
    "policy_loss": Row({"tokens": unit(policy_loss_case)}, (Bar("tokens", "copy_share", 0.85),)),
    "logprob_logits": Row(
        {"forward": unit(logprob_logits_case), "forward and backward": unit(logprob_logits_gradient_case)},
        (Bar("forward", "copy_share", 0.8), Bar("forward and backward", "copy_share", 0.8)),
        expected_s=30,
    ),
    "head": Row(
        _heads(),
        tuple(Bar(f"Qwen2.5-0.5B {way}", "matrix_share", 0.6) for way in ("forward", "forward and backward")),
        expected_s=60,
    ),
    "sampling": Row(
        {"top-p 0.9": unit(sampling_case), "plain": unit(partial(sampling_case, top_p=1.0))},
        (Bar("top-p 0.9", "times_eager", 5.0),),
        expected_s=35,
    ),
    "upload": Row({"a PPO batch": unit(upload_case)}, (Bar("a PPO batch", "times_eager", 2.0),), expected_s=8),
    "update": Row({"GRPO": _update}, expected_s=45, most_s=150),
    "attention": Row(
        {
            f"{context} tokens": unit(partial(_attention_of, context, num_rows), compiles=False)
            for context, num_rows in _CONTEXTS.items()
        }
        | {"shared prompts": unit(shared_prefix_case)},
        expected_s=30,
    ),
    "gae": Row({"tokens": unit(gae_case)}, expected_s=8),
    "rms_norm": Row(_layers(rms_norm_case), expected_s=25),
    "gated": Row(_layers(gated_case), expected_s=25),
}
