"""`torch.ops.tunesmith.sample` and `sample_score`: the Triton sampler as operators that torch.compile knows.

They do not wait for the device and read nothing of the host's but shapes, so they can stand in a CUDA graph. Triton is
imported by the first call, not here.

Shape legend: B rows, V vocabulary, S slots.
"""

import torch

from tunesmith.kernels.arguments import with_dense_rows


@torch.library.custom_op("tunesmith::sample", mutates_args=())
def sample(
    logits_BV: torch.Tensor,
    settings_B4: torch.Tensor,
    integers_B6: torch.Tensor,
    changed_BV: torch.Tensor | None,
    seen_SV: torch.Tensor | None,
    filters: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(token_B int64, scores_B2 float32, status_B int32) for each row of logits; `torch_impl.sample` is the definition.

    The scores are the log-prob under what was drawn from, and under the model. A status that is not 0 says that there
    is no token: 1 a logit is not finite, 2 the bias forbids all, 3 bias or penalty overflow.

    `settings_B4` float64: temperature, top_p, min_p, repetition penalty. `integers_B6` int64: top_k (0 is off), row of
    `seen_SV`, and the four noise keys. `changed_BV`: the logits with a bias, or None. `seen_SV`: bool, what the penalty
    applies to, or None. Without `filters` neither top_k nor top_p nor min_p is looked at.
    """
    from tunesmith.kernels.sample.triton_impl import Rows, draw

    changed_BV = None if changed_BV is None else with_dense_rows(changed_BV)
    seen_SV = None if seen_SV is None else with_dense_rows(seen_SV)
    given = (settings_B4.contiguous(), integers_B6.contiguous(), changed_BV, seen_SV, filters)
    return draw(Rows(with_dense_rows(logits_BV), *given))


@torch.library.custom_op("tunesmith::sample_score", mutates_args=())
def sample_score(logits_BV: torch.Tensor, token_B: torch.Tensor, temperature_B: torch.Tensor) -> torch.Tensor:
    """Log-prob of given tokens [B], float32, with the bits of the second score of `sample`; NaN where a logit of the
    row is not finite. `temperature_B` is float64, and 0 counts as 1.
    """
    from tunesmith.kernels.sample.triton_impl import score

    return score(with_dense_rows(logits_BV), token_B.contiguous(), temperature_B.contiguous())


@sample.register_fake
def _(logits_BV: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_rows = logits_BV.shape[0]
    return (
        logits_BV.new_empty(num_rows, dtype=torch.int64),
        logits_BV.new_empty((num_rows, 2), dtype=torch.float32),
        logits_BV.new_empty(num_rows, dtype=torch.int32),
    )


@sample_score.register_fake
def _(logits_BV: torch.Tensor, *_: object) -> torch.Tensor:
    return logits_BV.new_empty(logits_BV.shape[0], dtype=torch.float32)
