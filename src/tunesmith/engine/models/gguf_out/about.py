"""The entries of a GGUF file on its model: names, licence, and what it was trained from, on and how (`general.*`)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import gguf
import yaml

from tunesmith.base.runs.listing import read_recipe
from tunesmith.engine.models.assets import SMOLLM2, SMOLLM2_HUB_ID
from tunesmith.engine.models.export import hub_id

_SOURCES = ("prompts", "demonstrations", "pairs")
"""Sections of a recipe that name data."""

_HUB = "https://huggingface.co"
_LICENSES = {SMOLLM2_HUB_ID: "apache-2.0"}
"""Of the model that comes without a card."""


@dataclass(frozen=True, slots=True)
class About:
    """The entries of a file. Paths of this machine are not among them: of a local file only its name is told."""

    name: str
    base: str = ""
    algorithm: str = ""
    license: str = ""
    datasets: Sequence[str] = ()
    rewards: Sequence[str] = ()

    @property
    def description(self) -> str:
        """One sentence."""
        parts = [f"Trained from {self.base} with Tunesmith" if self.base else "Trained with Tunesmith"]
        parts += [f" ({self.algorithm})" if self.algorithm else ""]
        parts += [f" on {', '.join(self.datasets)}" if self.datasets else ""]
        parts += [f", rewarded by {', '.join(self.rewards)}" if self.rewards else ""]
        return "".join(parts)

    def add_to(self, writer: gguf.GGUFWriter, *, has_phi3_vocabulary: bool = True) -> None:
        """Add the entries. llama.cpp looks for the tokens of Phi-3 in a file with that name, and fails without them."""
        writer.add_name(self.name if has_phi3_vocabulary else re.sub("(?i)phi-?3", "phi_3", self.name))
        writer.add_description(self.description)
        if self.algorithm:
            writer.add_finetune(self.algorithm)
        if self.license:
            writer.add_license(self.license)
        if self.base:
            writer.add_base_model_count(1)
            writer.add_base_model_name(0, self.base.rpartition("/")[2])
            if "/" in self.base:
                writer.add_base_model_organization(0, self.base.partition("/")[0])
                writer.add_base_model_repo_url(0, f"{_HUB}/{self.base}")
        if self.datasets:
            writer.add_dataset_count(len(self.datasets))
        for index, one in enumerate(self.datasets):
            writer.add_dataset_name(index, one)
            if hub_id(one):
                writer.add_dataset_repo_url(index, f"{_HUB}/datasets/{one}")
        writer.add_tags(["tunesmith", "rlhf", *([self.algorithm.lower()] if self.algorithm else []), "text-generation"])


def about_run(run: Path, *, license: str = "") -> About:
    """The entries on the model of a run folder. Without `license` it is that in the base model's card."""
    recipe = read_recipe(run)
    model = recipe.get("model")
    base = str(cast(Mapping[str, object], model).get("name", "")) if isinstance(model, Mapping) else ""
    base_id = hub_id(base) or ""
    sections = [recipe.get(key) for key in _SOURCES]
    sources = [str(cast(Mapping[str, Any], one).get("source") or "") for one in sections if isinstance(one, Mapping)]
    rewards = recipe.get("reward")
    reward_rows = cast(list[Any], rewards) if isinstance(rewards, list) else []
    return About(
        name=run.resolve().name,
        base=base_id or Path(base).name,
        algorithm=str(recipe.get("algorithm", "")).upper(),
        license=license or _license_of(base, base_id),
        datasets=tuple(dict.fromkeys(_public(one) for one in sources if one)),
        rewards=tuple(
            _public(str(one["source"])) for one in reward_rows if isinstance(one, Mapping) and "source" in one
        ),
    )


def _public(source: str) -> str:
    """A name of the hub as it is; of a local file its last part."""
    return source if hub_id(source) else source.rpartition("/")[2]


def _license_of(base: str, base_id: str) -> str:
    """The licence in the card of a base model on this machine; nothing is downloaded for it."""
    if base == SMOLLM2 or base_id in _LICENSES:
        return _LICENSES[SMOLLM2_HUB_ID]
    card = Path(base).expanduser() / "README.md"
    if not card.is_file():
        return ""
    front = card.read_text(encoding="utf-8", errors="replace")[:65536].split("---\n")
    try:
        values = yaml.safe_load(front[1]) if len(front) > 2 and not front[0] else None
    except yaml.YAMLError:
        return ""
    return str(values.get("license", "")) if isinstance(values, dict) else ""
