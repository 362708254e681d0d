"""Objectives: losses, and functions that make training examples from data. Each objective has one file.

Recipes name an objective by its class name in snake case. The docstring of the objective's file is its card for users.
"""

from dataclasses import asdict, fields

from thrifty.core.errors import UsageError, did_you_mean
from thrifty.core.objective import Objective
from thrifty.core.old_names import OBJECTIVES as NEW_OBJECTIVES
from thrifty.core.recipe import ObjectiveSettings
from thrifty.objectives.chat_answers import ChatAnswers
from thrifty.objectives.classification import Classification
from thrifty.objectives.contrastive import Contrastive
from thrifty.objectives.masked_reconstruction import MaskedReconstruction
from thrifty.objectives.masked_token import MaskedToken
from thrifty.objectives.mass import Mass
from thrifty.objectives.multi_label_classification import MultiLabelClassification
from thrifty.objectives.next_token import NextToken
from thrifty.objectives.regression import Regression
from thrifty.objectives.sequence_to_sequence import SequenceToSequence
from thrifty.objectives.token_classification import TokenClassification

OBJECTIVES: dict[str, type[Objective]] = {
    "next_token": NextToken,
    "masked_token": MaskedToken,
    "sequence_to_sequence": SequenceToSequence,
    "mass": Mass,
    "chat_answers": ChatAnswers,
    "classification": Classification,
    "multi_label_classification": MultiLabelClassification,
    "regression": Regression,
    "token_classification": TokenClassification,
    "contrastive": Contrastive,
    "masked_reconstruction": MaskedReconstruction,
}


def find_objective(name: str, **settings: float | str) -> Objective:
    """Return the objective `name` with the given settings and defaults for all others.

    Raises UsageError for an unknown name or setting, or for a value out of bounds.
    """
    if name not in OBJECTIVES:
        raise UsageError(
            f"there is no objective {name!r}", fix=did_you_mean(NEW_OBJECTIVES.get(name, name), OBJECTIVES)
        )
    settable = {field.name for field in fields(ObjectiveSettings)} - {"name"}
    known = settable & {field.name for field in fields(OBJECTIVES[name])}
    for setting in settings.keys() - known:
        raise UsageError(
            f"objective.{setting} is set, but {name} has no such setting",
            fix=did_you_mean(setting, known) if known else f"leave objective.{setting} out",
        )
    return OBJECTIVES[name](**settings)


def chosen_objective(settings: ObjectiveSettings) -> Objective:
    """Return the objective of a recipe. Raises UsageError like `find_objective`."""
    return find_objective(**{name: value for name, value in asdict(settings).items() if value is not None})
