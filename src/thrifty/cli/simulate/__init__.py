"""The verb `simulate`: a training step on a cluster, attention on an accelerator."""

from thrifty.cli.simulate.simulate_verb import command

__all__ = ["command"]
