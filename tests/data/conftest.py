"""Makes the datasets library quiet."""

import os

os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
