"""A chart: a plain Plotly JSON figure with its text alternative and its data table.

A figure is valid Plotly JSON in the light palette; no Plotly is imported, the page's script draws it. Text from prompts
and models goes through `label`, because Plotly reads a few HTML tags in labels.
"""

import html
from dataclasses import dataclass
from typing import Any

from tunesmith.reports.palette import LIGHT
from tunesmith.reports.text import short


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
