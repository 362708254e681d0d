"""Energy by published modules and by counted operations, with table names and missing operations."""

import pytest

from thrifty.core.errors import UsageError
from thrifty.simulators.accelerator.accelerator_file import find_machine
from thrifty.simulators.accelerator.energy_model import by_actions, by_activity, by_tables, find_table, table_names
from thrifty.simulators.accelerator.priced_operations import PricedOperation


def test_energy_tables_price_operations() -> None:
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
def test_energy_grows_with_bits_and_capacity(kind: str) -> None:
    for name in table_names():
        result = [find_table(name).picojoules(PricedOperation(kind, bits)) for bits in (4, 8, 9, 16, 24, 32, 64)]
        assert result == sorted(result) and result[0] > 0
    sizes = [
        find_table("horowitz-45nm").picojoules(PricedOperation("sram", 64, size))
        for size in (1 << 10, 1 << 14, 1 << 24)
    ]
    assert sizes == sorted(sizes)


def test_unpriced_actions_are_listed() -> None:
    counted = {
        PricedOperation("int_add", 32): 1000,
        PricedOperation("int_multiply", 32): 10,
        PricedOperation("sram", 64, 8192): 5,
    }
    result = by_actions(counted, find_table("horowitz-45nm"))
    assert result.total == pytest.approx((1000 * 0.1 + 10 * 3.1 + 5 * 10) * 1e-12)
    assert (result.table, result.unpriced) == ("horowitz-45nm", ())
    other = by_actions(counted, find_table("aladdin-45nm"))
    assert other.total == pytest.approx((1000 * 0.21 + 10 * 12.68) * 1e-12) and other.unpriced == ("sram",)


def test_every_table_and_range_end_is_compared() -> None:
    result = {energy.table: energy.total for energy in by_tables({PricedOperation("dram", 64): 1e12})}
    assert result["horowitz-45nm, low"] == pytest.approx(1300) and result["horowitz-45nm, high"] == pytest.approx(2600)
    assert set(result) == {*table_names(), "horowitz-45nm, low", "horowitz-45nm, high"}


def test_module_energy_has_dynamic_and_static_parts() -> None:
    machine = find_machine("a3")
    result = by_activity(machine, {"output": 500.0}, cycles=2000)
    assert result is not None
    output, values = result.parts["output"], result.parts["value memory"]
    assert output == pytest.approx(50.918e-3 * 500e-9 + 0.070e-3 * 2e-6)
    assert values == pytest.approx(2.901e-3 * 500e-9 + 0.987e-3 * 2e-6)
    assert result.total == pytest.approx(sum(result.parts.values()))
    assert result.total - output - values == pytest.approx((11.502 - 0.070 - 0.987) * 1e-3 * 2e-6)
    assert by_activity(find_machine("dense"), {"score": 1.0}, 1) is None


def test_a_slower_clock_costs_only_static_energy() -> None:
    fast, slow = (
        by_activity(find_machine("a3").replaced("clock", clock), {"output": 500.0}, 500) for clock in (1e9, 5e8)
    )
    assert fast is not None and slow is not None
    assert slow.total - fast.total == pytest.approx(11.502e-3 * 500e-9, rel=1e-3)
