"""What a run leaves behind loads with plain transformers."""

import json

import pytest
import torch
import yaml
from oracles import tiny_classifier
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    pipeline,
)

from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import ModelError, RunError
from tunesmith.engine.models.export import ModelCard, load_value_head, render_card, save_final
from tunesmith.engine.models.heads import ScalarHead
from tunesmith.engine.models.load import load_policy, load_reward_model, new_reward_model
from tunesmith.engine.models.tiny import FAMILIES, tiny_model

CARD = ModelCard(
    base_model="smollm2", algorithm="PPO", metrics={"reward": 0.123456, "steps": 9}, recipe={"run": {"steps": 9}}
)
IDS = torch.randint(3, 259, (3, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_policy_makes_the_round_trip(family, dtype, tmp_path):
    loaded = tiny_model(family, dtype=dtype)
    folder = save_final(loaded.model, loaded.tokenizer, tmp_path / "final", CARD)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    assert torch.equal(model(IDS).logits, loaded.model(IDS).logits)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "hé"}]
    arguments = {"add_generation_prompt": True, "return_dict": False}
    assert tokenizer.apply_chat_template(chat, **arguments) == loaded.tokenizer.apply_chat_template(chat, **arguments)
    generation_config = GenerationConfig.from_pretrained(folder)
    assert (generation_config.eos_token_id, generation_config.pad_token_id) == (2, 2)
    again = load_policy(ModelSection(name=str(folder)), dtype=dtype).model.state_dict()
    assert all(torch.equal(tensor, again[key]) for key, tensor in loaded.model.state_dict().items())


def test_the_cache_of_generation_is_on_in_the_folder_though_training_has_it_off(tmp_path):
    loaded = load_policy(ModelSection(name="tiny:llama"))
    assert loaded.model.config.use_cache is False
    folder = save_final(loaded.model, loaded.tokenizer, tmp_path / "final", CARD)
    assert json.loads((folder / "config.json").read_text())["use_cache"] is True
    assert loaded.model.config.use_cache is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_reward_model_makes_the_round_trip_and_plain_logits_are_its_rewards(family, dtype, tmp_path):
    section = ModelSection(name=f"tiny:{family}", seed=1)
    reward_model = new_reward_model(section, dtype=dtype)
    torch.nn.init.normal_(reward_model.model.score.weight)
    folder = save_final(reward_model, reward_model.tokenizer, tmp_path / "final", CARD)
    plain = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    assert (plain.config.num_labels, tuple(plain.score.weight.shape)) == (1, (1, 32))
    lengths_B = torch.tensor([9, 4, 6])
    ids_BS = IDS.clone()
    ids_BS[torch.arange(3), lengths_B - 1] = 2
    ids_BS[torch.arange(9) >= lengths_B[:, None]] = plain.config.pad_token_id
    mask_BS = (torch.arange(9) < lengths_B[:, None]).long()
    again = load_reward_model(str(folder), dtype=torch.float32)
    expected_B = plain(ids_BS, attention_mask=mask_BS).logits[:, 0]
    torch.testing.assert_close(again(ids_BS, lengths_B), expected_B, atol=1e-5, rtol=1e-5)
    assert torch.equal(again.model.score.weight, reward_model.model.score.weight)
    # And as a user would: in the dtype of the files, where an fp32 score on a bf16 trunk must not raise.
    assert AutoModelForSequenceClassification.from_pretrained(folder)(ids_BS).logits.isfinite().all()
    assert AutoTokenizer.from_pretrained(folder).pad_token_id == plain.config.pad_token_id


def test_a_two_label_classifier_serves_as_reward_after_the_round_trip(tmp_path):
    loaded = tiny_classifier("llama", num_labels=2)
    loaded.model.config.id2label = {0: "bad", 1: "good"}
    folder = save_final(loaded.model, loaded.tokenizer, tmp_path / "final", CARD)
    lengths_B = torch.tensor([9, 9, 9])
    logits_BK = loaded.model(IDS).logits
    raw = load_reward_model(str(folder), label="good", dtype=torch.float32)
    odds = load_reward_model(str(folder), label="good", transform="log_odds", dtype=torch.float32)
    torch.testing.assert_close(raw(IDS, lengths_B), logits_BK[:, 1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(odds(IDS, lengths_B), logits_BK[:, 1] - logits_BK[:, 0], atol=1e-5, rtol=1e-5)
    with pytest.raises(ModelError, match=r"set label to one of 0 \(bad\), 1 \(good\)"):
        load_reward_model(str(folder))


def test_the_text_pipeline_runs_on_the_folder(tmp_path):
    loaded = tiny_model("llama")
    folder = save_final(loaded.model, loaded.tokenizer, tmp_path / "final", CARD)
    result = pipeline("text-generation", model=str(folder))("The film", max_new_tokens=3, do_sample=False)
    assert result[0]["generated_text"].startswith("The film")


def test_the_value_head_lies_beside_the_weights(tmp_path):
    loaded = tiny_model("llama")
    head = ScalarHead(32)
    torch.nn.init.normal_(head.weight)
    folder = save_final(loaded.model, loaded.tokenizer, tmp_path / "final", CARD, value_head=head)
    assert torch.equal(load_value_head(folder).weight, head.weight)
    assert load_value_head(save_final(loaded.model, loaded.tokenizer, tmp_path / "none", CARD)) is None


def test_a_folder_that_was_there_is_replaced_whole(tmp_path):
    loaded = tiny_model("llama")
    target = tmp_path / "final"
    target.mkdir()
    (target / "old.txt").write_text("x")
    save_final(loaded.model, loaded.tokenizer, target, CARD)
    assert not (target / "old.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_a_place_that_cannot_be_written_is_a_run_error(tmp_path):
    (tmp_path / "file").write_text("x")
    loaded = tiny_model("llama")
    with pytest.raises(RunError, match="cannot write the model"):
        save_final(loaded.model, loaded.tokenizer, tmp_path / "file" / "final", CARD)


def test_the_card_has_front_matter_for_the_hub_and_the_recipe(tmp_path):
    loaded = tiny_model("llama")
    text = (save_final(loaded.model, loaded.tokenizer, tmp_path / "final", CARD) / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    fields = yaml.safe_load(front)
    assert fields["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert fields["pipeline_tag"] == "text-generation"
    assert "ppo" in fields["tags"]
    assert "| `reward` | 0.1235 |" in body
    assert "steps: 9" in body


def test_a_local_path_is_no_base_model_for_the_hub(tmp_path):
    card = ModelCard(base_model=str(tmp_path), algorithm="reward")
    text = render_card(card, is_classifier=True, is_adapter=False)
    assert "base_model:" not in text
    assert "pipeline_tag: text-classification" in text
