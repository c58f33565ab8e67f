"""The exported model folder of a run; `from_pretrained` loads it without Tunesmith."""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import ModelError, RunError
from tunesmith.engine.models.adapter_folder import adapter_dtype, is_adapter_folder, is_reward_adapter, save_adapters
from tunesmith.engine.models.assets import SMOLLM2, SMOLLM2_HUB_ID, write_folder
from tunesmith.engine.models.folder_check import find_pickle
from tunesmith.engine.models.heads import RewardModel, ScalarHead
from tunesmith.engine.models.load import load_policy, new_reward_model
from tunesmith.engine.models.loaded import quiet_transformers
from tunesmith.engine.models.lora import base_of, has_adapters, merge

VALUE_HEAD_FILE = "value_head.safetensors"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Contents of the README.md of a model folder. `base_model` is the model that was trained.

    `root` is the hub id of the model that the header names as its base, by default that of `base_model`; `datasets` are
    hub ids, `place` is what `from_pretrained` is given, and `sections` have a heading and Markdown each.

    Example: `ModelCard(base_model="smollm2", algorithm="PPO", metrics={"reward": 0.7}, recipe={"run": {"steps": 9}})`.
    """

    base_model: str
    algorithm: str
    title: str = ""
    metrics: Mapping[str, object] = field(default_factory=dict[str, object])
    recipe: Mapping[str, object] = field(default_factory=dict[str, object])
    root: str = ""
    license: str = ""
    datasets: Sequence[str] = ()
    tags: Sequence[str] = ()
    place: str = "path/to/this/folder"
    sections: Mapping[str, str] = field(default_factory=dict[str, str])


def save_final(
    model: PreTrainedModel | RewardModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    card: ModelCard,
    *,
    value_head: ScalarHead | None = None,
    replaces: bool = True,
) -> Path:
    """`folder`, with weights (safetensors), config, tokenizer, chat template, generation config and a model card.

    `value_head` becomes `value_head.safetensors`. The folder is complete or absent; an existing one is replaced,
    or is an error without `replaces`.

    Raises:
        RunError: it cannot be written.
    """
    inner = model.model if isinstance(model, RewardModel) else model

    def build(content: Path) -> None:
        _save_model(inner, tokenizer, content)
        if value_head is not None:
            tensors = {name: tensor.contiguous() for name, tensor in value_head.state_dict().items()}
            save_file(tensors, content / VALUE_HEAD_FILE)
        text = render_card(card, is_classifier=not inner.can_generate(), is_adapter=has_adapters(inner))
        (content / "README.md").write_text(text, encoding="utf-8")

    try:
        write_folder(folder, build, replaces=replaces)
    except OSError as error:
        raise RunError(
            f"cannot write the model to {folder}: {error}; free some space or choose another run.dir"
        ) from error
    return folder


def save_weights(model: PreTrainedModel, folder: Path) -> None:
    """Write weights and configuration of `model` to `folder`, with adapters merged into the weights."""
    if has_adapters(model):
        model = copy.deepcopy(model)
        merge(model)
    _save_model(model, None, folder)


def load_value_head(folder: Path) -> ScalarHead | None:
    """The value head in `folder`, or None. Raises ModelError if the file is not a value head, or a pickle."""
    path = folder / VALUE_HEAD_FILE
    if not path.is_file():
        if pickles := find_pickle(folder, path.stem):
            raise ModelError(
                f"{folder} has {pickles[0]}, which can run code when read; convert it to {VALUE_HEAD_FILE} with "
                "`safetensors.torch.save_file` in a place where you trust the file"
            )
        return None
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read as safetensors ({error}); it is damaged or no value head") from error
    if tensors.keys() != {"weight", "bias"} or tensors["weight"].dim() != 2:
        raise ModelError(f"{path} holds {', '.join(sorted(tensors))}; a value head has weight and bias")
    head = ScalarHead(tensors["weight"].shape[1])
    head.load_state_dict(tensors)
    return head


def render_card(card: ModelCard, *, is_classifier: bool, is_adapter: bool) -> str:
    """The text of the model card: YAML front matter as the hub reads it, then what was done and how to load it."""
    front: dict[str, object] = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-classification" if is_classifier else "text-generation",
        "tags": ["tunesmith", "rlhf", card.algorithm.lower().replace(" ", "-"), *card.tags],
    }
    if named := card.root or hub_id(card.base_model):
        front["base_model"] = named
    if card.license:
        front["license"] = card.license
    if card.datasets:
        front["datasets"] = [*card.datasets]
    auto_class = "SequenceClassification" if is_classifier else "CausalLM"
    auto_class = f"AutoPeftModelFor{auto_class}" if is_adapter else f"AutoModelFor{auto_class}"
    imports = f"from transformers import {auto_class}, AutoTokenizer"
    if is_adapter:
        imports = f"from peft import {auto_class}\nfrom transformers import AutoTokenizer"
    title = card.title or f"{Path(card.base_model).name} after {card.algorithm}"
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n",
        f"# {title}\n",
        f"Trained from `{card.base_model}` with Tunesmith ({card.algorithm}).\n",
        f"## Use\n\n```python\n{imports}\n\n"
        f'model = {auto_class}.from_pretrained("{card.place}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{card.place}")\n```\n',
    ]
    parts += [f"## {heading}\n\n{text}\n" for heading, text in card.sections.items()]
    if card.metrics:
        rows = "\n".join(f"| `{name}` | {_figure(value)} |" for name, value in card.metrics.items())
        parts.append(f"## Figures\n\n| metric | value |\n|---|---|\n{rows}\n")
    if card.recipe:
        recipe = yaml.safe_dump(dict(card.recipe), sort_keys=False, allow_unicode=True)
        parts.append(f"## Recipe\n\n```yaml\n{recipe}```\n")
    return "\n".join(parts)


def _save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    # Training runs without the cache of generation; whoever loads the folder wants it.
    use_cache, model.config.use_cache = model.config.use_cache, True
    generation_config = model.generation_config if model.can_generate() else None
    if generation_config is not None and tokenizer is not None:
        if generation_config.eos_token_id is None:
            generation_config.eos_token_id = tokenizer.eos_token_id
        if generation_config.pad_token_id is None:
            generation_config.pad_token_id = tokenizer.pad_token_id
    try:
        with quiet_transformers():
            if has_adapters(model):
                save_adapters(model, folder)
            else:
                model.save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
    except ValueError as error:
        # Old repositories carry sampling values without do_sample, which the library reads but refuses to write.
        raise RunError(
            f"the library refuses to write this model ({error}); correct its generation_config.json"
        ) from error
    finally:
        model.config.use_cache = use_cache


def hub_id(name: str) -> str | None:
    """The hub id of `name` if it has one: the hub links a card to it, and rejects a local path there."""
    if name == SMOLLM2:
        return SMOLLM2_HUB_ID
    parts = name.split("/")
    is_hub_id = len(parts) == 2 and all(parts) and parts[0] not in (".", "..", "~") and not Path(name).exists()
    return name if is_hub_id else None


def card_figures(folder: Path) -> dict[str, str]:
    """The figures in the card of a model folder of ours, by metric; none if it has no such card."""
    try:
        text = (folder / "README.md").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return {}
    return dict(re.findall(r"^\| `(.+)` \| (.+) \|$", text.partition("\n## Figures\n")[2], re.MULTILINE))


def _figure(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def save_merged(source: Path, dest: Path, *, trust_remote_code: bool = False) -> Path:
    """Write the base with the adapters in `source` merged into it to `dest`, as a plain model folder.

    Weights and adapters are summed in float32 and rounded once to the dtype of the adapters. A value head is copied.

    Raises:
        ModelError: `source` holds no adapters, or their base cannot be loaded.
    """
    if not is_adapter_folder(source):
        raise ModelError(f"{source} holds no adapters, so there is nothing to merge; leave --merge out")
    section = ModelSection(name=str(source), trust_remote_code=trust_remote_code)
    load = new_reward_model if is_reward_adapter(source, str(source)) else load_policy
    loaded = load(section, dtype=adapter_dtype(source))
    card = ModelCard(base_of(loaded.model).name, "merged adapters")
    merge(loaded.model)
    head = load_value_head(source)
    return save_final(loaded.model, loaded.tokenizer, dest, card, value_head=head, replaces=False)
