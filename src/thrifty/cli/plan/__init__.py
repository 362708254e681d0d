"""The verb `plan`: options under a budget, model sizes, clusters."""

from thrifty.cli.plan.plan_verb import command

__all__ = ["command"]
