"""Makes the helpers of this folder, and the recipes of the trainers' tests, importable here and in other ranks."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "trainers")]
