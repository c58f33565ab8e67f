"""Reward models: reading the last token by length, labels, log-odds; heads in float32."""

import pytest
import torch
from oracles import tiny_classifier
from transformers import AutoModelForSequenceClassification, DistilBertConfig

from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import ModelError
from tunesmith.engine.models.heads import Critic, RewardModel, ScalarHead
from tunesmith.engine.models.load import new_reward_model
from tunesmith.engine.models.lora import frozen_copy
from tunesmith.engine.models.tiny import FAMILIES, byte_tokenizer, tiny_model

LENGTHS = torch.tensor([7, 3, 10, 1])


def padded(pad_id):
    """Right-padded rows that hold eos (2) and id 0 inside and end with eos, as rollouts do."""
    ids_BS = torch.randint(3, 259, (4, 10), generator=torch.Generator().manual_seed(0))
    ids_BS[:, 0] = 2
    ids_BS[torch.arange(4), LENGTHS - 1] = 2
    ids_BS[torch.arange(10) >= LENGTHS[:, None]] = pad_id
    return ids_BS


def classifier(num_labels=1, family="llama", dtype=torch.float32, **options):
    loaded = tiny_classifier(family, num_labels=num_labels, dtype=dtype)
    return RewardModel(loaded.model, loaded.tokenizer, **options)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pad_id", [0, 2, 50])
def test_each_row_is_scored_at_its_last_token_whatever_pads_it(family, pad_id):
    reward_model = classifier(family=family)
    ids_BS = padded(pad_id)
    alone = torch.cat(
        [reward_model.model(ids_BS[b : b + 1, :n]).logits[0] for b, n in enumerate(LENGTHS.tolist()) if n]
    )
    single = torch.cat(
        [reward_model(ids_BS[b : b + 1, :n], LENGTHS[b : b + 1]) for b, n in enumerate(LENGTHS.tolist())]
    )
    torch.testing.assert_close(reward_model(ids_BS, LENGTHS), single, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(single, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("label", [1, "1", "positive", "POSITIVE"])
def test_a_label_by_index_or_name_picks_its_logit_raw_or_as_log_odds(label):
    loaded = tiny_classifier("llama", num_labels=3)
    loaded.model.config.id2label = {0: "NEGATIVE", 1: "POSITIVE", 2: "NEUTRAL"}
    ids_BS = padded(0)
    logits_BK = loaded.model(ids_BS).logits
    raw = RewardModel(loaded.model, loaded.tokenizer, label=label)
    odds = RewardModel(loaded.model, loaded.tokenizer, label=label, transform="log_odds")
    torch.testing.assert_close(raw(ids_BS, LENGTHS), logits_BK[:, 1], atol=1e-5, rtol=1e-5)
    p_B = logits_BK.softmax(-1)[:, 1]
    torch.testing.assert_close(odds(ids_BS, LENGTHS), (p_B / (1 - p_B)).log(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("num_labels", "options", "message"),
    [
        (2, {}, r"2 labels and none was chosen; set label to one of 0 \(LABEL_0\), 1"),
        (2, {"label": "good"}, "no label 'good'; its labels are 0"),
        (2, {"label": 5}, "no label 5"),
        (1, {"label": 3}, "one label, so leave label out"),
        (1, {"transform": "log_odds"}, "use transform raw"),
    ],
)
def test_labels_that_the_model_lacks_are_refused(num_labels, options, message):
    with pytest.raises(ModelError, match=message):
        classifier(num_labels, **options)


def test_an_encoder_is_scored_by_its_own_pooling_and_ignores_padding():
    config = DistilBertConfig(vocab_size=259, dim=16, n_layers=1, n_heads=2, hidden_dim=32, num_labels=2)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    reward_model = RewardModel(model, byte_tokenizer(), label=1)
    assert not reward_model.pools_last_token
    ids_BS = padded(0)
    alone = torch.cat([model(ids_BS[b : b + 1, :n]).logits[:, 1] for b, n in enumerate(LENGTHS.tolist())])
    torch.testing.assert_close(reward_model(ids_BS, LENGTHS), alone, atol=1e-5, rtol=1e-5)


def test_lengths_that_do_not_fit_are_refused():
    with pytest.raises(ModelError, match="each row needs 1 token"):
        classifier()(padded(0), torch.tensor([7, 0, 10, 1]))


def test_heads_stay_in_float32_on_a_bfloat16_trunk():
    reward_model = classifier(dtype=torch.bfloat16)
    assert reward_model.model.score.weight.dtype == torch.float32
    assert reward_model(padded(0), LENGTHS).dtype == torch.float32
    values = ScalarHead(32)(torch.ones(2, 3, 32, dtype=torch.bfloat16))
    assert (values.shape, values.dtype) == ((2, 3), torch.float32)


def test_a_value_head_starts_at_zero():
    assert (ScalarHead(8)(torch.randn(2, 8)) == 0).all()


def test_a_critic_made_of_a_frozen_copy_is_trainable_and_has_no_output_layer():
    critic = Critic(frozen_copy(tiny_model("qwen2").model))
    assert all(parameter.requires_grad for parameter in critic.parameters())
    assert not any("lm_head" in name for name, _ in critic.named_parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_reward_model_has_the_trunk_of_its_base_and_a_head_at_zero(family):
    section = ModelSection(name=f"tiny:{family}", seed=3, dtype="float32")
    first = new_reward_model(section)
    base = tiny_model(family, seed=3).model.base_model.state_dict()
    trunk = first.model.base_model.state_dict()
    assert all(torch.equal(trunk[name], tensor) for name, tensor in base.items())
    assert not first.model.score.weight.any()
    assert (first.model.config.num_labels, first.model.config.pad_token_id, first.tokenizer.pad_token_id) == (1, 0, 0)
