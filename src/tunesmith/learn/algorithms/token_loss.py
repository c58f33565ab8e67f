"""The loss of supervised fine-tuning: the negative log-likelihood of the learnt tokens.

Shape legend: N learnt tokens.
"""

from dataclasses import dataclass

from torch import Tensor

from tunesmith.engine.kernels.masking import Denominator, check_denominator, check_shapes, total
from tunesmith.learn.algorithms.sums import Sums


@dataclass(frozen=True, slots=True)
class TokenStats(Sums):
    """Sums over learnt tokens: their number, -log p and entropy in nats, and how many were the most likely one."""

    tokens: Tensor
    loss: Tensor
    entropy: Tensor
    top: Tensor

    def metrics(self) -> dict[str, float]:
        """The means, by TRL's names."""
        sums = self.floats()
        tokens = sums["tokens"]
        return {
            "loss": sums["loss"] / tokens,
            "mean_token_accuracy": sums["top"] / tokens,
            "entropy": sums["entropy"] / tokens,
        }


def negative_log_likelihood(
    logp_N: Tensor, entropy_N: Tensor, is_top_N: Tensor, *, num_tokens: Denominator
) -> tuple[Tensor, TokenStats]:
    """Scalar loss -sum(log p) / `num_tokens`, differentiable through `logp_N`, and detached statistics.

    `num_tokens` counts the learnt tokens of the whole step, so that micro-batches add up to the mean over all of them,
    and a long demonstration weighs as much as its tokens. `is_top_N` is true where no token was more likely than the
    learnt one. Raises InputError if the shapes differ or `num_tokens` is not positive.
    """
    check_shapes(logp_N=logp_N, entropy_N=entropy_N, is_top_N=is_top_N)
    check_denominator("num_tokens", num_tokens)
    loss = -logp_N.sum() / num_tokens
    ones_N = is_top_N.new_ones(is_top_N.shape)
    return loss, TokenStats(total(ones_N), -total(logp_N), total(entropy_N), total(is_top_N))
