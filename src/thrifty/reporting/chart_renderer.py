"""Renderer of Vega-Lite charts as SVG, PNG, PDF, and as a script for live pages. Requires the extra `charts`."""

import functools
from collections.abc import Mapping
from typing import Any

import altair as alt

from thrifty.core.errors import UsageError

VEGA_LITE = alt.SCHEMA_VERSION.removeprefix("v").rpartition(".")[0]
INSTALL = "pip install 'thrifty[charts]'"


def render_svg(spec: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return a chart as SVG. Without the extra `charts`, return an SVG with the install command, so that the page
    remains usable.
    """
    try:
        convert = _converter()
    except UsageError:
        text = f'<text x="8" y="20" font-family="sans-serif">This chart requires {INSTALL}</text>'
        return f'<svg xmlns="http://www.w3.org/2000/svg" width="480" height="32">{text}</svg>'
    return convert.vegalite_to_svg(spec, vl_version=VEGA_LITE, config=config, allowed_base_urls=[])


def render_png(spec: Mapping[str, Any], config: Mapping[str, Any]) -> bytes:
    """Return a chart as PNG. Raises UsageError without the extra `charts`."""
    return _converter().vegalite_to_png(spec, vl_version=VEGA_LITE, config=config, scale=2, allowed_base_urls=[])


def render_pdf(spec: Mapping[str, Any], config: Mapping[str, Any]) -> bytes:
    """Return a chart as PDF. Raises UsageError without the extra `charts`."""
    return _converter().vegalite_to_pdf(spec, vl_version=VEGA_LITE, config=config, allowed_base_urls=[])


@functools.cache
def vega_bundle() -> str:
    """Return Vega, Vega-Lite and vega-embed as one self-contained script. The first call takes one or two seconds.

    Raises UsageError without the extra `charts`.
    """
    return _converter().javascript_bundle(vl_version=VEGA_LITE).replace("</script", "<\\/script")


def _converter() -> Any:
    try:
        import vl_convert
    except ImportError:
        raise UsageError("charts require the package vl-convert-python, which is not installed", fix=INSTALL) from None
    return vl_convert
