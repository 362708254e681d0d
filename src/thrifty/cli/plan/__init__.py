"""The verb `plan`: techniques for a budget, model sizes, clusters."""

from thrifty.cli.plan.plan_verb import command

__all__ = ["command"]
