"""What is learned. One file per objective; its class name in snake case is its name in a recipe."""

from collections.abc import Callable

from thrifty.core.errors import UsageError, did_you_mean
from thrifty.core.objective import Objective
from thrifty.objectives.next_token import NextToken

OBJECTIVES: dict[str, Callable[[], Objective]] = {"next_token": NextToken}


def find_objective(name: str) -> Objective:
    if name not in OBJECTIVES:
        raise UsageError(f"there is no objective {name!r}", fix=did_you_mean(name, OBJECTIVES))
    return OBJECTIVES[name]()
