"""Roofline of drawing tokens on a CPU: the model's matrix products alone, at the rate measured in the same run.

The rate is that of the faster of torch's products and the engine's own, which in bfloat16 are the same to the bit, and
with `--weights int8` are those in 8 bits. Each product has the weight of its own layer, as in a real pass: a single
weight would stay in the cache.
Shape legend: M rows, I inputs, O outputs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from benchmarks.common import seconds_of
from benchmarks.contenders import ModelSettings
from benchmarks.workloads import Workload
from tunesmith.base.schema.weights import Weights
from tunesmith.engine.kernels.linear.api import BlocksLikeTorch, linear, pack
from tunesmith.engine.kernels.linear_int8.api import linear as int8_linear
from tunesmith.engine.kernels.linear_int8.api import pack as pack_int8
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models.loaded import PreTrainedModel

SHOWN_ROWS = (16, 32, 64, 128)
"""Rows whose rates are always measured and shown."""

_MOST_DECODE_ROWS, _MOST_PREFILL_ROWS = 128, 2048
_FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
_NUM_TRIES = 3

_Own = Callable[[torch.Tensor], torch.Tensor]


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


def needed_rows(work: Workload) -> tuple[int, ...]:
    """Numbers of rows that `ideal_s` needs, and those that are shown."""
    return tuple(sorted({_decode_rows(work), _prefill_rows(work), len(work.prompt_ids), *SHOWN_ROWS}))


def ideal_s(work: Workload, lengths: Sequence[int], rates: Rates) -> float:
    """Seconds of the products that `lengths` new tokens for each row of the workload need, at the measured rates.

    Each prompt counts once, and its output layer once, which gives the first token. Every other token is a row of a
    full batch (all completions, at most 128): that rows run out towards the end is not excused.
    """
    rows, chunk, num_prompts = _decode_rows(work), _prefill_rows(work), len(work.prompt_ids)
    prefill_s = rates.trunk_s[chunk] * work.num_prompt_tokens / chunk + rates.head_s[num_prompts]
    return prefill_s + (rates.trunk_s[rows] + rates.head_s[rows]) * (sum(lengths) - len(lengths)) / rows


def _decode_rows(work: Workload) -> int:
    return min(len(work.rows), _MOST_DECODE_ROWS)


def _prefill_rows(work: Workload) -> int:
    return min(work.num_prompt_tokens, _MOST_PREFILL_ROWS)


class Products:
    """The matrix products of a model and nothing else."""

    def __init__(self, settings: ModelSettings) -> None:
        trunk_OI, head_OI = linear_weights(settings.load().model)
        kernels = Kernels()
        blocks = BlocksLikeTorch(kernels)
        self._trunk, self._head = (
            [_Product(weight_OI, _own_product(weight_OI, blocks, kernels, settings.weights)) for weight_OI in weights]
            for weights in (trunk_OI, [head_OI])
        )
        self._flops = 2 * sum(weight_OI.numel() for weight_OI in trunk_OI), 2 * head_OI.numel()

    @torch.no_grad()
    def rates(self, rows: Sequence[int]) -> tuple[Rates, Rates]:
        """(the faster of torch's products and our own, torch's alone) for each number of rows."""
        seconds = [
            [{count: _fastest_s(products, count, is_own) for count in rows} for is_own in (False, True)]
            for products in (self._trunk, self._head)
        ]
        fastest = [{count: min(of_torch[count], own[count]) for count in rows} for of_torch, own in seconds]
        trunk_flop, head_flop = self._flops
        return (
            Rates(fastest[0], fastest[1], trunk_flop, head_flop),
            Rates(seconds[0][0], seconds[1][0], trunk_flop, head_flop),
        )


def linear_weights(model: PreTrainedModel) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Weights `[O, I]` of all linear layers in their order, and of the output layer.

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


def _own_product(weight_OI: torch.Tensor, blocks: BlocksLikeTorch, kernels: Kernels, weights: Weights) -> _Own | None:
    """The engine's product with a weight; None where it takes torch's."""
    if weights == "int8":
        rounded = pack_int8(weight_OI, kernels=kernels)
        return lambda x_MI: int8_linear(x_MI, rounded, None)
    block = blocks.of(weight_OI)
    if block is None:
        return None
    packed = pack(weight_OI, block, kernels=kernels)
    return lambda x_MI: linear(x_MI, packed, None)


class _Product:
    """One product in two ways: torch's with its weight packed by oneDNN where it packs such weights, and our own."""

    def __init__(self, weight_OI: torch.Tensor, own: _Own | None) -> None:
        self.num_inputs, self.dtype = weight_OI.shape[1], weight_OI.dtype
        self._weight_OI = weight_OI
        has_packed = weight_OI.dtype in (torch.bfloat16, torch.float32) and torch.backends.mkldnn.is_available()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), 64) if has_packed else None
        self._own = own

    def __call__(self, x_MI: torch.Tensor, is_own: bool) -> torch.Tensor:
        if is_own and self._own is not None:
            return self._own(x_MI)
        if self._packed is None:
            return nn.functional.linear(x_MI, self._weight_OI)
        return torch.ops.mkldnn._linear_pointwise(x_MI, self._packed, None, "none", [], "")


def _fastest_s(products: Sequence[_Product], num_rows: int, is_own: bool) -> float:
    sizes = {product.num_inputs for product in products}
    inputs = {size: torch.randn(num_rows, size).to(products[0].dtype) for size in sizes}

    def work() -> None:
        for product in products:
            product(inputs[product.num_inputs], is_own)

    work()
    return min(seconds_of(work) for _ in range(_NUM_TRIES))
