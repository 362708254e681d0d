"""The verb `data`: inspect, download, score and prune data sets."""

from thrifty.cli.data.data_verb import command

__all__ = ["command"]
