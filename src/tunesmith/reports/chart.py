"""The colours of reports and figures, light and dark.

Before is orange and after is blue in every picture and table: a pair that stays apart for people with any common colour
blindness, and before is always drawn hollow or hatched as well. Figures are built with the light values; the page swaps
each for the dark value of the same name, so no two names share a light value.
"""

import html
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tunesmith.reports.text import short

LIGHT: Mapping[str, str] = MappingProxyType(
    {
        "paper": "#faf9f6",
        "card": "#ffffff",
        "ink": "#1d2127",
        "muted": "#5b626e",
        "line": "#e3e0d8",
        "grid": "#eceae4",
        "after": "#1463a8",
        "after_soft": "#e6f0f9",
        "before": "#a35a00",
        "before_soft": "#fbf0e1",
        "good": "#1d6b45",
        "bad": "#a8323a",
        "stage_1": "#3f6fa8",
        "stage_2": "#7fb6d9",
        "stage_3": "#3d9a8b",
        "stage_4": "#b9a64a",
        "stage_5": "#c0677a",
        "stage_6": "#7a6bb0",
        "stage_7": "#8a9a5b",
        "stage_8": "#a3a7ae",
    }
)

DARK: Mapping[str, str] = MappingProxyType(
    {
        "paper": "#131519",
        "card": "#1a1d23",
        "ink": "#e9e7e2",
        "muted": "#a3a9b4",
        "line": "#31353d",
        "grid": "#272b32",
        "after": "#7cb8f2",
        "after_soft": "#1a2a3b",
        "before": "#eba653",
        "before_soft": "#332612",
        "good": "#7ccfa0",
        "bad": "#f08c92",
        "stage_1": "#6c9bd6",
        "stage_2": "#9fd0ee",
        "stage_3": "#62bfae",
        "stage_4": "#d6c46c",
        "stage_5": "#e08d9f",
        "stage_6": "#a597dc",
        "stage_7": "#aebd7e",
        "stage_8": "#858b95",
    }
)

STAGES = tuple(value for name, value in LIGHT.items() if name.startswith("stage_"))
"""Colours of series that are neither before nor after."""


def dark_of_light() -> dict[str, str]:
    """The dark colour for each light one; the page's script applies it to figures."""
    return {LIGHT[name]: DARK[name] for name in LIGHT}


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


def layout(**changes: Any) -> dict[str, Any]:
    """The layout all figures share: no frame, quiet grid, no zooming, so that a page scrolls under a finger."""
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
        "xaxis": {**axis, "showgrid": False},
        "yaxis": {**axis, "automargin": True},
    }
    for name, value in changes.items():
        base[name] = {**base[name], **value} if isinstance(base.get(name), dict) else value
    return base
