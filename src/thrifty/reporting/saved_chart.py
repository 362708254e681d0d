"""Charts as images: SVG for pages, and standalone SVG, PNG or PDF on a white background for papers and slides."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thrifty.core.atomic_files import AtomicFiles
from thrifty.core.errors import UsageError
from thrifty.reporting.chart_renderer import render_pdf, render_png, render_svg
from thrifty.reporting.color_theme import LIGHT, chart_look, css_variable

FORMATS = (".svg", ".png", ".pdf")


class SavedChart:
    """Vega-Lite chart that can be saved, and shown in a notebook."""

    def __init__(self, spec: Mapping[str, Any]):
        colours = re.sub(r"var\(--([\w-]+)\)", lambda match: LIGHT[match[1]], json.dumps(spec))
        self.spec: dict[str, Any] = {**json.loads(colours), "background": LIGHT["surface"], "padding": 20}
        self.look = chart_look(LIGHT.__getitem__, font="sans-serif")

    def save(self, file: str | Path) -> Path:
        """Write the chart as .svg, .png or .pdf, and return the path. An existing file is replaced. Raises UsageError
        for any other suffix.
        """
        path = Path(file)
        if path.suffix not in FORMATS:
            raise UsageError(
                f"{str(path)!r} does not end in {' or '.join(FORMATS)}", fix=f"use {path.with_suffix('.pdf')}"
            )
        pdf = path.suffix == ".pdf" and render_pdf(self.spec, self.look)
        AtomicFiles().swap(path, pdf or (self.png() if path.suffix == ".png" else self.svg().encode()))
        return path

    def png(self) -> bytes:
        return render_png(self.spec, self.look)

    def svg(self) -> str:
        return render_svg(self.spec, self.look)

    _repr_svg_ = svg


def page_svg(spec: Mapping[str, Any]) -> str:
    """Return a chart as SVG for a page: its colors are CSS variables, and its ids differ from those of other charts."""
    plain = {key: part for key, part in spec.items() if key != "$schema"}
    look = chart_look(css_variable, font="sans-serif")  # a font that renderer and browser both have, so that labels fit
    svg = render_svg({**plain, "background": None}, look)
    key = hashlib.sha256(svg.encode()).hexdigest()[:8]
    return re.sub(r'( id="|url\(#)', rf"\g<1>c{key}-", svg)
