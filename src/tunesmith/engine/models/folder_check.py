"""Checks of a model folder before any library reads it: size and depth of its JSON, pickles, and code.

A model folder may come from anywhere. Pickles run code when they are read, and Python files are imported through
`auto_map`. Pickles are always refused, code unless the user allows it.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from tunesmith.base.core.errors import ModelError
from tunesmith.base.core.log import get_logger

_logger = get_logger(__name__)

MAX_CONFIG_BYTES = 4_000_000
"""Configs have some kilobytes; one with 100,000 label names has about 4 MB."""

_MAX_BYTES = {
    "config.json": MAX_CONFIG_BYTES,
    "generation_config.json": MAX_CONFIG_BYTES,
    "tokenizer_config.json": 4 * MAX_CONFIG_BYTES,
    # One row for each tensor; 10 MB are real, for mixtures of many experts.
    "model.safetensors.index.json": 25 * MAX_CONFIG_BYTES,
    "adapter_config.json": MAX_CONFIG_BYTES,
    "base.json": MAX_CONFIG_BYTES,
}
_MAX_DEPTH = 40
_MAX_LAYERS = 10_000
_LAYER_KEYS = frozenset({"num_hidden_layers", "num_layers", "n_layer", "n_layers"})
_KERNEL_KEYS = frozenset({"attn_implementation", "_attn_implementation", "experts_implementation"})
_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".h5", ".msgpack"})
_PLAIN_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
_NUM_NAMED = 3


def check_folder(folder: Path, name: str, *, trust_remote_code: bool, how_to_trust: str) -> None:
    """Check the files of the model `name` in `folder` without running any of its code.

    Raises:
        ModelError: an invalid file, a pickle, quantised weights, or code without `trust_remote_code` (with it, code is
            logged as a warning); `how_to_trust` ends the message.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(f"the folder of {name!r} holds no config.json, so it is no model; give another folder")
    documents = {file: _read_json(folder / file) for file in _MAX_BYTES if (folder / file).is_file()}
    _check_config(documents["config.json"], folder / "config.json")
    _check_weights(folder, name, documents.get("model.safetensors.index.json"))
    _check_precision(folder, name, documents["config.json"])
    code = _code_of(folder, documents)
    if code and not trust_remote_code:
        raise ModelError(
            f"{name!r} wants to run code of its own ({', '.join(code)}), which Tunesmith does not run unasked. Take a "
            f"model that the transformers library knows, or remove auto_map from its JSON files to load it with the "
            f"library's own class, or read the code and, if you trust it, {how_to_trust}"
        )
    if code:
        _logger.warning("model %s: code of its own is run, as trust_remote_code says: %s", name, ", ".join(code))


def check_adapter_folder(folder: Path, name: str) -> dict[str, dict[str, object]]:
    """The JSON files of the adapters `name` in `folder`, by file name. Raises ModelError; see `check_folder`."""
    files = [file for file in ("adapter_config.json", "base.json") if (folder / file).is_file()]
    documents = {file: _read_json(folder / file) for file in files}
    if "adapter_config.json" not in documents:
        raise ModelError(f"the folder of {name!r} holds no adapter_config.json, so it holds no adapters")
    if not (folder / "adapter_model.safetensors").is_file():
        pickles = find_pickle(folder, "adapter_model")
        found = f"only {pickles[0]}, which can run code when read" if pickles else "no weights"
        raise ModelError(f"the adapters {name!r} have {found}; Tunesmith reads adapter_model.safetensors alone")
    return documents


def find_pickle(folder: Path, stem: str = "*") -> list[str]:
    """Names of files in `folder` and the folders below it that are pickles by their ending, sorted, a few at most."""
    found = (path for depth in ("", "*/", "*/*/") for path in folder.glob(f"{depth}{stem}.*"))
    return sorted(str(path.relative_to(folder)) for path in found if path.suffix.lower() in _PICKLES)[:_NUM_NAMED]


def _read_json(file: Path) -> dict[str, object]:
    """The object in `file`; ModelError if it is too large, no JSON, no object, or nested too deeply."""
    limit = _MAX_BYTES[file.name]
    try:
        size = file.stat().st_size
        if size > limit:
            raise ModelError(f"{file} has {size:,} bytes, more than the {limit:,} that are read; it is no model config")
        data = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read as JSON ({error}); get the model again") from error
    except RecursionError as error:
        raise ModelError(_too_deep(file)) from error
    if not isinstance(data, dict):
        raise ModelError(f"{file} holds no JSON object but a {type(data).__name__}; get the model again")
    if max((depth for depth, _, _ in _walk(data)), default=0) > _MAX_DEPTH:
        raise ModelError(_too_deep(file))
    return data


def _too_deep(file: Path) -> str:
    return f"{file} is nested more than {_MAX_DEPTH} levels deep; it is no model config"


def _walk(data: object) -> Iterator[tuple[int, str, object]]:
    """Depth, key and value of every entry of every object in `data`, without recursion."""
    stack: list[tuple[int, object]] = [(1, data)]
    while stack:
        depth, value = stack.pop()
        if isinstance(value, dict):
            for key, item in value.items():
                yield depth, key, item
                stack.append((depth + 1, item))
        elif isinstance(value, list):
            yield depth, "", None
            stack.extend((depth + 1, item) for item in value)


def _check_config(config: dict[str, object], file: Path) -> None:
    """Refuse a model of so many layers that building it would not end."""
    for _, key, value in _walk(config):
        if key in _LAYER_KEYS and isinstance(value, int) and value > _MAX_LAYERS:
            raise ModelError(f"{file} gives {key} as {value:,}; at most {_MAX_LAYERS:,} are built. Get the model again")


def _check_weights(folder: Path, name: str, index: dict[str, object] | None) -> None:
    if not any(folder.glob("*.safetensors")):
        pickles = find_pickle(folder)
        found = f"only {', '.join(pickles)}, which can run code when read" if pickles else "no weights"
        raise ModelError(
            f"{name!r} has {found}; Tunesmith reads safetensors alone. Take a revision with safetensors, or convert "
            "it with `save_pretrained` in a place where you trust the file"
        )
    shards = index.get("weight_map") if index else {}
    if not isinstance(shards, dict):
        raise ModelError(f"{folder / 'model.safetensors.index.json'} has no weight_map; get the model again")
    for shard in set(map(str, shards.values())):
        if "/" in shard or "\\" in shard or not shard.endswith(".safetensors"):
            raise ModelError(
                f"{folder / 'model.safetensors.index.json'} names the shard {shard!r}; a shard is a .safetensors file "
                "in the same folder. Get the model again"
            )
        if not (folder / shard).is_file():
            raise ModelError(
                f"{folder / 'model.safetensors.index.json'} names the shard {shard!r}, which is not there; get the "
                "model again"
            )
    if shards and "model.safetensors" not in shards.values() and (folder / "model.safetensors").is_file():
        raise ModelError(
            f"{name!r} has two sets of weights: model.safetensors, and the shards of model.safetensors.index.json. "
            "Libraries differ in which they read; remove one of them"
        )


def _check_precision(folder: Path, name: str, config: dict[str, object]) -> None:
    """Refuse a quantised model: its numbers are no weights that could be trained, or mean nothing without scales."""
    methods = [value for _, key, value in _walk(config) if key in ("quantization_config", "quantization") and value]
    kinds = [str(method.get("quant_method", "")) if isinstance(method, dict) else "" for method in methods]
    found = f"config.json says so ({kinds[0] or 'quantization_config'})" if kinds else _quantised_tensor(folder)
    if found:
        raise ModelError(
            f"{name!r} is quantised: {found}. Tunesmith computes with float32, bfloat16 or float16 weights; take the "
            "repository's version in bfloat16, or load it with transformers, dequantise it (`model.dequantize()`), and "
            "save it with `save_pretrained`. If the weights in its files are plain, remove the key from config.json"
        )


def _quantised_tensor(folder: Path) -> str:
    """A weight in `folder` that is stored in integers or in 8 bits or less, in words; empty if there is none."""
    for path in sorted(folder.glob("*.safetensors")):
        for key, dtype in _dtypes(path).items():
            if dtype not in _PLAIN_DTYPES and (dtype.startswith("F") or key.endswith("weight")):
                return f"{key} in {path.name} is stored as {dtype}"
    return ""


def _dtypes(file: Path) -> dict[str, str]:
    """The dtype of each tensor in `file`; empty if it cannot be read, which the library that loads it reports."""
    with contextlib.suppress(SafetensorError, OSError), safe_open(file, "np") as tensors:
        return {key: str(tensors.get_slice(key).get_dtype()) for key in tensors.keys()}  # noqa: SIM118 - no __iter__
    return {}


def _code_of(folder: Path, documents: dict[str, dict[str, object]]) -> list[str]:
    """Code that the library would import for this folder: Python files, classes of other repositories, hub kernels."""
    # The library loads this one without any entry in a config.
    references = ["custom_generate/generate.py"] if (folder / "custom_generate" / "generate.py").is_file() else []
    for data in documents.values():
        for _, key, value in _walk(data):
            if key == "auto_map" and value:
                references += _references(value)
            if key in _KERNEL_KEYS and isinstance(value, str) and "/" in value:
                references.append(f"the kernel {value!r}")
    if not references:
        return []
    files = [repr(path.name)[1:-1] for path in sorted(folder.glob("*.py"))]
    # A local class is in one of the files; name only references to other places.
    elsewhere = [reference for reference in references if "--" in reference or "/" in reference]
    return list(dict.fromkeys([*files, *elsewhere])) or list(dict.fromkeys(references))


def _references(value: object) -> list[str]:
    """The `module.Class` entries of an `auto_map`, which maps names to one of them or to a list."""
    items = value.values() if isinstance(value, dict) else [value]
    flat = [part for item in items for part in (item if isinstance(item, list) else [item])]
    return [repr(str(part))[1:-1] for part in flat if part is not None] or ["auto_map"]
