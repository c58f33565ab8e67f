"""Settings, noise and logits for the tests of the sampler, and its comparison with the definition in float64.

Shapes: B rows, V vocabulary.
"""

from dataclasses import replace

import pytest
import torch

from drawn import normal
from tunesmith.base.core.errors import TrainingError
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.kernels.sample import torch_impl
from tunesmith.engine.kernels.sample.api import sample
from tunesmith.engine.kernels.sample.torch_impl import LogitBias, NoiseKeys, SampleSettings, Seen

OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "greedy": {"temperature": 0.0, "top_k": 3},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "bias": {"bias": {1: 1.0, 3: float("-inf"), 11: 2.0}},
    "top_k and top_p": {"top_k": 6, "top_p": 0.7, "temperature": 1.4},
    "top_p and min_p": {"top_p": 0.95, "min_p": 0.05, "temperature": 0.8},
    "all": {
        "temperature": 1.3,
        "top_k": 8,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "bias": {0: -1.0, 5: 0.5},
    },
}


def logits_of(*shape: int, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    """Random logits in float32."""
    return normal(*shape, scale=scale, seed=seed)


def keys_of(num_rows: int, *, seed: int = 0, position: int = 0) -> NoiseKeys:
    """Keys of groups of seven samples."""
    row_B = torch.arange(num_rows)
    return NoiseKeys(torch.full((num_rows,), seed), row_B // 7, row_B % 7, torch.full((num_rows,), position))


def rows_of(keys: NoiseKeys, rows: torch.Tensor) -> NoiseKeys:
    """The keys of some rows."""
    return NoiseKeys(*(getattr(keys, name)[rows] for name in NoiseKeys.__slots__))


def is_clear(logits_BV: torch.Tensor, chosen: SampleSettings, keys: NoiseKeys, seen: Seen | None) -> torch.Tensor:
    """Rows whose noise and filters are further than rounding in float32 from any limit."""
    exact_BV = torch_impl.distribution(logits_BV, chosen, seen=seen)
    gap_BV = exact_BV.exp().cumsum(-1) - torch_impl.uniform(keys)[:, None]
    clear_B = gap_BV.abs().amin(-1) > 1e-6
    for factor in (1 - 1e-5, 1 + 1e-5):
        moved = replace(
            chosen,
            top_p_B=torch.where(chosen.top_p_B < 1, chosen.top_p_B * factor, 1.0).clamp(max=1),
            min_p_B=chosen.min_p_B * factor,
        )
        kept_BV = torch_impl.distribution(logits_BV, moved, seen=seen).isfinite()
        clear_B &= (kept_BV == exact_BV.isfinite()).all(-1)
    return clear_B | (chosen.temperature_B == 0)


def assert_as_defined(
    logits_BV: torch.Tensor,
    chosen: SampleSettings,
    keys: NoiseKeys,
    seen: Seen | None,
    kernels: Kernels,
    *,
    most_unclear: float = 0.5,
    rtol: float = 0.0,
) -> None:
    """Tokens and log-probs are those of the definition in every row that is clear, and fewer than `most_unclear` of
    all rows are not."""
    found = sample(logits_BV, chosen, keys, seen=seen, kernels=kernels)
    exact = torch_impl.sample(logits_BV, chosen, keys, seen=seen)
    clear_B = is_clear(logits_BV, chosen, keys, seen)
    assert (~clear_B).float().mean() < most_unclear
    assert torch.equal(found.token_B[clear_B], exact.token_B[clear_B])
    for name in ("logp_B", "raw_logp_B"):
        assert getattr(found, name).dtype == torch.float32
        torch.testing.assert_close(getattr(found, name)[clear_B], getattr(exact, name)[clear_B], atol=1e-5, rtol=rtol)


def check_greedy_takes_the_lowest_id(kernels: Kernels) -> None:
    """Of several largest logits, with and without a filter."""
    logits_BV = torch.zeros(3, 300)
    logits_BV[0, [70, 200, 299]] = 4.0
    logits_BV[1, 299] = 1.0
    for top_k in (0, 2):
        drawn = sample(logits_BV, SampleSettings.same(3, temperature=0, top_k=top_k), keys_of(3), kernels=kernels)
        assert drawn.token_B.tolist() == [70, 299, 0]
        torch.testing.assert_close(drawn.logp_B, logits_BV.log_softmax(-1)[range(3), drawn.token_B])


def check_a_bias_that_leaves_nothing_or_overflows(kernels: Kernels) -> None:
    """Is refused, naming its row."""
    nothing = LogitBias.of([{}, {token: float("-inf") for token in range(5)}])
    with pytest.raises(TrainingError, match="row 1 of 2: the logit bias forbids every token"):
        sample(logits_of(2, 5), replace(SampleSettings.same(2), bias=nothing), keys_of(2), kernels=kernels)
    tiny = SampleSettings.same(2, repetition_penalty=1e-45)
    with pytest.raises(TrainingError, match=r"row 0 of 2: .*make a logit infinite"):
        sample(torch.ones(2, 5), tiny, keys_of(2), seen=Seen.of([[1], []], 5), kernels=kernels)


def check_parts_of_a_larger_tensor(kernels: Kernels) -> None:
    """Draw the tokens of their copies without gaps."""
    wide_BV = logits_of(10, 900)
    for part_BV in (wide_BV[::2, 100:777], wide_BV.t()[:10, :7]):
        chosen, keys = SampleSettings.same(len(part_BV), top_p=0.9), keys_of(len(part_BV))
        found = sample(part_BV, chosen, keys, kernels=kernels)
        assert torch.equal(found.token_B, sample(part_BV.contiguous(), chosen, keys, kernels=kernels).token_B)
