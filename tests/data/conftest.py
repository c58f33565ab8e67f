"""Makes `formats.py` importable for the tests beside it, and the datasets library quiet."""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
sys.path.insert(0, str(Path(__file__).parent))
