import pytest

from thrifty.reporting.number_format import duration, percent, scaled, significant


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (scaled(1_234_567, "B"), "1.23 MB"),
        (scaled(999_900, "B"), "1.00 MB"),
        (scaled(12.0, "B"), "12.0 B"),
        (scaled(2.4e12, "FLOP/s"), "2.40 TFLOP/s"),
        (scaled(None, "B"), "–"),
        (significant(3.14159), "3.14"),
        (significant(9.999), "10.0"),
        (significant(12345.6), "12,346"),
        (significant(3e-4), "3e-4"),
        (significant(-0.25), "-0.250"),
        (significant(0.0), "0.00"),
        (percent(0.4137), "41.4 %"),
        (duration(0.0), "0.00 s"),
        (duration(8.8e-7), "880 ns"),
        (duration(7.76e-4), "776 µs"),
        (duration(0.9996e-3), "1,000 µs"),
        (duration(1e-3), "0.00100 s"),
        (duration(0.249), "0.249 s"),
        (duration(59.99), "1 min 00 s"),
        (duration(161), "2 min 41 s"),
        (duration(3599.7), "1 h 00 min"),
        (duration(9000), "2 h 30 min"),
        (duration(200_000), "2 d 7 h"),
    ],
)
def test_numbers_have_readable_formats(shown, expected):
    assert shown == expected
