"""Settings of a technique: annotated attributes of its class, given by name, and never assigned."""

from dataclasses import FrozenInstanceError, dataclass, replace

import pytest

from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique


class Scaled(Technique):
    stage, numerics = Stage.ACCUMULATE, Numerics.DIFFERENT
    factor: float = 2.0


@dataclass(frozen=True)
class ScaledTwice(Scaled):
    """Decorated as a dataclass is, which changes nothing."""

    again: float = 3.0


def test_settings_are_annotated_attributes_given_by_name() -> None:
    assert Scaled() == Scaled(factor=2.0) != Scaled(factor=3.0) and hash(Scaled()) == hash(Scaled())
    assert replace(ScaledTwice(again=1.0), factor=5.0) == ScaledTwice(factor=5.0, again=1.0)
    assert repr(ScaledTwice()) == "ScaledTwice(factor=2.0, again=3.0)"
    for kind in (Scaled, ScaledTwice):
        with pytest.raises(TypeError, match="positional"):
            kind(3.0)


def test_settings_are_never_assigned() -> None:
    for value in (Scaled(), ScaledTwice()):
        with pytest.raises(FrozenInstanceError):
            value.factor = 3.0  # type: ignore[misc]
        with pytest.raises(FrozenInstanceError):
            del value.factor
