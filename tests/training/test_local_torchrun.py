"""Stores of locally started ranks are reachable from this machine only."""

import socket
from datetime import timedelta

import psutil
import pytest
from torch.distributed import TCPStore

from thrifty.training import local_torchrun, rendezvous
from thrifty.training.process_launch import python


def listening() -> set[str]:
    return {each.laddr.ip for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN}


def test_torchruns_store_listens_on_the_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def as_torchrun(arguments: list[str]) -> None:
        options = dict(argument.removeprefix("--").split("=") for argument in arguments)
        address, port = options["master-addr"], int(options["master-port"])
        own = TCPStore(address, port, is_master=True, multi_tenant=True, timeout=timedelta(seconds=10))
        own.set("key", "value")
        seen.append((listening(), own.get("key"), options["nproc-per-node"]))

    before = listening()
    monkeypatch.setattr(local_torchrun, "main", as_torchrun)
    local_torchrun.start(["--nproc-per-node=2"])
    assert seen == [(before | {"127.0.0.1"}, b"value", "2")]
    assert python(2)[1:] == ["-m", local_torchrun.__name__, "--nproc-per-node=2"]


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_the_store_of_rank_0_listens_there_too(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", str(port))
    before = listening()
    kept = rendezvous.connect(host=True)
    rendezvous.connect(host=False).set("key", "value")
    assert kept.get("key") == b"value" and listening() == before | {"127.0.0.1"}
