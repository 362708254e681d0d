"""The verb `plan`: choose techniques for a budget, model sizes, and cluster layouts."""

from thrifty.cli.plan.plan_verb import command

__all__ = ["command"]
