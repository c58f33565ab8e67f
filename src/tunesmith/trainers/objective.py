"""The policy loss of a micro-batch as a function of the current log-probs.

Shape legend: B sequences, T completion tokens.
"""

from dataclasses import dataclass

from torch import Tensor

from tunesmith.algorithms import importance, policy_loss
from tunesmith.algorithms.importance import Correction
from tunesmith.algorithms.policy_loss import PolicyStats
from tunesmith.algorithms.sums import Denominator
from tunesmith.batch.pack import PolicyBatch
from tunesmith.config.algorithm_sections import GRPOSection, PPOSection
from tunesmith.config.rollout_sections import ImportanceSection
from tunesmith.kernels.policy_loss.records import PolicyTerms, PolicyTokens


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The loss, a scalar with gradients to log-probs and entropies; statistics of its surrogate; importance weights."""

    loss: Tensor
    stats: PolicyStats
    drawn: Correction


@dataclass(frozen=True, slots=True)
class Objective:
    """Surrogate, entropy bonus and KL of some tokens, all `[B, T]`: `algorithms.policy_loss.objective`.

    `advantage_BT` are without importance weights, which `importance` asks for: the engine may have drawn from another
    distribution than the policy's, `sampled_logp_BT`. `old_logp_BT` is None where the policy of now is the old one.
    """

    terms: PolicyTerms
    importance: ImportanceSection
    mask_BT: Tensor
    advantage_BT: Tensor
    sampled_logp_BT: Tensor
    old_logp_BT: Tensor | None
    reference_logp_BT: Tensor | None
    denominator: Denominator
    num_tokens: float

    def of(self, logp_BT: Tensor, entropy_BT: Tensor) -> Evaluated:
        """The loss of tokens of which the policy says this."""
        old_logp_BT = logp_BT.detach() if self.old_logp_BT is None else self.old_logp_BT
        drawn = importance.correction(old_logp_BT, self.sampled_logp_BT, self.mask_BT, self.importance)
        tokens = PolicyTokens(
            logp_BT,
            old_logp_BT,
            self.advantage_BT * drawn.weight_BT,
            self.mask_BT,
            self.reference_logp_BT,
            entropy_BT if self.terms.entropy_coef > 0 else None,
        )
        loss, stats = policy_loss.objective(tokens, self.terms, self.denominator, self.num_tokens)
        return Evaluated(loss, stats, drawn)


@dataclass(frozen=True, slots=True)
class Weights:
    """What sums are divided by, over all micro-batches and ranks, and what the KL in the loss is multiplied by."""

    denominator: Denominator
    num_tokens: float
    kl_coef: float


def objective_of(
    section: PPOSection | GRPOSection,
    importance_section: ImportanceSection,
    micro: PolicyBatch,
    weights: Weights,
    *,
    is_single: bool = False,
) -> Objective:
    """The objective of a micro-batch as the recipe has it; `is_single`: the policy of now is the one that drew."""
    kl_coef = weights.kl_coef if section.kl.place == "loss" else 0.0
    return Objective(
        terms=policy_loss.terms_of(section, section.kl, kl_coef),
        importance=importance_section,
        mask_BT=micro.sequences.mask_BT,
        advantage_BT=micro.advantage_BT,
        sampled_logp_BT=micro.sequences.sampled_logp_BT,
        old_logp_BT=None if is_single else micro.old_logp_BT,
        reference_logp_BT=micro.reference_logp_BT if kl_coef > 0 else None,
        denominator=weights.denominator,
        num_tokens=weights.num_tokens,
    )
