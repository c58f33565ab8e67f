"""Folders with adapters in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`, and our `base.json`.

`base.json` names the base as in a recipe, with the seed of random weights, the number of layers kept, and whether the
base was in 8 bits in training. PEFT does not read or write it.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tunesmith.base.core.errors import ModelError
from tunesmith.engine.models.assets import SMOLLM2, SMOLLM2_HUB_ID
from tunesmith.engine.models.ensemble import HEADS
from tunesmith.engine.models.folder_check import check_adapter_folder
from tunesmith.engine.models.length_trend import TREND, LengthTrend
from tunesmith.engine.models.loaded import quiet_transformers
from tunesmith.engine.models.lora import ADAPTER, AdapterBase, base_of, has_transposed_weights, inject, peft

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
BASE_FILE = "base.json"

_PREFIX = "base_model.model."
_SCORE = "score.weight"

_USED = (
    *("r", "lora_alpha", "target_modules", "exclude_modules", "use_dora", "use_rslora", "task_type"),
    *("rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern"),
)
"""Supported keys of PEFT's config that change the computation."""

_OF_TRAINING = (
    *("auto_mapping", "base_model_name_or_path", "peft_type", "peft_version", "revision", "inference_mode"),
    *("lora_dropout", "fan_in_fan_out", "modules_to_save", "megatron_core"),
    *("ephemeral_gpu_offload", "ensure_weight_tying"),
)
"""Keys that do not change the computation, or that are checked separately."""

_PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Initialisations that leave the base weights unchanged."""


def is_adapter_folder(folder: Path) -> bool:
    """True if `folder` holds adapters and no model."""
    return (folder / CONFIG_FILE).is_file() and not (folder / "config.json").is_file()


def save_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Write the adapters of `model`, and a reward model's head, into `folder`."""
    base = base_of(model)
    config: Any = copy.deepcopy(model.peft_config[ADAPTER])  # type: ignore[index]
    config.inference_mode = True
    config.base_model_name_or_path = _name_for_peft(base.name)
    tensors: dict[str, torch.Tensor] = peft().get_peft_model_state_dict(
        model, adapter_name=ADAPTER, save_embedding_layers=False
    )
    if config.task_type == "SEQ_CLS":
        config.modules_to_save = ["score"]
        tensors = {**tensors, _SCORE: model.get_parameter(_SCORE)}
    config.save_pretrained(folder)
    save_file(
        {f"{_PREFIX}{name}": tensor.detach().contiguous() for name, tensor in tensors.items()},
        folder / WEIGHTS_FILE,
        metadata={"format": "pt"},
    )
    own = asdict(base)
    if (known := getattr(model.config, HEADS, None)) is not None:
        own |= {"num_heads": model.config.num_labels, HEADS: known}
    if (trend := getattr(model.config, TREND, None)) is not None:
        own |= {TREND: trend}
    (folder / BASE_FILE).write_text(json.dumps(own, indent=1) + "\n", encoding="utf-8")


def read_base(folder: Path, name: str) -> AdapterBase:
    """The base of the adapters in `folder`.

    Raises:
        ModelError: no base is named, or a file is invalid.
    """
    documents = check_adapter_folder(folder, name)
    own = documents.get(BASE_FILE)
    if own is None:
        base = documents[CONFIG_FILE].get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise ModelError(f"{folder / CONFIG_FILE} names no base; write it into base_model_name_or_path")
        return AdapterBase(base)
    base, seed, num_layers = own.get("name"), own.get("seed"), own.get("num_layers")
    is_int8 = own.get("is_int8", False)  # older folders do not say
    if (
        not isinstance(base, str)
        or not isinstance(seed, int)
        or not (num_layers is None or isinstance(num_layers, int))
        or not isinstance(is_int8, bool)
    ):
        raise ModelError(f"{folder / BASE_FILE} has no name, seed and num_layers of a base; get the folder again")
    return AdapterBase(base, seed, num_layers, is_int8)


def read_heads(folder: Path, name: str) -> tuple[int, Mapping[str, object]] | None:
    """(Number of heads of the reward model in `folder`, what is known of them); None if it has one.

    Raises:
        ModelError: a file is invalid.
    """
    own = check_adapter_folder(folder, name).get(BASE_FILE) or {}
    count, known = own.get("num_heads", 1), own.get(HEADS)
    if known is None:
        return None
    if not isinstance(count, int) or count < 2 or not isinstance(known, Mapping):
        raise ModelError(f"{folder / BASE_FILE} has no number of heads; get the folder again")
    return count, cast(Mapping[str, object], known)


def read_trend(folder: Path, name: str) -> LengthTrend | None:
    """The trend over length that the rewards of the model in `folder` are corrected by; None if there is none.

    Raises:
        ModelError: a file is invalid.
    """
    return LengthTrend.of_config((check_adapter_folder(folder, name).get(BASE_FILE) or {}).get(TREND))


def is_reward_adapter(folder: Path, name: str) -> bool:
    """True if the adapters in `folder` are a reward model's."""
    return check_adapter_folder(folder, name)[CONFIG_FILE].get("task_type") == "SEQ_CLS"


def is_made_here(folder: Path) -> bool:
    """True for adapters that `save_adapters` wrote."""
    return (folder / BASE_FILE).is_file()


def adapter_dtype(folder: Path) -> torch.dtype:
    """The dtype that the adapters in `folder` were trained in."""
    return next(tensor.dtype for key, tensor in _read_tensors(folder).items() if key != _SCORE)


def load_adapters(model: PreTrainedModel, folder: Path, name: str) -> None:
    """Add the adapters in `folder`, and a head with them, to `model`, their base. They are trained on, without dropout.

    Raises:
        ModelError: their kind is not supported, or they belong to another model.
    """
    values = check_adapter_folder(folder, name)[CONFIG_FILE]
    base = read_base(folder, name)
    inject(model, _config(values, folder, model), base)
    tensors = _read_tensors(folder)
    score = tensors.pop(_SCORE, None)
    if (score is None) != (values.get("task_type") != "SEQ_CLS") or (
        score is not None and score.shape != getattr(getattr(model, "score", None), "weight", score.new_empty(0)).shape
    ):
        raise ModelError(f"the head in {folder} does not fit: it is for another kind of model")
    if score is not None:
        model.get_parameter(_SCORE).data.copy_(score)
    expected: dict[str, torch.Tensor] = peft().get_peft_model_state_dict(model, save_embedding_layers=False)
    if {key: t.shape for key, t in expected.items()} != {key: t.shape for key, t in tensors.items()}:
        strange = sorted(expected.keys() ^ tensors.keys()) or ["shapes"]
        raise ModelError(f"the adapters in {folder} do not fit their base {base.name!r} ({', '.join(strange[:3])})")
    with quiet_transformers():
        peft().set_peft_model_state_dict(model, tensors, ADAPTER)


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors in `folder`, by their names in the model."""
    try:
        tensors = load_file(folder / WEIGHTS_FILE)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{folder / WEIGHTS_FILE} cannot be read as safetensors ({error}); it is damaged") from error
    return {key.removeprefix(_PREFIX): tensor for key, tensor in tensors.items()}


def _config(values: Mapping[str, Any], folder: Path, model: PreTrainedModel) -> Any:
    """PEFT's config from `values`.

    Raises:
        ModelError: a method or option that is not supported here.
    """
    library = peft()
    plain = library.LoraConfig().to_dict()
    known = {*_USED, *_OF_TRAINING}
    strange = [key for key, value in values.items() if key not in known and value and value != plain.get(key)]
    if values.get("init_lora_weights") in _PLAIN_STARTS and "init_lora_weights" in strange:
        strange.remove("init_lora_weights")
    if set(values.get("modules_to_save") or ()) - {"score", "classifier"}:
        strange.append("modules_to_save")
    if values.get("peft_type") != "LORA" or strange:
        raise ModelError(
            f"{folder / CONFIG_FILE} is of type {values.get('peft_type')!r} with {', '.join(strange) or 'no options'}; "
            "LoRA and DoRA without further options are known. Merge it with PEFT, and give the merged model"
        )
    used = {key: values[key] for key in _USED if values.get(key) is not None}
    try:
        return library.LoraConfig(**used, fan_in_fan_out=has_transposed_weights(model))
    except (TypeError, ValueError) as error:
        raise ModelError(f"{folder / CONFIG_FILE} makes no sense to PEFT ({error}); get the folder again") from error


def _name_for_peft(name: str) -> str:
    """The base as PEFT expects it: a hub id, or the path of a model folder."""
    if name == SMOLLM2:
        return SMOLLM2_HUB_ID
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return name
    return str((folder / "final" if (folder / "final").is_dir() else folder).resolve())
