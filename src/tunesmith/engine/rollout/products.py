"""The choice of `rollout.weights: auto`: the seconds of a decoding step's products in the model's dtype and in 8 bits,
by a short measurement.

Shape legend: R rows, I inputs, O outputs.
"""

import functools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch

from tunesmith.base.config.recipe import SamplingRecipe
from tunesmith.base.config.schema import SPECS
from tunesmith.base.core.log import get_logger
from tunesmith.base.schema.weights import Weights
from tunesmith.engine.distributed.ranks import gathered, num_ranks, rank
from tunesmith.engine.kernels.linear_int8.api import has_native
from tunesmith.engine.kernels.native import NATIVE_DTYPES, Choice, Kernels
from tunesmith.engine.models.architecture import Projection
from tunesmith.engine.models.int8_base import is_int8
from tunesmith.engine.models.language_model import LanguageModel
from tunesmith.engine.rollout.runner import PackedLinear, Packer, projections

_log = get_logger(__name__)

RecipeT = TypeVar("RecipeT", bound=SamplingRecipe)
Shapes = tuple[tuple[tuple[int, int], int], ...]

WORTH = 0.8
"""Share of the seconds in the model's dtype that products in 8 bits take at most where `auto` chooses them: products
are a part of drawing alone.
"""

_LIMIT_S, _MAX_TRIES = 0.02, 6
"""Each form of a weight is multiplied for this long, or this often."""

_MOST_NUMBERS = 2**21
"""Numbers of a weight that is multiplied in the measurement: some outputs stand for all of a large one."""


def product_seconds(policy: LanguageModel, cfg: SamplingRecipe) -> Mapping[Weights, float] | None:
    """Seconds of all products of a decoding step, by the form of the weights, with as many rows and threads as draw.

    Measured once in a process for each model's shapes; draws no random numbers. None where there is no such choice: on
    a GPU, without a kernel for this processor, with experts, with a base in 8 bits, and where ranks divide the model.
    """
    decoder, cpu = policy.decoder, torch.device("cpu")
    if cfg.rollout.backend != "native" or decoder is None or decoder.part is not None or decoder.is_divided:
        return None
    dtype, linears = decoder.architecture.dtype, projections(decoder.architecture)
    if dtype not in NATIVE_DTYPES or not has_native(policy.kernels, cpu):
        return None
    shapes: Counter[tuple[int, int]] = Counter()
    for one in linears:
        if not isinstance(one, Projection) or is_int8(one):
            return None
        shapes[sum(one.sizes), one.weights[0].shape[1]] += 1
    num_rows = min(cfg.rollout.num_slots, _completions(cfg))
    num_threads = torch.get_num_threads()
    if cfg.scale.workers:
        num_rows, num_threads = min(num_rows, cfg.scale.lease), cfg.scale.threads_per_worker
    return _measured(tuple(sorted(shapes.items())), dtype, num_rows, num_threads, policy.kernels.choice)


def _completions(cfg: SamplingRecipe) -> int:
    """Completions of a step that one rank draws."""
    return max(1, cfg.rollout.prompts_per_step * cfg.rollout.completions_per_prompt // num_ranks())


def with_chosen_weights(cfg: RecipeT, policy: LanguageModel) -> RecipeT:
    """`cfg` with the weights that `rollout.weights: auto` stands for on this machine, the same on all ranks.

    They are the model's where nothing corrects for others (`rollout.importance: off`), where sums of any number of
    ranks are to be equal, which needs an exact engine, and where another engine would need a pass for the old policy:
    it computes prompts and completions once more, which costs more than 8 bits save.
    """
    if cfg.rollout.weights != "auto":
        return cfg
    chosen: Weights = "model"
    seconds = product_seconds(policy, cfg)
    if seconds is None:
        why = "there are no products in 8 bits here, or no others"
    else:
        why = f"products of a decoding step take {seconds['model']:.3g} s, and {seconds['int8']:.3g} s in 8 bits"
        if cfg.rollout.importance.mode == "off":
            why += ", but rollout.importance is off"
        elif cfg.scale.is_exact:
            why += ", but scale.reduction is exact"
        elif int8_needs_old_policy(cfg):
            why += ", but the update would then need a pass for the old policy"
        elif seconds["int8"] <= WORTH * seconds["model"]:
            chosen = "int8"
    choices: list[Weights] = [chosen]
    chosen = gathered(choices, "choice of weights", all_ranks=True)[0]
    if rank() == 0:
        _log.info("rollout.weights is auto: %s, because %s", chosen, why)
    return with_weights(cfg, chosen)


def int8_needs_old_policy(cfg: SamplingRecipe) -> bool:
    """True if a step whose completions are drawn in 8 bits computes the log-probs of the old policy by a pass."""
    return SPECS[cfg.algorithm].passes(with_weights(cfg, "int8")).old_policy


def with_weights(cfg: RecipeT, weights: Weights) -> RecipeT:
    """`cfg` with `rollout.weights` as given."""
    return cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update={"weights": weights})})


@functools.cache
def _measured(
    shapes: Shapes, dtype: torch.dtype, num_rows: int, num_threads: int, kernels: Choice
) -> Mapping[Weights, float]:
    forms: tuple[Weights, ...] = ("model", "int8")
    packers = [Packer(Kernels(kernels), form) for form in forms]
    total_s, before = [0.0, 0.0], torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for (num_outputs, num_inputs), count in shapes:
            num_used = min(num_outputs, max(64, _MOST_NUMBERS // num_inputs // 64 * 64))
            weight_OI, x_RI = (torch.ones(size, num_inputs, dtype=dtype) for size in (num_used, num_rows))
            best_s = _best_s([packer.pack_weight(weight_OI, None, (num_used,)) for packer in packers], x_RI)
            total_s = [so_far + count * num_outputs / num_used * s for so_far, s in zip(total_s, best_s, strict=True)]
    finally:
        torch.set_num_threads(before)
    return dict(zip(forms, total_s, strict=True))


@torch.no_grad()
def _best_s(linears: Sequence[PackedLinear], x_RI: torch.Tensor) -> list[float]:
    """The least seconds of each of `linears`, of a few tries in turn."""
    best_s, begin_s = [float("inf")] * len(linears), time.perf_counter()
    for _ in range(_MAX_TRIES):
        for place, linear in enumerate(linears):
            start_s = time.perf_counter()
            linear(x_RI)
            best_s[place] = min(best_s[place], time.perf_counter() - start_s)
        if time.perf_counter() - begin_s > _LIMIT_S * len(linears):
            break
    return best_s
