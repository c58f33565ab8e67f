"""Adapters and their base as one plain model folder."""

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tunesmith.config.sections import ModelSection
from tunesmith.core.errors import ModelError
from tunesmith.models.adapter_folder import adapter_dtype, is_adapter_folder, is_reward_adapter
from tunesmith.models.export import ModelCard, load_value_head, save_final
from tunesmith.models.load import load_policy, new_reward_model
from tunesmith.models.lora import base_of, merge


def save_merged(source: Path, dest: Path, *, trust_remote_code: bool = False) -> Path:
    """`dest`, with the model that the adapters in `source` make of their base: a model folder like any other.

    Weights and adapters are summed in float32 and rounded once to the dtype of the adapters. A value head is taken
    along. Raises ModelError if `source` holds no adapters, or their base cannot be loaded.
    """
    if not is_adapter_folder(source):
        raise ModelError(f"{source} holds no adapters, so there is nothing to merge; leave --merge out")
    model, tokenizer = _load(source, trust_remote_code)
    card = ModelCard(base_of(model).name, "merged adapters")
    merge(model)
    return save_final(model, tokenizer, dest, card, value_head=load_value_head(source))


def _load(source: Path, trust_remote_code: bool) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    section = ModelSection(name=str(source), trust_remote_code=trust_remote_code)
    dtype = adapter_dtype(source)
    if is_reward_adapter(source, str(source)):
        reward_model = new_reward_model(section, dtype=dtype)
        return reward_model.model, reward_model.tokenizer
    loaded = load_policy(section, dtype=dtype)
    return loaded.model, loaded.tokenizer
