"""The example script runs as printed and learns what it says."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "examples" / "preference_tuning.py"


def test_the_example_learns_the_taste_of_its_rater():
    options = ["--device", "cpu", "--pairs", "3000", "--width", "32", "--epochs", "2"]
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    foretold = [float(share) for share in re.findall(r"([\d.]+)% of unseen votes foretold", done.stdout)]
    assert len(foretold) == 2
    assert foretold[-1] > 90
