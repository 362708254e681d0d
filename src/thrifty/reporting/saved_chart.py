"""Standalone chart for papers and slides: SVG, PNG or PDF on a white background."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thrifty.core.errors import UsageError
from thrifty.reporting.chart_renderer import render_pdf, render_png, render_svg
from thrifty.reporting.color_theme import LIGHT, chart_look

FORMATS = (".svg", ".png", ".pdf")


class SavedChart:
    """Vega-Lite chart that can be saved, and shown in a notebook."""

    def __init__(self, spec: Mapping[str, Any]):
        colours = re.sub(r"var\(--([\w-]+)\)", lambda match: LIGHT[match[1]], json.dumps(spec))
        self.spec: dict[str, Any] = {**json.loads(colours), "background": LIGHT["surface"], "padding": 12}
        self.look = chart_look(LIGHT.__getitem__, font="sans-serif")

    def save(self, file: str | Path) -> Path:
        """Write the chart as .svg, .png or .pdf. Raises UsageError for any other suffix, or without the extra
        `charts`.
        """
        path = Path(file)
        if path.suffix not in FORMATS:
            raise UsageError(
                f"{str(path)!r} does not end in {' or '.join(FORMATS)}", fix=f"use {path.with_suffix('.pdf')}"
            )
        if path.suffix == ".svg":
            path.write_text(self._repr_svg_(), encoding="utf-8")
        else:
            path.write_bytes((render_pdf if path.suffix == ".pdf" else render_png)(self.spec, self.look))
        return path

    def _repr_svg_(self) -> str:
        return render_svg(self.spec, self.look)
