"""Number formats for readers. Values are in SI base units."""

import math

_STEPS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
MISSING = "–"


def scaled(value: float | None, unit: str = "", digits: int = 3) -> str:
    """Return a value with an SI prefix: 1234567.0, "B" -> "1.23 MB"."""
    if value is None:
        return MISSING
    size, prefix = prefix_for(value)
    return f"{significant(value / size, digits)} {prefix}{unit}".rstrip()


def prefix_for(value: float) -> tuple[float, str]:
    """Return the factor and the SI prefix that leave one to three digits before the decimal point."""
    return next(((size, prefix) for size, prefix in _STEPS if abs(value) >= 0.9995 * size), (1.0, ""))


def significant(value: float | None, digits: int = 3) -> str:
    """Return a value with `digits` significant digits. Values below 0.001 have an exponent."""
    if value is None:
        return MISSING
    if value and abs(value) < 1e-3:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    rounded = abs(float(f"{value:.{digits - 1}e}"))
    magnitude = math.floor(math.log10(rounded)) if rounded else 0
    return f"{value:,.{max(0, digits - 1 - magnitude)}f}"


def whole(value: float | None) -> str:
    return MISSING if value is None else f"{value:,.0f}"


def percent(share: float | None, digits: int = 1) -> str:
    return MISSING if share is None else f"{100 * share:.{digits}f} %"


def duration(seconds: float | None) -> str:
    """Return a duration as text: 7.8e-4 -> "780 µs", 0.81 -> "0.81 s", 161 -> "2 min 41 s", 9000 -> "2 h 30 min"."""
    if seconds is None:
        return MISSING
    if 0 < seconds < 1e-3:
        unit, size = ("µs", 1e-6) if seconds >= 1e-6 else ("ns", 1e-9)
        return f"{significant(seconds / size)} {unit}"
    if seconds < 59.95:
        return f"{significant(seconds)} s"
    total = round(seconds)
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"
