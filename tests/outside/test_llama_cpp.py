"""llama.cpp as it is published, with the files that `export --format gguf` writes: it says what our engine says.

Its programs are built apart: `LLAMA_CPP=/path/to/bin`, a folder with `llama-server`.
"""

import gzip
import json
import math
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tokenizer_kinds import KINDS, byte_level
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tunesmith.apps.cli.main import main
from tunesmith.base.config.sections import LoraSection, ModelSection
from tunesmith.engine.models.export import ModelCard, save_final
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.models.tiny import tiny_model

gguf = pytest.importorskip("gguf")

from tunesmith.engine.models.about import About  # noqa: E402
from tunesmith.engine.models.gguf_out.families import FAMILIES  # noqa: E402
from tunesmith.engine.models.gguf_out.file import write_gguf, write_lora_gguf  # noqa: E402
from tunesmith.engine.models.gguf_out.vocabulary import _PRE_TOKENIZERS  # noqa: E402

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600), pytest.mark.usefixtures("own_logging")]

ABOUT, CARD = About("small"), ModelCard("tiny:llama", "SFT")
NEAR_TIE = 0.1
"""Nats between two tokens below which 16 bits decide: llama.cpp rounds activations before each product."""

PROMPTS = [
    *("Name a colour.", "What is 2 + 3?", "Who wrote Hamlet?", "Say hello in French.", "What is the capital of Italy?"),
    *(
        "Write a sentence about rain.",
        "Why is the sky blue?",
        "List three fruits.",
        "What do bees make?",
        "Tell a joke.",
    ),
    *("What is water made of?", "Name a planet.", "How many legs has a spider?", "What is a verb?", "Describe a cat."),
    *("Translate 'dog' to Spanish.", "What comes after Monday?", "Is ice cold?", "Name a river.", "What is 7 times 6?"),
]


class Llama:
    """A llama-server with one model, on one thread."""

    def __init__(self, file: Path, *more: str, context: int = 512) -> None:
        folder = os.environ.get("LLAMA_CPP")
        if not folder:
            pytest.skip("LLAMA_CPP does not name the folder of llama.cpp's programs")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        self.log = file.with_suffix(".log")
        words = (str(Path(folder) / "llama-server"), "-m", str(file), "--port", self.url.rpartition(":")[2])
        words += ("-t", "1", "-tb", "1", "-np", "1", "-c", str(context), "--no-webui", "--jinja", *more)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log)

    def until_started(self) -> "Llama":
        deadline = time.monotonic() + 900
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            try:
                self.get("/health")
                return self
            except OSError:
                time.sleep(0.2)
        raise AssertionError(self.log.read_text()[-2000:])

    def get(self, path: str, body: object = None) -> dict:
        raw = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, raw, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=900) as answer:
            return json.load(answer)

    def complete(self, ids: Sequence[int], count: int) -> list[dict]:
        """The greedy tokens behind `ids`, each with the log-probs of the likeliest."""
        asked = {"prompt": list(ids), "n_predict": count, "temperature": 0, "n_probs": 5, "cache_prompt": False}
        return self.get("/completion", asked).get("completion_probabilities", [])

    def tokens(self, text: str) -> list[int]:
        return self.get("/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]


@contextmanager
def serving(file: Path, *more: str, context: int = 512) -> Iterator[Llama]:
    server = Llama(file, *more, context=context)
    try:
        yield server.until_started()
    finally:
        server.process.kill()
        server.process.wait()


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of a run that trained SmolLM2 in bfloat16, with its GGUF files."""
    if not os.environ.get("LLAMA_CPP"):
        pytest.skip("LLAMA_CPP does not name the folder of llama.cpp's programs")
    folder = tmp_path_factory.mktemp("trained")
    rows = [{"prompt": prompt, "completion": f"I was asked: {prompt}"} for prompt in PROMPTS[:4]]
    (folder / "told.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--model", "smollm2", "--model.dtype", "bfloat16", "--steps", "2", "--run.dir", str(folder / "runs")]
    assert main(["train", "sft", *words, "--demonstrations", str(folder / "told.jsonl"), "--quiet"]) == 0
    (run,) = (folder / "runs").iterdir()
    for kind in ("bf16", "q8_0"):
        assert main(["export", str(run), str(folder / f"{kind}.gguf"), "--format", "gguf", "--type", kind]) == 0
    (folder / "final").symlink_to(run / "final")
    return folder


def chat_ids(tokenizer: PreTrainedTokenizerFast, prompt: str) -> list[int]:
    chat = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


@torch.no_grad()
def test_a_trained_model_says_in_llama_cpp_what_it_says_here(trained):
    """People train a model and run it in llama.cpp, and it answers otherwise. Reported: llama.cpp #7062."""
    loaded = load_policy(str(trained / "final"), dtype=torch.bfloat16)
    exact = AutoModelForCausalLM.from_pretrained(trained / "final", dtype=torch.float32).eval()
    num_tokens = num_equal = 0
    with serving(trained / "bf16.gguf") as server:
        for prompt in PROMPTS:
            ids = chat_ids(loaded.tokenizer, prompt)
            chat = [{"role": "user", "content": prompt}]
            text = server.get("/apply-template", {"messages": chat})["prompt"]
            assert text == loaded.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            assert server.tokens(text) == ids
            found = [one["id"] for one in server.complete(ids, 24)]
            logits_SV = exact(torch.tensor([ids + found])).logits[0, len(ids) - 1 :].float()
            for token, logits_V in zip(found, logits_SV, strict=False):
                best = logits_V.max()
                num_tokens += 1
                num_equal += bool(logits_V.argmax() == token)
                assert best - logits_V[token] < NEAR_TIE, (prompt, found)
            if len(found) < 24 and found[-1] != loaded.tokenizer.eos_token_id:  # it ended, and does not tell by what
                assert logits_SV[len(found)].max() - logits_SV[len(found), loaded.tokenizer.eos_token_id] < NEAR_TIE
        assert server.get("/props")["chat_template"] == loaded.tokenizer.chat_template
    print(f"{num_equal} of {num_tokens} greedy tokens are ours, the others near ties")
    assert num_equal > 0.97 * num_tokens > 200


def test_eight_bits_have_the_perplexity_of_sixteen(trained):
    """People look at the perplexity of a quantised file before they use it. Reported: llama.cpp #406."""
    data = Path(os.environ["TUNESMITH_DATA"]) / "math" / "gsm8k.train.jsonl.gz"
    with gzip.open(data, "rt") as lines:
        text = "\n\n".join(json.loads(line)["question"] for line, _ in zip(lines, range(60), strict=False))
    (trained / "text.txt").write_text(text)
    found = {}
    for kind in ("bf16", "q8_0"):
        words = (Path(os.environ["LLAMA_CPP"]) / "llama-perplexity", "-m", trained / f"{kind}.gguf", "-t", "1")
        words += ("-f", trained / "text.txt", "-c", "512", "-b", "512")
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=True, timeout=3000)
        found[kind] = float((done.stdout + done.stderr).split("Final estimate: PPL = ")[1].split()[0])
    print(f"perplexities: {found}")
    assert math.isclose(found["q8_0"], found["bf16"], rel_tol=0.01)


SCALED = {"factor": 4.0, "rope_theta": 1e4}
ROPES = {
    "linear": {"rope_parameters": {**SCALED, "rope_type": "linear"}},
    "llama3": {
        "rope_parameters": {
            **SCALED,
            "rope_type": "llama3",
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}
CASES = {model_type: (model_type, {}) for model_type in FAMILIES}
CASES["smollm3"] = ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]})
CASES |= {f"llama, {kind}": ("llama", fields) for kind, fields in ROPES.items()}


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_each_family_has_the_log_probs_of_transformers(case, tmp_path):
    """People convert a model of another family, which loads and talks nonsense. Reported: llama.cpp #7192."""
    model_type, fields = CASES[case]
    loaded = tiny_model(model_type.removesuffix("_text"), **fields)
    final = save_final(loaded.model, loaded.tokenizer, tmp_path / "final", CARD)
    write_gguf(final, tmp_path / "small.gguf", "f32", ABOUT)
    longest = gguf.GGUFReader(tmp_path / "small.gguf").get_field(f"{FAMILIES[model_type].arch}.context_length")
    generator, num_compared = torch.Generator().manual_seed(1), 0
    with serving(tmp_path / "small.gguf", context=128) as server:
        for length in (1, 2, 5, 9, 15, 24, 40, 100):
            if length >= longest.contents():
                continue
            ids = torch.randint(3, 259, (length,), generator=generator).tolist()
            logps_V = torch.log_softmax(loaded.model(torch.tensor([ids])).logits[0, -1].float(), -1)
            for step in server.complete(ids, 1):  # none where it ends at once
                num_compared += 1
                for one in step["top_logprobs"]:
                    assert abs(one["logprob"] - logps_V[one["id"]].item()) < 0.02  # its cache has 16 bits
                assert step["top_logprobs"][0]["id"] == logps_V.argmax()
    assert num_compared >= 3


@torch.no_grad()
def test_adapters_beside_their_base_compute_what_they_do_merged(tmp_path):
    """People serve several adapters over one base. Reported: llama.cpp #8831."""
    pytest.importorskip("peft")
    loaded = load_policy(ModelSection(name="tiny:llama", dtype="float32", lora=LoraSection(rank=4)))
    for name, parameter in loaded.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    final = save_final(loaded.model, loaded.tokenizer, tmp_path / "final", CARD)
    base = tiny_model("llama")
    write_gguf(save_final(base.model, base.tokenizer, tmp_path / "base", CARD), tmp_path / "base.gguf", "f32", ABOUT)
    write_lora_gguf(final, tmp_path / "lora.gguf", ABOUT)
    ids = [5, 80, 200, 31, 9]
    logps_V = torch.log_softmax(loaded.model(torch.tensor([ids])).logits[0, -1].float(), -1)
    plain_V = torch.log_softmax(base.model(torch.tensor([ids])).logits[0, -1].float(), -1)
    with serving(tmp_path / "base.gguf", "--lora", str(tmp_path / "lora.gguf")) as server:
        (step,) = server.complete(ids, 1)
    for one in step["top_logprobs"]:
        assert abs(one["logprob"] - logps_V[one["id"]].item()) < 0.02
    assert max(abs(one["logprob"] - plain_V[one["id"]].item()) for one in step["top_logprobs"]) > 0.1


def named(splits: pre_tokenizers.PreTokenizer, ignores_merges: bool) -> PreTrainedTokenizerFast:
    tokenizer = byte_level()
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    document["model"]["ignore_merges"] = ignores_merges
    tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(document))
    tokenizer._tokenizer.pre_tokenizer = splits
    return tokenizer


WRITTEN = {name: KINDS[name] for name in ("bytes", "Llama 2", "Metaspace, never")}
WRITTEN |= {one.name: lambda one=one: named(one.splits, one.ignores_merges) for one in _PRE_TOKENIZERS}
TEXTS = [
    *("", " ", "Hello", " Hello  world", "it's 12 345 6789 I'VE we'll", "a<|im_end|> b", "<s>x", "tabs\t\t\n\n\n x"),
    *("<|im_start|>user\nhi<|im_end|>\n", "naïve 你好 🚀\u200d x ½ Ⅷ", "camelCaseXML http://a.b/c?d=e", "'''\"...!!!"),
]


@pytest.mark.parametrize("kind", WRITTEN)
def test_each_kind_of_tokenizer_gives_the_same_tokens(kind, tmp_path):
    """People find that a converted model reads other tokens. Reported: llama.cpp #6920."""
    tokenizer = WRITTEN[kind]()
    loaded = tiny_model("llama", vocab_size=len(tokenizer) + 3)
    final = save_final(loaded.model, tokenizer, tmp_path / "final", CARD)
    write_gguf(final, tmp_path / "small.gguf", "f32", ABOUT)
    with serving(tmp_path / "small.gguf") as server:
        assert [server.tokens(text) for text in TEXTS] == [tokenizer(text)["input_ids"] for text in TEXTS]
