"""Models by name: every form, and every wrong name with what to do about it.

What may be in a model's folder is tested in test_folder_check.py.
"""

import shutil
import subprocess
import sys

import pytest
import torch
from oracles import tiny_classifier

from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import ModelError
from tunesmith.engine.models.export import ModelCard, save_final
from tunesmith.engine.models.load import (
    compute_dtype,
    find_folder,
    load_policy,
    load_reward_model,
    new_reward_model,
)
from tunesmith.engine.models.lora import frozen_copy
from tunesmith.engine.models.tiny import FAMILIES, tiny_model

CARD = ModelCard(base_model="tiny:llama", algorithm="PPO")


@pytest.fixture
def folder(tmp_path):
    loaded = tiny_model("llama")
    return save_final(loaded.model, loaded.tokenizer, tmp_path / "model", CARD)


@pytest.mark.parametrize("name", ["scratch", *(f"tiny:{family}" for family in FAMILIES)])
def test_models_made_in_code_have_names(name):
    loaded = load_policy(ModelSection(name=name, seed=5))
    again = load_policy(ModelSection(name=name, seed=5)).model.state_dict()
    assert all(torch.equal(tensor, again[key]) for key, tensor in loaded.model.state_dict().items())
    assert (loaded.source, loaded.tokenizer.padding_side, loaded.model.training) == (name, "right", False)


def test_a_folder_and_the_run_above_it_load_the_same_weights(folder, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(folder, run / "final")
    first, second = (load_policy(ModelSection(name=str(path))).model.state_dict() for path in (folder, run))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_run_without_a_final_model_is_refused(tmp_path):
    (tmp_path / "recipe.yaml").write_text("algorithm: ppo\n")
    with pytest.raises(ModelError, match="did not finish"):
        load_policy(ModelSection(name=str(tmp_path)))


def test_dtype_and_gradient_checkpointing_come_from_the_section(folder):
    section = ModelSection(name=str(folder), dtype="bfloat16", gradient_checkpointing=True)
    loaded = load_policy(section)
    assert loaded.dtype == loaded.model.dtype == torch.bfloat16
    assert loaded.model.is_gradient_checkpointing
    assert load_policy(section, dtype=torch.float32).model.dtype == torch.float32


def test_a_tokenizer_without_padding_pads_with_its_eos(folder):
    loaded = tiny_model("llama")
    loaded.tokenizer.pad_token = None
    loaded.tokenizer.padding_side = "left"
    loaded.tokenizer.save_pretrained(folder)
    tokenizer = load_policy(ModelSection(name=str(folder))).tokenizer
    assert (tokenizer.pad_token_id, tokenizer.padding_side) == (tokenizer.eos_token_id, "right")


def test_pickled_weights_are_refused_naming_safetensors(folder):
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    for load in (lambda name: load_policy(ModelSection(name=name)), load_reward_model):
        with pytest.raises(ModelError, match=r"only pytorch_model\.bin, which can run code.*reads safetensors alone"):
            load(str(folder))


def test_damaged_weights_are_a_model_error(folder):
    (folder / "model.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(ModelError, match=r"cannot load.*header"):
        load_policy(ModelSection(name=str(folder)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./missing/folder", "does not exist and is no hub id; give a hub id, a local folder"),
        ("missing.gguf", "does not exist"),
        ("a/b/c", "does not exist and is no hub id"),
        ("tiny:mamba", "families are llama"),
        ("", "does not exist|no config.json"),
    ],
)
def test_names_that_lead_nowhere_say_what_is_allowed(name, message):
    with pytest.raises(ModelError, match=message):
        load_policy(ModelSection(name=name))


def test_folders_and_files_that_are_no_models_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        find_folder(str(tmp_path))
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelError, match=r"is no model folder or \.gguf file"):
        find_folder(str(tmp_path / "notes.txt"))


def test_a_missing_hub_id_without_network_says_what_to_do(tmp_path):
    # In a process of its own: the hub library reads HF_HUB_OFFLINE when it is imported.
    code = (
        "from tunesmith.engine.models.load import load_policy\n"
        "from tunesmith.base.config.sections import ModelSection\n"
        "from tunesmith.base.core.errors import ModelError\n"
        "try:\n    load_policy(ModelSection(name='nobody/nothing'))\n"
        "except ModelError as error:\n    print(error)\n"
    )
    environment = {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": ":".join(sys.path),
    }
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert "cannot get 'nobody/nothing' from the hub" in done.stdout
    assert "HF_HUB_OFFLINE is set" in done.stdout
    assert "give a folder" in done.stdout


def test_a_language_model_is_no_reward_model_and_the_other_way_round(folder, tmp_path):
    with pytest.raises(ModelError, match=r"no reward model: its weights lack score\.weight"):
        load_reward_model(str(folder))
    loaded = tiny_classifier("qwen2")
    classifier = save_final(loaded.model, loaded.tokenizer, tmp_path / "classifier", CARD)
    with pytest.raises(ModelError, match=r"no complete language model: its weights lack lm_head\.weight"):
        load_policy(ModelSection(name=str(classifier)))
    with pytest.raises(ModelError, match="no trained reward head"):
        load_reward_model("tiny:llama")


def test_a_reward_model_starts_from_the_weights_of_a_folder(folder):
    reward_model = new_reward_model(ModelSection(name=str(folder), dtype="float32"))
    base = tiny_model("llama").model.base_model.state_dict()
    assert all(torch.equal(tensor, base[key]) for key, tensor in reward_model.model.base_model.state_dict().items())
    again = new_reward_model(ModelSection(name=str(folder)))
    assert torch.equal(reward_model.model.score.weight, again.model.score.weight)


def test_a_trained_reward_model_keeps_its_head_when_trained_further(tmp_path):
    first = new_reward_model(ModelSection(name="tiny:llama", seed=1, dtype="float32"))
    torch.nn.init.normal_(first.model.score.weight)
    saved = save_final(first, first.tokenizer, tmp_path / "reward", CARD)
    second = new_reward_model(ModelSection(name=str(saved), seed=2, dtype="float32"))
    assert torch.equal(first.model.score.weight, second.model.score.weight)


def test_a_loaded_reward_model_is_frozen(tmp_path):
    first = new_reward_model(ModelSection(name="tiny:llama"))
    saved = save_final(first, first.tokenizer, tmp_path / "reward", CARD)
    loaded = load_reward_model(str(saved))
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_frozen_copy_shares_nothing_and_takes_no_gradient(family):
    model = tiny_model(family).model
    twin = frozen_copy(model)
    expected = [parameter.clone() for parameter in twin.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(a, b) for a, b in zip(expected, twin.parameters(), strict=True))
    assert not any(parameter.requires_grad for parameter in twin.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert twin.num_parameters() == model.num_parameters()


def test_the_embedding_of_a_padding_token_that_is_the_eos_learns_like_any_other(folder):
    model = load_policy(ModelSection(name=str(folder))).model
    model.base_model(torch.tensor([[5, 2, 7]])).last_hidden_state.sum().backward()
    assert model.get_input_embeddings().weight.grad[2].abs().sum() > 0


def test_rotary_frequencies_stay_in_float32():
    exact, coarse = (tiny_model("llama", dtype=dtype).model for dtype in (torch.float32, torch.bfloat16))
    assert torch.equal(exact.model.rotary_emb.inv_freq, coarse.model.rotary_emb.inv_freq)


def test_dtypes_go_by_name():
    assert compute_dtype("bfloat16") == torch.bfloat16
    assert compute_dtype("auto") in (torch.float32, torch.bfloat16)
    with pytest.raises(ModelError, match="no dtype 'int8'"):
        compute_dtype("int8")
