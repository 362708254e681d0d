"""Designs without masks: the systolic array against SCALE-Sim's reports, the dense pipeline, and rooflines."""

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thrifty.core.errors import UsageError
from thrifty.simulators.accelerator.accelerator_file import find_machine
from thrifty.simulators.accelerator.accelerator_simulation import limit_resources, simulate
from thrifty.simulators.accelerator.attention_trace import AttentionTrace, layer_of
from thrifty.simulators.accelerator.designs.systolic import folds, reported_cycles
from thrifty.simulators.accelerator.scale_sim import GemmShape, compute_report, read_cfg, read_topology
from thrifty.simulators.accelerator.synthetic_traces import synthetic_trace

RAN = {
    # (m, n, k): total cycles in COMPUTE_REPORT.csv of scalesim 3.0.0 on 8 rows x 4 columns
    (512, 512, 64): {"os": 606207, "ws": 542719, "is": 542719},
    (512, 64, 512): {"os": 534527, "ws": 542719, "is": 671743},
    (10, 7, 5): {"os": 59, "ws": 55, "is": 74},
    (33, 40, 65): {"os": 3749, "ws": 4589, "is": 4697},
    (64, 64, 64): {"os": 9471, "ws": 10495, "is": 10495},
    (100, 9, 31): {"os": 1598, "ws": 1415, "is": 2699},
}


def test_cycles_on_32_x_32_are_computed_at_once() -> None:
    """512x512x64 takes 32,255 cycles, and 512x64x512 takes 18,367. SCALE-Sim needs seconds for both."""
    began = time.perf_counter()
    assert reported_cycles(512, 512, 64, 32, 32, "os") == 32_255
    assert reported_cycles(512, 64, 512, 32, 32, "os") == 18_367
    assert time.perf_counter() - began < 0.05


@pytest.mark.parametrize("shape", RAN)
@pytest.mark.parametrize("dataflow", ["os", "ws", "is"])
def test_cycles_equal_scale_sim_in_three_dataflows(shape: tuple[int, int, int], dataflow: str) -> None:
    assert reported_cycles(*shape, 8, 4, dataflow) == RAN[shape][dataflow]


def output_stationary(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, int]:
    """Return a (R, k) x b (k, C) and its cycles, simulated register by register on an array of R x C.

    Row r of `a` enters from the left r cycles late and moves right. Column c of `b` enters from above c cycles late and
    moves down.
    """
    rows, columns, steps = len(a), b.shape[1], a.shape[1]
    right, down, sums = (np.zeros((rows, columns)) for _ in range(3))
    cycle, done = 0, np.zeros((rows, columns), int)
    while (done < steps).any():
        right = np.concatenate(
            [[[a[r, cycle - r] if 0 <= cycle - r < steps else 0] for r in range(rows)], right[:, :-1]], 1
        )
        down = np.concatenate([[[b[cycle - c, c] if 0 <= cycle - c < steps else 0 for c in range(columns)]], down[:-1]])
        sums += right * down
        here = cycle - np.add.outer(np.arange(rows), np.arange(columns))
        done += (here >= 0) & (here < steps)
        cycle += 1
    return sums, cycle


def weight_stationary(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, int]:
    """Return a (m, R) x b (R, C) and its cycles. b is loaded one row per cycle; sums leave at the bottom."""
    rows, columns, count = len(b), b.shape[1], len(a)
    right, sums = np.zeros((rows, columns)), np.zeros((rows, columns))
    result, cycle = np.full((count, columns), np.nan), 0
    while np.isnan(result).any():
        right = np.concatenate(
            [[[a[cycle - r, r] if 0 <= cycle - r < count else 0] for r in range(rows)], right[:, :-1]], 1
        )
        sums = np.concatenate([np.zeros((1, columns)), sums[:-1]]) + right * b
        for column in range(columns):
            row = cycle - (rows - 1) - column
            if 0 <= row < count:
                result[row, column] = sums[-1, column]
        cycle += 1
    return result, rows + cycle


@given(*(st.integers(1, 7) for _ in range(3)), st.integers(0, 2**32 - 1))
def test_cycles_equal_a_register_level_simulation(rows: int, columns: int, steps: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    a, b = random.normal(size=(rows, steps)), random.normal(size=(steps, columns))
    product, cycles = output_stationary(a, b)
    np.testing.assert_allclose(product, a @ b, atol=1e-12)
    assert folds(rows, columns, steps, rows, columns, "os") == (1, cycles)
    a, b = random.normal(size=(steps, rows)), random.normal(size=(rows, columns))
    product, cycles = weight_stationary(a, b)
    np.testing.assert_allclose(product, a @ b, atol=1e-12)
    assert folds(steps, columns, rows, rows, columns, "ws") == (1, cycles)
    assert folds(columns, steps, rows, rows, columns, "is") == (1, cycles)


@given(
    *(st.integers(1, 90) for _ in range(3)), st.integers(1, 9), st.integers(1, 9), st.sampled_from(["os", "ws", "is"])
)
def test_folds_equal_the_number_of_tiles(m: int, n: int, k: int, rows: int, columns: int, flow: str) -> None:
    down, across = {"os": (m, n), "ws": (k, n), "is": (k, m)}[flow]
    count, each = folds(m, n, k, rows, columns, flow)
    assert count == len(range(0, down, rows)) * len(range(0, across, columns))
    assert reported_cycles(m, n, k, rows, columns, flow) == count * each - 1
    assert count * each * rows * columns >= m * n * k


def test_attention_is_two_products_per_head() -> None:
    machine = find_machine("systolic").replaced("rows", 8).replaced("columns", 4)
    for flow in ("os", "ws", "is"):
        trace = synthetic_trace("uniform", 0.3, heads=2, lengths=[33, 20], width=16)
        result = simulate(machine.replaced("dataflow", flow), trace)
        products = [reported_cycles(n, n, 16, 8, 4, flow) + reported_cycles(n, 16, n, 8, 4, flow) + 2 for n in (33, 20)]
        assert result.cycles == 2 * sum(products)
    assert limit_resources(machine, multipliers=128).settings["rows"] == 8 and result.multipliers == 32


CFG = """[general]
run_name = small
[architecture_presets]
ArrayHeight:    8
ArrayWidth:     4
Dataflow :      ws
Bandwidth :     10
[run_presets]
InterfaceBandwidth: USER
"""


def test_scale_sim_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.cfg").write_text(CFG)
    (tmp_path / "t.csv").write_text("Layer,M,N,K,\n" + "".join(f"l,{m},{n},{k},\n" for m, n, k in RAN))
    rows = compute_report(read_topology(tmp_path / "t.csv"), read_cfg(tmp_path / "a.cfg"))
    assert [row["Total Cycles"] for row in rows] == [result["ws"] for result in RAN.values()]
    assert [round(row["Overall Util %"], 3) for row in rows[:2]] == [96.604, 96.604]
    assert [round(row["Mapping Efficiency %"], 3) for row in rows[2:4]] == [54.688, 90.278]
    assert rows[2]["Least Cycles of Words"] == pytest.approx((50 + 35 + 70) / 10)


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (CFG.replace("ws", "wss"), "did you mean 'ws'"),
        (CFG.replace("8", "0"), "ArrayHeight is 0"),
        (CFG.replace("10", "-10"), "Bandwidth is -10"),
        (CFG.replace("ArrayWidth", "ArrayWdth"), "cannot be read.*\n.*ArrayWidth"),
        ("ArrayHeight: 8", "cannot be read"),
        (CFG.replace("10", "nan"), "Bandwidth is nan"),
        (CFG.replace("8", "9" * 25), "ArrayHeight is 1e.25.*\n.*at most"),
        (CFG + "[sparsity]\nSparsitySupport : true\n", "'SparsitySupport' is not simulated"),
    ],
)
def test_invalid_architectures_are_refused(cfg: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.cfg").write_text(cfg)
    with pytest.raises(UsageError, match=message):
        read_cfg(tmp_path / "a.cfg")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Layer,IFMAP Height,\nc,3,", "the line Layer,M,N,K"),
        ("Layer,M,N,K,\nc,3,4,", "line 2.*not a layer"),
        ("Layer,M,N,K,\nc,3,4,5,\n\nd,3,0,5,", "line 4"),
        ("Layer,M,N,K,\n", "has no layers"),
        ("", "not a topology"),
        ("Layer,M,N\nc,3,4\n", "the line Layer,M,N,K"),
        ("Layer,M,N,K\nc,-3,4,5\n", "line 2.*not a layer"),
        ("Layer,M,N,K\nc,²,4,5\n", "line 2.*not a layer"),
        ("Layer,M,N,K\nc,9999999999,9999999999,9999999999\n", "line 2.*too large"),
        ("Layer,M,N,K,Sparsity\nc,3,4,5,2:4\n", "column 'sparsity', which is not simulated"),
    ],
)
def test_invalid_topologies_are_refused_with_the_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_topology(tmp_path / "t.csv")


def test_a_product_of_one_value_on_one_multiplier() -> None:
    machine = find_machine("systolic")
    for setting in ("rows", "columns"):
        machine = machine.replaced(setting, 1)
    (row,) = compute_report([GemmShape("one", 1, 1, 1)], machine)
    assert row["Total Cycles"] == 0 and row["Overall Util %"] == 100  # the index of its only cycle


def test_dense_pipeline_by_hand_calculation() -> None:
    trace = AttentionTrace("plain", (layer_of("one", mask=np.ones((1, 1, 6, 6), bool), width=64),))
    result = simulate(find_machine("dense"), trace)
    assert result.cycles == 6 * 6 + 2 * 6  # a key per cycle; the last query passes two more stations
    assert result.utilisation == pytest.approx(36 / 48)
    assert simulate(limit_resources(find_machine("dense"), multipliers=256), trace).cycles == 6 * 3 + 2 * 3


@pytest.mark.parametrize("multipliers", [128, 512])
def test_dense_utilisation_at_every_head_width(multipliers: int) -> None:
    machine = limit_resources(find_machine("dense"), multipliers=multipliers)
    for width in (8, 16, 24, 64, 128):
        layer = layer_of("one", mask=np.ones((1, 1, 256, 256), bool), width=width)
        assert simulate(machine, AttentionTrace("plain", (layer,))).utilisation > 0.9


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_roofline_is_the_longer_of_operations_and_bytes(fused: bool, padded: bool) -> None:
    machine = find_machine("v100").replaced("fused", fused).replaced("padded", padded)
    trace = synthetic_trace("uniform", 0.1, heads=16, lengths=[512, 128])
    lengths = [512, 512] if padded else [512, 128]
    operations = sum(16 * 4 * n * n * 64 for n in lengths)
    moved = sum(16 * (4 * n * 64 + (0 if fused else 4 * n * n)) * 4 for n in lengths)
    result = simulate(machine, trace)
    expected = max(operations / (10144 * 1.38e9), moved / 900e9)
    assert result.seconds == pytest.approx(expected, rel=1e-4) if fused else result.seconds >= expected
    assert result.row()["outer_bytes"] == moved
    slow = simulate(limit_resources(machine, bandwidth=1e9), trace)
    assert slow.seconds == pytest.approx(moved / 1e9, rel=1e-3)


def test_gpu_energy_is_board_power_times_seconds() -> None:
    result = simulate(find_machine("v100"), synthetic_trace("uniform", 0.1, tokens=256))
    energy = result.energy("activity")
    assert energy is not None and energy.total == pytest.approx(250 * result.seconds)
