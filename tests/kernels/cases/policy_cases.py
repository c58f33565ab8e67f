"""Batches and settings for the tests of the policy loss, and its comparison with the definition in float64.

Shapes: B sequences, T completion tokens.
"""

from dataclasses import dataclass, fields, replace

import torch
from hypothesis import strategies as st

from tunesmith.engine.kernels.masking import Denominator
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.kernels.policy_loss.api import fused_policy_loss
from tunesmith.engine.kernels.policy_loss.records import PolicyTerms, PolicyTokens
from tunesmith.learn.algorithms.policy_loss import policy_loss

_SHARED = {
    "clip_low": st.sampled_from([0.1, 0.2, 0.5]),
    "clip_high": st.sampled_from([0.1, 0.28]),
    "kl": st.sampled_from(["k1", "k2", "k3"]),
    "kl_coef": st.sampled_from([0.0, 0.3]),
    "corrects_kl": st.booleans(),
}
TERMS = st.one_of(
    st.builds(PolicyTerms, **_SHARED, dual_clip=st.sampled_from([None, 1.3, 3.0])),
    st.builds(PolicyTerms, **_SHARED, surrogate=st.just("cispo")),
)
NOISE = st.sampled_from([0.0, 1e-3, 0.3, 2.0])
"""How far old and reference log-probs lie from the new ones, in nats."""


@dataclass(frozen=True)
class Case:
    """A batch, its settings and its denominator."""

    tokens: PolicyTokens
    terms: PolicyTerms
    denominator: Denominator

    @classmethod
    def of(
        cls,
        num_rows: int,
        num_columns: int,
        terms: PolicyTerms,
        *,
        noise: float = 0.3,
        share: float = 0.8,
        dtype: torch.dtype = torch.float32,
        per_row: bool = False,
        seed: int = 0,
    ) -> "Case":
        generator = torch.Generator().manual_seed(seed)
        shape = (num_rows, num_columns)
        first, second, third, fourth = torch.randn(4, *shape, generator=generator).unbind()
        mask_BT = torch.rand(*shape, generator=generator) < share
        logp_BT = -first.abs() - 0.1
        numbers = {
            "logp_BT": logp_BT,
            "old_logp_BT": logp_BT + noise * second,
            "advantage_BT": third,
            "reference_logp_BT": logp_BT + noise * fourth if terms.kl_coef else None,
        }
        # What stands outside of the mask must reach nothing.
        dirty = {
            name: None if value is None else value.masked_fill(~mask_BT, float("nan")).to(dtype)
            for name, value in numbers.items()
        }
        denominator = torch.arange(1.0, num_rows + 1)[:, None] if per_row else 7.0
        return cls(PolicyTokens(mask_BT=mask_BT, **dirty), terms, denominator)

    def wide(self) -> "Case":
        """The same numbers in float64."""
        values = {field.name: getattr(self.tokens, field.name) for field in fields(PolicyTokens)}
        tokens = PolicyTokens(
            **{k: v if v is None or v.dtype == torch.bool else v.detach().double() for k, v in values.items()}
        )
        return Case(tokens, self.terms, self.denominator)

    def with_leaf(self) -> tuple["Case", torch.Tensor]:
        """The case with new log-probs as a leaf."""
        leaf_BT = self.tokens.logp_BT.detach().clone().requires_grad_()
        return replace(self, tokens=replace(self.tokens, logp_BT=leaf_BT)), leaf_BT


def check(case: Case, kernels: Kernels, *, tolerance: float = 2e-6) -> None:
    """Loss, sums and gradient of the kernel are those of the definition, by autograd in float64."""
    ours, our_leaf_BT = case.with_leaf()
    wide, wide_leaf_BT = case.wide().with_leaf()
    fused = fused_policy_loss(ours.tokens, ours.terms, ours.denominator, kernels=kernels)
    assert fused is not None
    loss, sums_S = fused
    exact_loss, exact = policy_loss(wide.tokens, wide.terms, wide.denominator, 1.0)
    # A sum's rounding grows with the sum of magnitudes, here at most a few per token.
    size = max(1, case.tokens.mask_BT.numel()) * tolerance
    torch.testing.assert_close(loss.detach().double(), exact_loss.detach(), atol=size, rtol=1e-5)
    torch.testing.assert_close(sums_S, exact.pack(), atol=size, rtol=1e-5)
    (found_BT,) = torch.autograd.grad(3.0 * loss, our_leaf_BT)
    (expected_BT,) = torch.autograd.grad(3.0 * exact_loss, wide_leaf_BT)
    step = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[found_BT.dtype]
    torch.testing.assert_close(found_BT.double(), expected_BT, atol=10 * tolerance, rtol=1e-5 + step)
