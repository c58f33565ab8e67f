"""A model folder from anywhere: nothing in it is run, unless the user says so. Canary files show what ran."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from oracles import tiny_classifier

from tunesmith.apps.cli.main import main
from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import ModelError
from tunesmith.engine.models.export import ModelCard, load_value_head, save_final
from tunesmith.engine.models.folder_check import MAX_CONFIG_BYTES
from tunesmith.engine.models.load import load_policy, load_reward_model, new_reward_model
from tunesmith.engine.models.tiny import tiny_model

CARD = ModelCard(base_model="tiny:llama", algorithm="PPO")

# A model of its own in a file of its own. Importing it leaves the canary.
MODELING = """
import pathlib

from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, LlamaPreTrainedModel, PreTrainedTokenizerFast

pathlib.Path(CANARY).touch()


class MineConfig(LlamaConfig):
    model_type = "mine"


class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig


class MineForSequenceClassification(LlamaPreTrainedModel):
    config_class = MineConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


class MineTokenizer(PreTrainedTokenizerFast):
    pass
"""
AUTO_MAP = {
    "AutoConfig": "modeling_mine.MineConfig",
    "AutoModelForCausalLM": "modeling_mine.MineForCausalLM",
    "AutoModelForSequenceClassification": "modeling_mine.MineForSequenceClassification",
}

LOAD_TRUSTED = """
import sys
from pathlib import Path
from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core import log
from tunesmith.base.core.errors import ModelError
from tunesmith.engine.models.export import ModelCard, save_final
from tunesmith.engine.models.load import load_policy, new_reward_model

log.configure()
section = ModelSection(name=sys.argv[1], trust_remote_code=True)
loaded = load_policy(section)
reward_model = new_reward_model(section)
print(type(loaded.model).__name__, type(loaded.tokenizer).__name__, type(reward_model.model).__name__)
final = save_final(loaded.model, loaded.tokenizer, Path(sys.argv[2]), ModelCard(base_model="x", algorithm="PPO"))
print(type(load_policy(ModelSection(name=str(final), trust_remote_code=True)).model).__name__)
adapters = {"name": str(final), "trust_remote_code": True, "lora": {"rank": 2}}
adapted = load_policy(ModelSection.model_validate(adapters))
card = ModelCard(base_model="x", algorithm="PPO")
folder = save_final(adapted.model, adapted.tokenizer, Path(sys.argv[2]).with_name("adapters"), card)
print(type(load_policy(ModelSection(name=str(folder), trust_remote_code=True)).model).__name__)
for name in (final, folder):
    try:
        load_policy(ModelSection(name=str(name)))
    except ModelError:
        print("refused")
"""

COMPARE = ["compare", "--scorer", "length", "-n", "1", "--max-new-tokens", "2", "--json"]


class LeavesCanary:
    """Unpickling it creates the file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.canary),)


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    loaded = tiny_model("llama")
    return save_final(loaded.model, loaded.tokenizer, tmp_path / "model", CARD)


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    loaded = tiny_classifier("llama")
    return save_final(loaded.model, loaded.tokenizer, tmp_path / "classifier", CARD)


def load_as_policy(folder: Path) -> object:
    return load_policy(ModelSection(name=str(folder)))


def start_reward_model(folder: Path) -> object:
    return new_reward_model(ModelSection(name=str(folder)))


def load_as_reward(folder: Path) -> object:
    return load_reward_model(str(folder))


LOADERS = (load_as_policy, start_reward_model, load_as_reward)
Loader = Callable[[Path], object]


def write_pickle(path: Path, canary: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pickle.dumps(LeavesCanary(canary)))


def change_json(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def give_code(folder: Path, canary: Path) -> None:
    (folder / "modeling_mine.py").write_text(f"CANARY = {str(canary)!r}\n{MODELING}")
    change_json(folder / "config.json", auto_map=AUTO_MAP, model_type="mine")
    tokenizer = {"AutoTokenizer": [None, "modeling_mine.MineTokenizer"]}
    change_json(folder / "tokenizer_config.json", auto_map=tokenizer, tokenizer_class="MineTokenizer")


def test_the_pickle_of_these_tests_does_run_code_when_it_is_read(canary: Path) -> None:
    pickle.loads(pickle.dumps(LeavesCanary(canary)))
    assert canary.exists()


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.ckpt", "deeper/model.pth", "model.pkl"])
def test_a_pickle_in_place_of_weights_is_refused_with_the_alternative_named(
    classifier: Path, canary: Path, load: Loader, name: str
) -> None:
    (classifier / "model.safetensors").unlink()
    write_pickle(classifier / name, canary)
    with pytest.raises(ModelError, match=rf"only {name}, which can run code.*reads safetensors alone.*save_pretrained"):
        load(classifier)
    assert not canary.exists()


@pytest.mark.parametrize("load", LOADERS)
def test_a_pickle_that_calls_itself_safetensors_is_refused(classifier: Path, canary: Path, load: Loader) -> None:
    write_pickle(classifier / "model.safetensors", canary)
    with pytest.raises(ModelError, match="cannot load"):
        load(classifier)
    assert not canary.exists()


def test_pickles_beside_safetensors_are_left_alone(folder: Path, canary: Path) -> None:
    for name in ("pytorch_model.bin", "optimizer.pt", "tokenizer.pkl", "nested/pytorch_model.bin", "training_args.bin"):
        write_pickle(folder / name, canary)
    load_as_policy(folder)
    assert not canary.exists()


@pytest.mark.parametrize("shard", ["pytorch_model.bin", "../model.safetensors", "/etc/model.safetensors"])
def test_an_index_that_leads_to_pickles_or_out_of_the_folder_is_refused(folder: Path, canary: Path, shard: str) -> None:
    write_pickle(folder / "pytorch_model.bin", canary)
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="names the shard"):
        load_as_policy(folder)
    assert not canary.exists()


def test_a_pickled_value_head_is_refused_with_the_alternative_named(folder: Path, canary: Path) -> None:
    write_pickle(folder / "value_head.bin", canary)
    with pytest.raises(ModelError, match=r"value_head\.bin, which can run code.*convert it to value_head\.safetensors"):
        load_value_head(folder)
    write_pickle(folder / "value_head.safetensors", canary)
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        load_value_head(folder)
    assert not canary.exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json"])
def test_a_pickle_in_place_of_a_text_file_is_never_read_as_one(folder: Path, canary: Path, name: str) -> None:
    # Without this file the library looks into the older ones.
    (folder / "tokenizer_config.json").unlink()
    write_pickle(folder / name, canary)
    with pytest.raises(ModelError):
        load_as_policy(folder)
    assert not canary.exists()


@pytest.mark.parametrize("load", LOADERS)
def test_code_in_a_folder_is_not_run_and_the_message_says_what_to_do(
    classifier: Path, canary: Path, load: Loader
) -> None:
    give_code(classifier, canary)
    with pytest.raises(ModelError, match=r"code of its own \(modeling_mine\.py\)") as caught:
        load(classifier)
    remedy = "reward function of your own" if load is load_as_reward else "model.trust_remote_code"
    assert remedy in str(caught.value)
    assert not canary.exists()


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("config.json", {"auto_map": {"AutoModelForCausalLM": "someone/else--modeling.Mine"}}),
        ("config.json", {"text_config": {"auto_map": {"AutoConfig": "mine.Mine"}}}),
        ("config.json", {"auto_map": "mine.Mine"}),
        ("config.json", {"attn_implementation": "someone/kernel"}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["mine.Mine", None]}}),
        ("tokenizer_config.json", {"auto_map": ["mine.Mine", None]}),
    ],
)
def test_every_way_to_ask_for_code_is_found(folder: Path, file: str, values: dict[str, object]) -> None:
    change_json(folder / file, **values)
    with pytest.raises(ModelError, match="code of its own"):
        load_as_policy(folder)


def test_a_generate_function_that_comes_along_is_found_too(folder: Path) -> None:
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text("raise SystemExit('ran')\n")
    with pytest.raises(ModelError, match="custom_generate"):
        load_as_policy(folder)


def test_python_files_that_nothing_asks_for_are_no_reason_to_refuse(folder: Path) -> None:
    (folder / "notes.py").write_text("raise SystemExit('ran')\n")
    load_as_policy(folder)


def test_trusted_code_runs_with_a_warning_for_policy_tokenizer_and_reward_model(
    folder: Path, canary: Path, tmp_path: Path
) -> None:
    # In a process of its own: the library keeps classes and a copy of the code.
    give_code(folder, canary)
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hub")}
    command = [sys.executable, "-c", LOAD_TRUSTED, str(folder), str(tmp_path / "final")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "MineForCausalLM MineTokenizer MineForSequenceClassification",
        "MineForCausalLM",
        "MineForCausalLM",
        "refused",
        "refused",
    ]
    assert f"model {folder}: code of its own is run, as trust_remote_code says: modeling_mine.py" in done.stderr
    assert canary.exists()


def test_compare_runs_the_code_of_its_models_if_it_is_told_to(
    folder: Path, canary: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    give_code(folder, canary)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "The film"}\n')
    words = [*COMPARE, "--before", str(folder), "--after", str(folder), "--prompts", str(prompts)]
    assert main(words) == 2
    assert "`--trust-remote-code` of generate, chat, compare and export" in capsys.readouterr().err
    assert not canary.exists()
    command = [sys.executable, "-m", "tunesmith", *words, "--trust-remote-code"]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kl_per_sequence"] == 0.0
    assert canary.exists()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (" " * 10_000_000 + "{}", f"more than the {MAX_CONFIG_BYTES:,} that are read"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested more than"),
        ('{"a":' * 60 + "1" + "}" * 60, "nested more than"),
        ('{"a":' + "[" * 60 + "]" * 60 + "}", "nested more than"),
        ("[1]", "holds no JSON object but a list"),
        ('{"model_type": ', "cannot be read as JSON"),
        ("", "cannot be read as JSON"),
        ("\x00", "cannot be read as JSON"),
        ('{"model_type": "llama", "num_hidden_layers": 1000000000}', "num_hidden_layers as 1,000,000,000"),
    ],
    ids=["10 MB", "deep", "rather deep", "deep lists", "list", "cut", "empty", "binary", "endless layers"],
)
@pytest.mark.parametrize("load", LOADERS)
def test_a_hostile_config_is_one_clear_error(classifier: Path, text: str, problem: str, load: Loader) -> None:
    (classifier / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        load(classifier)
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("config.json", {"hidden_size": "abc"}),
        ("config.json", {"hidden_size": -1}),
        ("config.json", {"num_attention_heads": 0}),
        ("config.json", {"vocab_size": -5}),
        ("config.json", {"vocab_size": 10**12}),
        ("config.json", {"model_type": ["a"]}),
        ("config.json", {"dtype": "evil"}),
        ("config.json", {"quantization_config": {"quant_method": "gptq"}}),
        ("config.json", {"id2label": "x"}),
        ("tokenizer_config.json", {"tokenizer_class": 5}),
        ("tokenizer.json", {"model": {"type": "evil"}}),
        ("tokenizer.json", {"added_tokens": 5}),
    ],
)
def test_values_that_make_no_sense_are_a_model_error_not_a_crash(
    folder: Path, file: str, values: dict[str, object]
) -> None:
    change_json(folder / file, **values)
    with pytest.raises(ModelError, match=r"cannot load|is quantised"):
        load_as_policy(folder)


def test_weights_of_a_torch_pickle_are_refused_though_the_library_could_read_them(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only pytorch_model\.bin"):
        load_as_policy(folder)
