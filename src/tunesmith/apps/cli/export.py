"""`tunesmith export`: the trained model of a run as a folder that plain `from_pretrained` loads, or as a GGUF file."""

import json
import os
import shutil
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tunesmith.apps.cli.options import Positional, flag, parse
from tunesmith.apps.cli.output import Output, reporting
from tunesmith.base.core.errors import InputError, RunError
from tunesmith.base.core.extras import naming_extras

GgufType = Literal["bf16", "f16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
"""Types of the weights in a GGUF file."""

_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model.safetensors"
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Copy the trained model of a run to a folder that plain `from_pretrained` loads, or adapters to one that PEFT
    loads; or write a GGUF file for llama.cpp and a Modelfile for Ollama. Nothing is overwritten without --overwrite.
    """

    run: Annotated[str, Positional, flag("A run folder.", "RUN")]
    dest: Annotated[str, Positional, flag("New or empty folder; for GGUF a file or folder, or RUN/gguf.", "DEST")] = ""
    format: Annotated[Literal["folder", "gguf"], flag("What is written.")] = "folder"
    type: Annotated[GgufType, flag("Of the weights in a GGUF file.")] = "bf16"
    lora: Annotated[bool, flag("Adapters as a LoRA GGUF; without it, merged into their base.")] = False
    license: Annotated[str, flag("Licence in a GGUF file; without it, the base model's, if it is known.", "NAME")] = ""
    overwrite: Annotated[bool, flag("Replace a GGUF file and its Modelfile.")] = False
    merge: Annotated[bool, flag("Put adapters into the weights of their base: a plain model.")] = False
    trust_remote_code: Annotated[bool, flag("With --merge, run code that the base brings along.")] = False
    json: Annotated[bool, flag("Print one JSON object.")] = False


def export(words: Sequence[str]) -> None:
    """Run `tunesmith export`."""
    options = parse(ExportOptions, words, "export")
    from tunesmith.base.runs.listing import folder_bytes

    with reporting(as_json=options.json) as output, writing_to(options.dest or options.run):
        source = final_folder(Path(options.run).expanduser())
        check_layout(source)
        dest = Path(options.dest).expanduser()
        if options.format == "gguf":
            _export_gguf(options, dest, output)
            return
        check_folder_options(options)
        check_dest(source, dest)
        if options.merge:
            from tunesmith.engine.models.export import save_merged

            save_merged(source, dest, trust_remote_code=options.trust_remote_code)
        else:
            copy_whole(source, dest)
        num_bytes = folder_bytes(dest)
        output.say(f"{dest}  {num_bytes / 1e6:.1f} MB")
        output.finish({"source": source, "dest": dest, "num_bytes": num_bytes})


def check_folder_options(options: ExportOptions) -> None:
    """Raise InputError if DEST is missing, or an option of GGUF files is given for a folder."""
    if not options.dest:
        raise InputError("export needs a new or empty folder: tunesmith export RUN DEST")
    plain = ExportOptions(run="")
    for name in ("type", "lora", "license", "overwrite"):
        if getattr(options, name) != getattr(plain, name):
            raise InputError(f"--{name} is for GGUF files; add --format gguf, or leave it out")


def _export_gguf(options: ExportOptions, dest: Path, output: Output) -> None:
    if options.merge or options.trust_remote_code:
        raise InputError("a GGUF file has adapters merged without --merge, and no code; leave these flags out")
    run = Path(options.run).expanduser()
    with naming_extras():
        from tunesmith.engine.models.gguf_out.leave import export_gguf
    left = export_gguf(
        run,
        dest if options.dest else run / "gguf",
        options.type,
        lora=options.lora,
        license=options.license,
        replaces=options.overwrite,
    )
    output.say(f"{left.file}  {left.num_bytes / 1e6:.1f} MB")
    if left.modelfile is not None:
        output.say(f"{left.modelfile}  for `ollama create NAME -f {left.modelfile}`")
    output.finish(
        {"source": run / "final", "dest": left.file, "modelfile": left.modelfile, "num_bytes": left.num_bytes}
    )


def final_folder(run: Path) -> Path:
    """The folder of the trained model of `run`; RunError if it is no run folder or has none yet."""
    if not run.is_dir():
        raise RunError(f"{run} is no folder; give a run folder, such as runs/20260102-030405-ppo-1a2b")
    if not (run / "final").is_dir():
        is_run = (run / "recipe.yaml").exists()
        raise RunError(
            f"{run} has no final/: its training did not end; see its checkpoints/"
            if is_run
            else f"{run} is no run folder: it has neither recipe.yaml nor final/"
        )
    return run / "final"


def check_layout(folder: Path) -> None:
    """Raise RunError if config, tokenizer or weights are missing in `folder`, or a weight file is truncated."""
    has_adapters = (folder / _ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()
    config = _ADAPTER_CONFIG if has_adapters else "config.json"
    missing = [name for name in (config, "tokenizer_config.json") if not (folder / name).is_file()]
    if has_adapters:
        weights = [_ADAPTER_WEIGHTS]
    elif (folder / _INDEX).is_file():
        shards = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        weights = sorted(set(map(str, shards)))
    else:
        weights = [_WEIGHTS]
    missing += [name for name in weights if not (folder / name).is_file()]
    if missing:
        raise RunError(f"{folder} is incomplete: {', '.join(missing)} missing")
    for name in weights:
        if not _is_whole(folder / name):
            raise RunError(f"{folder / name} is damaged: its size does not fit its header")


def check_dest(source: Path, dest: Path) -> None:
    """Raise InputError if `dest` is inside `source` or not empty."""
    if dest.resolve().is_relative_to(source.resolve()):
        raise InputError(f"{dest} is inside {source}; give a folder elsewhere")
    if dest.is_file() or (dest.is_dir() and any(dest.iterdir())):
        raise InputError(f"{dest} exists and is {'no folder' if dest.is_file() else 'not empty'}; give another folder")


def copy_whole(source: Path, dest: Path) -> None:
    """Copy `source` to `dest`. The copy is moved into place when complete."""
    dest.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{dest.name}-", dir=dest.parent) as aside:
        copy = Path(aside) / "copy"
        shutil.copytree(source, copy)
        os.replace(copy, dest)


@contextmanager
def writing_to(place: str) -> Generator[None]:
    """Raise InputError for what the system refuses in the block, which writes to `place`."""
    try:
        yield
    except BrokenPipeError:  # of the output
        raise
    except OSError as error:
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror or error  # of one file
        raise InputError(f"{place} cannot be written: {reason}; free some space, or give another place") from error


def _is_whole(file: Path) -> bool:
    """True if the size of a safetensors file is what its header promises."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):
            return True
    except (SafetensorError, OSError):
        return False
