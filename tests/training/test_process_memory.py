"""Memory that steps free stays for the next step and is returned to the system after training."""

import json
import subprocess
import sys
from collections.abc import Mapping

import pytest
from tiny_runs import plain_run, technique, with_optimizer

from thrifty.composition.compose import compose
from thrifty.training import memory_meter

PROGRAM = """
import json, resource, psutil, torch
from thrifty.training.memory_meter import keep_freed_memory

def faults_of(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        torch.empty(2**25, dtype=torch.uint8).fill_(1)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / times

before = faults_of(4)
with keep_freed_memory(torch.device("cpu")):
    faults_of(24)  # until blocks have found their places: seven of a size are kept aside
    kept, held = faults_of(4), psutil.Process().memory_info().rss
print(json.dumps([before, kept, held - psutil.Process().memory_info().rss, faults_of(1)]))
"""


BETWEEN_OTHERS = """
import json, psutil, sys, torch
from thrifty.training import memory_meter as memory

with getattr(memory, sys.argv[1])(torch.device("cpu")):
    before = psutil.Process().memory_info().rss
    blocks = [torch.ones(2**23, dtype=torch.uint8) for _ in range(40)]
    del blocks[::2]
    larger = [torch.ones(3 * 2**22, dtype=torch.uint8) for _ in range(20)]
    live = sum(block.nbytes for block in [*blocks, *larger])
    print(json.dumps([(psutil.Process().memory_info().rss - before) / live]))
"""


LARGE_AND_SMALL = """
import json, psutil, torch
from thrifty.training.memory_meter import keep_freed_memory

def left(count, size):
    before = psutil.Process().memory_info().rss
    blocks = [torch.ones(size, dtype=torch.uint8) for _ in range(count)]
    del blocks
    return psutil.Process().memory_info().rss - before

with keep_freed_memory(torch.device("cpu")):
    print(json.dumps([left(2, 2**27), left(16, 2**22)]))
"""


def found(program: str = PROGRAM, *words: str, **environment: str) -> list[float]:
    """Return the output of a program: page faults of a large block while memory is kept, of the first block
    afterwards, and the bytes returned."""
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the kernel for page faults")
def test_freed_memory_is_returned_after_training() -> None:
    before, kept, given_back, after = found()
    assert kept < before / 8 and after > before / 2
    assert given_back > 2**24


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the kernel for page faults")
@pytest.mark.parametrize("own", [{"MALLOC_ARENA_MAX": "2"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}])
def test_a_users_allocator_settings_are_kept(own: dict[str, str]) -> None:
    before, kept, given_back, _ = found(**own)
    assert kept > before / 2 and given_back < 2**24


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the kernel for what a process holds")
def test_a_process_that_returns_memory_holds_only_its_tensors() -> None:
    (kept,), (given_back,) = (found(BETWEEN_OTHERS, way) for way in ("keep_freed_memory", "return_freed_memory"))
    assert given_back < 1.02 < 1.3 < kept  # larger tensors have no room in what is free between others


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the kernel for what a process holds")
def test_only_large_freed_blocks_are_returned() -> None:
    large, small = found(LARGE_AND_SMALL)
    assert large < 2**22 and small > 2**25


@pytest.mark.parametrize(
    ("name", "promises"),
    [("memory.optimal_recompute", True), ("memory.activation_budget", True), ("memory.recompute", False)],
)
def test_a_run_with_promised_bytes_returns_memory(monkeypatch: pytest.MonkeyPatch, name: str, promises: bool) -> None:
    chosen: list[Mapping[int, int]] = []
    monkeypatch.setattr(memory_meter, "_limited", lambda device, limits: chosen.append(limits))
    memory_meter.set_freed_memory_policy(compose(plain_run(), with_optimizer([technique(name)]), 2))
    assert chosen == [memory_meter._GIVING_BACK if promises else memory_meter._KEEPING]
