"""Start of ranks on this machine only, by torchrun with a store on the loopback interface."""

import sys

from torch.distributed.run import main

from thrifty.training.rendezvous import LOOPBACK, loopback_store


def start(arguments: list[str]) -> None:
    """Run torchrun with these arguments until its ranks have ended."""
    store = loopback_store()  # torchrun's own store, opened at the same port in this process, shares it
    main(["--nnodes=1", f"--master-addr={LOOPBACK}", f"--master-port={store.port}", *arguments])


if __name__ == "__main__":
    start(sys.argv[1:])
