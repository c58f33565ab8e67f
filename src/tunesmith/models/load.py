"""Models by name: hub id, local folder, run folder, GGUF file, `smollm2`, `scratch`, `tiny:<family>`.

Weights are read from safetensors alone (a pickle can run code), and code of a model's repository is run only where the
recipe says so (`model.trust_remote_code`); see `folder_check`.
"""

import copy
import re
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tunesmith.config.sections import ModelSection
from tunesmith.core.errors import ModelError
from tunesmith.models import adapter_folder, assets, lora, tiny
from tunesmith.models.folder_check import check_adapter_folder, check_folder
from tunesmith.models.freeze import keep_lower_layers
from tunesmith.models.heads import RewardModel, RewardTransform
from tunesmith.models.loaded import (
    LoadedModel,
    cast_parameters,
    disable_dropout,
    quiet_transformers,
    unmask_padding_embedding,
)
from tunesmith.models.tokenizer import spare_pad_token

__all__ = [
    "LoadedModel",
    "compute_dtype",
    "count_parameters",
    "find_folder",
    "frozen_copy",
    "load_policy",
    "load_reward_model",
    "new_reward_model",
]

_FORMS = "a hub id, a local folder, a run folder, a .gguf file, smollm2, scratch, or tiny:<family>"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TINY = "tiny:"
_TRUST_POLICY = (
    "set model.trust_remote_code to true (`--model.trust-remote-code true` of train, `--trust-remote-code` of "
    "generate, chat, compare and export)"
)
_TRUST_REWARD = (
    "load it in a reward function of your own (`./file.py:name`), because a reward source never runs a model's code"
)

# What the library raises when the values of a config or tokenizer file make no sense.
_LIBRARY_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
    TypeError,
    ValueError,
)


def load_policy(
    section: ModelSection, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> LoadedModel:
    """The language model that `section` names, in evaluation mode without dropout, with its right-padding tokenizer.

    With `section.lora` its base is frozen and fresh adapters are trained; where `section` names a folder with adapters,
    these stand on their base, and are trained on. `dtype` overrides the section's. A tokenizer without a padding token
    pads with its eos: lengths make the masks.
    Raises ModelError for a name that leads nowhere or to something that is no language model.
    """
    dtype = dtype or compute_dtype(section.dtype, device)
    if _is_built_in_code(section.name):
        loaded = _build_in_code(section.name, section.seed, dtype)
    else:
        trust = section.trust_remote_code
        folder = find_folder(section.name, trust_remote_code=trust)
        if adapter_folder.is_adapter_folder(folder):
            return _adapted_policy(section, folder, device, dtype)
        model = _from_folder(AutoModelForCausalLM, folder, section.name, dtype, trust_remote_code=trust)
        tokenizer = load_tokenizer(folder, section.name, trust_remote_code=trust)
        loaded = LoadedModel(model, tokenizer, section.name, dtype)
    _prepare(loaded.model, device, gradient_checkpointing=section.gradient_checkpointing)
    lora.add_adapters(loaded.model, section.lora, _as_base(section))
    return loaded


def new_reward_model(
    section: ModelSection, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> RewardModel:
    """A reward model on the trunk of the model that `section` names, with a fresh score head.

    The head starts at zero: every pair is a coin flip at first, and few votes are not spent on unlearning a random one.
    A model that already is a single-label classifier keeps its head. The padding token is one that never ends a
    sequence, if one can be spared. With `section.lora` the trunk is frozen, and fresh adapters are trained beside the
    head; the adapters of a policy become a part of the trunk's weights, those of a reward model are trained on.
    """
    dtype = dtype or compute_dtype(section.dtype, device)
    trust, in_code = section.trust_remote_code, _is_built_in_code(section.name)
    folder = Path() if in_code else find_folder(section.name, trust_remote_code=trust)
    if not in_code and adapter_folder.is_adapter_folder(folder):
        _refuse_second_adapters(section)
        if adapter_folder.is_reward_adapter(folder, section.name):
            return _adapted_reward_model(section, folder, device, dtype)
        policy = load_policy(section, dtype=dtype)
        lora.merge(policy.model)
    else:
        policy = _build_in_code(section.name, section.seed, dtype) if in_code else None
    if policy is not None:
        tokenizer, model = policy.tokenizer, _classifier_on(policy.model, dtype)
        has_head = False
    else:
        tokenizer = load_tokenizer(folder, section.name, trust_remote_code=trust)
        model, missing = _from_pretrained(
            AutoModelForSequenceClassification, folder, section.name, dtype, trust_remote_code=trust, num_labels=1
        )
        has_head = "score.weight" not in missing
    score = getattr(model, "score", None)
    if not isinstance(score, nn.Linear):
        raise ModelError(
            f"{section.name!r} ({type(model).__name__}) has no score head on its last token, so it cannot "
            "be trained as a reward model; take a decoder such as Llama, Qwen, Gemma or GPT-2"
        )
    if not has_head:
        nn.init.zeros_(score.weight)
    if spare := spare_pad_token(tokenizer):
        tokenizer.pad_token = spare
    model.config.pad_token_id = tokenizer.pad_token_id
    _prepare(model, device, gradient_checkpointing=section.gradient_checkpointing)
    lora.add_adapters(model, section.lora, _as_base(section))
    return RewardModel(model, tokenizer, source=section.name)


def load_reward_model(
    name: str,
    *,
    label: str | int | None = None,
    transform: RewardTransform = "raw",
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> RewardModel:
    """The trained reward model or classifier `name`, frozen; `label` and `transform` say which logit is the reward.

    Code that the model brings along is never run here. Raises ModelError if it asks for that, if `name` is no sequence
    classifier, or if it has several labels and none was chosen.
    """
    dtype = dtype or compute_dtype("auto", device)
    if _is_built_in_code(name):
        raise ModelError(f"{name!r} has no trained reward head; give a run folder, a local folder or a hub id")
    folder = find_folder(name, how_to_trust=_TRUST_REWARD)
    if adapter_folder.is_adapter_folder(folder):
        if not adapter_folder.is_reward_adapter(folder, name):
            raise ModelError(f"{name!r} holds the adapters of a policy, which scores nothing; give a reward model")
        found = _adapted_reward_model(ModelSection(name=name), folder, device, dtype)
        model = RewardModel(found.model, found.tokenizer, label=label, transform=transform, source=name)  # type: ignore[arg-type]
        return model.eval().requires_grad_(False)
    model, missing = _from_pretrained(AutoModelForSequenceClassification, folder, name, dtype)
    if missing:
        raise ModelError(
            f"{name!r} is no reward model: its weights lack {', '.join(sorted(missing)[:3])}; "
            "give a sequence classifier, for example the run folder of `tunesmith train reward`"
        )
    _prepare(model, device)
    reward_model = RewardModel(model, load_tokenizer(folder, name), label=label, transform=transform, source=name)
    return reward_model.eval().requires_grad_(False)


def find_folder(name: str, *, trust_remote_code: bool = False, how_to_trust: str = _TRUST_POLICY) -> Path:
    """The local folder with the files of the model `name`, after download or conversion where needed.

    A run folder leads to its `final/`. Raises ModelError if there is none, if its weights are not safetensors, or if it
    brings code along and `trust_remote_code` is off.
    """
    path = Path(name).expanduser()
    if name == assets.SMOLLM2:
        return assets.resolve(name)
    if path.is_file() and path.suffix.lower() == ".gguf":
        return assets.convert_gguf(path)
    if path.is_dir():
        folder = _model_folder(path, name)
        _check(folder, name, trust_remote_code, how_to_trust)
        return folder
    if path.exists() or not _HUB_ID.fullmatch(name) or path.suffix.lower() == ".gguf":
        what = "is no model folder or .gguf file" if path.exists() else "does not exist and is no hub id"
        raise ModelError(f"the model {name!r} {what}; give {_FORMS}")
    folder = assets.download_from_hub(name, with_code=trust_remote_code)
    _check(folder, name, trust_remote_code, how_to_trust)
    return folder


def load_tokenizer(folder: Path, name: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer in `folder`, padding on the right, with its eos as padding token if it has none."""
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        # The tokenizers library raises `Exception` itself for a file that makes no sense.
        if type(error) is not Exception and not isinstance(error, _LIBRARY_ERRORS):
            raise
        raise ModelError(
            f"cannot load a tokenizer for {name!r} ({_first_line(error)}); look at its tokenizer.json"
        ) from error
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of `model` in evaluation mode that takes no gradients: the reference policy.

    It has storage of its own. Only where adapters are trained it shares their frozen base; then it is that base, or the
    base with the adapters as they are now where these change something already.
    """
    return lora.frozen_twin(model)


def count_parameters(model: nn.Module) -> int:
    """Number of parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def compute_dtype(requested: str, device: str | torch.device = "cpu") -> torch.dtype:
    """The dtype called `requested` in a recipe: for `auto`, bfloat16 where the device computes in it.

    Otherwise `auto` is float32 on a CPU, where emulated bfloat16 is several times slower, and float16 on a GPU.
    """
    named = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if requested in named:
        return named[requested]
    if requested != "auto":
        raise ModelError(f"there is no dtype {requested!r}; give auto, {', '.join(named)}")
    if torch.device(device).type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if has_bf16 else torch.float32


def _is_built_in_code(name: str) -> bool:
    return name == "scratch" or name.startswith(_TINY)


def _build_in_code(name: str, seed: int, dtype: torch.dtype) -> LoadedModel:
    if name == "scratch":
        return tiny.scratch_model(seed, dtype=dtype)
    return tiny.tiny_model(name.removeprefix(_TINY), seed, dtype=dtype)


def _model_folder(folder: Path, name: str) -> Path:
    """`folder`, or the `final/` of the run that it is."""
    for place in (folder / "final", folder):
        if (place / "config.json").is_file() or adapter_folder.is_adapter_folder(place):
            return place
    if (folder / "recipe.yaml").is_file():
        raise ModelError(f"the run {name!r} has no final/ model: it did not finish; give another run or a model folder")
    raise ModelError(f"the folder of {name!r} holds no config.json, so it is no model; give {_FORMS}")


def _check(folder: Path, name: str, trust_remote_code: bool, how_to_trust: str) -> None:
    if adapter_folder.is_adapter_folder(folder):
        check_adapter_folder(folder, name)
    else:
        check_folder(folder, name, trust_remote_code=trust_remote_code, how_to_trust=how_to_trust)


def _adapted_policy(section: ModelSection, folder: Path, device: str | torch.device, dtype: torch.dtype) -> LoadedModel:
    """The base of the adapters in `folder`, with them; they are what is trained."""
    _refuse_second_adapters(section)
    if adapter_folder.is_reward_adapter(folder, section.name):
        raise ModelError(
            f"{section.name!r} holds the adapters of a reward model, which writes no text; give a policy's"
        )
    base = _base_section(section, folder)
    loaded = load_policy(base, device=device, dtype=dtype)
    adapter_folder.load_adapters(loaded.model, folder, section.name)
    return LoadedModel(loaded.model, _tokenizer_beside(folder, section, loaded.tokenizer), section.name, dtype)


def _adapted_reward_model(
    section: ModelSection, folder: Path, device: str | torch.device, dtype: torch.dtype
) -> RewardModel:
    """The reward model whose adapters and head are in `folder`."""
    found = new_reward_model(_base_section(section, folder), device=device, dtype=dtype)
    keep_lower_layers(found.model, adapter_folder.read_base(folder, section.name).num_layers)
    adapter_folder.load_adapters(found.model, folder, section.name)
    return RewardModel(found.model, _tokenizer_beside(folder, section, found.tokenizer), source=section.name)


def _base_section(section: ModelSection, folder: Path) -> ModelSection:
    base = adapter_folder.read_base(folder, section.name)
    trust = section.trust_remote_code
    if not _is_built_in_code(base.name) and adapter_folder.is_adapter_folder(
        find_folder(base.name, trust_remote_code=trust)
    ):
        raise ModelError(
            f"the base of {section.name!r} is {base.name!r}, which holds adapters itself; merge that one with "
            "`tunesmith export --merge`"
        )
    return section.model_copy(update={"name": base.name, "seed": base.seed})


def _as_base(section: ModelSection) -> lora.AdapterBase:
    """What names the model of `section` beside its adapters; a path is absolute, so that any folder leads there."""
    path = Path(section.name).expanduser()
    has_path = not _is_built_in_code(section.name) and section.name != assets.SMOLLM2 and path.exists()
    return lora.AdapterBase(str(path.resolve()) if has_path else section.name, section.seed)


def _tokenizer_beside(folder: Path, section: ModelSection, of_base: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer that was saved with the adapters; theirs may have another template. PEFT saves none."""
    if not (folder / "tokenizer_config.json").is_file():
        return of_base
    return load_tokenizer(folder, section.name, trust_remote_code=section.trust_remote_code)


def _refuse_second_adapters(section: ModelSection) -> None:
    if section.lora.rank:
        raise ModelError(
            f"{section.name!r} holds adapters, and model.lora asks for others; set model.lora.rank to 0 to train these "
            "on, or merge them first with `tunesmith export --merge`"
        )


def _from_folder(
    auto_class: type, folder: Path, name: str, dtype: torch.dtype, *, trust_remote_code: bool
) -> PreTrainedModel:
    model, missing = _from_pretrained(auto_class, folder, name, dtype, trust_remote_code=trust_remote_code)
    if missing:
        raise ModelError(
            f"{name!r} is no complete language model: its weights lack {', '.join(sorted(missing)[:3])}; "
            "give a causal language model"
        )
    return model


def _from_pretrained(
    auto_class: type,
    folder: Path,
    name: str,
    dtype: torch.dtype,
    *,
    trust_remote_code: bool = False,
    **options: object,
) -> tuple[PreTrainedModel, set[str]]:
    """The model and the names of parameters that its files lack."""
    try:
        with quiet_transformers():
            model, info = auto_class.from_pretrained(  # type: ignore[attr-defined]
                folder,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **options,
            )
    except _LIBRARY_ERRORS as error:
        raise ModelError(f"cannot load {name!r} from {folder} ({_first_line(error)}); give {_FORMS}") from error
    return model, set(info["missing_keys"])


def _classifier_on(policy: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    config = copy.deepcopy(policy.config)
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config)
    cast_parameters(model, dtype)
    model.base_model.load_state_dict(policy.base_model.state_dict())
    return model


def _prepare(model: PreTrainedModel, device: str | torch.device, *, gradient_checkpointing: bool = False) -> None:
    disable_dropout(model)
    unmask_padding_embedding(model)
    model.to(device)  # type: ignore[arg-type]
    model.eval()
    model.config.use_cache = False
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()


def _first_line(error: Exception) -> str:
    """What `error` says in one line; a line that only announces the next takes it along."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
