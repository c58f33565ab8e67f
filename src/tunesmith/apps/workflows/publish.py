"""The files of a hub repository with a run's model: weights, tokenizer, template, card, and a mark of the run."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tunesmith.apps.workflows.model_card import published_card
from tunesmith.base.core.errors import ModelError
from tunesmith.base.core.version import __version__
from tunesmith.base.runs.listing import read_object
from tunesmith.engine.models.about import about_run
from tunesmith.engine.models.adapter_folder import BASE_FILE, CONFIG_FILE, is_adapter_folder, is_reward_adapter
from tunesmith.engine.models.export import hub_id, save_merged
from tunesmith.engine.models.hub import MARK

_CARD = "README.md"
_BASE = "base_model_name_or_path"


def published_files(
    run: Path,
    name: str,
    folder: Path,
    *,
    adapters: bool = False,
    gguf: str | None = None,
    base: str = "",
    license: str = "",
    trust_remote_code: bool = False,
) -> dict[str, Path | bytes]:
    """The content of each file by its path in the repository `name`: files of `run`, or made in `folder`, or bytes.

    Adapters are merged into their base, or sent alone with `adapters`; `gguf` is the type of a GGUF file to be
    sent too. `base` is the hub id of the base model, which a run that was trained from a folder of this machine does
    not know.

    Raises:
        ModelError: there are no adapters, their base cannot be loaded, or is not on the hub; or there is no place in
            a GGUF file for the model.
    """
    final, about = (run / "final").resolve(), about_run(run, license=license)  # a live loop may serve another soon
    has_adapters = is_adapter_folder(final)
    if adapters and not has_adapters:
        raise ModelError(f"{final} holds no adapters; leave --adapters out")
    if base:
        about = replace(about, base=base, root=base)
    if adapters and hub_id(about.base) is None:
        raise ModelError(
            f"the adapters belong to {about.base}, which only this machine has; push that too and give its name by "
            "--base OWNER/NAME, or leave --adapters out to push merged weights"
        )
    source = final
    if has_adapters and not adapters:
        source = save_merged(final, folder / "model", trust_remote_code=trust_remote_code)
    is_classifier = is_reward_adapter(final, str(final)) if has_adapters else _is_classifier(final)
    files: dict[str, Path | bytes] = _below(source)
    if adapters and base:
        keys = {CONFIG_FILE: _BASE, BASE_FILE: "name"}
        files |= {file: _with_base(final / file, key, base) for file, key in keys.items()}
    if gguf:
        from tunesmith.engine.models.gguf_out.leave import export_gguf

        export_gguf(run, folder / "gguf", gguf, license=license)
        files |= _below(folder / "gguf")
    card = published_card(
        run, final, about, name, is_classifier=is_classifier, is_adapter=adapters, tags=("gguf",) if gguf else ()
    )
    files[_CARD] = card.encode()
    mark = {"run": about.name, "id": run_id(run), "tunesmith": __version__, "files": sorted([*files, MARK])}
    files[MARK] = (json.dumps(mark, indent=1) + "\n").encode()
    return files


def run_id(run: Path) -> str:
    """A text that another run does not have, also one whose folder has the same name."""
    try:
        with (run / "metrics.jsonl").open("rb") as lines:
            first = lines.readline()  # which has the times of the first step
    except OSError:
        first = b""
    return hashlib.sha256(run.resolve().name.encode() + first).hexdigest()[:16]


def _below(folder: Path) -> dict[str, Path | bytes]:
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def _is_classifier(final: Path) -> bool:
    names = read_object(final / "config.json").get("architectures")
    return isinstance(names, list) and any(str(one).endswith("ForSequenceClassification") for one in names)


def _with_base(file: Path, key: str, base: str) -> bytes:
    """A JSON file of adapters that names the base `base`."""
    values: Mapping[str, object] = {**read_object(file), key: base}
    return (json.dumps(values, indent=1) + "\n").encode()
