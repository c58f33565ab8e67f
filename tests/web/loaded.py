"""Loads what every run and every server loads, and has transformers, Jinja, the stores and the pages prepare what they
keep in a process.

The process that others are forked from imports this, so that it is done once and not in each of them.
"""

import tempfile
from importlib import import_module
from pathlib import Path

from app_parts import app_in
from tunesmith.base.core import faults
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.observe.reports.html import write_run_report

RUNS = [f"tunesmith.learn.trainers.{name}" for name in ("run", "resume", "sft", "reward", "dpo", "ppo", "grpo")]
SERVERS = ["tunesmith.apps.cli.main", "tunesmith.apps.cli.serve", "tunesmith.collect.web.server", "uvicorn"]

for name in (*RUNS, "tunesmith.learn.live.loop", *SERVERS, "pytest"):
    import_module(name)
with tempfile.TemporaryDirectory() as folder:
    tiny_model("llama").model.save_pretrained(folder)
    write_run_report(Path(folder))
with tempfile.TemporaryDirectory() as folder, app_in(Path(folder)) as parts:
    assert parts.client().get("/login").status_code == 200
faults._plan.cache_clear()  # each process has its own
