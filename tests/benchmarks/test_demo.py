"""`benchmarks.demo`: completions that repeat themselves are found, and a demo has all figures."""

import json

import pytest

from benchmarks.demo import BARS, main, repeats


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A good film, and a good film too.", True),
        ("A good film. A good one.", False),
        ("so so so so", True),
        ("so so so", False),
        ("", False),
    ],
)
def test_a_completion_repeats_itself_if_three_words_come_twice(text: str, expected: bool):
    assert repeats(text) is expected


@pytest.mark.slow
def test_a_quick_demo_has_the_figures(capsys: pytest.CaptureFixture[str]):
    assert main(["--quick", "--dtype", "float32", "--json", "--quiet"]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    (row,) = facts["rows"]
    assert row.keys() >= {*BARS, "num_samples", "minutes"}
    assert facts["passed"].keys() == BARS.keys()
