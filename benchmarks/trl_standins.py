"""Stand-ins for what TRL's tests fetch from the Hub: its data sets and tiny models, made by its own scripts.

Each script of TRL builds one of them and pushes it; here the push saves it to a folder. What the scripts fetch
themselves is made here: settings of models, and a byte-level BPE whose special tokens have the ids that the tests name.
Models go into a cache as huggingface_hub lays it out, so that `from_pretrained` finds them without a network. It
replaces functions of libraries for good: `python -m benchmarks.trl_standins SOURCE FOLDER TEST_FILE...` is a process of
its own.
"""

import importlib
import json
import runpy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

DATA_SETS = ("zen", "zen-image", "zen-multi-image", "toolcall", "harmony")

_MODELS = "generate_tiny_models"  # a package of TRL's
_REVISION = "0" * 40
_NUM_LEARNED = 3000
_FIRST_SPECIAL = 151643
_CONTROL = (  # with the ids that they have in the tokenizers of Qwen2.5 and Qwen3
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
_ADDED = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    "<|finetune_right_pad_id|>",  # of Llama, by which a test pads
)
_PINNED = {  # ids that the tests of tools give for completions, in Qwen2.5's vocabulary; Ġ is a space, Ċ a new line
    **{293: "Ġb", 314: "Ġ{", 330: 'Ġ"', 397: ">Ċ", 411: "out", 450: "de", 497: '",', 522: "</", 606: "name"},
    **{788: '":', 894: "Ġany", 927: "sh", 944: "'t", 1318: "text", 1414: "Ġknow", 1513: "Ġdon", 2765: "Ġwon"},
    **{4913: '{"', 5212: 'Ġ{"', 5392: "Ġtool", 6023: "hi", 6659: "call", 7692: "async", 9520: "step", 11248: "}}Ċ"},
    **{13477: "crement", 14172: "tool", 16252: "Ġincrement", 16370: "arguments", 17453: "Done", 22785: "_tool"},
    **{35744: "increment", 64648: "multiply", 93054: "_multiply", 95642: '"}}Ċ'},
}
_TEMPLATES = {"Qwen/Qwen3": "qwen3", "meta-llama": "llama3", "openai/gpt-oss": "gptoss"}
_FOR_TEMPLATE = ("qwen3", "Qwen/Qwen3-4B")
"""Kind and name of the model whose chat template the tests clone."""

_GENERATION = {
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "repetition_penalty": 1.05,
    "bos_token_id": _FIRST_SPECIAL,
    "eos_token_id": [_FIRST_SPECIAL + 2, _FIRST_SPECIAL],
    "pad_token_id": _FIRST_SPECIAL,
}
"""As Qwen2.5 has it: whoever draws with a model's own settings instead of the trainer's is found out."""

_FAILURES = (ArithmeticError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)


def tokenizer_of(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE that learned from `texts`, with as many tokens as Qwen3's; most are never used."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    learned = _byte_level(models.BPE())
    learned.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=_NUM_LEARNED, initial_alphabet=alphabet))
    merges = [tuple(merge) for merge in json.loads(learned.to_str())["model"]["merges"]]
    others = iter(dict.fromkeys(token for token in map("".join, merges) if token not in _PINNED.values()))
    tokens = [*alphabet]
    for index in range(len(alphabet), _FIRST_SPECIAL):
        tokens.append(_PINNED.get(index) or next(others, f"<|unused_{index}|>"))
    vocabulary = {token: index for index, token in enumerate((*tokens, *_CONTROL, *_ADDED))}
    backend = _byte_level(models.BPE(vocab=vocabulary, merges=merges))
    backend.add_special_tokens(list(_CONTROL))
    backend.add_tokens(list(_ADDED))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )


def _byte_level(model: models.BPE) -> Tokenizer:
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def make(source: Path, folder: Path, wanted: str) -> dict[str, str]:
    """Fill `folder` with data sets, and with the models that `wanted`, the text of tests, names.

    Why a script failed is returned by the script's name.
    """
    scripts = source / "scripts"
    templates = {path.stem: path.read_text() for path in (Path(trl.__file__).parent / "chat_templates").glob("*.jinja")}
    files = {name: scripts / f"generate_{name.replace('-', '_')}_dataset.py" for name in DATA_SETS}
    found = {name: script for name, script in files.items() if script.exists()}
    tokenizer = tokenizer_of([*templates.values(), *(script.read_text() for script in found.values())])
    failed: dict[str, str] = {}

    def save_data(data: Any, repo: str, config_name: str) -> None:
        data.save_to_disk(folder / "datasets" / repo / config_name)

    _replace(datasets.DatasetDict, push_to_hub=save_data)
    for name, script in found.items():
        _attempt(failed, script, lambda script=script, name=name: runpy.run_path(str(script))["main"](0.1, True, name))
    if (scripts / _MODELS).exists():
        sys.path.insert(0, str(scripts))
        _replace_fetches(tokenizer, templates, partial(_save_model, folder / "hub", wanted))
        kind, name = _FOR_TEMPLATE
        _save(folder / "hub", name, AutoConfig.for_model(kind), AutoTokenizer.from_pretrained(name))
    for script in (*scripts.glob(f"{_MODELS}/for_causal_lm/*.py"), *scripts.glob(f"{_MODELS}/for_sequence*/*.py")):
        kind = script.stem.split("_for_")[0]
        _replace(AutoConfig, from_pretrained=partial(_config, kind, len(tokenizer)))
        module = f"{_MODELS}.{script.parent.name}.{script.stem}"
        _attempt(failed, script, lambda module=module: importlib.import_module(module))
    return failed


def _replace_fetches(tokenizer: Any, templates: Mapping[str, str], save: Callable[..., None]) -> None:
    def fetch_tokenizer(name: str, **_: object) -> Any:
        stem = next((stem for start, stem in _TEMPLATES.items() if name.startswith(start)), "qwen2_5")
        tokenizer.chat_template = templates[stem]
        tokenizer.bos_token = "<|endoftext|>" if stem == "llama3" else None  # its template begins with it
        return tokenizer

    _replace(AutoTokenizer, from_pretrained=fetch_tokenizer)
    _replace(GenerationConfig, from_pretrained=lambda *_, **__: GenerationConfig(**_GENERATION))
    checks = ("check_transformers_version", "check_dtype_pattern", "print_config_diff", "smoke_test")
    common = importlib.import_module(f"{_MODELS}._common")
    _replace(common, push_to_hub=save, **dict.fromkeys(checks, lambda *_: None))


def _config(kind: str, vocab_size: int, _: str, **changes: Any) -> Any:
    return AutoConfig.for_model(kind, vocab_size=vocab_size, **changes)


def _save_model(
    hub: Path, wanted: str, model: Any, tokenizer: Any, generation: Any, prefix: str = "", suffix: str = ""
) -> None:
    name = "-".join(filter(None, (prefix, type(model).__name__, suffix)))
    if f"trl-internal-testing/{name}" in wanted:
        _save(hub, f"trl-internal-testing/{name}", model, tokenizer, generation)


def _save(hub: Path, name: str, *parts: Any) -> None:
    repo = hub / f"models--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(_REVISION)
    for part in filter(None, parts):
        part.save_pretrained(repo / "snapshots" / _REVISION)


def _replace(owner: Any, **members: object) -> None:
    for name, member in members.items():
        setattr(owner, name, member)


def _attempt(failed: dict[str, str], script: Path, work: Callable[[], object]) -> None:
    try:
        work()
    except _FAILURES as error:  # for example a model that this version of transformers lacks
        failed[script.stem] = f"{type(error).__name__}: {str(error)[:100]}"


def main(words: Sequence[str]) -> int:
    """Exit code 0; scripts that failed are printed, because tests that need them cannot run."""
    source, folder, *tests = map(Path, words)
    failed = make(source, folder, "".join(test.read_text() for test in tests))
    print(json.dumps(failed, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
