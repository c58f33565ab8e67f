"""The rows of `benchmarks.gpu` in their order, their bars, and the process that measures them.

A row has settings, each measured on its own, so that one that fails takes no other along.
"""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks import cases, gpu_measure, gpu_models, layer_cases
from benchmarks.cases import Case, Setting
from benchmarks.gpu_measure import Clock, Measured
from tunesmith.base.core.trace import span, trace

_MUCH_BYTES = 1 << 30
_QWEN, _LLAMA = (896, 151936), (2048, 128256)
"""Width and vocabulary of the output layers of Qwen2.5-0.5B and of Llama-3.2-1B."""

Unit = Callable[[Setting, Clock], Measured]
"""Measures one setting of a row."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A bound that `setting` of a row is to reach.

    `quantity` is `copy_share`, `matrix_share`, `roofline_share` or `times_eager`.
    """

    setting: str
    quantity: str
    least: float


@dataclass(frozen=True, slots=True)
class Row:
    """Settings by name, their bars, how long the row is expected to take, and a setting at most."""

    units: Mapping[str, Unit]
    bars: tuple[Bar, ...] = ()
    expected_s: float = 20.0
    most_s: float = 90.0


def _unit(
    build: Callable[..., Case],
    *sizes: Any,
    small: tuple[Any, ...] = (),
    compiles: bool = True,
    by_graph: bool = False,
    **how: Any,
) -> Unit:
    """Measures the case of `build` with `sizes`, in a quick run with those of `small`.

    Without `compiles` torch.compile is left out, which saves its seconds. `by_graph`: see `Case`.
    """

    def measure(setting: Setting, clock: Clock) -> Measured:
        case = build(setting, *(small if setting.quick and small else sizes), **how)
        case = replace(case, compiles=case.compiles and compiles, by_graph=by_graph)
        return gpu_measure.measured_case(case, clock)

    return measure


def _preference() -> dict[str, Unit]:
    return {
        f"{pairs} pairs, {str(dtype).removeprefix('torch.')}": _unit(
            cases.preference_case,
            *(pairs, dtype),
            small=(min(pairs, 40), dtype),
            compiles=pairs == 1_000_000,
            all_ways=True,
        )
        for dtype in (torch.float32, torch.bfloat16)
        for pairs in (1_000_000, 100_000, 10_000, 1_000)
    }


def _heads() -> dict[str, Unit]:
    return {
        f"{name} forward{' and backward' if both else ''}": _unit(
            cases.head_case, *shape, small=(32, 300), compiles=shape == _QWEN, with_gradients=both
        )
        for name, shape in (("Qwen2.5-0.5B", _QWEN), ("Llama-3.2-1B", _LLAMA))
        for both in (False, True)
    }


def _attention() -> dict[str, Unit]:
    sizes = {256: 256, 1024: 256, 4096: 256, 32768: 64}  # tokens of a context, and how many sequences
    return {
        f"{context} tokens": _unit(
            layer_cases.attention_case, context, rows, small=(min(context, 40), 2), compiles=False, by_graph=True
        )
        for context, rows in sizes.items()
    } | {"shared prompts": _unit(layer_cases.shared_prefix_case, by_graph=True)}


def _layer(build: Callable[..., Case]) -> Row:
    units = {
        "forward": _unit(build),
        "forward and backward": _unit(build, with_gradients=True),
        "a decoding step": _unit(build, 256, small=(4,), compiles=False, by_graph=True),
    }
    return Row(units, expected_s=25)


CEILINGS = "ceilings"
"""The row that the shares of all others are of."""

ROWS: Mapping[str, Row] = {
    CEILINGS: Row({"copy": gpu_measure.copy, "matrix": gpu_measure.matrix}, expected_s=15),
    "engine": Row(
        {
            "256 x 256": gpu_models.drawing,
            "log-probs": gpu_models.mismatch,
            "launches": gpu_models.decode_launches,
        },
        (Bar("256 x 256", "times_eager", 20.0), Bar("256 x 256", "roofline_share", 0.25)),
        expected_s=90,
        most_s=180,
    ),
    "preference": Row(
        _preference(),
        tuple(Bar(f"1000000 pairs, {dtype}", "copy_share", 0.85) for dtype in ("float32", "bfloat16")),
        expected_s=45,
    ),
    "masked_softmax": Row({"causal": _unit(layer_cases.masked_softmax_case)}, (Bar("causal", "copy_share", 0.85),)),
    "policy_loss": Row({"tokens": _unit(layer_cases.policy_loss_case)}, (Bar("tokens", "copy_share", 0.85),)),
    "logprob_logits": Row(
        {"forward": _unit(cases.logits_case), "forward and backward": _unit(cases.logits_case, with_gradients=True)},
        (Bar("forward", "copy_share", 0.8), Bar("forward and backward", "copy_share", 0.8)),
        expected_s=30,
    ),
    "head": Row(
        _heads(),
        tuple(Bar(f"Qwen2.5-0.5B {way}", "matrix_share", 0.6) for way in ("forward", "forward and backward")),
        expected_s=60,
    ),
    "sampling": Row(
        {"top-p 0.9": _unit(cases.sampling_case), "plain": _unit(cases.sampling_case, top_p=1.0)},
        (Bar("top-p 0.9", "times_eager", 5.0),),
        expected_s=35,
    ),
    "upload": Row(
        {"a PPO batch": _unit(layer_cases.upload_case)}, (Bar("a PPO batch", "times_eager", 2.0),), expected_s=8
    ),
    "update": Row({"GRPO": gpu_models.update}, expected_s=45, most_s=150),
    "attention": Row(_attention(), expected_s=30),
    "gae": Row({"tokens": _unit(layer_cases.gae_case)}, expected_s=8),
    "rms_norm": _layer(layer_cases.rms_norm_case),
    "gated": _layer(layer_cases.gated_case),
}


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Device, seed, threads, and whether sizes are tiny."""

    device: str
    seed: int
    quick: bool
    num_threads: int


class Rows:
    """The process that measures. It may die of a row: the next one gets a fresh one."""

    def __init__(self, settings: WorkerSettings) -> None:
        torch.set_num_threads(settings.num_threads)
        self._device = torch.device(settings.device)
        self._setting = Setting(self._device, settings.seed, settings.quick, large=self._device.type == "cuda")
        self._clock = Clock(self._device, settings.quick)

    def measure(self, row: str, setting: str) -> Measured:
        """The figures of one setting. The span is a place for `core.faults`: `<row>/<setting>`."""
        with trace(), span(f"{row}/{setting}"):
            measured = ROWS[row].units[setting](self._setting, self._clock)
        if self._device.type == "cuda":
            if torch.cuda.memory_allocated(self._device) > _MUCH_BYTES:
                gc.collect()  # of cycles, which takes long
            torch.cuda.empty_cache()
        return measured
