"""Makes `live_rig.py` and the helpers of tests/trainers importable."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "trainers")]
