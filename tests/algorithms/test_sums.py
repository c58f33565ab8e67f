from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tunesmith.base.core.errors import InputError
from tunesmith.engine.kernels.masking import check_denominator, check_shapes, kept, total
from tunesmith.learn.algorithms.sums import Sums, merged


@dataclass(frozen=True, slots=True)
class Counts(Sums):
    num: Tensor
    value: Tensor


def test_records_add_up_and_survive_packing():
    records = [Counts(total(torch.ones(n)), total(torch.full((n,), 0.5))) for n in (1, 2, 3)]
    assert merged(records).floats() == {"num": 6.0, "value": 3.0}
    assert Counts.unpack(merged(records).pack()).floats() == merged(records).floats()


def test_sums_are_detached_and_exact_where_fp32_would_lose_ones():
    x = torch.ones(2, requires_grad=True)
    assert not total(x).requires_grad
    big = total(torch.tensor([2.0**25])) + total(torch.tensor([1.0]))
    assert big.item() == 2**25 + 1


def test_kept_shields_value_and_gradient_from_nan_and_widens_bf16():
    x = torch.tensor([[1.0, float("nan")]], requires_grad=True)
    kept(x, torch.tensor([[True, False]])).square().sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[2.0, 0.0]]
    assert kept(x.detach().bfloat16(), torch.ones(1, 2, dtype=torch.bool)).dtype == torch.float32


def test_differing_shapes_are_named():
    with pytest.raises(InputError, match=r"a \(2, 3\), b \(2,\)"):
        check_shapes(a=torch.zeros(2, 3), b=torch.zeros(2), c=None)


@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_denominator_must_be_positive(value: float):
    with pytest.raises(InputError, match="num_tokens is"):
        check_denominator("num_tokens", value)
