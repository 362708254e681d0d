from hypothesis import given
from hypothesis import strategies as st

from thrifty.reporting.loss_curves import CurvePoint, curve, smooth, spans, thin

values = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=400)
limits = st.integers(4, 60)


def points_of(numbers: list[float]) -> list[CurvePoint]:
    return [CurvePoint(step, value) for step, value in enumerate(numbers, start=1)]


@given(values, limits)
def test_thinning_keeps_both_ends_and_the_extremes_and_the_order(numbers, limit):
    points = points_of(numbers)
    kept = thin(points, limit)
    assert len(kept) <= limit
    assert set(kept) <= set(points) and kept == sorted(kept)
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert min(point.value for point in kept) == min(numbers)
    assert max(point.value for point in kept) == max(numbers)


@given(values, limits)
def test_the_rows_of_a_table_cover_every_step_and_keep_the_extremes(numbers, limit):
    rows = spans(points_of(numbers), limit)
    assert len(rows) <= limit
    assert [row.first for row in rows] == [1, *[row.last + 1 for row in rows[:-1]]]
    assert rows[-1].last == len(numbers)
    assert min(row.low for row in rows) == min(numbers) and max(row.high for row in rows) == max(numbers)


def test_a_smoothed_line_stays_on_a_straight_line():
    points = points_of([3.0 * step for step in range(600)])
    inner = slice(0, -10)  # at the end the window has one side only
    for point, smoothed in zip(points[inner], smooth(points)[inner], strict=True):
        assert abs(point.value - smoothed.value) < 1e-9


def test_smoothing_quiets_noise():
    points = points_of([step % 2 for step in range(600)])
    assert all(abs(point.value - 0.5) < 0.1 for point in smooth(points)[20:])


def test_values_that_are_not_finite_numbers_are_left_out():
    records = [{"step": step, "loss": loss} for step, loss in enumerate([1.0, float("nan"), None, "2", True, 3, 1e999])]
    assert curve(records, "loss") == [CurvePoint(0, 1.0), CurvePoint(5, 3.0)]
