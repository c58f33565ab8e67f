"""`tunesmith plan` against measurements: the published table of NeMo-Aligner.

`published`: each row of the table, predicted with the factor of another row; the largest error of them counts.
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common import Say, command, parser, print_table, run
from tunesmith.planning.calibration import PUBLISHED, published_factor, published_step


def published() -> list[dict[str, float]]:
    """Each published step, and its prediction from each other row that is furthest off."""
    rows: list[dict[str, float]] = []
    for nodes, measured_s in PUBLISHED.items():
        others = [published_step(nodes, published_factor(other)).total_s for other in PUBLISHED if other != nodes]
        worst_s = max(others, key=lambda seconds: abs(seconds - measured_s))
        rows.append({"nodes": nodes, "predicted_s": worst_s, "published_s": measured_s})
    return rows


def measure(options: Namespace, say: Say) -> Mapping[str, object]:
    """The figures."""
    say("published steps")
    rows = published()
    uncalibrated = {nodes: published_step(nodes).total_s for nodes in PUBLISHED}
    ratios = {f"ratio_{nodes // 8}": uncalibrated[8] / uncalibrated[nodes] for nodes in (16, 32)}
    return {"published": rows, **ratios}


def show(facts: Mapping[str, Any]) -> None:
    """Print the figures."""
    rows = [
        [str(row["nodes"]), f"{row['predicted_s']:.1f}", f"{row['published_s']:.1f}",
         f"{row['predicted_s'] / row['published_s'] - 1:+.1%}"]
        for row in facts["published"]
    ]  # fmt: skip
    print_table(["nodes", "predicted s", "published s", "error"], rows)
    print(f"ratios {facts['ratio_2']:.2f} and {facts['ratio_4']:.2f}; published 1.77 and 3.13")


def main(words: Sequence[str]) -> int:
    """The command line."""
    return command(parser("plan", __doc__, "json", "out", "quiet"), words, measure, show)


if __name__ == "__main__":
    run("plan")
