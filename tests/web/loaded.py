"""Loads what every run and every server loads, and has transformers and Jinja prepare what they keep in a process.

The process that others are forked from imports this, so that it is done once and not in each of them.
"""

import tempfile
from pathlib import Path

from tunesmith.engine.models.tiny import tiny_model
from tunesmith.observe.reports.html import write_run_report

with tempfile.TemporaryDirectory() as folder:
    tiny_model("llama").model.save_pretrained(folder)
    write_run_report(Path(folder))
