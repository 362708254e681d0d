"""Two hosts, simulated by network namespaces with address and name, joined by a link that can be cut."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import user_work
from command_line import CommandLine, assert_equal, kill, wait_until

from thrifty.training.checkpoint import load

pytestmark = pytest.mark.slow

STARTING = 180.0
"""Seconds within which a run has started on both hosts of a busy machine."""
STEPS = 100
SETTINGS = {"steps": STEPS, "checkpoints__every": 10, "evaluation__every": 30}
ENTER = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Hosts:
    """The hosts `alpha` and `beta`, which see the same disk."""

    names = ("alpha", "beta")
    addresses = ("10.77.0.1", "10.77.0.2")

    def __init__(self, folder: Path):
        self.spaces = [f"{folder.name}-{name}" for name in self.names]
        self.known = folder / "hosts"
        known = [("127.0.0.1", "localhost"), *zip(self.addresses, self.names, strict=True)]
        self.known.write_text("".join(f"{address} {name}\n" for address, name in known))
        self.started: list[subprocess.Popen[str]] = []

    def set_up(self) -> None:
        alpha, beta = self.spaces
        for space in self.spaces:
            ip("netns", "add", space)
        ip("link", "add", "wire", "netns", alpha, "type", "veth", "peer", "name", "wire", "netns", beta)
        for space, address in zip(self.spaces, self.addresses, strict=True):
            ip("-n", space, "address", "add", f"{address}/24", "dev", "wire")
            for device in ("wire", "lo"):
                ip("-n", space, "link", "set", device, "up")

    def take_down(self) -> None:
        for process in self.started:
            kill(process)
        for space in self.spaces:
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)

    def cut(self) -> None:
        ip("-n", self.spaces[1], "link", "set", "wire", "down")

    def join(self) -> None:
        ip("-n", self.spaces[1], "link", "set", "wire", "up")

    def inside(self, number: int) -> list[str | Path]:
        """Return the command prefix that runs a command on a host."""
        space, name = self.spaces[number], self.names[number]
        return ["ip", "netns", "exec", space, "unshare", "--uts", "--mount", "sh", "-c", ENTER, name, self.known]

    def start_by_srun(self, *words: str | Path) -> list[subprocess.Popen[bytes]]:
        """Start a process on each host with the variables of srun, where hosts are known by name."""
        step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "alpha,beta"}
        shared = {**os.environ, **step, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        for number in range(2):
            variables = {"SLURM_PROCID": str(number), "SLURM_LOCALID": "0", "GLOO_SOCKET_IFNAME": "wire"}
            command = [*self.inside(number), sys.executable, *words]
            self.started.append(subprocess.Popen(command, env={**shared, **variables}))  # type: ignore[arg-type]
        return self.started[-2:]  # type: ignore[return-value]

    def start(
        self, thrifty: CommandLine, *words: str, meet: int = 0, nodes: str = "2", restarts: int = 0
    ) -> list[subprocess.Popen[str]]:
        """Start torchrun with one rank on each host; the rendezvous is on host number `meet`."""
        for number, address in enumerate(self.addresses):
            meeting = [
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={self.addresses[meet]}:29500",
                "--rdzv-id=a-job",
                "--rdzv-conf=last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=5",
                f"--local-addr={address}",
            ]
            ranks = [f"--nnodes={nodes}", "--nproc-per-node=1", f"--max-restarts={restarts}", *meeting]
            process = subprocess.Popen(
                [*self.inside(number), sys.executable, "-m", "torch.distributed.run", *ranks, "-m", "thrifty", *words],
                cwd=thrifty.folder,
                env=thrifty.variables(),
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            self.started.append(process)
        return self.started[-2:]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("needs the programs ip and unshare (Debian: iproute2, util-linux)")
    made = Hosts(tmp_path)
    try:
        made.set_up()
    except subprocess.CalledProcessError as error:
        made.take_down()
        pytest.skip(f"this system lets us make no networks: {error.stderr.strip()}")
    yield made
    made.take_down()


@pytest.fixture(scope="session")
def whole(common_folder: Path) -> CommandLine:
    """Return the run on two ranks of one host."""
    thrifty = CommandLine(common_folder)
    thrifty.train("whole on two", "--with", "parallelism.replicate", ranks=2, **SETTINGS)
    return thrifty


def made(thrifty: CommandLine, kind: str = "step") -> list[dict]:
    return thrifty.records("run", kind) if (thrifty.run("run") / "records.jsonl").is_file() else []


def told(stderr: str) -> str:
    assert stderr.count("thrifty: ") == 1, stderr
    return stderr[stderr.index("thrifty: ") :]


def test_a_lost_link_ends_the_run_on_both_hosts(thrifty: CommandLine, whole: CommandLine, hosts: Hosts) -> None:
    thrifty.environment["THRIFTY_SILENCE"] = "10"
    alpha, beta = hosts.start(thrifty, *thrifty.recipe("run", "--with", "parallelism.replicate", **SETTINGS))
    assert wait_until(lambda: made(thrifty, "checkpoint"), alpha, STARTING)
    hosts.cut()
    sides = [process.communicate(timeout=60)[1] for process in (alpha, beta)]
    assert alpha.returncode == 1 and beta.returncode != 0
    here, there = map(told, sides)
    assert re.match(r"thrifty: rank 1 on beta \(process \d+\) has sent no heartbeat for 1\d s, last seen in ", here)
    assert "its host is unreachable" in here and "thrifty resume" in here
    assert re.match(r"thrifty: rank 1 on beta \(process \d+\) could not reach the store at 10.77.0.1:\d+ for", there)
    assert len(made(thrifty)) < STEPS, "the run was over before the wire was cut"
    assert [notice["text"] in here for notice in made(thrifty, "notice")] == [True]
    hosts.join()
    for process in hosts.start(thrifty, "resume", "run"):
        assert process.wait(STARTING) == 0
    assert_equal(thrifty.tensors("run"), whole.tensors("whole on two"))


def test_a_run_continues_without_the_host_of_rank_0(thrifty: CommandLine, whole: CommandLine, hosts: Hosts) -> None:
    words = thrifty.recipe("run", "--with", "parallelism.replicate", **SETTINGS)
    alpha, beta = hosts.start(thrifty, *words, meet=1, nodes="1:2", restarts=2)
    assert wait_until(lambda: made(thrifty, "checkpoint"), beta, STARTING)
    kill(alpha)
    before = len(made(thrifty))
    assert 0 < before < STEPS
    stderr = beta.communicate(timeout=STARTING)[1]
    assert beta.returncode == 0, stderr
    assert json.loads((thrifty.run("run") / "environment.json").read_text())["ranks"] == 1
    latest = {step["step"]: step for step in made(thrifty)}
    expected = whole.records("whole on two")
    assert [latest[step]["tokens"] for step in sorted(latest)] == [step["tokens"] for step in expected]
    assert [latest[step]["loss"] for step in sorted(latest)] == pytest.approx(
        [step["loss"] for step in expected], rel=1e-5
    )


def test_a_run_by_srun_on_user_objects_survives_a_lost_host(hosts: Hosts, tmp_path: Path) -> None:
    command = [sys.executable, user_work.__file__, str(tmp_path), "straight", "100", "2"]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    words = (user_work.__file__, str(tmp_path), "killed", "100", "1")
    first, second = hosts.start_by_srun(*words)
    assert wait_until(lambda: (tmp_path / "killed" / "checkpoints" / "step-00000020").is_dir(), first, STARTING)
    kill(second)
    assert first.wait(timeout=120) != 0
    assert [process.wait(timeout=STARTING) for process in hosts.start_by_srun(*words)] == [0, 0]
    straight, killed = (load(tmp_path / name / "checkpoints").tensors for name in ("straight", "killed"))
    assert_equal(killed, straight)
