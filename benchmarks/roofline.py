"""The roofline of drawing tokens on a CPU: the model's matrix products alone, at the rate measured in the same run.

The rate is that of the faster of torch's products and the engine's own, which in bfloat16 are the same to the bit.
Each product has the weight of its own layer, as in a real pass: a single weight, used again and again, would stay in
the cache and promise what no engine can reach. Shape legend: M rows, I inputs, O outputs.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from benchmarks.contenders import ModelSettings
from benchmarks.process import Server, serve
from benchmarks.workloads import Workload
from tunesmith.config.sections import ModelSection
from tunesmith.kernels.linear.api import BlocksLikeTorch, linear, pack
from tunesmith.kernels.native import Kernels
from tunesmith.models.load import load_policy
from tunesmith.models.loaded import PreTrainedModel

SHOWN_ROWS = (16, 32, 64, 128)
"""Rows whose rates are always measured and shown."""

_MOST_DECODE_ROWS, _MOST_PREFILL_ROWS = 128, 2048
_FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
_NUM_TRIES = 3


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds of all products of one pass over M rows: the layers', and the output layer's; with their FLOPs a row."""

    trunk_s: Mapping[int, float]
    head_s: Mapping[int, float]
    trunk_flop: int
    head_flop: int

    def gflops(self, num_rows: int) -> float:
        """GFLOP/s of a whole pass over `num_rows` rows."""
        seconds = self.trunk_s[num_rows] + self.head_s[num_rows]
        return num_rows * (self.trunk_flop + self.head_flop) / seconds / 1e9


@dataclass(frozen=True, slots=True)
class ProductRates:
    """`fastest`: the faster of torch's products and our own, for each number of rows; `torch`: torch's alone."""

    fastest: Rates
    torch: Rates


@dataclass(frozen=True, slots=True)
class Ideal:
    """Seconds that the matrix products of a workload need by themselves."""

    prefill_s: float
    decode_s: float

    @property
    def seconds(self) -> float:
        """Both together."""
        return self.prefill_s + self.decode_s


@dataclass(frozen=True, slots=True)
class MeasureRows:
    """Measure passes over each of these numbers of rows."""

    rows: tuple[int, ...]


def needed_rows(work: Workload) -> tuple[int, ...]:
    """The numbers of rows that `ideal` asks for, and those that are shown."""
    needed = {_decode_rows(work), _prefill_rows(work), len(work.prompt_ids), *SHOWN_ROWS}
    return tuple(sorted(needed))


def ideal(work: Workload, lengths: Sequence[int], rates: Rates) -> Ideal:
    """Seconds of the products that `lengths` new tokens for each row of the workload need, at the measured rates.

    Each prompt counts once, and its output layer once; the first token comes from there. Every other token is a row
    of a full batch (all completions, at most 128): that rows run out towards the end is not excused.
    """
    rows, chunk, num_prompts = _decode_rows(work), _prefill_rows(work), len(work.prompt_ids)
    prefill_s = rates.trunk_s[chunk] * work.num_prompt_tokens / chunk + rates.head_s[num_prompts]
    num_decoded = sum(lengths) - len(lengths)
    return Ideal(prefill_s, (rates.trunk_s[rows] + rates.head_s[rows]) * num_decoded / rows)


def _decode_rows(work: Workload) -> int:
    return min(len(work.rows), _MOST_DECODE_ROWS)


def _prefill_rows(work: Workload) -> int:
    return min(work.num_prompt_tokens, _MOST_PREFILL_ROWS)


class GemmContender:
    """The matrix products of a model and nothing else."""

    def __init__(self, settings: ModelSettings) -> None:
        torch.set_num_threads(settings.num_threads)
        loaded = load_policy(ModelSection.model_validate({"name": settings.name, "dtype": settings.dtype}))
        kernels = Kernels()
        blocks = BlocksLikeTorch(kernels)
        trunk_OI, head_OI = linear_weights(loaded.model)
        self._trunk = [_Product(weight_OI, blocks.of(weight_OI), kernels) for weight_OI in trunk_OI]
        self._head = [_Product(head_OI, blocks.of(head_OI), kernels)]
        self._trunk_flop = 2 * sum(weight_OI.numel() for weight_OI in trunk_OI)
        self._head_flop = 2 * head_OI.numel()

    @torch.no_grad()
    def handle(self, request: MeasureRows) -> ProductRates:
        """The fastest of a few passes for each number of rows."""
        of_torch, own = (self._rates(request.rows, is_own) for is_own in (False, True))
        trunk_s = {rows: min(of_torch.trunk_s[rows], own.trunk_s[rows]) for rows in request.rows}
        head_s = {rows: min(of_torch.head_s[rows], own.head_s[rows]) for rows in request.rows}
        return ProductRates(Rates(trunk_s, head_s, self._trunk_flop, self._head_flop), of_torch)

    def _rates(self, rows: Sequence[int], is_own: bool) -> Rates:
        trunk_s = {count: _fastest(self._trunk, count, is_own) for count in rows}
        head_s = {count: _fastest(self._head, count, is_own) for count in rows}
        return Rates(trunk_s, head_s, self._trunk_flop, self._head_flop)


def serve_gemm(settings: ModelSettings, server: Server) -> None:
    """The matrix products."""
    serve(GemmContender, settings, server)


def linear_weights(model: PreTrainedModel) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The weights `[O, I]` of all linear layers in their order, and of the output layer.

    Those that read the same input are joined (q, k and v; gate and up), as an engine would: it is faster.
    """
    head = cast(nn.Linear, model.get_output_embeddings())
    groups: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if module is head:
            continue
        parent, _, leaf = name.rpartition(".")
        if isinstance(module, nn.Linear):
            groups.setdefault(f"{parent}.{_FUSED.get(leaf, leaf)}", []).append(module.weight.detach())
        elif type(module).__name__ == "Conv1D":  # GPT-2's layer, [I, O]
            groups.setdefault(name, []).append(module.weight.detach().T.contiguous())  # type: ignore[union-attr]
    return [torch.cat(parts) for parts in groups.values()], head.weight.detach()


class _Product:
    """One product in two ways: torch's with its weight packed by oneDNN where it packs such weights, and our own."""

    def __init__(self, weight_OI: torch.Tensor, block: int | None, kernels: Kernels) -> None:
        self.num_inputs, self.dtype = weight_OI.shape[1], weight_OI.dtype
        self._weight_OI = weight_OI
        self._packed = _packed(weight_OI)
        self._own = None if block is None else pack(weight_OI, block, kernels=kernels)

    def __call__(self, x_MI: torch.Tensor, is_own: bool) -> torch.Tensor:
        if is_own and self._own is not None:
            return linear(x_MI, self._own, None)
        if self._packed is None:
            return nn.functional.linear(x_MI, self._weight_OI)
        return torch.ops.mkldnn._linear_pointwise(x_MI, self._packed, None, "none", [], "")


def _packed(weight_OI: torch.Tensor) -> torch.Tensor | None:
    """The weight in oneDNN's own layout; None where this build or this precision has none."""
    if weight_OI.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), 64)


def _fastest(products: Sequence[_Product], num_rows: int, is_own: bool) -> float:
    inputs = {size: torch.randn(num_rows, size) for size in {product.num_inputs for product in products}}
    inputs = {size: x_MI.to(products[0].dtype) for size, x_MI in inputs.items()}

    def work() -> None:
        for product in products:
            product(inputs[product.num_inputs], is_own)

    work()
    return min(_seconds(work) for _ in range(_NUM_TRIES))


def _seconds(work: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s
