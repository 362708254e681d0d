"""Charts if the extra `charts` is not installed."""

import sys

import pytest

from thrifty.core.errors import UsageError
from thrifty.reporting.chart_renderer import render_png, render_svg, vega_bundle


@pytest.fixture
def without_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    vega_bundle.cache_clear()


@pytest.mark.usefixtures("without_extra")
def test_an_svg_without_the_extra_names_the_install_command() -> None:
    image = render_svg({"mark": "bar"}, {})
    assert image.startswith("<svg") and "pip install 'thrifty[charts]'" in image


@pytest.mark.usefixtures("without_extra")
def test_png_and_scripts_without_the_extra_are_refused() -> None:
    for draw in (lambda: render_png({"mark": "bar"}, {}), vega_bundle):
        with pytest.raises(UsageError, match="vl-convert-python") as refused:
            draw()
        assert refused.value.fix == "pip install 'thrifty[charts]'"
