"""The colours of reports and figures, light and dark.

Before is orange and after is blue in every picture and table: a pair that stays apart for people with any common colour
blindness, and before is always drawn hollow or hatched as well. Figures are built with the light values; the page swaps
each for the dark value of the same name, so no two names share a light value.
"""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tunesmith.observe.reports.text import short

_PALETTE = {
    "paper": ("#faf9f6", "#131519"),
    "card": ("#ffffff", "#1a1d23"),
    "ink": ("#1d2127", "#e9e7e2"),
    "muted": ("#5b626e", "#a3a9b4"),
    "line": ("#e3e0d8", "#31353d"),
    "grid": ("#eceae4", "#272b32"),
    "after": ("#1463a8", "#7cb8f2"),
    "after_soft": ("#e6f0f9", "#1a2a3b"),
    "before": ("#a35a00", "#eba653"),
    "before_soft": ("#fbf0e1", "#332612"),
    "good": ("#1d6b45", "#7ccfa0"),
    "bad": ("#a8323a", "#f08c92"),
    "stage_1": ("#3f6fa8", "#6c9bd6"),
    "stage_2": ("#7fb6d9", "#9fd0ee"),
    "stage_3": ("#3d9a8b", "#62bfae"),
    "stage_4": ("#b9a64a", "#d6c46c"),
    "stage_5": ("#c0677a", "#e08d9f"),
    "stage_6": ("#7a6bb0", "#a597dc"),
    "stage_7": ("#8a9a5b", "#aebd7e"),
    "stage_8": ("#a3a7ae", "#858b95"),
}
"""(light, dark) colours by name."""

LIGHT: Mapping[str, str] = MappingProxyType({name: light for name, (light, _) in _PALETTE.items()})
DARK: Mapping[str, str] = MappingProxyType({name: dark for name, (_, dark) in _PALETTE.items()})

STAGES = tuple(value for name, value in LIGHT.items() if name.startswith("stage_"))
"""Colours of series that are neither before nor after."""


def dark_of_light() -> dict[str, str]:
    """The dark colour for each light one; the page's script applies it to figures."""
    return dict(_PALETTE.values())


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of texts below the names of their columns."""

    caption: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure with everything a page needs to show it to anyone.

    `figure` is `{"data": [...], "layout": {...}}`; `description` says in words what the picture shows; `columns` and
    `rows` are the same facts as a table; `note` is a remark below the picture; `height` is in CSS pixels.
    """

    id: str
    title: str
    description: str
    figure: dict[str, Any]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    height: int = 260


def label(text: object, limit: int = 60) -> str:
    """`text` for a Plotly label: one short line in which nothing is markup."""
    # A pair of dollars would ask for MathJax.
    return html.escape(short(text, limit), quote=False).replace("$", "&#36;")


def layout(*, x: str, y: str = "", **changes: Any) -> dict[str, Any]:
    """The layout of all figures, with axis titles `x` and `y`; `changes` update its keys.

    No frame, a light grid, and no zooming, so that a page scrolls on a touch screen.
    """
    axis = {"gridcolor": LIGHT["grid"], "zerolinecolor": LIGHT["line"], "linecolor": LIGHT["line"], "fixedrange": True}
    base: dict[str, Any] = {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {
            "family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif",
            "size": 12.5,
            "color": LIGHT["muted"],
        },
        "margin": {"l": 46, "r": 12, "t": 8, "b": 40},
        "hovermode": "x unified",
        "hoverlabel": {"bgcolor": LIGHT["card"], "bordercolor": LIGHT["line"], "font": {"color": LIGHT["ink"]}},
        "dragmode": False,
        "showlegend": False,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        "xaxis": {**axis, "showgrid": False, "title": {"text": x, "standoff": 6}},
        "yaxis": {**axis, "automargin": True, **({"title": {"text": y, "standoff": 8}} if y else {})},
    }
    for name, value in changes.items():
        base[name] = {**base[name], **value} if isinstance(base.get(name), dict) else value
    return base


def scatter(name: str, x: Sequence[object], y: Sequence[object], mode: str = "lines", **more: Any) -> dict[str, Any]:
    """A scatter trace, see Plotly's reference of `scatter`."""
    return {"type": "scatter", "mode": mode, "name": name, "x": list(x), "y": list(y), **more}
