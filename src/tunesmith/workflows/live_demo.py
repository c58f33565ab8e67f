"""`tunesmith demo --live`: a person votes in the browser, and SmolLM2 learns while they do."""

import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tunesmith.config.load import load_live
from tunesmith.live import loop as live
from tunesmith.live.loop import LiveResult
from tunesmith.workflows.live_processes import server


@dataclass(frozen=True, slots=True)
class LiveDemo:
    """The folder of votes, versions and metrics, and what the trainer came to."""

    folder: Path
    result: LiveResult


def run_live_demo(out: Path, *, seed: int = 0, announce: Callable[[str], object], opens_page: bool = True) -> LiveDemo:
    """Serve the voting page and train until Ctrl-C. The folder is `live` below `out`; used again, it goes on.

    `announce` is given the address that logs the person in. Raises RunError if the server does not come up.
    """
    folder = out / "live"
    folder.mkdir(parents=True, exist_ok=True)
    cfg, provenance = load_live(recipe="live_smollm2", overrides={"live.dir": str(folder), "run.seed": seed})
    with server(folder) as served:
        announce(served.login_url)
        if opens_page:
            webbrowser.open(served.login_url)
        return LiveDemo(folder, live.run(cfg, provenance=provenance))
