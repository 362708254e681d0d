"""A process that the system refuses memory ends with a message, and a leaner start works."""

import re
import shlex
import sys

import pytest
from command_line import CommandLine
from limited_technique import add_limited

from thrifty.training.run_folder import RunFolder

LIMITED = """
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + 2**26
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    blocks = [torch.empty(2**22) for _ in range(32)]
"""


@pytest.fixture
def limited(thrifty: CommandLine) -> CommandLine:
    add_limited(thrifty, LIMITED)
    return thrifty


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits its address space by what Linux says of it")
def test_out_of_memory_names_the_phase_and_a_leaner_start(limited: CommandLine) -> None:
    done = limited(*limited.recipe("short", "--with", "limited", checkpoints__every=2), exit_code=3)
    message = done.stderr[done.stderr.index("thrifty: ") :]
    assert "Traceback" not in done.stderr and len(message.splitlines()) == 2
    assert re.match(r"thrifty: out of memory in the forward pass of step 3: 17 MB more were refused", message)
    summary = RunFolder(limited.run("short")).read_json("summary")
    assert (summary["status"], summary["exit_code"], summary["steps"]) == ("stopped", 3, 2)
    start = shlex.split(re.findall("`(.*?)`", message)[1])
    assert start[:4] == ["thrifty", "resume", "runs/short", "--fork"]
    assert limited.json(*start[1:], "--without", "limited")["status"] == "finished"
