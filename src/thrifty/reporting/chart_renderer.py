"""Renderer of Vega-Lite charts as SVG, PNG, PDF, and as a script for live pages.

vl_convert is imported at the first chart, because it is a library of 90 MB.
"""

import functools
from collections.abc import Mapping
from typing import Any

import altair as alt

VEGA_LITE = alt.SCHEMA_VERSION.removeprefix("v").rpartition(".")[0]


def render_svg(spec: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return a chart as SVG."""
    import vl_convert

    return vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE, config=config, allowed_base_urls=[])


def render_png(spec: Mapping[str, Any], config: Mapping[str, Any]) -> bytes:
    """Return a chart as PNG."""
    import vl_convert

    return vl_convert.vegalite_to_png(spec, vl_version=VEGA_LITE, config=config, scale=2, allowed_base_urls=[])


def render_pdf(spec: Mapping[str, Any], config: Mapping[str, Any]) -> bytes:
    """Return a chart as PDF."""
    import vl_convert

    return vl_convert.vegalite_to_pdf(spec, vl_version=VEGA_LITE, config=config, allowed_base_urls=[])


@functools.cache
def vega_bundle() -> str:
    """Return Vega, Vega-Lite and vega-embed as one self-contained script. The first call takes one or two seconds."""
    import vl_convert

    return vl_convert.javascript_bundle(vl_version=VEGA_LITE).replace("</script", "<\\/script")
