"""The objective of a micro-batch: what it says of its gradient is so, and a step learns the same either way."""

from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import PROMPTS, grpo_recipe, ppo_recipe
from torch.utils.flop_counter import FlopCounterMode

from tunesmith.batch.pack import PolicyBatch, Sequences
from tunesmith.config.policy_sections import GRPOSection
from tunesmith.config.rollout_sections import ImportanceSection
from tunesmith.trainers import grpo, ppo, rollouts
from tunesmith.trainers.objective import Objective, Weights, objective_of

LENGTHS = (5, 1, 3)


def normal(seed: int) -> torch.Tensor:
    return torch.randn(len(LENGTHS), max(LENGTHS), generator=torch.Generator().manual_seed(seed))


MASK_BT = torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]


def objective(is_single: bool = False, level: str = "token", **options: Any) -> Objective:
    section = GRPOSection.model_validate({"kl": {"coef": 0.3}, "entropy_coef": 0.1, **options})
    zero_B = torch.zeros(len(LENGTHS), dtype=torch.int64)
    logp_BT = normal(0) * MASK_BT
    sequences = Sequences(zero_B[:, None], zero_B, zero_B, MASK_BT, logp_BT + 0.2 * normal(1), logp_BT)
    micro = PolicyBatch(sequences, logp_BT + 0.1 * normal(2), logp_BT + 0.1 * normal(3), normal(4) * MASK_BT)
    denominator = torch.tensor([[3.0], [7.0], [2.0]]) if section.loss_normalization == "sequence" else 9.0
    importance = ImportanceSection.model_validate({"level": level})
    return objective_of(section, importance, micro, Weights(denominator, 11.0, 0.3), is_single=is_single)


@pytest.mark.parametrize("is_single", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_normalization": "sequence", "entropy_coef": 0.0},
        {"kl": {"coef": 0.2, "place": "reward"}, "dual_clip": 3.0},
        {"surrogate": "cispo", "kl": {"coef": 0.2, "estimator": "k2"}},
        {"kl": {"coef": 0.2, "bias_correction": True}},
    ],
)
def test_what_is_known_of_the_gradient_is_the_gradient(options: dict[str, Any], is_single: bool) -> None:
    goal = objective(is_single, **options)
    logp_BT, entropy_BT = (normal(0) * MASK_BT).requires_grad_(), (normal(5).abs() * MASK_BT).requires_grad_()
    grads = torch.autograd.grad(4 * goal.of(logp_BT, entropy_BT).loss, (logp_BT, entropy_BT), allow_unused=True)
    known = goal.known(lambda loss: 4 * loss)
    assert known is not None
    logp_N, entropy_N = logp_BT[MASK_BT], entropy_BT[MASK_BT]
    with torch.no_grad():
        parts = [known(rows, logp_N[rows], entropy_N[rows]) for rows in (slice(0, 2), slice(2, 8), slice(8, 9))]
    for grad_BT, said in zip(grads, zip(*((one.d_logp_N, one.d_entropy_N) for one in parts), strict=True), strict=True):
        if grad_BT is None:
            assert all(part is None for part in said)
        else:
            torch.testing.assert_close(torch.cat(said), grad_BT[MASK_BT], rtol=1e-6, atol=1e-8)


def test_a_ratio_of_whole_completions_is_not_known_token_by_token() -> None:
    assert objective(importance_sampling_level="sequence").known(lambda loss: loss) is None
    assert objective(level="sequence").known(lambda loss: loss) is None


@pytest.mark.parametrize("trainer", [grpo, ppo])
def test_a_step_in_one_visit_learns_what_a_step_in_two_learns(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vocabulary is tiny, so the bound is lowered until the logits of a micro-batch do not fit; as on a GPU."""
    monkeypatch.setattr("tunesmith.kernels.logprob.head_blocks.ONE_VISIT_ON", {"cpu"})
    found = []
    for chunk_bytes in (2**26, 2**12):
        monkeypatch.setattr("tunesmith.kernels.logprob.head_blocks.CPU_CHUNK_BYTES", chunk_bytes)
        recipe = {grpo: grpo_recipe, ppo: ppo_recipe}[trainer]
        state = trainer.build(recipe(tmp_path, run={"steps": 1}), prompts=PROMPTS, rewards=[low_ids])
        asked = rollouts.prompts_of_step(state.cfg, state.prompts.train, 0)
        with FlopCounterMode(display=False) as counter:
            result = trainer.step(state, asked, 0)
        found.append((result.metrics, list(state.policy.module.parameters()), counter.get_total_flops()))
    (whole, weights, operations), (known, others, fewer) = found
    assert known["entropy"] == pytest.approx(whole["entropy"], rel=1e-5)
    assert known["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)
    assert all(torch.allclose(a, b, atol=1e-5, rtol=1e-3) for a, b in zip(weights, others, strict=True))
    assert fewer == operations  # three products of the output layer, whether its logits are kept or not


def low_ids(completion_ids: Any, **_: object) -> list[float]:
    """Share of the tokens in the lower half of the vocabulary."""
    return [sum(token < 130 for token in ids) / len(ids) for ids in completion_ids]
