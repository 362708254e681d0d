"""Energy by published modules and by counted actions: every table is its own, and says what it does not know."""

import pytest

from thrifty.core.errors import UsageError
from thrifty.simulators.accelerator.accelerator_file import find_machine
from thrifty.simulators.accelerator.energy_model import by_actions, by_activity, by_tables, find_table, table_names
from thrifty.simulators.accelerator.priced_operations import PricedOperation


def test_tables_say_what_they_say() -> None:
    horowitz, aladdin = find_table("horowitz-45nm"), find_table("aladdin-45nm")
    for kind, bits, expected in (("int_add", 32, 0.1), ("int_multiply", 8, 0.2), ("float_multiply", 16, 1.1)):
        assert horowitz.picojoules(PricedOperation(kind, bits)) == pytest.approx(expected)
    assert horowitz.picojoules(PricedOperation("sram", 64, 32768)) == pytest.approx(20)
    assert horowitz.picojoules(PricedOperation("sram", 128, 8192)) == pytest.approx(20)
    assert horowitz.picojoules(PricedOperation("dram", 8)) == pytest.approx(1950 / 8)
    assert aladdin.picojoules(PricedOperation("float_add", 64)) == pytest.approx(43.8)
    assert aladdin.picojoules(PricedOperation("sram", 64, 32768)) is None
    assert all(find_table(name).source and find_table(name).grade in "PRXSM" for name in table_names())
    with pytest.raises(UsageError, match="did you mean 'horowitz-45nm'"):
        find_table("horowitz")


@pytest.mark.parametrize("kind", ["int_add", "int_multiply", "float_add", "float_multiply"])
def test_between_and_beyond_points_more_bits_take_more(kind: str) -> None:
    for name in table_names():
        found = [find_table(name).picojoules(PricedOperation(kind, bits)) for bits in (4, 8, 9, 16, 24, 32, 64)]
        assert found == sorted(found) and found[0] > 0
    sizes = [
        find_table("horowitz-45nm").picojoules(PricedOperation("sram", 64, size))
        for size in (1 << 10, 1 << 14, 1 << 24)
    ]
    assert sizes == sorted(sizes)


def test_counted_actions_add_up_and_what_has_no_price_is_named() -> None:
    counted = {
        PricedOperation("int_add", 32): 1000,
        PricedOperation("int_multiply", 32): 10,
        PricedOperation("sram", 64, 8192): 5,
    }
    found = by_actions(counted, find_table("horowitz-45nm"))
    assert found.total == pytest.approx((1000 * 0.1 + 10 * 3.1 + 5 * 10) * 1e-12)
    assert (found.table, found.unpriced) == ("horowitz-45nm", ())
    other = by_actions(counted, find_table("aladdin-45nm"))
    assert other.total == pytest.approx((1000 * 0.21 + 10 * 12.68) * 1e-12) and other.unpriced == ("sram",)


def test_every_table_is_shown_and_the_ends_of_ranges() -> None:
    found = {energy.table: energy.total for energy in by_tables({PricedOperation("dram", 64): 1e12})}
    assert found["horowitz-45nm, low"] == pytest.approx(1300) and found["horowitz-45nm, high"] == pytest.approx(2600)
    assert set(found) == {*table_names(), "horowitz-45nm, low", "horowitz-45nm, high"}


def test_modules_take_their_power_while_at_work_and_their_static_power_always() -> None:
    machine = find_machine("a3")
    found = by_activity(machine, {"output": 500.0}, cycles=2000)
    assert found is not None
    output, values = found.parts["output"], found.parts["value memory"]
    assert output == pytest.approx(50.918e-3 * 500e-9 + 0.070e-3 * 2e-6)
    assert values == pytest.approx(2.901e-3 * 500e-9 + 0.987e-3 * 2e-6)
    assert found.total == pytest.approx(sum(found.parts.values()))
    assert found.total - output - values == pytest.approx((11.502 - 0.070 - 0.987) * 1e-3 * 2e-6)
    assert by_activity(find_machine("dense"), {"score": 1.0}, 1) is None


def test_a_slower_clock_takes_as_much_for_the_work_and_more_for_standing_there() -> None:
    fast, slow = (
        by_activity(find_machine("a3").replaced("clock", clock), {"output": 500.0}, 500) for clock in (1e9, 5e8)
    )
    assert fast is not None and slow is not None
    assert slow.total - fast.total == pytest.approx(11.502e-3 * 500e-9, rel=1e-3)
