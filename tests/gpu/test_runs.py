"""The command line on a GPU: training, bit-exact resuming, and predicted memory."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from command_line import CommandLine, assert_equal, kill, wait_until, write_corpus
from gpu_only import on_a_gpu
from limited_technique import add_limited

pytestmark = on_a_gpu
STEPS = 30
GROWING = ["--with", "growth.stacking:at=[8,16]", "--with", "sparsity.rigl:every=4,density=0.5"]
SAVING = [
    "--with",
    "memory.recompute",
    "--with",
    "memory.offload_optimizer",
    "--with",
    "large_batch.gradient_accumulation",
]


@pytest.fixture
def thrifty(tmp_path: Path) -> CommandLine:
    write_corpus(tmp_path / "corpus")
    return CommandLine(tmp_path, {"THRIFTY_CACHE": str(tmp_path / "cache")}, fresh=True)


def test_auto_device_is_the_gpu(thrifty: CommandLine) -> None:
    thrifty.train("run", timeout=300)
    environment = json.loads((thrifty.run("run") / "environment.json").read_text())
    assert environment["device"] == "cuda:0" and environment["gpu"] == torch.cuda.get_device_name()


@pytest.mark.parametrize("more", [[], GROWING, SAVING], ids=["alone", "growing and sparse", "saving memory"])
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "mixed and compiled"])
def test_resume_is_bit_identical_after_kill(thrifty: CommandLine, plain: bool, more: list[str]) -> None:
    common = [*more, "--set", "checkpoints.every=5"]
    thrifty.train("straight", *common, steps=STEPS, plain=plain, timeout=300)
    process = thrifty.start(*thrifty.recipe("killed", *common, steps=STEPS, plain=plain))
    checkpoints = thrifty.run("killed") / "checkpoints"
    assert wait_until(lambda: (checkpoints / "LATEST").exists(), process, seconds=200)
    kill(process)
    thrifty("resume", "killed", timeout=300)
    assert_equal(thrifty.tensors("killed"), thrifty.tensors("straight"))
    losses = [[record["loss"] for record in thrifty.records(name)] for name in ("killed", "straight")]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS


@pytest.mark.parametrize("strategy", ["parallelism.replicate", "parallelism.shard", "parallelism.tensor"])
def test_rank_under_torchrun_trains_over_nccl(thrifty: CommandLine, strategy: str) -> None:
    ranked = thrifty.train("ranked", "--with", strategy, ranks=1, timeout=300)
    alone = thrifty.train("alone", timeout=300)
    assert ranked["held_out_loss"] == pytest.approx(alone["held_out_loss"], rel=1e-4)


def test_predicted_memory_equals_peak_memory(thrifty: CommandLine) -> None:
    wide = {"model__width": 512, "model__depth": 6, "data__batch": 32, "data__length": 256}
    for name, more in (("plain", []), ("recompute", ["--with", "memory.recompute"])):
        summary = thrifty.train(name, *more, timeout=300, **wide)
        assert summary["peak_memory"] == pytest.approx(summary["predicted_memory"], rel=0.1), name


LIMITED = """
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / whole)
    blocks = [torch.empty(2**22, device="cuda") for _ in range(64)]
"""


def test_out_of_memory_reports_phase_and_a_working_fix(thrifty: CommandLine) -> None:
    add_limited(thrifty, LIMITED)
    words = thrifty.recipe("short", "--with", "limited", checkpoints__every=2)
    message = thrifty(*words, exit_code=3, timeout=300).stderr
    assert "out of memory in the forward pass of step 3" in message and "Traceback" not in message
    assert "tensors on the device held" in message and "the predicted peak is" in message
    summary = json.loads((thrifty.run("short") / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"], summary["steps"]) == ("stopped", 3, 2)
    start = shlex.split(re.findall("`(.*?)`", message)[1])
    assert thrifty.json(*start[1:], "--without", "limited", timeout=300)["status"] == "finished"


def test_model_trained_on_gpu_samples_text_on_gpu(thrifty: CommandLine) -> None:
    thrifty.train("run", plain=False, timeout=300)
    assert thrifty("sample", "run", "--prompt", "def ", timeout=300).stdout.strip()
    assert torch.cuda.get_device_name() in thrifty("doctor", timeout=300).stdout
