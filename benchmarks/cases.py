"""Cases of `benchmarks.kernels` and `benchmarks.gpu`: an operation beside plain torch; here preference and log-probs.

Shapes: N, M and B rows, H hidden, V vocabulary.
"""

import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear

from tunesmith.engine.kernels.logprob import torch_impl as logprob_torch
from tunesmith.engine.kernels.logprob.api import chosen_logp_entropy
from tunesmith.engine.kernels.logprob.head import OutputLayer, head_logp_entropy
from tunesmith.engine.kernels.native import Choice, Kernels
from tunesmith.engine.kernels.preference import torch_impl as preference_torch
from tunesmith.engine.kernels.preference.api import iterative_tuning, process_user_preference, update_in_place
from tunesmith.engine.kernels.preference.torch_impl import PreferenceBatch
from tunesmith.engine.kernels.sample import torch_impl as sample_torch
from tunesmith.engine.kernels.sample.api import draw_in_triton, sample
from tunesmith.engine.kernels.sample.torch_impl import NoiseKeys, SampleSettings

Work = Callable[[], object]

_ROWS = slice(0, 64)
"""Rows that are compared with float64, which takes long."""

ULP = 2**-7  # of a bfloat16 number near the top of its range, relative to it
_SOME_PAIRS = slice(0, 1 << 17)
BLOCKS = (64, 128, 256, 512)
_MOST_DIFFERENT = 32  # one row in so many may draw another token than float64 does, where rows are many and long


@dataclass(frozen=True, slots=True)
class Setting:
    """Device, seed, small sizes or those that fill a GPU, and the choice of kernels."""

    device: torch.device
    seed: int
    quick: bool
    large: bool = False
    choice: Choice = "auto"

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, stream: int = 0) -> torch.Tensor:
        """Standard normal numbers, drawn on the device; another `stream` gives others."""
        return torch.randn(*shape, generator=self._generator(stream), device=self.device).to(dtype)

    def whole(self, end: int, *shape: int, stream: int = 0) -> torch.Tensor:
        """Whole numbers from 0 to `end`, exclusive."""
        return torch.randint(end, shape, generator=self._generator(stream), device=self.device)

    def sized(self, whole: int, small: int, large: int | None = None) -> int:
        """The first; the second in a quick run; the third, if there is one, to fill a GPU."""
        if self.quick:
            return small
        return large if self.large and large is not None else whole

    def mask(self, shape: tuple[int, int]) -> torch.Tensor:
        """Right-padded rows, half full to full."""
        length_B1 = shape[1] // 2 + self.whole(shape[1] // 2 + 1, shape[0], 1, stream=9)
        return torch.arange(shape[1], device=self.device) < length_B1

    def _generator(self, stream: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(1000 * self.seed + stream)


@dataclass(frozen=True, slots=True)
class Case:
    """Our operation and the plain one, as calls without arguments.

    `num_bytes` is what it must read and write at least, `num_flops` its multiplications and additions where they are
    the bound; `max_error` the distance to its definition in float64 (`error_of`), at most `tolerance`. `variants` are
    other ways of ours; `liger` is Liger's kernel where it can run. `compiles` is false where torch.compile has nothing
    to work on, or would unroll a loop for minutes; `by_wall` is true where part of the work is the processor's, and
    `by_graph` where the engine replays it in a CUDA graph, so that a launch costs next to nothing.
    """

    ours: Work
    plain: Work
    max_error: Callable[[], float]
    tolerance: float
    num_bytes: int
    size: str
    against: str
    picked: str
    measures_memory: bool = False
    num_flops: int = 0
    variants: Mapping[str, Work] = field(default_factory=dict[str, Work])
    liger: Work | None = None
    compiles: bool = True
    by_wall: bool = False
    by_graph: bool = False


def error_of(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Largest difference of (found, exact) over all pairs, each over the largest magnitude of `exact` or 1.

    NaN where one of them is NaN, or where only one is infinite.
    """
    worst = 0.0
    for found, exact in pairs:
        if exact.numel():
            found, exact = found.detach().double().cpu(), exact.detach().double().cpu()
            error = float((found - exact).abs().max()) / max(1.0, float(exact.abs().max()))
            worst = error if error != error else max(worst, error)
    return worst


def liger(tensor: torch.Tensor, function: Callable[[Any], object]) -> Work | None:
    """`function` of Liger's functions; None where Liger is not installed, or the tensor is not on a GPU."""
    if tensor.device.type != "cuda" or importlib.util.find_spec("liger_kernel") is None:
        return None
    return lambda: function(importlib.import_module("liger_kernel.transformers.functional"))


def preference_case(
    setting: Setting, num_pairs: int | None = None, dtype: torch.dtype = torch.float32, *, all_ways: bool = False
) -> Case:
    """Selection of 65,536 pairs of 512 numbers, or of `num_pairs`, and the update, against torch.

    The bytes are those of the selected rows, read and written; the output is memory in use, as a copy's target is. With
    `all_ways` its variants are those of `preference_ways`.
    """
    num_pairs, width, scale = num_pairs or setting.sized(65536, 64), setting.sized(512, 33, 512), 1e-3
    a_BN, b_BN = setting.normal(num_pairs, width, dtype=dtype), setting.normal(num_pairs, width, dtype=dtype, stream=1)
    batch = PreferenceBatch(a_BN, b_BN, setting.whole(2, num_pairs).float())
    weights_N, out_BN, kernels = setting.normal(width, stream=2), torch.empty_like(a_BN), Kernels(setting.choice)
    updated_N = weights_N.clone()

    def error() -> float:
        found_N, some = weights_N.clone(), preference_part(batch, _SOME_PAIRS)
        update_in_place(some, found_N, scale=scale, out_BN=out_BN[_SOME_PAIRS], kernels=kernels)
        wide = PreferenceBatch(some.outputs_a_BN.double(), some.outputs_b_BN.double(), some.choices_B)
        exact = preference_torch.select_and_update(wide, weights_N.double(), scale)
        return error_of([(out_BN[_SOME_PAIRS], exact.selected_BN), (found_N, exact.weights_N)])

    return Case(
        ours=lambda: update_in_place(batch, updated_N, scale=scale, out_BN=out_BN, kernels=kernels),
        plain=lambda: preference_torch.select_and_update(batch, weights_N, scale),
        max_error=error,
        tolerance=1e-5,
        num_bytes=2 * a_BN.element_size() * num_pairs * width,
        size=f"{num_pairs} pairs of {width} numbers, {str(dtype).removeprefix('torch.')}",
        against="where, and a product and a sum",
        picked=kernels.picked("preference", a_BN),
        variants=preference_ways(batch, updated_N, out_BN, kernels) if all_ways else {},
    )


def preference_ways(
    batch: PreferenceBatch, weights_N: torch.Tensor, out_BN: torch.Tensor, kernels: Kernels
) -> dict[str, Work]:
    """One batch and ten batches (`tuning`) at every size of a block, and with atomic sums where there are any."""
    size = max(1, len(out_BN) // 10)
    parts = [preference_part(batch, slice(start, start + size)) for start in range(0, len(out_BN), size)]
    sums = (True, False) if kernels.picked("preference", out_BN) == "triton" else (True,)
    ways: dict[str, Work] = {}
    for block, deterministic in itertools.product((None, *BLOCKS), sums):
        how = {"learning_rate": 1e-6, "deterministic": deterministic, "block": block, "kernels": kernels}
        label = f"{'' if block is None else f', block {block}'}{'' if deterministic else ', atomic'}"
        ways[f"process{label}"] = partial(process_user_preference, batch, weights_N, out_BN=out_BN, **how)
        ways[f"tuning{label}"] = partial(iterative_tuning, parts, weights_N, **how)
    return ways


def preference_part(batch: PreferenceBatch, rows: slice) -> PreferenceBatch:
    """Some pairs of a batch."""
    return PreferenceBatch(batch.outputs_a_BN[rows], batch.outputs_b_BN[rows], batch.choices_B[rows])


def head_case(
    setting: Setting, width: int | None = None, num_tokens: int | None = None, *, with_gradients: bool = False
) -> Case:
    """Log-probs and entropies of 2,048 tokens of 49,152 from hidden states, against log_softmax and gather.

    With gradients of hidden states and weight if wanted; `width` and `num_tokens` for another output layer.
    """
    num_rows = setting.sized(2048, 32, 8192)
    width, num_tokens = width or setting.sized(576, 64, 896), num_tokens or setting.sized(49152, 500, 151936)
    hidden_NH = setting.normal(num_rows, width, dtype=torch.bfloat16).requires_grad_(with_gradients)
    weight_VH = (0.1 * setting.normal(num_tokens, width, stream=1)).bfloat16().requires_grad_(with_gradients)
    ids_N, d_logp_N = setting.whole(num_tokens, num_rows), setting.normal(num_rows, stream=2)
    kernels, layer = Kernels(setting.choice), OutputLayer(weight_VH.detach())

    def finished(logp_N: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(logp_N, (hidden_NH, weight_VH), d_logp_N) if with_gradients else (logp_N,)

    def ours() -> tuple[torch.Tensor, ...]:
        return finished(head_logp_entropy(hidden_NH, OutputLayer(weight_VH), ids_N, kernels=kernels)[0])

    def plain() -> tuple[torch.Tensor, ...]:
        logp_NV = linear(hidden_NH, weight_VH).float().log_softmax(-1)
        return finished(logp_NV.gather(1, ids_N[:, None])[:, 0])

    def error() -> float:
        hidden_MH, ids_M = hidden_NH.detach()[_ROWS], ids_N[_ROWS]
        exact = logprob_torch.chosen_logp_entropy(linear(hidden_MH, layer.weight_VH).double(), ids_M)
        pairs = list(zip(head_logp_entropy(hidden_MH, layer, ids_M, kernels=kernels), exact, strict=True))
        if with_gradients:  # both in bfloat16: some units in its last place
            pairs += zip(ours(), plain(), strict=True)
        return error_of(pairs)

    def by_liger(functions: Any) -> object:
        loss = functions.liger_fused_linear_cross_entropy(hidden_NH, weight_VH, ids_N, reduction="sum")
        return torch.autograd.grad(loss, (hidden_NH, weight_VH))

    return Case(
        ours=ours,
        plain=plain,
        max_error=error,
        # On a GPU a product of other rows may round otherwise.
        tolerance=0.03 if with_gradients or setting.device.type == "cuda" else 1e-4,
        num_bytes=(4 if with_gradients else 2) * (num_rows + num_tokens) * width,
        size=f"{num_rows} x {num_tokens} from {width} numbers, bfloat16{', with gradients' if with_gradients else ''}",
        against="log_softmax and gather",
        picked=kernels.picked("logprob", hidden_NH),
        measures_memory=True,
        num_flops=(6 if with_gradients else 2) * num_rows * width * num_tokens,
        liger=liger(hidden_NH, by_liger) if with_gradients else None,
    )


def logits_case(setting: Setting, *, with_gradients: bool = False) -> Case:
    """Log-probs and entropies from 2,048 rows of logits, against log_softmax and gather.

    With the gradient of the logits they are read twice, and the gradient is written.
    """
    num_rows, num_tokens = setting.sized(2048, 32, 8192), setting.sized(49152, 500, 151936)
    logits_NV = _likely(setting, num_rows, num_tokens).requires_grad_(with_gradients)
    ids_N, d_logp_N = setting.whole(num_tokens, num_rows), setting.normal(num_rows, stream=2)
    kernels = Kernels(setting.choice)

    def ours(rows: slice = slice(None)) -> tuple[torch.Tensor, ...]:
        leaf_MV = logits_NV[rows].detach().requires_grad_(with_gradients)
        found = chosen_logp_entropy(leaf_MV, ids_N[rows], 1.0, kernels=kernels)
        return torch.autograd.grad(found[0], leaf_MV, d_logp_N[rows]) if with_gradients else found

    def plain() -> object:
        logp_N = logits_NV.float().log_softmax(-1).gather(1, ids_N[:, None])[:, 0]
        return torch.autograd.grad(logp_N, logits_NV, d_logp_N) if with_gradients else logp_N

    def error() -> float:
        leaf_MV = logits_NV[_ROWS].detach().double().requires_grad_()
        exact = logprob_torch.chosen_logp_entropy(leaf_MV, ids_N[_ROWS])
        if with_gradients:
            exact = torch.autograd.grad(exact[0], leaf_MV, d_logp_N[_ROWS].double())
        return error_of(zip(ours(_ROWS), exact, strict=True))

    copied_NV = logits_NV.detach().clone() if setting.device.type == "cuda" else logits_NV  # Liger may write over it
    return Case(
        ours=ours,
        plain=plain,
        max_error=error,
        tolerance=ULP if with_gradients else 1e-5,
        num_bytes=(3 if with_gradients else 1) * 2 * logits_NV.numel(),
        size=f"{num_rows} x {num_tokens} bfloat16{', with the gradient' if with_gradients else ''}",
        against=f"log_softmax and gather, without the entropy{', by autograd' if with_gradients else ''}",
        picked=kernels.picked("logprob", logits_NV),
        measures_memory=True,
        liger=None
        if with_gradients
        else liger(logits_NV, lambda of: of.liger_cross_entropy(copied_NV, ids_N, reduction="none")),
    )


def sampling_case(setting: Setting, top_p: float = 0.9) -> Case:
    """A token of each of 32 rows of logits within top-p, and its log-prob, against sorting."""
    num_rows, num_tokens = setting.sized(32, 4, 256), setting.sized(49152, 500, 151936)
    logits_BV, kernels = _likely(setting, num_rows, num_tokens), Kernels(setting.choice)
    row_B = torch.arange(num_rows)
    keys = NoiseKeys(row_B * 0, row_B, row_B * 0, row_B * 0)
    settings = SampleSettings.same(num_rows, top_p=top_p)
    # A number within float32's rounding of a limit may fall on its other side; in few rows there is none.
    most_different = num_rows // _MOST_DIFFERENT if setting.large else 0

    def error() -> float:
        rows = slice(0, min(num_rows, 64))
        some = (
            SampleSettings.same(rows.stop, top_p=top_p),
            NoiseKeys(*(getattr(keys, f.name)[rows] for f in fields(keys))),
        )
        found = sample(logits_BV[rows], *some, kernels=kernels)
        exact = sample_torch.sample(logits_BV[rows].cpu(), *some, dtype=torch.float64)
        same_B = found.token_B.cpu() == exact.token_B
        if int((~same_B).sum()) > most_different:
            return float("inf")
        pairs = ((found.logp_B, exact.logp_B), (found.raw_logp_B, exact.raw_logp_B))
        return error_of((a.cpu()[same_B], b[same_B]) for a, b in pairs)

    def plain() -> object:
        logits_BV_ = logits_BV.float()
        if top_p < 1:  # as transformers has it
            sorted_BV, token_BV = logits_BV_.sort(descending=False)
            is_out_BV = sorted_BV.softmax(-1).cumsum(-1) <= 1 - top_p
            is_out_BV[:, -1] = False
            logits_BV_ = logits_BV_.masked_fill(is_out_BV.scatter(1, token_BV, is_out_BV), -torch.inf)
        logp_BV = logits_BV_.log_softmax(-1)
        drawn_B1 = torch.multinomial(logp_BV.exp(), 1)
        return drawn_B1, logp_BV.gather(1, drawn_B1)

    def operator() -> Work:
        """The kernel as an engine calls it: nothing is copied, and nothing waits for it."""
        numbers = (settings.temperature_B, settings.top_p_B, settings.min_p_B, settings.repetition_penalty_B)
        integers = (settings.top_k_B, keys.seed_B * 0, keys.seed_B, keys.prompt_B, keys.sample_B, keys.position_B)
        settings_B4, integers_B6 = (torch.stack(of, -1).to(setting.device) for of in (numbers, integers))
        return lambda: draw_in_triton(logits_BV, settings_B4, integers_B6, None, None, top_p < 1)

    picked = kernels.picked("sample", logits_BV)
    return Case(
        ours=lambda: sample(logits_BV, settings, keys, kernels=kernels),
        plain=plain,
        max_error=error,
        tolerance=1e-5,
        num_bytes=2 * logits_BV.numel(),
        size=f"{num_rows} x {num_tokens} bfloat16, top-p {top_p}",
        against="sort, cumsum, scatter and multinomial" if top_p < 1 else "log_softmax and multinomial",
        picked=picked,
        variants={"operator": operator()} if picked == "triton" else {},
    )


def _likely(setting: Setting, num_rows: int, num_tokens: int) -> torch.Tensor:
    """Logits with the spread of a language model's: a few hundred likely tokens and a long tail."""
    logits_NV = (2.5 * setting.normal(num_rows, num_tokens)).bfloat16()
    likely_NK = setting.whole(num_tokens, num_rows, 200)
    return logits_NV.scatter_add_(1, likely_NK, (8 + 2 * setting.normal(num_rows, 200, stream=1)).bfloat16())
