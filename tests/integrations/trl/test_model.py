"""The packed answer to TRL's fused call: which tokens it computes, and when it leaves them to TRL.

Dimension letters: B rows, S columns.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from transformers import OPTConfig, OPTForCausalLM
from transformers.integrations.neftune import activate_neftune
from trl.trainer.utils import add_fused_lm_head

from tunesmith.engine.models.tiny import tiny_model
from tunesmith.integrations.trl.model import (
    LabelledTokens,
    LiveModels,
    Twin,
    evaluating,
    install,
    labelled_tokens,
    unwrapped,
)

FIELDS = ("log_probs", "entropy", "mean_logits", "is_top1")


def batch(padding_side: str) -> dict[str, torch.Tensor]:
    """Four rows of 12 columns, two of which share a prompt; the last 5 tokens of each are labelled."""
    generator = torch.Generator().manual_seed(0)
    ids_BS = torch.randint(3, 259, (4, 12), generator=generator)
    ids_BS[2, :6] = ids_BS[0, :6]
    mask_BS = torch.ones_like(ids_BS)
    labels_BS = ids_BS.masked_fill(torch.arange(12) < 7, -100)
    for row, width in ((1, 3), (3, 5)):
        part = slice(0, width) if padding_side == "left" else slice(12 - width, 12)
        mask_BS[row, part], ids_BS[row, part], labels_BS[row, part] = 0, 2, -100
    return {"input_ids": ids_BS, "attention_mask": mask_BS, "labels": labels_BS}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2"])
@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_all_fields_and_gradients_are_those_of_trl(family: str, padding_side: str, temperature: float):
    ours, theirs = tiny_model(family).model, tiny_model(family).model
    for model in (ours, theirs):
        add_fused_lm_head(model, temperature=temperature, outputs=FIELDS)
    install(ours, LiveModels(), autocast=nullcontext, temperature=temperature)
    found, expected = (model(**batch(padding_side), fused_lm_head=True) for model in (ours, theirs))
    assert torch.allclose(found.loss, expected.loss, atol=1e-5)
    assert torch.equal(found.label_mask, expected.label_mask)
    for name in FIELDS:
        if getattr(found, name) is None:
            assert (name == "is_top1" and temperature != 1) or (name == "mean_logits" and family == "gemma2")
        else:
            assert torch.allclose(getattr(found, name).float(), getattr(expected, name).float(), atol=1e-4), name
    for result in (found, expected):
        (result.loss + result.entropy.sum()).backward()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine.grad, other.grad, atol=1e-4, rtol=1e-3), name


def test_several_sequences_of_a_row_are_told_apart_by_their_positions():
    ours, theirs = tiny_model("llama").model, tiny_model("llama").model
    for model in (ours, theirs):
        add_fused_lm_head(model)
    install(ours, LiveModels(), autocast=nullcontext)
    ids_BS = torch.arange(3, 13)[None]
    positions_BS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    labels_BS = ids_BS.masked_fill(positions_BS == 0, -100)
    found = ours(input_ids=ids_BS, position_ids=positions_BS, labels=labels_BS, fused_lm_head=True)
    alone = [
        theirs(input_ids=ids_BS[:, part], labels=ids_BS[:, part], fused_lm_head=True).log_probs
        for part in (slice(0, 4), slice(4, 10))
    ]
    expected = torch.cat([alone[0], torch.zeros(1, 1), alone[1]], 1)
    assert torch.allclose(found.log_probs, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("mask", "labels", "positions", "said"),
    [
        ([1, 1, 0, 1], [-100, 5, -100, 5], None, "gaps"),
        ([1, 1, 1, 1], [-100] * 4, None, "no labelled token"),
        ([0, 1, 1, 1], [-100, 5, 5, 5], None, "no token before"),
        ([1, 1, 1, 1], [-100, 5, 5, 5], [0, 1, 3, 4], "positions"),
    ],
)
def test_what_cannot_be_packed_is_named(mask: list[int], labels: list[int], positions: list[int] | None, said: str):
    ids_BS = torch.tensor([[7, 5, 5, 5]])
    places = None if positions is None else torch.tensor([positions])
    found = labelled_tokens(ids_BS, torch.tensor([labels]), torch.tensor([mask]), places)
    assert isinstance(found, str)
    assert said in found


def test_rows_of_one_prompt_are_neighbours_and_those_without_labels_are_gone():
    ids_BS = torch.tensor([[9, 9, 1, 2], [5, 6, 1, 2], [9, 9, 3, 4], [8, 8, 8, 8]])
    labels_BS = ids_BS.clone()
    labels_BS[:, :2], labels_BS[3] = -100, -100
    found = labelled_tokens(ids_BS, labels_BS, None, None)
    assert isinstance(found, LabelledTokens)
    assert found.ids_RL.tolist() == [[5, 6, 1], [9, 9, 1], [9, 9, 3]]
    assert found.row_N.tolist() == [1, 1, 0, 0, 2, 2]


def test_an_unknown_family_is_computed_by_trl_and_named_once(caplog: pytest.LogCaptureFixture):
    config = OPTConfig(
        vocab_size=259, hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, num_hidden_layers=1, num_attention_heads=4
    )
    model = OPTForCausalLM(config).eval()
    add_fused_lm_head(model)
    expected = model(**batch("right"), fused_lm_head=True).log_probs
    install(model, LiveModels(), autocast=nullcontext)
    for _ in range(2):
        torch.testing.assert_close(model(**batch("right"), fused_lm_head=True).log_probs, expected)
    said = [record.message for record in caplog.records if "OPTModel" in record.message]
    assert len(said) == 1


@pytest.mark.parametrize("change", ["dropout", "hook", "forward", "neftune"])
def test_a_part_that_only_its_own_forward_computes_is_left_to_trl(change: str, caplog: pytest.LogCaptureFixture):
    model = tiny_model("gpt2" if change == "dropout" else "llama").model
    if change == "dropout":
        model.transformer.h[0].mlp.dropout.p = 0.5
        model.train()
    elif change == "hook":
        model.model.layers[0].register_forward_hook(lambda *_: None)
    elif change == "neftune":  # which reads the number of rows from the embedding's output: a traceback, issue 45.26
        activate_neftune(model, 5.0)
    else:
        model.model.norm.forward = nn.Identity().forward
    models = LiveModels()
    assert models.get(model) is None
    assert any(change in record.message for record in caplog.records)


def test_a_call_without_the_fused_head_is_the_models_own():
    model = tiny_model("llama").model
    expected = model(input_ids=torch.arange(3, 9)[None]).logits
    install(model, LiveModels(), autocast=nullcontext)
    torch.testing.assert_close(model(input_ids=torch.arange(3, 9)[None]).logits, expected)


def test_autocast_gives_the_bits_of_weights_in_bfloat16():
    live = tiny_model("llama").model
    half = tiny_model("llama", dtype=torch.bfloat16).model
    results = []
    for model, autocast in ((live, lambda: torch.autocast("cpu", torch.bfloat16)), (half, nullcontext)):
        add_fused_lm_head(model)
        install(model, LiveModels(), autocast=autocast)
        results.append(model(**batch("left"), fused_lm_head=True))
    assert torch.equal(results[0].log_probs, results[1].log_probs)
    results[0].loss.backward()
    assert all(one.grad is not None and one.grad.dtype == torch.float32 for one in live.parameters())


def test_a_twin_follows_the_live_model_and_leaves_it_alone():
    live = tiny_model("llama").model
    model = LiveModels().get(live)
    assert model is not None
    twin = Twin(model, torch.bfloat16)
    with torch.no_grad():
        live.model.norm.weight.mul_(3)
    assert all(one.dtype == torch.float32 for one in live.parameters())
    twin.refresh()
    assert torch.equal(twin.model.module.model.norm.weight.float(), live.model.norm.weight)


def test_evaluation_mode_ends_as_it_began():
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    model[1].eval()
    with evaluating(model):
        assert not any(part.training for part in model.modules())
    assert [part.training for part in model] == [True, False]
    assert unwrapped(model) is model
