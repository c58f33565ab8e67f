"""Low-rank adapters beside linear maps, as the trainer and the rollout engine compute them: one definition for both.

With a base map `y = x W^T`, an adapter gives `y + scaling * (x A^T) B^T` (LoRA, Hu et al. 2021, eq. 3). DoRA (Liu et
al. 2024, eq. 5) also trains the length m of each row of the adapted weight: `m / |W + scaling B A| * (y + scaling * (x
A^T) B^T)`, without a gradient through the denominator (section 4.3). `W + scaling B A` itself is never computed.

Shape legend: T tokens, I inputs, O outputs, R rank.
"""

from dataclasses import dataclass

import torch
from torch import nn

from tunesmith.engine.kernels.linear.exact import is_exact, linear


@dataclass(frozen=True, slots=True)
class Adapter:
    """The trained parts beside one linear map: A `[R, I]`, B `[O, R]`, and DoRA's magnitude, else None.

    `dropout` applies to the input of A.
    """

    down_RI: nn.Parameter
    up_OR: nn.Parameter
    scaling: float
    magnitude_O: nn.Parameter | None
    dropout: nn.Module | None


def low_rank(x_TI: torch.Tensor, down_RI: torch.Tensor, scaling: float) -> torch.Tensor:
    """`scaling * x A^T`, `[T, R]`; of all factors the smallest tensor to scale."""
    inner_TR = linear(x_TI, down_RI)
    return inner_TR if scaling == 1 else inner_TR * scaling


def add_low_rank(y_TO: torch.Tensor, inner_TR: torch.Tensor, up_OR: torch.Tensor) -> torch.Tensor:
    """`y + inner B^T`, rounded once; where products are exact, the product and then the sum."""
    if is_exact(inner_TR, up_OR):
        return y_TO + linear(inner_TR, up_OR)
    return torch.addmm(y_TO, inner_TR, up_OR.t())


def stretch(y_TO: torch.Tensor, scale_O: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """`scale * y + bias` in y's dtype; `scale_O` is float32 or wider."""
    stretched_TO = (y_TO * scale_O).to(y_TO.dtype)
    return stretched_TO if bias_O is None else stretched_TO + bias_O


def dora_scale(adapter: Adapter, weight_OI: torch.Tensor) -> torch.Tensor:
    """`m / |W + scaling B A|` in float32 or wider, with a gradient to m alone.

    The lengths are rounded to the weight's dtype, like the magnitudes, so it is exactly 1 before the first update.
    """
    assert adapter.magnitude_O is not None, "only DoRA has a scale"
    wide = _wide(weight_OI)
    return adapter.magnitude_O.to(wide) / row_lengths(adapter, weight_OI).to(wide)


@torch.no_grad()
def row_lengths(adapter: Adapter, weight_OI: torch.Tensor) -> torch.Tensor:
    """`|W + scaling B A|` of each row, in the weight's dtype.

    The square root of |W|^2 + 2 s B (A W^T) + s^2 B (A A^T) B^T, row by row, without a tensor of the size of W.
    """
    wide = _wide(weight_OI)
    down_RI, up_OR, scaling = adapter.down_RI.to(wide), adapter.up_OR.to(wide), adapter.scaling
    square_O = torch.linalg.vector_norm(weight_OI, dim=1, dtype=wide).square()
    cross_OR = linear(weight_OI, adapter.down_RI).to(wide)
    square_O = square_O + ((2 * scaling * cross_OR + scaling**2 * (up_OR @ linear(down_RI, down_RI))) * up_OR).sum(1)
    return square_O.clamp(min=torch.finfo(torch.float32).tiny).sqrt().to(weight_OI.dtype)


@torch.no_grad()
def merged(adapter: Adapter, weight_OI: torch.Tensor) -> torch.Tensor:
    """The sum of base and adapter as one weight: summed in float32, rounded once to the weight's dtype."""
    wide = _wide(weight_OI)
    changed_OI = weight_OI.to(wide) + adapter.scaling * (adapter.up_OR.to(wide) @ adapter.down_RI.to(wide))
    if adapter.magnitude_O is not None:
        changed_OI *= dora_scale(adapter, weight_OI)[:, None]
    return changed_OI.to(weight_OI.dtype)


def is_dora(adapter: Adapter | None) -> bool:
    """True for DoRA, which scales the product with the weight and adds the bias afterwards."""
    return adapter is not None and adapter.magnitude_O is not None


def is_idle(adapter: Adapter, weight_OI: torch.Tensor) -> bool:
    """True if the adapter changes nothing: B is zero, and each magnitude is the length of its row."""
    if bool(adapter.up_OR.any()):
        return False
    return adapter.magnitude_O is None or torch.equal(adapter.magnitude_O, row_lengths(adapter, weight_OI))


def _wide(weight_OI: torch.Tensor) -> torch.dtype:
    return torch.promote_types(weight_OI.dtype, torch.float32)
