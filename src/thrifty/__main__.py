"""`python -m thrifty`, which is what `torchrun -m thrifty` starts on every rank."""

from thrifty.cli.main import main

main()
