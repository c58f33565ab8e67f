"""GGUF files that we write: read back by our own reader and by the `gguf` package, and what is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizer_kinds import KINDS, TEMPLATES, byte_level, llama_2
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tunesmith.base.config.sections import LoraSection, ModelSection
from tunesmith.base.core.errors import ModelError
from tunesmith.engine.models.assets import convert_gguf
from tunesmith.engine.models.export import ModelCard, save_final, save_merged
from tunesmith.engine.models.load import load_policy, new_reward_model
from tunesmith.engine.models.tiny import byte_tokenizer, tiny_model

gguf = pytest.importorskip("gguf")

from tunesmith.engine.models.about import About, about_run  # noqa: E402
from tunesmith.engine.models.gguf_out.families import FAMILIES  # noqa: E402
from tunesmith.engine.models.gguf_out.file import TYPES, write_gguf, write_lora_gguf  # noqa: E402
from tunesmith.engine.models.gguf_out.modelfile import go_template, modelfile  # noqa: E402
from tunesmith.engine.models.gguf_out.vocabulary import vocabulary_of  # noqa: E402

CARD = ModelCard("tiny:llama", "SFT")
ABOUT = About("small", base="org/base", algorithm="SFT", license="mit", datasets=("told.jsonl", "org/data"))

_PLAIN = {"rope_type": "default", "rope_theta": 1e4}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
_LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
READ_BACK = {
    "llama": ("llama", {}),
    "llama 3": ("llama", {"rope_parameters": _LLAMA3, "head_dim": 64}),
    "llama, small heads": ("llama", {"rope_parameters": _LLAMA3, "head_dim": 8}),
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 12}),
    "gpt2": ("gpt2", {}),
    "starcoder2": ("starcoder2", {"sliding_window": None, "rope_parameters": {**_PLAIN, "rope_theta": 7e5}}),
}
"""Families that transformers reads with this tokenizer, and values that it leaves out."""


def folder_of(path: Path, family: str = "llama", dtype: torch.dtype = torch.bfloat16, **fields: object) -> Path:
    loaded = tiny_model(family, dtype=dtype, **fields)
    return save_final(loaded.model, loaded.tokenizer, path, CARD)


def fields_of(file: Path) -> dict[str, object]:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


def tensors_of(file: Path) -> dict[str, np.ndarray]:
    return {one.name: gguf.dequantize(one.data, one.tensor_type) for one in gguf.GGUFReader(file).tensors}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNESMITH_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("family", READ_BACK)
def test_what_is_written_is_read_back_to_the_bit(family, tmp_path, cache):
    model_type, fields = READ_BACK[family]
    final = folder_of(tmp_path / "final", model_type, **fields)
    write_gguf(final, tmp_path / "small.gguf", "bf16", ABOUT)
    before = load_policy(str(final), dtype=torch.bfloat16)
    after = load_policy(str(tmp_path / "small.gguf"), dtype=torch.bfloat16)
    expected, found = before.model.state_dict(), after.model.state_dict()
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    ids = torch.randint(3, 259, (2, 90), generator=torch.Generator().manual_seed(0))
    assert torch.equal(after.model(ids).logits, before.model(ids).logits)
    text = "naïve 12 <|im_end|>\n 🙂"
    assert after.tokenizer(text)["input_ids"] == before.tokenizer(text)["input_ids"]
    assert after.tokenizer.chat_template == before.tokenizer.chat_template
    assert after.model.generation_config.eos_token_id == 2


_CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
_GEMMA3 = {"sliding_attention": {**_PLAIN, "rope_theta": 2e4}}
_GEMMA3 |= {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gemma2", {**_CAPS, "head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 16}),
        ("gemma3", {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 16, "rope_parameters": _GEMMA3}),
        ("phi3", {"sliding_window": None}),
        ("stablelm", {"rope_parameters": {**_PLAIN, "rope_theta": 5e4, "partial_rotary_factor": 0.5}}),
    ],
)
def test_models_whose_tokenizers_are_others_are_read_back_too(family, fields, tmp_path, cache):
    final = folder_of(tmp_path / "final", family, torch.float32, **fields)
    write_gguf(final, tmp_path / "small.gguf", "f32", ABOUT)
    before = AutoModelForCausalLM.from_pretrained(final)
    after = AutoModelForCausalLM.from_pretrained(convert_gguf(tmp_path / "small.gguf"))
    ids = torch.randint(3, 259, (2, 90), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(after(ids).logits, before(ids).logits, rtol=0, atol=2e-6)
    assert (before(ids).logits - before(ids.flip(1)).logits).abs().max() > 0.1


def test_all_families_are_written_with_all_their_weights(tmp_path):
    special = {"smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}}
    for model_type in FAMILIES:
        family = model_type.removesuffix("_text")
        final = folder_of(tmp_path / family, family, torch.float32, **special.get(family, {}))
        write_gguf(final, tmp_path / f"{family}.gguf", "f32", ABOUT)
        # As many numbers as there are: a norm with an offset and reordered rows keep them.
        stored = load_file(final / "model.safetensors")
        found = tensors_of(tmp_path / f"{family}.gguf")
        again = sum(found[name].size for name in ("output.weight",) if name in found and "lm_head.weight" not in stored)
        assert sum(one.size for one in found.values()) - again == sum(one.numel() for one in stored.values()), family


def test_the_file_says_what_the_model_is_and_what_it_was_trained_on(tmp_path):
    loaded = tiny_model("llama", dtype=torch.bfloat16)
    loaded.model.generation_config.eos_token_id = [2, 0]
    final = save_final(loaded.model, loaded.tokenizer, tmp_path / "final", CARD)
    write_gguf(final, tmp_path / "small.gguf", "bf16", ABOUT)
    found = fields_of(tmp_path / "small.gguf")
    expected = {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": "small",
        "general.license": "mit",
        "general.finetune": "SFT",
        "general.description": "Trained from org/base with Tunesmith (SFT) on told.jsonl, org/data",
        "general.base_model.0.repo_url": "https://huggingface.co/org/base",
        "general.dataset.0.name": "told.jsonl",
        "general.dataset.1.repo_url": "https://huggingface.co/datasets/org/data",
        "llama.rope.dimension_count": 8,
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": loaded.tokenizer.chat_template,
    }
    assert {key: found.get(key) for key in expected} == expected


def test_a_run_tells_its_data_without_the_paths_of_the_machine(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        "model: {name: smollm2}\nalgorithm: grpo\nprompts: {source: /home/ada/secret/asked.jsonl}\n"
        "reward:\n- {source: ./mine.py:score}\n- {source: org/judge}\n"
    )
    about = about_run(tmp_path)
    assert (about.base, about.license) == ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")
    assert (about.datasets, about.rewards) == (("asked.jsonl",), ("mine.py:score", "org/judge"))
    assert about_run(tmp_path, license="mit").license == "mit"


def test_the_licence_is_read_from_the_card_of_a_local_base(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "README.md").write_text("---\nlicense: gemma\n---\n# Base\n")
    (tmp_path / "recipe.yaml").write_text(f"model: {{name: {tmp_path / 'base'}}}\nalgorithm: sft\n")
    assert (about_run(tmp_path).license, about_run(tmp_path).base) == ("gemma", "base")


@pytest.mark.parametrize("kind", TYPES)
def test_each_type_holds_the_weights_as_well_as_its_bits_allow(kind, tmp_path):
    final = folder_of(tmp_path / "final", dtype=torch.float32, hidden_size=64, intermediate_size=80)
    write_gguf(final, tmp_path / "small.gguf", kind, ABOUT)
    found, stored = tensors_of(tmp_path / "small.gguf"), load_file(final / "model.safetensors")
    allowed = {"f32": 0, "f16": 1e-3, "bf16": 4e-3, "q8_0": 8e-3, "q5_1": 0.05, "q5_0": 0.05, "q4_1": 0.1, "q4_0": 0.1}
    for name, source in (("ffn_up", "mlp.up_proj"), ("attn_v", "self_attn.v_proj"), ("attn_norm", "input_layernorm")):
        expected = stored[f"model.layers.1.{source}.weight"].numpy()
        error = np.abs(found[f"blk.1.{name}.weight"] - expected).max() / np.abs(expected).max()
        assert error <= (0 if name == "attn_norm" else allowed[kind]), (name, error)
    kinds = {one.name: one.tensor_type.name for one in gguf.GGUFReader(tmp_path / "small.gguf").tensors}
    ends = kind.upper() if kind in ("f32", "f16", "bf16") else "Q8_0"
    assert (kinds["token_embd.weight"], kinds["output_norm.weight"]) == (ends, "F32")
    if kind == "q4_0":  # 80 numbers are no whole blocks of 32
        assert kinds["blk.0.ffn_down.weight"] == "BF16"


def test_adapters_alone_are_what_the_merged_weights_have_more_than_the_base(tmp_path):
    pytest.importorskip("peft")
    section = ModelSection(name="tiny:llama", dtype="float32", lora=LoraSection(rank=4, alpha=12))
    loaded = load_policy(section)
    for name, parameter in loaded.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    final = save_final(loaded.model, loaded.tokenizer, tmp_path / "final", CARD)
    write_lora_gguf(final, tmp_path / "lora.gguf", ABOUT)
    write_gguf(save_merged(final, tmp_path / "merged"), tmp_path / "merged.gguf", "f32", ABOUT)
    write_gguf(folder_of(tmp_path / "base", dtype=torch.float32), tmp_path / "base.gguf", "f32", ABOUT)
    lora, merged, base = (tensors_of(tmp_path / f"{name}.gguf") for name in ("lora", "merged", "base"))
    found = fields_of(tmp_path / "lora.gguf")
    assert (found["general.type"], found["adapter.type"], found["adapter.lora.alpha"]) == ("adapter", "lora", 12.0)
    names = {name.removesuffix(".lora_a") for name in lora if name.endswith(".lora_a")}
    assert len(names) == 14
    for name in names:
        added = 12 / 4 * lora[f"{name}.lora_b"] @ lora[f"{name}.lora_a"]
        assert np.abs(added).max() > 0.01
        np.testing.assert_allclose(merged[name], base[name] + added, atol=1e-5)


def test_dora_has_no_lora_file(tmp_path):
    pytest.importorskip("peft")
    loaded = load_policy(ModelSection(name="tiny:llama", lora=LoraSection(rank=2, use_dora=True)))
    final = save_final(loaded.model, loaded.tokenizer, tmp_path / "final", CARD)
    with pytest.raises(ModelError, match="DoRA adapters"):
        write_lora_gguf(final, tmp_path / "lora.gguf", ABOUT)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "glm4", "exaone4"])
def test_a_family_that_is_not_known_is_refused_by_name(family, tmp_path):
    final = folder_of(tmp_path / "final", family)
    with pytest.raises(ModelError, match=rf"family '{family}'.*known are llama, mistral"):
        write_gguf(final, tmp_path / "small.gguf", "bf16", ABOUT)
    assert not (tmp_path / "small.gguf").exists()


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("granite", {"attention_multiplier": 0.2}, None),
        ("gemma2", {"query_pre_attn_scalar": 16}, "attention scores times 0.25 instead of"),
        ("gpt2", {"activation_function": "silu"}, "the activation silu"),
        ("smollm3", {}, "layers without rotary positions"),
        ("gemma", {"tie_word_embeddings": False}, "an output layer of its own"),
        ("qwen2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "'yarn'"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused_by_name(family, fields, words, tmp_path):
    final = folder_of(tmp_path / "final", family, **fields)
    if words is None:
        assert write_gguf(final, tmp_path / "small.gguf", "bf16", ABOUT) > 0
        return
    with pytest.raises(ModelError, match=words):
        write_gguf(final, tmp_path / "small.gguf", "bf16", ABOUT)


def test_scaled_rotary_positions_of_llama_3_are_factors_of_the_frequencies(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {**scaling, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    final = folder_of(tmp_path / "final", rope_parameters=rope)
    write_gguf(final, tmp_path / "small.gguf", "bf16", ABOUT)
    factors = tensors_of(tmp_path / "small.gguf")["rope_freqs.weight"]
    model = AutoModelForCausalLM.from_pretrained(final)
    plain = 1e4 ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(plain / torch.tensor(factors), model.model.rotary_emb.inv_freq)
    assert (factors[0], factors[-1]) == (1, 8)


def test_a_window_that_llama_cpp_has_not_is_the_context_length(tmp_path, caplog):
    write_gguf(folder_of(tmp_path / "final", "mistral"), tmp_path / "small.gguf", "bf16", ABOUT)
    assert fields_of(tmp_path / "small.gguf")["llama.context_length"] == 16
    assert "has no sliding windows" in caplog.text


def test_a_reward_model_has_no_gguf_file(tmp_path):
    reward_model = new_reward_model(ModelSection(name="tiny:llama"))
    final = save_final(reward_model, reward_model.tokenizer, tmp_path / "final", CARD)
    assert AutoModelForSequenceClassification.from_pretrained(final).config.num_labels == 1
    with pytest.raises(ModelError, match="reward model, which writes no text"):
        write_gguf(final, tmp_path / "small.gguf", "bf16", ABOUT)


def change_weights(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "lack model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.update(strange=torch.zeros(2)), "hold strange"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"model.norm.weight is \[3\]"),
        (lambda t: t["model.norm.weight"].fill_(1e6), None),
        (lambda t: t["model.layers.0.mlp.up_proj.weight"].fill_(1e6), "too large for float16"),
    ],
)
def test_a_damaged_folder_leaves_nothing_and_what_was_there_stays(change, words, tmp_path):
    final, file = folder_of(tmp_path / "final"), tmp_path / "out" / "small.gguf"
    file.parent.mkdir()
    file.write_text("old")
    change_weights(final, change)
    if words is None:  # vectors are float32, also in a float16 file
        assert write_gguf(final, file, "f16", ABOUT, replaces=True) > 1000
        return
    with pytest.raises(ModelError, match=words):
        write_gguf(final, file, "f16", ABOUT, replaces=True)
    assert [path.name for path in file.parent.iterdir()] == ["small.gguf"]
    assert file.read_text() == "old"


def test_a_file_is_replaced_only_when_told_and_needs_room(tmp_path, monkeypatch):
    final, file = folder_of(tmp_path / "final"), tmp_path / "small.gguf"
    write_gguf(final, file, "bf16", ABOUT)
    before = file.read_bytes()
    with pytest.raises(ModelError, match="exists; give another place, or --overwrite"):
        write_gguf(final, file, "q8_0", ABOUT)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 1000))
    with pytest.raises(ModelError, match="and 0 MB are free"):
        write_gguf(final, file, "q8_0", ABOUT, replaces=True)
    assert file.read_bytes() == before


@pytest.mark.parametrize("kind", ["byte-level", "byte-level, first space", "Unigram", "WordPiece"])
def test_a_tokenizer_that_llama_cpp_has_not_is_refused(kind):
    with pytest.raises(ModelError, match="the tokenizer of small"):
        vocabulary_of(KINDS[kind](), 600, "small")


def test_merges_alone_or_whole_pieces_first_are_other_pre_tokenizers():
    tokenizer = byte_tokenizer()
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    document["model"]["ignore_merges"] = True
    tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(document))
    with pytest.raises(ModelError, match="splits texts as none"):
        vocabulary_of(tokenizer, 259, "small")


def test_rows_without_a_token_are_padding_and_tokens_without_a_row_are_left_out():
    found = vocabulary_of(byte_tokenizer(), 262, "small")
    assert found.tokens[-3:] == ["[PAD259]", "[PAD260]", "[PAD261]"]
    assert [int(kind) for kind in found.types[-4:]] == [1, 5, 5, 5]
    assert len(vocabulary_of(byte_tokenizer(), 258, "small").tokens) == 258


GO = {
    "if .System": "if System",
    "else": "else",
    "end": None,
    "range $i, $_ := .Messages": "for m in Messages",
    "$last := eq (len (slice $.Messages $i)) 1": "set last = loop.last",
    'if eq .Role "user"': "if m.role == 'user'",
    'else if eq .Role "assistant"': "elif m.role == 'assistant'",
    "if not $last": "if not last",
    'if and (ne .Role "assistant") $last': "if m.role != 'assistant' and last",
}
"""Go's actions and Jinja's, which mean the same."""


def run_go(template: str, messages: list[dict[str, str]]) -> str:
    """The text of a chat by Ollama's rules: `.System` is the system message, which is one of the messages too."""
    from jinja2 import Environment

    pieces, opened, index = [], [], 0
    while (start := template.find("{{", index)) >= 0:
        end = template.index("}}", start)
        pieces.append(template[index:start])
        action = template[start + 2 : end].strip()
        if action in (".Content", ".System"):
            pieces.append("{{ m.content }}" if action == ".Content" else "{{ System }}")
        else:
            word = GO[action] or f"end{opened.pop()}"
            if word.split()[0] in ("if", "for"):
                opened.append(word.split()[0])
            pieces.append("{% " + word + " %}")
        index = end + 2
    text = "".join([*pieces, template[index:]])
    assert not opened
    system = "".join(one["content"] for one in messages if one["role"] == "system")
    return Environment(keep_trailing_newline=True).from_string(text).render(Messages=messages, System=system)


CHATS = (
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}],
)


@pytest.mark.parametrize("kind", TEMPLATES)
def test_ollamas_template_writes_what_the_models_own_does(kind):
    tokenizer = llama_2()
    tokenizer.chat_template = TEMPLATES[kind]
    template = go_template(tokenizer)
    if kind == "own end, then eos":  # which writes the last message otherwise
        assert template is None
        return
    for chat in CHATS:
        expected = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert run_go(template, chat) == expected
    continued = [*CHATS[0], {"role": "assistant", "content": "Once"}]
    assert run_go(template, continued).endswith("Once")


def test_a_system_message_of_the_template_is_kept_and_the_first_token_left_to_ollama():
    tokenizer = llama_2()  # writes <s> by itself
    start = "{{ bos_token }}{% if messages[0].role != 'system' %}<|im_start|>system\nBe good.<|im_end|>\n{% endif %}"
    tokenizer.chat_template = start + TEMPLATES["ChatML"]
    template = go_template(tokenizer)
    for chat in CHATS:
        expected = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert "<s>" + run_go(template, chat) == expected
    plain = byte_level()
    plain.chat_template = tokenizer.chat_template
    assert run_go(go_template(plain), CHATS[0]).startswith("<s>")


def test_the_modelfile_has_template_stops_and_licence():
    text = modelfile("a.gguf", byte_tokenizer(), ["<|im_end|>", 'a"b'], "mit")
    assert text.startswith('FROM ./a.gguf\nTEMPLATE """')
    assert text.endswith('"""\nPARAMETER stop "<|im_end|>"\nLICENSE """mit"""\n')
    assert "LICENSE" not in modelfile("a.gguf", byte_tokenizer(), [], 'a"""b')  # it would end there
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATES["own end, then eos"].replace("m.content", "m.content | upper")
    assert "# The chat template has no simple form" in modelfile("a.gguf", tokenizer, [], "")
