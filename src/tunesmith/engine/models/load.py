"""Models by name: hub id, local folder, run folder, GGUF file, `smollm2`, `scratch`, `tiny:<family>`.

Weights are read from safetensors only (a pickle can run code), and code in a model's repository runs only with
`model.trust_remote_code`; see `folder_check`.
"""

import copy
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tunesmith.base.config.algorithms.reward import HeadsSection
from tunesmith.base.config.keys import did_you_mean
from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import ModelError
from tunesmith.base.core.log import get_logger
from tunesmith.base.runs.listing import read_object
from tunesmith.engine.kernels.linear.api import cpu_has_bfloat16
from tunesmith.engine.models import adapter_folder, assets, ensemble, lora, tiny
from tunesmith.engine.models.folder_check import check_adapter_folder, check_folder
from tunesmith.engine.models.heads import MADE_HERE, RewardModel, RewardTransform
from tunesmith.engine.models.length_trend import describe_trend
from tunesmith.engine.models.loaded import (
    LIBRARY_ERRORS,
    LoadedModel,
    cast_parameters,
    disable_dropout,
    keep_lower_layers,
    quiet_transformers,
    unmask_padding_embedding,
)
from tunesmith.engine.models.tokenizer import spare_pad_token, stop_at_ends

_logger = get_logger(__name__)

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


def load_policy(
    section: ModelSection | str, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> LoadedModel:
    """The language model named by `section`, in evaluation mode without dropout, with its right-padding tokenizer.

    A text is its name alone. With `section.lora` fresh adapters of a frozen base are trained, which `section.base` may
    round to 8 bits; a folder with adapters is loaded with its base as it was in training, and they are trained on.
    `dtype` overrides the section's. Without a padding token, eos pads.

    Raises:
        ModelError: there is no such model, or it is not a language model.
    """
    section = ModelSection(name=section) if isinstance(section, str) else section
    dtype = dtype or compute_dtype(section.dtype, device)
    located = _locate(section)
    adapters = located.adapters
    if adapters is not None and adapter_folder.is_reward_adapter(adapters, section.name):
        raise ModelError(f"{section.name!r} holds the adapters of a reward model, which writes no text; give a policy")
    model, tokenizer = _language_model(located, dtype)
    _prepare(model, device, gradient_checkpointing=section.gradient_checkpointing)
    if adapters is None:
        lora.add_adapters(model, section.lora, _as_base(section))
    else:
        adapter_folder.load_adapters(model, adapters, section.name)
        tokenizer = _tokenizer_beside(adapters, section, tokenizer)
    _round_base(model, section)
    _check_vocabulary(model, tokenizer, section.name)
    stop_at_ends(model, tokenizer)
    return LoadedModel(model, tokenizer, section.name, dtype)


def new_reward_model(
    section: ModelSection,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    heads: HeadsSection | None = None,
    seed: int = 0,
) -> RewardModel:
    """A reward model on the trunk of the model named by `section`, with a score head that starts at zero.

    A model that already is a single-label classifier keeps its head, and the token that it is read at. For a new head
    the padding token is one that never ends a sequence; if the vocabulary has none, the config names none, so that the
    library's own forward reads the last token too. With `section.lora` the trunk is frozen, and fresh adapters are
    trained with the head. Adapters of a policy are merged into the trunk; those of a reward model are trained on.
    With `heads` there are as many, whose random parts are drawn with `seed`; without, as many as the model has.

    Raises:
        ModelError: there is no such model, it has no score head, or another number of heads, above 1.
    """
    dtype = dtype or compute_dtype(section.dtype, device)
    located = _locate(section)
    adapters = located.adapters
    if adapters is not None and not adapter_folder.is_reward_adapter(adapters, section.name):
        policy = load_policy(section, dtype=dtype)
        lora.merge(policy.model)
        adapters, model, tokenizer = None, _classifier_on(policy.model, dtype), policy.tokenizer
    else:
        model, tokenizer = _classifier(located, dtype)
    if adapters is not None:
        base_tokenizer, tokenizer = tokenizer, _tokenizer_beside(adapters, section, tokenizer)
        setattr(model.config, MADE_HERE, adapter_folder.is_made_here(adapters))
        if tokenizer is not base_tokenizer:  # with which they were trained
            model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        if facts := adapter_folder.read_heads(adapters, section.name):
            ensemble.add_heads(model, facts[0], 0.0, 0)  # the weights are loaded below
            ensemble.describe_heads(model, *facts)
        describe_trend(model, adapter_folder.read_trend(adapters, section.name))
    if getattr(model.config, MADE_HERE, False):
        spare = spare_pad_token(tokenizer)
        tokenizer.pad_token = spare or tokenizer.pad_token
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id if spare else None
    _check_vocabulary(model, tokenizer, section.name)
    if adapters is not None:
        _prepare(model, device, gradient_checkpointing=section.gradient_checkpointing)
        model.score.float()  # the head that is loaded is
        keep_lower_layers(model, adapter_folder.read_base(adapters, section.name).num_layers)
        adapter_folder.load_adapters(model, adapters, section.name)
    if heads is not None:
        ensemble.add_heads(model, heads.count, heads.prior_scale, seed)
    if adapters is None:
        _prepare(model, device, gradient_checkpointing=section.gradient_checkpointing)
        lora.add_adapters(model, section.lora, _as_base(section))
    _round_base(model, section)
    return RewardModel(model, tokenizer, source=section.name, section=section)


def load_reward_model(
    name: str,
    *,
    label: str | int | None = None,
    transform: RewardTransform = "raw",
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> RewardModel:
    """The trained reward model or classifier `name`, frozen. `label` and `transform` choose the logit (`RewardModel`).

    Code in the model's folder is never run here.

    Raises:
        ModelError: `name` needs such code, is not a sequence classifier, or has several labels and none was chosen.
    """
    if is_built_in(name):
        raise ModelError(f"{name!r} has no trained reward head; give a run folder, a local folder or a hub id")
    dtype = dtype or compute_dtype("auto", device)
    folder = find_folder(name, how_to_trust=_TRUST_REWARD)
    if adapter_folder.is_adapter_folder(folder):
        if not adapter_folder.is_reward_adapter(folder, name):
            raise ModelError(f"{name!r} holds the adapters of a policy, which scores nothing; give a reward model")
        adapted = new_reward_model(ModelSection(name=name), device=device, dtype=dtype)
        model, tokenizer = adapted.model, adapted.tokenizer
    else:
        model, missing = _from_pretrained(AutoModelForSequenceClassification, folder, name, dtype)
        if missing:
            raise ModelError(
                f"{name!r} is no reward model: its weights lack {_named(missing)}; "
                "give a sequence classifier, for example the run folder of `tunesmith train reward`"
            )
        _prepare(model, device)
        tokenizer = load_tokenizer(folder, name)
        _check_vocabulary(model, tokenizer, name)
    reward_model = RewardModel(model, tokenizer, label=label, transform=transform, source=name)
    return reward_model.eval().requires_grad_(False)


def as_reward_model(model: PreTrainedModel) -> RewardModel:
    """A classifier that is loaded already, frozen, with the tokenizer of the name or folder that it was loaded from.

    Raises:
        ModelError: it has several labels, or no tokenizer is found there.
    """
    name = str(model.config._name_or_path)
    if not name:
        raise ModelError(
            f"this {type(model).__name__} was not loaded by a name, so its tokenizer is not known; give "
            "`RewardModel(model, tokenizer)`"
        )
    tokenizer = load_tokenizer(find_folder(name, how_to_trust=_TRUST_REWARD), name)
    return RewardModel(model, tokenizer, source=name).eval().requires_grad_(False)


def _from_hub(name: str, *, with_code: bool) -> Path:
    """The snapshot of a hub repository. If the name could be a local folder, an error says that there is none."""
    try:
        return assets.download_from_hub(name, with_code=with_code)
    except ModelError as error:
        around = Path(name).expanduser().parent
        if around == Path() or not around.is_dir():
            raise
        near = did_you_mean(name, [str(path) for path in around.iterdir() if path.is_dir()])
        raise ModelError(
            f"there is no model folder {name!r}{near}; `tunesmith runs ls` lists runs. As a model of the hub: {error}"
        ) from error


def find_folder(name: str, *, trust_remote_code: bool = False, how_to_trust: str = _TRUST_POLICY) -> Path:
    """The local folder of the model `name`, downloaded or converted if needed; of a run folder, its `final/`.

    Raises:
        ModelError: there is none, its weights are not safetensors, or it contains code and `trust_remote_code` is off.
    """
    path = Path(name).expanduser()
    if name == assets.SMOLLM2:
        return assets.resolve()
    if path.is_file() and path.suffix.lower() == ".gguf":
        return assets.convert_gguf(path)
    if path.is_dir():
        folder = _model_folder(path, name)
    elif path.exists() or not _HUB_ID.fullmatch(name) or path.suffix.lower() == ".gguf":
        what = "is no model folder or .gguf file" if path.exists() else "does not exist and is no hub id"
        raise ModelError(f"the model {name!r} {what}; give {_FORMS}")
    else:
        folder = _from_hub(name, with_code=trust_remote_code)
    if adapter_folder.is_adapter_folder(folder):
        check_adapter_folder(folder, name)
    else:
        check_folder(folder, name, trust_remote_code=trust_remote_code, how_to_trust=how_to_trust)
    return folder


def load_tokenizer(folder: Path, name: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer in `folder`, padding on the right, with its eos as padding token if it has none."""
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        # The tokenizers library raises `Exception` itself for a file that makes no sense.
        if type(error) is not Exception and not isinstance(error, LIBRARY_ERRORS):
            raise
        raise ModelError(
            f"cannot load a tokenizer for {name!r} ({_first_line(error)}); look at its tokenizer.json"
        ) from error
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def compute_dtype(requested: str, device: str | torch.device = "cpu") -> torch.dtype:
    """The dtype named `requested` in a recipe. `auto` is bfloat16 if the hardware supports it, else float32 on a CPU
    (where emulated bfloat16 is several times slower) and float16 on a GPU.

    Raises:
        ModelError: the name is unknown.
    """
    named = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if requested in named:
        return named[requested]
    if requested != "auto":
        raise ModelError(f"there is no dtype {requested!r}; give auto, {', '.join(named)}")
    if torch.device(device).type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.bfloat16 if cpu_has_bfloat16() else torch.float32


def is_built_in(name: str) -> bool:
    """True for a model without files: `scratch`, or `tiny:<family>`."""
    return name == "scratch" or name.startswith(_TINY)


def _model_folder(folder: Path, name: str) -> Path:
    """`folder`, or its `final/` if it is a run folder."""
    for place in (folder / "final", folder):
        if (place / "config.json").is_file() or adapter_folder.is_adapter_folder(place):
            return place
    if (folder / "recipe.yaml").is_file():
        raise ModelError(f"the run {name!r} has no final/ model: it did not finish; give another run or a model folder")
    raise ModelError(f"the folder of {name!r} holds no config.json, so it is no model; give {_FORMS}")


@dataclass(frozen=True, slots=True)
class _Located:
    """A plain model (`base`, in `folder`; None if built in code), and the folder with its adapters, if any."""

    base: ModelSection
    folder: Path | None
    adapters: Path | None


def _locate(section: ModelSection) -> _Located:
    """The files of the model that `section` names; of a folder with adapters also its base.

    Raises:
        ModelError: there are none; the section asks for second adapters; the base holds adapters itself.
    """
    folder = _folder_of(section)
    if folder is None or not adapter_folder.is_adapter_folder(folder):
        return _Located(section, folder, None)
    if section.lora.rank:
        raise ModelError(
            f"{section.name!r} holds adapters, and model.lora asks for others; set model.lora.rank to 0 to train these "
            "on, or merge them first with `tunesmith export --merge`"
        )
    base = adapter_folder.read_base(folder, section.name)
    base_section = section.model_copy(update={"name": base.name, "seed": base.seed})
    base_folder = _folder_of(base_section)
    if base_folder is not None and adapter_folder.is_adapter_folder(base_folder):
        raise ModelError(
            f"the base of {section.name!r} is {base.name!r}, which holds adapters itself; merge that one with "
            "`tunesmith export --merge`"
        )
    return _Located(base_section, base_folder, folder)


def _folder_of(section: ModelSection) -> Path | None:
    if is_built_in(section.name):
        return None
    return find_folder(section.name, trust_remote_code=section.trust_remote_code)


def _language_model(located: _Located, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The base as a language model, as loaded."""
    name, trust = located.base.name, located.base.trust_remote_code
    if located.folder is None:
        build = tiny.scratch_model if name == "scratch" else partial(tiny.tiny_model, name.removeprefix(_TINY))
        built = build(located.base.seed, dtype=dtype)
        return built.model, built.tokenizer
    model, missing = _from_pretrained(AutoModelForCausalLM, located.folder, name, dtype, trust_remote_code=trust)
    if missing:
        raise ModelError(
            f"{name!r} is no complete language model: its weights lack {_named(missing)}; give a causal language model"
        )
    return model, load_tokenizer(located.folder, name, trust_remote_code=trust)


def _classifier(located: _Located, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The base as a classifier with one score per sequence; a head that it lacks starts at zero."""
    name, trust = located.base.name, located.base.trust_remote_code
    if located.folder is None:
        model, tokenizer = _language_model(located, dtype)
        return _classifier_on(model, dtype), tokenizer
    tokenizer = load_tokenizer(located.folder, name, trust_remote_code=trust)
    stored = read_object(located.folder / "config.json")
    labels = cast(Mapping[str, object], stored.get("id2label") or {})
    num_heads = max(1, len(labels)) if stored.get(ensemble.HEADS) is not None else 1
    model, missing = _from_pretrained(
        AutoModelForSequenceClassification, located.folder, name, dtype, trust_remote_code=trust, num_labels=num_heads
    )
    if not isinstance(score := getattr(model, "score", None), nn.Linear):
        raise ModelError(
            f"{name!r} ({type(model).__name__}) has no score head on its last token, so it cannot "
            "be trained as a reward model; take a decoder such as Llama, Qwen, Gemma or GPT-2"
        )
    if missing - {"score.weight"}:
        raise ModelError(f"the weights of {name!r} lack {_named(missing - {'score.weight'})}; get the model again")
    if "score.weight" in missing:
        nn.init.zeros_(score.weight)
        setattr(model.config, MADE_HERE, True)
    return model, tokenizer


def _as_base(section: ModelSection) -> lora.AdapterBase:
    """The name of the base, as stored with adapters; paths are absolute."""
    path = Path(section.name).expanduser()
    has_path = not is_built_in(section.name) and section.name != assets.SMOLLM2 and path.exists()
    return lora.AdapterBase(str(path.resolve()) if has_path else section.name, section.seed)


def _tokenizer_beside(folder: Path, section: ModelSection, base: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer saved with the adapters, which may have another template; else (PEFT saves none) the base's."""
    if not (folder / "tokenizer_config.json").is_file():
        return base
    return load_tokenizer(folder, section.name, trust_remote_code=section.trust_remote_code)


def _from_pretrained(
    auto_class: type,
    folder: Path,
    name: str,
    dtype: torch.dtype,
    *,
    trust_remote_code: bool = False,
    **options: object,
) -> tuple[PreTrainedModel, set[str]]:
    """The model and the names of parameters that its files lack.

    Raises:
        ModelError: it cannot be loaded; its files have weights that it does not have.
    """
    try:
        with quiet_transformers():
            model, info = auto_class.from_pretrained(  # type: ignore[attr-defined]
                folder,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are named below
                **options,
            )
    except LIBRARY_ERRORS as error:
        raise ModelError(f"cannot load {name!r} from {folder} ({_first_line(error)}); give {_FORMS}") from error
    for key, stored, needed in sorted(info["mismatched_keys"]):
        raise ModelError(
            f"the weight {key} of {name!r} is {list(stored)}, but a {type(model).__name__} of its config.json needs "
            f"{list(needed)}; correct config.json, or get the model again"
        )
    missing = set(info["missing_keys"])
    strange = [key for key in info["unexpected_keys"] if not _is_needless(key, model)]
    if "score.weight" in missing:  # a classifier made on a language model leaves its output layer out
        strange = [key for key in strange if not key.startswith(_outputs(model))]
    # A model of another kind lacks some and has others; what it lacks is the clearer message.
    if strange and not missing - {"score.weight"}:
        raise ModelError(
            f"the weights of {name!r} hold {_named(strange)}, which a {type(model).__name__} of its config.json does "
            "not have, so they would be left out; correct config.json (a bias that it switches off, the number of "
            "layers, the architecture), or remove them from the files"
        )
    if auto_class is AutoModelForSequenceClassification and not missing and _has_our_card(folder):
        setattr(model.config, MADE_HERE, True)  # by a version that did not write it into the config
    return model, missing


def _has_our_card(folder: Path) -> bool:
    card = folder / "README.md"
    return card.is_file() and "\n- tunesmith\n" in card.read_text(encoding="utf-8", errors="replace")[:4096]


def _is_needless(key: str, model: PreTrainedModel) -> bool:
    """True for a tensor that older versions of the library stored though nothing is lost without it: causal masks,
    frequencies, and the pooler of classifiers that read another token (RoBERTa).
    """
    is_buffer = any(f".{name}".endswith(f".{key}") for name, _ in model.named_buffers())
    is_pooler = not model.can_generate() and "pooler" in key.split(".")
    return is_buffer or is_pooler or key.endswith((".masked_bias", ".inv_freq", ".position_ids"))


def _outputs(model: PreTrainedModel) -> tuple[str, ...]:
    """The beginnings of the names that the output layer has in a language model with the trunk of `model`."""
    language_model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model.config), None)
    tied = getattr(language_model, "_tied_weights_keys", None) or ()
    return ("lm_head.", *(f"{name.rpartition('.')[0]}." for name in tied))


def _named(keys: Collection[str]) -> str:
    """Some of `keys`, and how many there are."""
    some = ", ".join(sorted(keys)[:3])
    return some if len(keys) <= 3 else f"{some} and {len(keys) - 3} more"


def _classifier_on(policy: PreTrainedModel, dtype: torch.dtype) -> Any:
    """A classifier on a copy of the trunk of `policy`, with a head at zero."""
    config = copy.deepcopy(policy.config)
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config)
    cast_parameters(model, dtype)
    model.base_model.load_state_dict(policy.base_model.state_dict())
    nn.init.zeros_(model.score.weight)
    setattr(model.config, MADE_HERE, True)
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


def _round_base(model: PreTrainedModel, section: ModelSection) -> None:
    """Round the base of the adapters to 8 bits if `section`, or the folder that they are from, says so."""
    was_int8 = lora.has_adapters(model) and lora.base_of(model).is_int8
    if section.base == "int8" or was_int8:
        lora.hold_base_in_int8(model, section.name)


def _check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse a tokenizer with tokens for which the embedding of `model` has no row.

    Special tokens that neither mark a role nor occur in the chat template are only named in a warning: Gemma 3 1B has
    one for images, which no text holds.
    """
    weight: Any = getattr(model.get_input_embeddings(), "weight", None)
    added = tokenizer.added_tokens_decoder
    if weight is None or max(len(tokenizer) - 1, *added) < len(weight):
        return
    outside = {index: token for token, index in tokenizer.get_vocab().items() if index >= len(weight)}
    named = {getattr(tokenizer, f"{role}_token") for role in ("bos", "eos", "pad", "unk", "sep", "cls", "mask")}
    needed = {
        index: token
        for index, token in sorted(outside.items())
        if index not in added or not added[index].special or token in named or token in str(tokenizer.chat_template)
    }
    some = ", ".join(f"{token!r} ({index})" for index, token in sorted((needed or outside).items())[:3])
    what = f"the tokenizer of {name!r} has {len(tokenizer)} tokens and its embedding {len(weight)} rows; without a row"
    if needed:
        raise ModelError(
            f"{what}: {some}. Take the tokenizer that belongs to the model, or give the tokens rows with "
            "`model.resize_token_embeddings(len(tokenizer))` and save the model"
        )
    if outside:
        _logger.warning("%s: %s. Text that holds one of them is refused", what, some)


def _first_line(error: Exception) -> str:
    """The first line of `error`, with the second if the first ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
