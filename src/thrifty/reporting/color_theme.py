"""Colors of pages and charts in light and dark mode, and a Vega-Lite config with these colors.

Curves use the colors of Okabe and Ito (2008, Color Universal Design), which people with color blindness can
distinguish. Each mode has its own shades. Contrast is at least 3:1 for curves and 4.5:1 for text (WCAG AA).
"""

from collections.abc import Callable
from typing import Any

LIGHT = {
    "ground": "#f7f8f9",
    "surface": "#ffffff",
    "ink": "#1b2026",
    "muted": "#59626c",
    "line": "#dde1e6",
    "control": "#7f8993",
    "accent": "#0072b2",
    "train": "#0072b2",
    "faint": "#8dbfe0",
    "held-out": "#d55e00",
    "trained": "#009e73",
    "violet": "#b25690",
    "olive": "#8a6d00",
    "cyan": "#1788a3",
    "good": "#00694f",
    "bad": "#a94400",
}
DARK = {
    "ground": "#13161a",
    "surface": "#1b1f25",
    "ink": "#e7eaed",
    "muted": "#a3acb5",
    "line": "#31373f",
    "control": "#79838e",
    "accent": "#56b4e9",
    "train": "#56b4e9",
    "faint": "#3a6a8a",
    "held-out": "#e69f00",
    "trained": "#3cc79e",
    "violet": "#d98cba",
    "olive": "#c7b23f",
    "cyan": "#7fd3e6",
    "good": "#3cc79e",
    "bad": "#f0884a",
}

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif'


def css_variable(name: str) -> str:
    """Return a color as a CSS variable, so that charts follow a change of the color scheme without a redraw."""
    return f"var(--{name})"


def chart_look(colour: Callable[[str], str], font: str = FONT) -> dict[str, Any]:
    """Return a Vega-Lite `config`. `colour` maps a color name to a value that the renderer understands."""
    text = {"labelColor": colour("muted"), "titleColor": colour("muted"), "labelFontSize": 12, "titleFontSize": 12}
    plain = {"titleFontWeight": "normal", "labelFont": font, "titleFont": font}
    return {
        "background": "transparent",
        "font": font,
        "view": {"stroke": None},
        "axis": {**text, **plain, "gridColor": colour("line"), "domain": False, "ticks": False, "labelPadding": 8},
        "axisX": {"grid": False, "domain": True, "domainColor": colour("control"), "titlePadding": 8},
        "legend": {**text, **plain, "labelColor": colour("ink"), "symbolStrokeWidth": 3, "columnPadding": 20},
        "range": {"category": [colour(name) for name in ("faint", "train", "held-out", "trained")]},
        "style": {
            "reference": {"color": colour("muted"), "strokeDash": [5, 4], "strokeWidth": 1.25},
            "reference-label": {"color": colour("ink"), "font": font, "fontSize": 12},
            "reference-halo": {"stroke": colour("surface"), "strokeWidth": 4, "font": font, "fontSize": 12},
            "change": {"color": colour("control"), "strokeWidth": 1},
            "hover": {"stroke": colour("surface"), "strokeWidth": 1.5, "size": 80},
        },
    }
