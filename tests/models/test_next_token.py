"""Packed sequences are scored as each would be alone, and the padded way gives the same numbers and gradients."""

from typing import Any

import pytest
import torch

from tunesmith.engine.batch.targets import LearntSequence, Targets, pack_targets
from tunesmith.engine.kernels.logprob.head import HeadScores, head_scores
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models import logprob
from tunesmith.engine.models.language_model import FullForward, LanguageModel, TrunkForward, language_model
from tunesmith.engine.models.logprob import next_token_scores
from tunesmith.engine.models.reader import describe
from tunesmith.engine.models.tiny import FAMILIES, tiny_model

SEQUENCES = [
    LearntSequence("a", tuple(range(30, 41)), (range(3, 5), range(8, 11))),
    LearntSequence("b", (50, 51), (range(1, 2),)),
    LearntSequence("c", tuple(range(60, 85)), (range(20, 22),)),
]


def models(family: str) -> tuple[LanguageModel, LanguageModel]:
    """The same weights with the flat decoder and without it."""
    module = tiny_model(family, 0, dtype=torch.float32).model
    packed = language_model(module, Kernels())
    assert packed.decoder is not None
    return packed, LanguageModel(module, FullForward(), packed.kernels)


def gradients(model: LanguageModel, scores: HeadScores) -> list[torch.Tensor]:
    model.module.zero_grad()
    (scores.logp_N.sum() + 0.3 * scores.entropy_N.sum()).backward()
    return [p.grad.clone() for p in model.module.parameters() if p.grad is not None]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_padded_and_one_at_a_time_agree(family: str) -> None:
    packed, padded = models(family)
    targets = pack_targets(SEQUENCES)
    ours = next_token_scores(packed, targets)
    theirs = next_token_scores(padded, targets)
    logp: list[float] = []
    for sequence in SEQUENCES:  # transformers' own forward, one whole sequence at a time
        logits_SV = packed.module(torch.tensor([sequence.ids])).logits[0].float()
        logp += [logits_SV[i - 1].log_softmax(-1)[sequence.ids[i]].item() for span in sequence.spans for i in span]
    torch.testing.assert_close(ours.logp_N, torch.tensor(logp), rtol=1e-5, atol=1e-5)
    for name in ("logp_N", "entropy_N"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-5, atol=1e-5)
    assert ours.is_top_N.tolist() == theirs.is_top_N.tolist()
    expected = gradients(padded, theirs)
    for one, other in zip(gradients(packed, ours), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_where_the_output_layer_is_known_the_padded_way_never_holds_all_logits(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, padded = models(family)
    known_head = LanguageModel(padded.module, TrunkForward(describe(padded.module).output_layer), padded.kernels)
    targets = pack_targets(SEQUENCES)
    expected = next_token_scores(padded, targets)
    ours = next_token_scores(known_head, targets)
    for name in ("logp_N", "entropy_N"):
        torch.testing.assert_close(getattr(ours, name), getattr(expected, name), rtol=1e-5, atol=1e-5)
    assert ours.is_top_N.tolist() == expected.is_top_N.tolist()
    exact = gradients(padded, expected)
    # Three rows of logits fit.
    monkeypatch.setattr("tunesmith.engine.kernels.logprob.head.CPU_CHUNK_BYTES", 3 * 4 * 259)
    for one, other in zip(gradients(known_head, next_token_scores(known_head, targets)), exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_sequence_is_not_touched_by_its_neighbours() -> None:
    packed, _ = models("llama")
    alone = next_token_scores(packed, pack_targets(SEQUENCES[2:]))
    beside = next_token_scores(packed, pack_targets(SEQUENCES))
    assert torch.equal(beside.logp_N[-2:], alone.logp_N)
    assert torch.equal(beside.entropy_N[-2:], alone.entropy_N)


def test_the_head_sees_the_states_before_learnt_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, padded = models("llama")
    rows: list[int] = []

    def recording(hidden_NH: torch.Tensor, *arguments: Any, **options: Any) -> HeadScores:
        rows.append(len(hidden_NH))
        return head_scores(hidden_NH, *arguments, **options)

    monkeypatch.setattr(logprob, "head_scores", recording)
    head = padded.module.get_output_embeddings()
    assert head is not None
    handle = head.register_forward_hook(lambda module, inputs, output: rows.append(inputs[0].flatten(0, -2).shape[0]))
    for model in (packed, padded):
        next_token_scores(model, pack_targets(SEQUENCES))
    handle.remove()
    assert rows == [8, 8]


def test_the_likeliest_token_is_told_from_the_others() -> None:
    packed, padded = models("llama")
    with torch.no_grad():
        best = int(packed.module(torch.tensor([[40, 41]])).logits[0, -1].argmax())
        other = (best + 1) % 200
        for model in (packed, padded):
            sequences = [LearntSequence(str(last), (40, 41, last), (range(2, 3),)) for last in (best, other)]
            assert next_token_scores(model, pack_targets(sequences)).is_top_N.tolist() == [True, False]


def test_a_backward_pass_may_follow_though_the_logits_are_written_over() -> None:
    packed, _ = models("llama")
    targets: Targets = pack_targets(SEQUENCES[1:2])
    scores = next_token_scores(packed, targets)
    scores.logp_N.sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in packed.module.parameters())
