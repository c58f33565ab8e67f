"""A run's model as a GGUF file beside a Modelfile."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from tunesmith.base.core.errors import ModelError
from tunesmith.engine.models.about import about_run
from tunesmith.engine.models.adapter_folder import is_adapter_folder
from tunesmith.engine.models.export import save_merged
from tunesmith.engine.models.gguf_out.file import stop_ids, write_gguf, write_lora_gguf
from tunesmith.engine.models.gguf_out.modelfile import modelfile
from tunesmith.engine.models.gguf_out.writing import write_beside
from tunesmith.engine.models.load import load_tokenizer


@dataclass(frozen=True, slots=True)
class Left:
    """The files that were written; `modelfile` is None for adapters, whose base only the user can name."""

    file: Path
    modelfile: Path | None
    num_bytes: int


def export_gguf(
    run: Path, dest: Path, kind: str, *, lora: bool = False, license: str = "", replaces: bool = False
) -> Left:
    """Write the model of the run folder `run` to `dest`, a `.gguf` file or a folder for one named after the run.

    Adapters are merged into their base first, or written alone with `lora`. `license` is that of the base if left out,
    where its card is on this machine.

    Raises:
        ModelError: llama.cpp has no place for the model, a file exists and is not to be replaced, the disk is full.
    """
    final, about = run / "final", about_run(run, license=license)
    has_adapters = is_adapter_folder(final)
    if lora and not has_adapters:
        raise ModelError(f"{final} holds no adapters; leave --lora out")
    named = dest.suffix.lower() == ".gguf"
    file = dest if named else dest / f"{about.name}-{'lora' if lora else kind}.gguf"
    beside = file.with_suffix(".Modelfile")
    for one in (file, beside):
        if one.exists() and not replaces:
            raise ModelError(f"{one} exists; give another place, or --overwrite")
    if lora:
        return Left(file, None, write_lora_gguf(final, file, about, replaces=replaces))
    if has_adapters:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".merged-", dir=file.parent) as folder:
            merged = save_merged(final, Path(folder) / "model")
            num_bytes = write_gguf(merged, file, kind, about, replaces=replaces)
    else:
        num_bytes = write_gguf(final, file, kind, about, replaces=replaces)
    tokenizer = load_tokenizer(final, about.name)
    stops = [str(tokenizer.convert_ids_to_tokens(index)) for index in stop_ids(final, tokenizer)]
    write_beside(beside, modelfile(file.name, tokenizer, stops, about.license))
    return Left(file, beside, num_bytes)
