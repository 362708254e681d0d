import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thrifty.reporting.run_charts import overlaid
from thrifty.reporting.run_curves import Curve, RunCurves, StepColumns

values = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=400)
limits = st.integers(4, 60)


def curve_of(numbers: list[float]) -> Curve:
    return Curve(np.arange(1, len(numbers) + 1), np.array(numbers, np.float64))


@given(values, limits)
def test_thinning_keeps_ends_extremes_and_order(numbers, limit):
    curve = curve_of(numbers)
    points, kept = curve.points, curve.thin(limit)
    assert len(kept) <= limit
    assert set(kept) <= set(points) and kept == sorted(kept)
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert min(point.value for point in kept) == min(numbers)
    assert max(point.value for point in kept) == max(numbers)


@given(values, limits)
def test_table_rows_cover_every_step_and_keep_extremes(numbers, limit):
    rows = curve_of(numbers).spans(limit)
    assert len(rows) <= limit
    assert [row.first for row in rows] == [1, *[row.last + 1 for row in rows[:-1]]]
    assert rows[-1].last == len(numbers)
    assert min(row.low for row in rows) == min(numbers) and max(row.high for row in rows) == max(numbers)
    assert rows[0].mean == pytest.approx(np.mean(numbers[: rows[0].last]), rel=1e-9, abs=1e-6)


def test_a_smoothed_line_stays_on_a_straight_line():
    curve = curve_of([3.0 * step for step in range(600)])
    inner = slice(0, -10)  # the window at the end is one-sided
    for point, smoothed in zip(curve.points[inner], curve.smooth(600)[inner], strict=True):
        assert point.step == smoothed.step and abs(point.value - smoothed.value) < 1e-9


def test_smoothing_reduces_noise():
    curve = curve_of([step % 2 for step in range(600)])
    assert all(abs(point.value - 0.5) < 0.1 for point in curve.smooth(300)[20:])


def test_the_moving_mean_survives_one_huge_value():
    smoothed = curve_of([1e25 if step == 100 else 2.0 for step in range(600)]).smooth(300)
    assert {point.value for point in smoothed if point.step > 120} == {2.0}


def test_non_finite_values_are_left_out():
    curves = StepColumns(["loss"])
    for step, loss in enumerate([1.0, math.nan, None, "2", True, 3, math.inf]):
        curves.put(step, {"loss": loss})
    assert curves.curve("loss").points == [(0, 1.0), (5, 3.0)]


@given(st.lists(st.tuples(st.integers(1, 60), st.floats(-1e6, 1e6)), max_size=120))
def test_the_later_record_of_a_repeated_step_counts(pairs):
    curves = StepColumns(["loss"])
    for step, loss in pairs:
        curves.put(step, {"loss": loss})
    assert curves.curve("loss").points == sorted(dict(pairs).items())


def test_a_later_column_has_gaps_before():
    curves = StepColumns(["loss"])
    curves.put(1, {"loss": 2.0})
    curves.add("accuracy")
    curves.put(2, {"loss": 1.0, "accuracy": 0.5})
    assert curves.curve("accuracy").points == [(2, 0.5)] and len(curves.curve("loss")) == 2


def test_losses_by_seconds_have_fractions_of_a_second():
    curves = RunCurves()
    for step in (1, 2):
        curves.put({"kind": "step", "step": step, "seconds": 0.4 * step})
        curves.put({"kind": "evaluation", "step": step, "loss": 3.0 - step})
    (figure,) = [figure for figure in overlaid({"run": curves}) if figure.id == "held_out_seconds"]
    assert [(row["step"], row["value"]) for row in figure.data["runs"]] == [(0.4, 2.0), (0.8, 1.0)]
