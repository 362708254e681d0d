"""Charts without the extra that draws them."""

import sys

import pytest

from thrifty.core.errors import UsageError
from thrifty.reporting.chart_renderer import render_png, render_svg, vega_bundle


@pytest.fixture
def without_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    vega_bundle.cache_clear()


@pytest.mark.usefixtures("without_extra")
def test_a_page_keeps_everything_but_its_charts_which_say_what_to_install() -> None:
    image = render_svg({"mark": "bar"}, {})
    assert image.startswith("<svg") and "pip install 'thrifty[charts]'" in image


@pytest.mark.usefixtures("without_extra")
def test_what_is_nothing_but_a_chart_is_refused_with_the_fix() -> None:
    for draw in (lambda: render_png({"mark": "bar"}, {}), vega_bundle):
        with pytest.raises(UsageError, match="vl-convert-python") as refused:
            draw()
        assert refused.value.fix == "pip install 'thrifty[charts]'"
