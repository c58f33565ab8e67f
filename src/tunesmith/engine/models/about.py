"""What is told of a model that leaves: names, licence, and what it was trained from, on and how.

A GGUF file has it in its entries (`general.*`), a repository of the hub in its card.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml

from tunesmith.base.config.yaml_text import is_mapping
from tunesmith.base.runs.listing import is_run, read_object, read_recipe
from tunesmith.engine.models.assets import SMOLLM2, SMOLLM2_HUB_ID
from tunesmith.engine.models.export import hub_id

if TYPE_CHECKING:
    import gguf

_SOURCES = ("prompts", "demonstrations", "pairs")
"""Sections of a recipe that name data."""

_FILES = (".jsonl", ".json", ".csv", ".parquet", ".txt", ".db")
"""Endings of files, which may be gone; `data/told.jsonl` has the form of a hub id."""

_HUB = "https://huggingface.co"
_LICENSES = {SMOLLM2_HUB_ID: "apache-2.0"}
"""Of the model that comes without a card."""


@dataclass(frozen=True, slots=True)
class About:
    """Facts on a model. Paths of this machine are not among them: of a local file only its name is told.

    `base` is the model that was trained, and `root` the hub id of that which it was itself trained from, run by run;
    empty if that is not known.
    """

    name: str
    base: str = ""
    root: str = ""
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

    def add_to(self, writer: "gguf.GGUFWriter", *, has_phi3_vocabulary: bool = True) -> None:
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
    """The facts on the model of a run folder. Without `license` it is that in the base model's card."""
    recipe = read_recipe(run)
    base = root = _base_of(recipe)
    below = run
    while is_run(place := _place(root, below)) and place != below:
        root, below = _base_of(read_recipe(place)), place
    root_id = "" if _place(root, below).exists() else hub_id(root) or ""
    sections = [recipe.get(key) for key in _SOURCES]
    sources = [str(cast(Mapping[str, Any], one).get("source") or "") for one in sections if isinstance(one, Mapping)]
    rewards = recipe.get("reward")
    reward_rows = cast(list[Any], rewards) if isinstance(rewards, list) else []
    return About(
        name=run.resolve().name,
        base=root_id if root == base and root_id else Path(base).name,
        root=root_id,
        algorithm=str(recipe.get("algorithm", "")).upper(),
        license=license or _license_of(str(_place(root, below)) if root_id == "" else root, root_id),
        datasets=tuple(dict.fromkeys(_public(one, run) for one in sources if one)),
        rewards=tuple(
            _public(str(one["source"]), run) for one in reward_rows if isinstance(one, Mapping) and "source" in one
        ),
    )


def _base_of(recipe: Mapping[str, object]) -> str:
    """The name of the model in a recipe."""
    return str(model.get("name", "")) if is_mapping(model := recipe.get("model")) else ""


def _place(name: str, run: Path) -> Path:
    """A file or folder that the recipe of `run` names, as seen from the folder in which it was started."""
    began = read_object(run / "environment.json").get("folder")
    return Path(str(began) if isinstance(began, str) else "") / Path(name).expanduser()


def _public(source: str, run: Path) -> str:
    """A name of the hub as it is; of a local file its last part."""
    is_file = _place(source, run).exists() or Path(source).suffix.lower() in _FILES
    return source if hub_id(source) and not is_file else source.rpartition("/")[2]


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
