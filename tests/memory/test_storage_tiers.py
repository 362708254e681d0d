"""Offloaded tensors return bit for bit, cost the modeled time, and leave nothing behind."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.tensor_tracing import StepTrace
from thrifty.memory.disk_tier import DiskTier
from thrifty.memory.host_tier import tier_for
from thrifty.memory.simulated_tier import LinkClock, SimulatedLink, SimulatedTier
from thrifty.memory.storage_tier import OffloadHandle, StorageTier, is_dense

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
SIZES = st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 1e-2)), min_size=1, max_size=20)
USES = st.sampled_from(["send", "finish_transfer", "prefetch", "get", "drop"])


@pytest.fixture(params=["disk", "simulated"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> StorageTier:
    return DiskTier(str(tmp_path)) if request.param == "disk" else SimulatedTier(SimulatedLink(1e9, 1e-5))


def tensors() -> list[Tensor]:
    x = torch.randn(48, 10)
    transposed = torch.randn(10, 48).t() * 1.0
    assert not transposed.is_contiguous()
    return [x, transposed, x[:, ::3], x[5:], x.bfloat16(), x > 0, torch.arange(7), torch.tensor(3.0), torch.zeros(0, 4)]


def test_sent_tensors_return_bit_identical_in_new_memory(tier: StorageTier) -> None:
    for tensor in tensors():
        ticket = tier.send(tensor)
        ticket.finish_transfer()
        back = ticket.get()
        assert torch.equal(back, tensor) and back.dtype == tensor.dtype
        assert not is_dense(tensor) or back.stride() == tensor.stride()
        assert not tensor.numel() or back.data_ptr() != tensor.data_ptr()
        assert torch.equal(ticket.get(), tensor)  # and once more


def test_get_before_transfer_ends_returns_the_tensor_itself(tier: StorageTier) -> None:
    tensor = torch.randn(100)
    assert tier.send(tensor).get().data_ptr() == tensor.data_ptr()


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 5), USES), max_size=60))
def test_any_order_of_calls_returns_values_and_frees_space(steps: list[tuple[int, str]]) -> None:
    for tier in (DiskTier(), SimulatedTier(SimulatedLink())):
        use(tier, steps)
        assert tier.account.now == 0


def test_closed_disk_tier_writes_to_no_later_file(tmp_path: Path) -> None:
    release, tier = threading.Event(), DiskTier()
    tier.thread.submit(release.wait)
    ticket, thread = tier.send(torch.ones(100)), tier.thread
    del tier, ticket
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context((tmp_path / f"{count}").open("wb")) for count in range(8)]
        release.set()
        thread.shutdown()
        assert all(not os.fstat(file.fileno()).st_size for file in files)


def use(tier: StorageTier, steps: list[tuple[int, str]]) -> None:
    tickets: dict[int, tuple[OffloadHandle, Tensor]] = {}
    for number, (key, what) in enumerate(steps):
        if what == "send":
            tensor = torch.full((64 * (key % 2 + 1),), float(number))
            tickets[key] = tier.send(tensor), tensor.clone()
        elif key in tickets and what == "drop":
            del tickets[key]
        elif key in tickets:
            result = getattr(tickets[key][0], what)()
            assert result is None or torch.equal(result, tickets[key][1])
    for ticket, expected in tickets.values():
        ticket.finish_transfer()
        assert torch.equal(ticket.get(), expected)
    assert tier.account.now == sum(expected.nbytes for _, expected in tickets.values())


def test_device_memory_is_free_until_prefetch(tier: StorageTier) -> None:
    with StepTrace() as trace:
        tensor = torch.ones(1000) * 2
        ticket = tier.send(tensor)
        del tensor
        assert trace.now == 4000
        ticket.finish_transfer()
        assert trace.now == 0 and tier.account.now == 4000
        ticket.prefetch()
        assert trace.now == 4000
        back = ticket.get()
        del back
        assert trace.now == 0


def test_fake_tensors_move_no_bytes() -> None:
    with FakeTensorMode(), StepTrace() as trace:
        tensor = torch.empty(8, 1000)
        for tier in (tier_for("disk", tensor), tier_for("simulated", tensor), tier_for("auto", tensor)):
            ticket = tier.send(tensor * 2)
            ticket.finish_transfer()
            assert trace.now == tensor.nbytes
            assert ticket.get().shape == tensor.shape and tier.account.now == 0
            assert tier.allocate([tensor])[0] is tensor


def test_allocated_copies_share_no_memory(tier: StorageTier) -> None:
    before = tensors()
    placed = tier.allocate(before)
    assert all(map(torch.equal, placed, before))
    for tensor, old in zip(placed, before, strict=True):
        kept = old.clone()
        tensor.zero_()
        assert torch.equal(old, kept) and not tensor.any()
    assert tier.account.now >= sum(tensor.nbytes for tensor in before if is_dense(tensor))
    del placed, tensor
    assert tier.account.now == 0


def test_host_tier_without_gpu_is_refused() -> None:
    with pytest.raises(RefusedError, match="trains on the CPU") as refused:
        tier_for("host", torch.ones(1))
    assert 'to="disk"' in refused.value.fix


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="missing' is not a writable folder"):
        DiskTier(str(tmp_path / "missing"))


def started(program: str, *args: object) -> subprocess.Popen[str]:
    code = f"import sys, torch\nfrom thrifty.memory.disk_tier import DiskTier\n{textwrap.dedent(program)}"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.slow
@LINUX
def test_killed_process_leaves_no_files(tmp_path: Path) -> None:
    program = """
    tier = DiskTier(sys.argv[1])
    ticket = tier.send(torch.randn(300_000))
    ticket.finish_transfer()
    placed = tier.allocate([torch.randn(500_000)])
    print("ready", flush=True)
    input()
    """
    with started(program, tmp_path) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        files = [path for path in Path(f"/proc/{process.pid}/fd").iterdir() if str(tmp_path) in str(path.readlink())]
        sizes = sorted({path.stat().st_size for path in files})
        process.send_signal(signal.SIGKILL)
    assert sizes[0] == 1_200_000 and sizes[1] >= 2_000_000
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["tier.send(torch.ones(2_000_000)).finish_transfer()", "tier.allocate([torch.ones(2_000_000)])"]
)
def test_full_disk_is_reported(tmp_path: Path, way: str) -> None:
    program = f"""
    import resource
    from thrifty.core.errors import InfeasibleError
    tier = DiskTier(sys.argv[1])
    tier.send(torch.ones(1000)).finish_transfer()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
    try:
        {way}
    except InfeasibleError as error:
        print(error.what, "|", error.fix)
    """
    with started(program, tmp_path) as process:
        out, errors = process.communicate(timeout=60)
    assert f"'{tmp_path}' has no space for another 8,000,000 bytes (File too large)" in out, errors
    assert "a larger disk" in out


@pytest.mark.slow
@LINUX
def test_mapped_state_is_not_anonymous_memory(tmp_path: Path) -> None:
    program = """
    import re
    def own() -> int:
        return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
    tier = DiskTier(sys.argv[1])
    tier.allocate([torch.zeros(10)])
    before = own()
    state = [tier.allocate([torch.zeros(12_000_000)])[0] for _ in range(2)]
    for tensor in state:
        tensor.add_(1)
    print(own() - before)
    """
    with started(program, tmp_path) as process:
        out, errors = process.communicate(timeout=60)
    assert int(out) < 10e6, errors  # of 96 MB


def test_link_transfers_are_sequential_per_direction() -> None:
    clock = LinkClock(SimulatedLink(bandwidth=100, latency=1))
    assert [clock.out(200), clock.out(100)] == [3, 5]
    clock.compute(2)
    clock.wait(3)
    assert (clock.now, clock.waited) == (3, 1)
    assert clock.back(100, gone=3) == 5  # while another tensor is still leaving
    assert clock.back(100, gone=9) == 11
    shared = LinkClock(SimulatedLink(bandwidth=100, latency=1, duplex=False))
    assert [shared.out(200), shared.back(100, gone=0), shared.out(0)] == [3, 5, 6]


@given(SIZES, st.floats(1e3, 1e12), st.floats(1, 100), st.booleans())
def test_faster_link_never_waits_longer(
    stages: list[tuple[int, float]], bandwidth: float, factor: float, duplex: bool
) -> None:
    slow, fast, endless = (
        waited(stages, SimulatedLink(rate, duplex=duplex)) for rate in (bandwidth, bandwidth * factor, math.inf)
    )
    assert fast <= slow * (1 + 1e-9) + 1e-12
    assert endless == 0.0
    assert slow <= waited(stages, SimulatedLink(bandwidth, duplex=False)) * (1 + 1e-9) + 1e-12


def waited(stages: list[tuple[int, float]], link: SimulatedLink) -> float:
    clock, gone = LinkClock(link), []
    for size, seconds in stages:
        clock.compute(seconds)
        gone.append(clock.out(size))
    for (size, seconds), left in zip(reversed(stages), reversed(gone), strict=True):
        clock.wait(clock.back(size, left))
        clock.compute(seconds)
    return clock.waited


@pytest.mark.parametrize("wrong", [{"bandwidth": 0.0}, {"latency": -1.0}])
def test_link_without_bandwidth_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="link: "):
        SimulatedLink(**wrong)  # type: ignore[arg-type]
