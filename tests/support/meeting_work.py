"""Ranks that meet in a store that outlives them, and end without putting anything away."""

import os
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from rank_processes import PROCESSES

from thrifty.training.rendezvous import Rendezvous


def meet_and_die(port: int, ranks: int) -> list[dict[str, Any]]:
    """The name of the meeting and a sum over the ranks, as each rank found it."""
    receivers = []
    for rank in range(ranks):
        receiver, sender = PROCESSES.Pipe(duplex=False)
        PROCESSES.Process(target=_rank, args=(rank, ranks, port, sender), daemon=True).start()
        sender.close()
        receivers.append(receiver)
    assert all(receiver.poll(60) for receiver in receivers), "the ranks do not meet"
    return [receiver.recv() for receiver in receivers]


def _rank(rank: int, ranks: int, port: int, sender: Connection) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    meeting = Rendezvous(30)
    dist.init_process_group("gloo", store=meeting.connection(), rank=rank, world_size=ranks)
    numbers = torch.tensor([rank + 1])
    dist.all_reduce(numbers)
    sender.send({"name": meeting.name, "sum": int(numbers)})
    os._exit(0)
