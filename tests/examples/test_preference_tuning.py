"""The weights learn the taste of a simulated rater from votes."""

import re


def test_the_example_learns_the_taste_of_its_rater(output_of):
    printed = output_of("preference_tuning.py", "--device", "cpu", "--pairs", "3000", "--width", "32", "--epochs", "2")
    foretold = [float(share) for share in re.findall(r"([\d.]+)% of unseen votes foretold", printed)]
    assert len(foretold) == 2
    assert foretold[-1] > 90
