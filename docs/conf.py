"""Configuration of the documentation. `make docs` builds it; warnings are errors."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from tunesmith import __version__

project = "Tunesmith"
author = "The Tunesmith authors"
copyright = "2026, the Tunesmith authors"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "reference"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 3

default_role = "code"  # docstrings mark code with single backticks
autodoc_typehints = "description"
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = "Tunesmith"
html_static_path = ["images"]  # the README's pictures too, which no page shows
html_copy_source = False
