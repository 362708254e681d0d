"""Curves on arrays are the report's curves of the same records."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thrifty.dashboard.live_curves import RunCurves
from thrifty.reporting import loss_curves as plain

VALUES = st.one_of(st.none(), st.floats(-1e6, 1e6), st.just(math.nan), st.just(math.inf))
RECORDS = st.lists(st.tuples(st.integers(1, 60), VALUES), max_size=120)


def both(pairs: list) -> tuple:
    """The curve of the board and the points of the report, which knows the records by their last one of a step."""
    curves = RunCurves(["loss"])
    for step, loss in pairs:
        curves.put(step, {"loss": loss})
    latest = dict(pairs)
    return curves.curve("loss"), plain.curve([{"step": step, "loss": latest[step]} for step in sorted(latest)], "loss")


@given(RECORDS, st.integers(4, 40))
def test_thinned_points_are_those_of_the_report(pairs, limit):
    ours, points = both(pairs)
    assert ours.thin(limit) == plain.thin(points, limit)


@given(RECORDS)
def test_the_moving_mean_is_that_of_the_report(pairs):
    ours, points = both(pairs)
    smoothed = plain.smooth(points, share=1 / 10)
    assert ours.smooth(len(points) or 1, share=1 / 10) == [
        (point.step, pytest.approx(point.value, rel=1e-9, abs=1e-6)) for point in smoothed
    ]


@given(RECORDS, st.integers(1, 20))
def test_stretches_are_those_of_the_report(pairs, limit):
    ours, points = both(pairs)
    for mine, theirs in zip(ours.spans(limit), plain.spans(points, limit), strict=True):
        assert (mine.first, mine.last, mine.low, mine.high) == (theirs.first, theirs.last, theirs.low, theirs.high)
        assert mine.mean == pytest.approx(theirs.mean, rel=1e-9, abs=1e-6)


def test_a_column_that_comes_later_has_gaps_before():
    curves = RunCurves(["loss"])
    curves.put(1, {"loss": 2.0})
    curves.add("accuracy")
    curves.put(2, {"loss": 1.0, "accuracy": 0.5})
    assert curves.curve("accuracy").thin(4) == [(2, 0.5)] and len(curves.curve("loss")) == 2


def test_after_one_enormous_value_the_moving_mean_is_still_that_of_its_window():
    curves = RunCurves(["gradient_norm"])
    for step in range(600):
        curves.put(step, {"gradient_norm": 1e25 if step == 100 else 2.0})
    smoothed = curves.curve("gradient_norm").smooth(300)
    assert {point.value for point in smoothed if point.step > 120} == {2.0}
