"""Pictures of figures: the program that draws a file of figures into an SVG file, and parts of such a picture."""

import html
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunesmith.base.core.errors import InputError, TunesmithError
from tunesmith.observe.reports.chart import LIGHT


def program(figures: str, picture: Callable[[Mapping[str, Any]], str]) -> Callable[[Sequence[str]], int]:
    """A function from the words of the command line to the exit code, 2 for bad input, which draws the figures of a
    file, those of the command `figures`, into another file.
    """

    def main(words: Sequence[str]) -> int:
        try:
            draw(words)
        except TunesmithError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        return 0

    def draw(words: Sequence[str]) -> None:
        if len(words) != 2:
            raise InputError(f"give two files: FIGURES.json of `{figures}`, and the picture OUT.svg")
        try:
            facts = json.loads(Path(words[0]).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{words[0]} cannot be read as figures: {error}") from error
        drawn = picture(facts)
        try:
            Path(words[1]).write_text(drawn, encoding="utf-8")
        except OSError as error:
            raise InputError(f"{words[1]} cannot be written: {error}; give a file in a folder that exists") from error

    return main


def opening(width: int, height: int, title: str) -> list[str]:
    """The beginning of a picture of so many pixels, on a card; it ends with `</svg>`."""
    return [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' font-family='sans-serif' "
        f"font-size='12' fill='{LIGHT['ink']}' role='img'>",
        f"<title>{html.escape(title)}</title>",
        f"<rect width='100%' height='100%' fill='{LIGHT['card']}'/>",
    ]


def path(points: Sequence[tuple[float, float]], style: str) -> str:
    """A line through the points."""
    return f"<path fill='none' {style} d='M{'L'.join(f'{x:.1f} {y:.1f}' for x, y in points)}'/>"
