"""Memory that steps free is there for the next step, and the machine's again when training is over."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, resource, psutil, torch
from thrifty.training.memory import keeping_freed

def faults_of(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        torch.empty(2**26, dtype=torch.uint8).fill_(1)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / times

before = faults_of(4)
with keeping_freed(torch.device("cpu")):
    faults_of(24)  # until blocks have found their places: seven of a size are kept aside
    kept, held = faults_of(4), psutil.Process().memory_info().rss
print(json.dumps([before, kept, held - psutil.Process().memory_info().rss, faults_of(1)]))
"""


def found(**environment: str) -> list[float]:
    """Page faults of a large block before, while memory is kept, and of the first one after; bytes given back third."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the kernel for page faults")
def test_what_is_freed_is_kept_while_training_and_given_back_afterwards() -> None:
    before, kept, given_back, after = found()
    assert kept < before / 8 and after > before / 2
    assert given_back > 2**25


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the kernel for page faults")
@pytest.mark.parametrize("own", [{"MALLOC_ARENA_MAX": "2"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}])
def test_who_has_settings_for_the_allocator_keeps_them(own: dict[str, str]) -> None:
    before, kept, given_back, _ = found(**own)
    assert kept > before / 2 and given_back < 2**25
