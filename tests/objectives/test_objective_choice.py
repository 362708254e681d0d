"""Objectives by name, with the settings of a recipe."""

import pytest

from thrifty.core.errors import UsageError
from thrifty.core.recipe import ObjectiveSettings
from thrifty.objectives import OBJECTIVES, chosen_objective, find_objective
from thrifty.objectives.masked_token import MaskedToken
from thrifty.objectives.sequence_to_sequence import SequenceToSequence


def test_settings_left_out_are_the_defaults() -> None:
    assert chosen_objective(ObjectiveSettings("masked_token", rate=0.4)) == MaskedToken(rate=0.4)
    assert chosen_objective(ObjectiveSettings("sequence_to_sequence")) == SequenceToSequence()


def test_every_name_makes_its_objective() -> None:
    for name, kind in OBJECTIVES.items():
        assert type(find_objective(name)) is kind


@pytest.mark.parametrize(
    ("settings", "what", "fix"),
    [
        (ObjectiveSettings("masked_tokens"), "no objective 'masked_tokens'", "masked_token"),
        (
            ObjectiveSettings("next_token", rate=0.1),
            "objective.rate is set, but next_token",
            "leave objective.rate out",
        ),
        (ObjectiveSettings("masked_token", mean_span=3.0), "objective.mean_span is set", "mask_share"),
        (ObjectiveSettings("masked_token", rate=1.5), "rate is 1.5", "at most 1"),
    ],
)
def test_wrong_setting_is_refused_with_a_fix(settings: ObjectiveSettings, what: str, fix: str) -> None:
    with pytest.raises(UsageError) as caught:
        chosen_objective(settings)
    assert what in caught.value.what and fix in caught.value.fix
