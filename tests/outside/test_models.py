"""Models of other tools: classifiers, weights, tokenizers and files as people bring them."""

import json
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import ModelError
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Completion, Group
from tunesmith.engine.models.export import ModelCard, save_final
from tunesmith.engine.models.heads import RewardModel
from tunesmith.engine.models.load import load_policy, load_reward_model, new_reward_model
from tunesmith.engine.models.tiny import byte_tokenizer, tiny_model
from tunesmith.learn.rewards.model import ModelReward
from tunesmith.learn.rewards.outcome import samples_of

EOS = 2
LENGTHS = (9, 4, 12, 1, 7)


def rows() -> list[list[int]]:
    """Sequences of several lengths that end with eos, with eos and the padding ids of the cases inside of some."""
    drawn = torch.randint(3, 259, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(0)).tolist()
    found = [row[:length] for row, length in zip(drawn, LENGTHS, strict=True)]
    for row in found:
        row[-1] = EOS
    found[0][2], found[2][9], found[2][10], found[4][-1] = EOS, EOS, EOS, 50
    return found


def padded(some: Sequence[Sequence[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, some))
    ids_BS = torch.tensor([[*row, *[pad_id] * (width - len(row))] for row in some])
    return ids_BS, torch.tensor([len(row) for row in some])


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def classifier(config: PretrainedConfig, num_labels: int = 1, pad_id: int | None = None) -> PreTrainedModel:
    config.num_labels, config.pad_token_id = num_labels, None
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.config.pad_token_id = pad_id
    return model


def own_logits(model: PreTrainedModel, some: Sequence[Sequence[int]]) -> torch.Tensor:
    """The logits of the model's own forward, each row alone and without padding."""
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.tensor([row])).logits for row in some])


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gpt_neox", "gemma2", "mixtral"])
@pytest.mark.parametrize("pad_id", [None, EOS, 50, 0])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_a_classifier_is_read_at_the_token_that_its_own_forward_reads(
    tmp_path: Path, family: str, pad_id: int | None, num_labels: int
) -> None:
    """Most reward models of TRL pad with the end-of-sequence token. Reported: issue 45.4."""
    folder = save(classifier(tiny_model(family).model.config, num_labels, pad_id), tmp_path)
    own = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    right = own_logits(own, rows())[:, num_labels - 1]
    loaded = load_reward_model(str(folder), label=num_labels - 1, dtype=torch.float32)
    for filler in (0, EOS, 50):  # what a caller pads with has no meaning
        torch.testing.assert_close(loaded(*padded(rows(), filler)), right, atol=1e-5, rtol=1e-4)
    for row, one in zip(rows(), right, strict=True):
        torch.testing.assert_close(loaded(*padded([row], 0))[0], one, atol=1e-5, rtol=1e-4)
    if pad_id is not None:
        ids_BS, lengths_B = padded(rows(), pad_id)
        mask_BS = (torch.arange(ids_BS.shape[1]) < lengths_B[:, None]).long()
        batch = own(input_ids=ids_BS, attention_mask=mask_BS).logits[:, num_labels - 1]
        torch.testing.assert_close(batch, right, atol=1e-5, rtol=1e-4)


ENCODERS: Mapping[str, Mapping[str, object]] = {
    "bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
    "roberta": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
    "fnet": {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64},
    "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64},
    "ctrl": {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 64},
}


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("pad_id", [1, 50])
def test_a_classifier_that_pools_by_itself_gives_each_row_what_it_gives_it_alone(family: str, pad_id: int) -> None:
    """Some read the last column (XLNet), mix all columns (FNet) or look for a padding id. Reported: issue 45.4."""
    config = AutoConfig.for_model(family, vocab_size=259, initializer_range=0.3, **ENCODERS[family])
    config.pad_token_id, config.num_labels = pad_id, 2
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    scorer = RewardModel(model, byte_tokenizer(), label=1).eval()
    with torch.no_grad():
        torch.testing.assert_close(scorer(*padded(rows(), 0)), own_logits(model, rows())[:, 1], atol=1e-5, rtol=1e-4)


def conversation(content: str) -> Prompt:
    return Prompt("p", ({"role": "user", "content": content},))


@pytest.mark.parametrize("pad_id", [None, EOS, 0])
def test_a_conversation_is_scored_with_all_that_the_template_writes(tmp_path: Path, pad_id: int | None) -> None:
    """ChatML ends with a newline, which classifiers of other tools read last. Reported: issue 45.4."""
    folder = save(classifier(tiny_model("llama").model.config, 1, pad_id), tmp_path)
    own, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder).eval(), byte_tokenizer()
    chats = [("Hi", "Hello."), ("Why?", "Because it is so.")]
    rendered = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": asked}, {"role": "assistant", "content": said}], return_dict=False
        )
        for asked, said in chats
    ]
    right = own_logits(own, rendered)[:, 0]  # type: ignore[arg-type]
    loaded = load_reward_model(str(folder), dtype=torch.float32)
    drawn = [sample(conversation(asked), said) for asked, said in chats]
    for policy_tokenizer in (None, byte_tokenizer()):  # the text encoded again, and the ids as they were drawn
        reward = ModelReward(loaded, policy_tokenizer=policy_tokenizer)
        assert reward.scores_token_ids == (policy_tokenizer is not None)
        torch.testing.assert_close(torch.tensor(reward.score(drawn)), right, atol=1e-5, rtol=1e-4)


def sample(prompt: Prompt, text: str):
    tokenizer = byte_tokenizer()
    prompt_ids = tokenizer.apply_chat_template(prompt.content, add_generation_prompt=True, return_dict=False)
    ids = (*tokenizer(text)["input_ids"], EOS)
    zeros = (0.0,) * len(ids)
    completion = Completion(token_ids=ids, text=text, finish_reason="stop", logps=zeros, raw_logps=zeros)
    return samples_of([Group(prompt, tuple(prompt_ids), (completion,), 0)])[0]


def test_a_classifier_of_several_labels_reads_plain_text_and_a_reward_model_of_one_reads_the_end(
    tmp_path: Path,
) -> None:
    """Sentiment classifiers learnt texts alone, reward models of TRL texts with eos. Reported: issue 45.4."""
    tokenizer = byte_tokenizer()
    prompt, text = Prompt("p", "The film was"), " good"
    ids = tokenizer("The film was good")["input_ids"]
    for num_labels, expected in ((2, ids), (1, [*ids, EOS])):
        folder = save(classifier(tiny_model("llama").model.config, num_labels, 0), tmp_path / str(num_labels))
        own = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        loaded = load_reward_model(str(folder), label=num_labels - 1, dtype=torch.float32)
        assert loaded.encode(prompt, text) == tuple(expected)
        zeros = (0.0,) * 5
        drawn = Completion(tuple(tokenizer(text)["input_ids"]), zeros, zeros, text, "length")
        (one,) = samples_of([Group(prompt, tuple(tokenizer("The film was")["input_ids"]), (drawn,), 0)])
        reward = ModelReward(loaded, policy_tokenizer=tokenizer).score([one])[0]
        assert reward == pytest.approx(own_logits(own, [expected])[0, -1].item(), abs=1e-5)


def our_reward_model(name: str) -> RewardModel:
    model = new_reward_model(ModelSection(name=name, dtype="float32"))
    torch.nn.init.normal_(model.model.score.weight, generator=torch.Generator().manual_seed(0))
    return model.eval()


@pytest.mark.parametrize("has_spare", [True, False])
@pytest.mark.parametrize("is_old", [False, True])
def test_our_reward_models_are_read_at_the_last_token_here_and_by_transformers(
    tmp_path: Path, has_spare: bool, is_old: bool
) -> None:
    """People load a trained reward model with transformers alone, GPT-2's too, whose vocabulary has no other token
    than eos to pad with. Reported: issue 45.4.
    """
    model = our_reward_model("tiny:llama")
    if not has_spare:
        model.model.config.pad_token_id = EOS if is_old else None  # which older versions wrote
    folder = save_final(model, model.tokenizer, tmp_path / "final", ModelCard("tiny:llama", "reward"))
    if is_old:
        change(folder / "config.json", tunesmith_reward_model=None)
    loaded = load_reward_model(str(folder), dtype=torch.float32)
    assert loaded.is_made_here
    right = model(*padded(rows(), 0))
    torch.testing.assert_close(loaded(*padded(rows(), 0)), right, atol=1e-5, rtol=1e-4)
    if has_spare or not is_old:
        own = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        torch.testing.assert_close(own_logits(own, rows())[:, 0], right, atol=1e-5, rtol=1e-4)


def test_training_goes_on_with_a_classifier_at_the_token_that_it_was_trained_at(tmp_path: Path) -> None:
    """People train the reward model of another tool on with votes of their own. Reported: issue 45.4."""
    folder = save(classifier(tiny_model("llama").model.config, 1, EOS), tmp_path)
    before = load_reward_model(str(folder), dtype=torch.float32)
    model = new_reward_model(ModelSection(name=str(folder), dtype="float32"))
    torch.testing.assert_close(model(*padded(rows(), 0)), before(*padded(rows(), 0)))
    again = save_final(model, model.tokenizer, tmp_path / "final", ModelCard(str(folder), "reward"))
    (again / "README.md").unlink()
    torch.testing.assert_close(
        load_reward_model(str(again), dtype=torch.float32)(*padded(rows(), 0)), before(*padded(rows(), 0))
    )


def change(file: Path, **values: object) -> None:
    """Change the JSON in `file`; None removes a key."""
    document = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))


def change_weights(folder: Path, more: Mapping[str, torch.Tensor], without: str = "-") -> None:
    file = folder / "model.safetensors"
    kept = {key: tensor for key, tensor in load_file(file).items() if without not in key}
    save_file({**kept, **more}, file, metadata={"format": "pt"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama as another tool saves it."""
    return save(tiny_model("llama").model, tmp_path / "model")


def as_new_reward_model(name: str) -> RewardModel:
    return new_reward_model(ModelSection(name=name))


LOADERS: Mapping[str, Callable[[str], object]] = {"policy": load_policy, "new reward model": as_new_reward_model}
ONES = torch.ones(32)


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize(
    "key",
    ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.mlp.up_proj.weight", "v_head.summary.weight", "a.b.c"],
)
def test_weights_that_the_model_of_the_config_does_not_have_are_refused(
    folder: Path, load: Callable[[str], object], key: str
) -> None:
    """A config.json says `attention_bias: false` of a file with biases, or fewer layers. Reported: issue 45.6."""
    change_weights(folder, {key: ONES})
    with pytest.raises(ModelError, match=f"hold {key}, which a Llama"):
        load(str(folder))


def test_layers_that_the_config_does_not_count_are_refused(folder: Path) -> None:
    """A config.json with fewer layers than the files have. Reported: issue 45.6."""
    change(folder / "config.json", num_hidden_layers=1)
    with pytest.raises(ModelError, match=r"hold model\.layers\.1\..* and 6 more"):
        load_policy(str(folder))


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_weights_that_the_files_lack_are_refused(folder: Path, load: Callable[[str], object]) -> None:
    """A file of which a part is missing is never completed by random numbers. Reported: issue 45.6."""
    change_weights(folder, {}, without="layers.1.mlp.up_proj")
    with pytest.raises(ModelError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        load(str(folder))


def test_a_weight_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    """A config.json of another size of the model. Reported: issue 45.6."""
    change(folder / "config.json", intermediate_size=48)
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.down_proj\.weight of .* is \[32, 64\].* needs \[32, 48\]"):
        load_policy(str(folder))


def test_a_reward_model_is_no_policy(tmp_path: Path) -> None:
    """A reward model with tied embeddings is given as the policy; its head was dropped. Reported: issue 45.6."""
    folder = save(classifier(tiny_model("llama").model.config, 1, 0), tmp_path)
    with pytest.raises(ModelError, match=r"hold score\.weight, which a LlamaForCausalLM"):
        load_policy(str(folder))


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("gpt2", ["h.0.attn.bias", "transformer.h.1.attn.masked_bias"]),
        ("gpt_neox", ["gpt_neox.layers.0.attention.bias", "gpt_neox.layers.0.attention.rotary_emb.inv_freq"]),
        ("llama", ["model.layers.0.self_attn.rotary_emb.inv_freq"]),
    ],
)
def test_masks_and_frequencies_of_old_files_are_no_weights(tmp_path: Path, family: str, keys: list[str]) -> None:
    """Files of GPT-2, Pythia and the first Llamas hold buffers that are computed now. Reported: issue 45.6."""
    folder = save(tiny_model(family).model, tmp_path)
    change_weights(folder, {key: torch.ones(4) for key in keys})
    load_policy(str(folder))


def test_the_pooler_that_no_classifier_of_roberta_reads_may_be_there(tmp_path: Path) -> None:
    """The most used sentiment classifiers (cardiffnlp's) hold it. Reported: cardiffnlp/tweeteval#21."""
    config = RobertaConfig(
        vocab_size=259, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, num_labels=1
    )
    folder = save(RobertaForSequenceClassification(config), tmp_path)
    change_weights(folder, {"roberta.pooler.dense.bias": ONES, "roberta.embeddings.position_ids": torch.arange(4)})
    load_reward_model(str(folder))


F8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("method", "cast", "message"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, F8, r"config\.json says so \(fp8\)"),
        (None, F8, "is stored as F8_E4M3"),
        (None, torch.int8, "is stored as I8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, None, r"\(bitsandbytes\).* remove the key"),
        ({"quant_method": "gptq", "bits": 4}, None, "gptq"),
        ({"quant_method": "mxfp4"}, None, "mxfp4"),
        ({"quant_method": "nobody knows"}, None, "nobody knows"),
    ],
)
@pytest.mark.parametrize("load", [load_policy, load_reward_model, as_new_reward_model])
def test_a_quantised_model_is_refused_in_words(
    folder: Path, method: object, cast: torch.dtype | None, message: str, load: Callable[[str], object]
) -> None:
    """People give the FP8, GPTQ or bitsandbytes version of a repository. Reported: issue 45.6."""
    weights = load_file(folder / "model.safetensors")
    if cast is not None:
        change_weights(folder, {key: tensor.to(cast) for key, tensor in weights.items() if "proj" in key})
    change(folder / "config.json", quantization_config=method)
    with pytest.raises(ModelError, match=f"is quantised.*{message}"):
        load(str(folder))


def test_two_sets_of_weights_are_refused(folder: Path) -> None:
    """A folder that was saved again in shards still has the old file, which libraries prefer. Reported: issue 45.6."""
    shutil.copy(folder / "model.safetensors", folder / "model-00001-of-00001.safetensors")
    names = dict.fromkeys(load_file(folder / "model.safetensors"), "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    with pytest.raises(ModelError, match="two sets of weights"):
        load_policy(str(folder))
    (folder / "model.safetensors").unlink()
    load_policy(str(folder))
    (folder / "model-00001-of-00001.safetensors").unlink()
    (folder / "other.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="which is not there"):
        load_policy(str(folder))


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize("role", ["plain", "pad_token", "template"])
def test_a_tokenizer_larger_than_the_embedding_is_named_at_load(
    folder: Path, load: Callable[[str], object], role: str
) -> None:
    """People add tokens, often `[PAD]`, and forget to resize the model. Reported: issue 45.6."""
    tokenizer = byte_tokenizer()
    if role == "plain":
        tokenizer.add_tokens(["<tool_a>", "<tool_b>"])
    else:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_a>", "<tool_b>"]})
    if role == "pad_token":
        tokenizer.pad_token = "<tool_a>"
    if role == "template":
        tokenizer.chat_template = str(tokenizer.chat_template).replace("<|im_end|>", "<tool_a>")
    tokenizer.save_pretrained(folder)
    with pytest.raises(ModelError, match=r"has 261 tokens and its embedding 259 rows; without a row: '<tool_a>' \(259"):
        load(str(folder))


def test_a_special_token_that_no_text_holds_may_lack_a_row(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Gemma 3 1B has a token for images, and no row for it. Reported: huggingface/transformers#37011."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    tokenizer.save_pretrained(folder)
    loaded = load_policy(str(folder))
    assert "'<image_soft_token>' (259)" in caplog.text
    ids = loaded.tokenizer("a<image_soft_token>")["input_ids"]
    with pytest.raises(ModelError, match="holds token 259, and the model's embedding has rows for tokens 0 to 258"):
        our_reward_model(str(folder))(torch.tensor([ids]), torch.tensor([2]))


def gguf_header() -> bytes:
    """The beginning of a GGUF file of version 3 with three entries: two texts and a list of numbers."""

    def text(words: str) -> bytes:
        return struct.pack("<Q", len(words)) + words.encode()

    entries = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        text("tokenizer.ggml.model") + struct.pack("<I", 8) + text("gpt2"),
        text("tokenizer.ggml.token_type") + struct.pack("<IIQ3i", 9, 5, 3, 1, 1, 1),
    ]
    return struct.pack("<4sIQQ", b"GGUF", 3, 2, len(entries)) + b"".join(entries)


@pytest.mark.parametrize("length", [0, 3, 4, 12, 24, 30, 60, 80, 110, 130, 150])
def test_a_gguf_file_cut_in_its_header_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """A download that broke off. Reported: issue 45.26."""
    pytest.importorskip("gguf")
    monkeypatch.setenv("TUNESMITH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cut.gguf").write_bytes(gguf_header()[:length])
    with pytest.raises(ModelError, match=r"cut\.gguf as a GGUF model \(.*may be cut or damaged"):
        load_policy(str(tmp_path / "cut.gguf"))


@pytest.mark.parametrize("pad", ["<|im_end|>", "<|endoftext|>", None])
def test_adapters_of_a_reward_model_are_read_at_the_token_that_their_tokenizer_says(
    tmp_path: Path, pad: str | None
) -> None:
    """TRL saves a reward model trained with LoRA as adapters, and the padding token in the tokenizer beside them.
    Reported: issue 45.4.
    """
    peft = pytest.importorskip("peft")
    base = save(tiny_model("llama").model, tmp_path / "base")
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"], init_lora_weights="gaussian")
    adapted = peft.get_peft_model(model, lora)
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name or "score" in name:
            torch.nn.init.normal_(parameter)
    adapted.save_pretrained(tmp_path / "adapters")
    if pad is not None:
        tokenizer = byte_tokenizer()
        tokenizer.pad_token = pad
        tokenizer.save_pretrained(tmp_path / "adapters")
        adapted.config.pad_token_id = tokenizer.pad_token_id  # as TRL sets it; else that of the base
    loaded = load_reward_model(str(tmp_path / "adapters"), dtype=torch.float32)
    right = own_logits(adapted.eval(), rows())[:, 0]
    torch.testing.assert_close(loaded(*padded(rows(), 0)), right, atol=1e-4, rtol=1e-4)
