"""Hidden states, an output layer, and what a loss gives the scores: shared by the tests of this folder.

Shape legend: N rows, H hidden, V vocabulary.
"""

import torch
from torch.nn.functional import linear

from drawn import normal
from tunesmith.engine.kernels.logprob import torch_impl
from tunesmith.engine.kernels.logprob.head import OutputLayer, head_logp_entropy
from tunesmith.engine.kernels.native import Kernels

ROWS, HIDDEN, TOKENS = 45, 32, 700
ROW_BYTES = {torch.float32: 4 * TOKENS, torch.bfloat16: 2 * TOKENS, torch.float64: 8 * TOKENS}
FORMS = [(False, None), (True, None), (False, 5.0), (True, 5.0)]


class Case:
    """Leaves, ids, and the gradients that a loss gives to the scores."""

    def __init__(self, dtype: torch.dtype, has_bias: bool = False, cap: float | None = None, rows: int = ROWS) -> None:
        self.hidden_NH = normal(rows, HIDDEN, seed=0).to(dtype).requires_grad_()
        self.weight_VH = (0.5 * normal(TOKENS, HIDDEN, seed=1)).to(dtype).requires_grad_()
        self.bias_V = normal(TOKENS, seed=2).to(dtype).requires_grad_() if has_bias else None
        self.cap = cap
        self.ids_N = torch.randint(TOKENS, (rows,), generator=torch.Generator().manual_seed(3))
        self.d_logp_N, self.d_entropy_N = normal(rows, seed=4), normal(rows, seed=5)

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [self.hidden_NH, self.weight_VH, *([] if self.bias_V is None else [self.bias_V])]

    def scores(
        self, kernels: Kernels, num_rows: int | None = None, logits: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """By chunks of at most `num_rows` rows of `logits`, by default in the states' dtype; None is one chunk."""
        chunk_bytes = (num_rows or ROWS) * ROW_BYTES[logits or self.hidden_NH.dtype]
        layer = OutputLayer(self.weight_VH, self.bias_V, self.cap)
        return head_logp_entropy(self.hidden_NH, layer, self.ids_N, 0.7, kernels=kernels, chunk_bytes=chunk_bytes)

    def gradients(self, scores: tuple[torch.Tensor, torch.Tensor], retain: bool = False) -> list[torch.Tensor]:
        logp_N, entropy_N = scores
        loss = (logp_N * self.d_logp_N).sum() + (entropy_N * self.d_entropy_N).sum()
        return list(torch.autograd.grad(loss, self.leaves, retain_graph=retain))

    def exact(self) -> list[torch.Tensor]:
        """Gradients by plain autograd in float64."""
        wide = [leaf.detach().double().requires_grad_() for leaf in self.leaves]
        logits_NV = linear(*wide)
        if self.cap is not None:
            logits_NV = self.cap * torch.tanh(logits_NV / self.cap)
        logp_N, entropy_N = torch_impl.chosen_logp_entropy(logits_NV, self.ids_N, 0.7)
        loss = (logp_N * self.d_logp_N).sum() + (entropy_N * self.d_entropy_N).sum()
        return list(torch.autograd.grad(loss, wide))
